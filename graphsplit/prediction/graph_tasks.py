"""Tasks of an emitted graph: every node where it runs, every tensor that changes devices on its way, once."""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.graphdefs import split_reference
from graphsplit.core.kernel_devices import kernel_devices
from graphsplit.costs.families import FREE, PASSED_ON
from graphsplit.costs.machine import Machine
from graphsplit.costs.seconds import Costs, sample_key
from graphsplit.costs.work import Work, bytes_of, is_known, work_of
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.prediction.bodies import BodyTime, seconds_of_bodies
from graphsplit.prediction.buffers import Buffer
from graphsplit.prediction.replay import Resource, Task, replay
from graphsplit.prediction.routes import Routes
from graphsplit.prediction.sizes import Sizes
from graphsplit.program.trip_counts import turns_of

_SAME_BUFFER = frozenset(
    {
        *("CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze"),
        *("StopGradient", "Switch", "Merge", "Bitcast"),
    }
)
_NO_BUFFER = frozenset({"Const", "Placeholder", "ReadVariableOp"})
_OVERWRITES = "elementwise"


@dataclass(frozen=True)
class Placed:
    """What a task is.

    Attributes:
      device: where it runs; of something sent, where it comes from.
      kind: `"compute"`, `"send"` or `"wait"` (what takes no time).
      type: of the operation; the kind of move that something sent belongs to.
      bytes: that are sent.
      target: where they are sent.
    """

    device: str
    kind: str
    type: str
    bytes: int = 0
    target: str = ""


@dataclass(frozen=True)
class GraphTasks:
    """An emitted graph, as a machine has to run it.

    Attributes:
      tasks: all of them.
      placed: what each is.
      buffers: what they make.
      resources: what they use.
      arguments: bytes of the function's arguments, by device.
      unknown: what could only be estimated from below, one sentence each.
    """

    tasks: tuple[Task, ...] = field(repr=False)
    placed: tuple[Placed, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    resources: dict[str, Resource] = field(repr=False)
    arguments: dict[str, int]
    unknown: tuple[str, ...] = ()


@collection_paused()
def tasks_of(plan: Plan, graph: EmittedGraph, machine: Machine, costs: Costs) -> GraphTasks:
    """Return what a machine has to do for an emitted graph.

    Args:
      plan: what was emitted; all sizes of its arguments are known.
      graph: the result.
      machine: its devices have the names that the graph asks for.
      costs: of single operations on them.
    """
    return _Writer(plan, graph, machine, costs).write()


class _Writer:
    def __init__(self, plan: Plan, graph: EmittedGraph, machine: Machine, costs: Costs):
        self._plan = plan
        self._graph = graph
        self._machine = machine
        self._costs = costs
        self._nodes = {node.name: node for node in graph.nodes}
        self._reads = {
            node.name: list(dict.fromkeys([split_reference(r.lstrip("^"))[0] for r in node.input]))
            for node in graph.nodes
        }
        self._order = list(graphlib.TopologicalSorter(self._reads).static_order())
        self._sizes = Sizes(plan, graph, self._nodes, self._order)
        devices = dict.fromkeys([*plan.devices, *[node.device for node in graph.nodes if node.device], plan.home])
        kind = f"device:{machine.device.kind}:"
        self._routes = Routes(machine, [device for device in devices if kind in device])
        self._tasks: list[Task] = []
        self._placed: list[Placed] = []
        self._at: dict[str, int] = {}  # the task of each node
        self._sent: dict[tuple[str, str], int] = {}
        self._buffers: list[dict[str, Any]] = []
        self._buffer_of: dict[tuple[str, str], int] = {}  # what a reference is read from on a device
        self._unknown: dict[str, None] = {}
        self._works: dict[tuple[int, int | None], tuple[Work, float]] = {}
        self._rank = {node.name: k for k, node in enumerate(graph.nodes)}

    def write(self) -> GraphTasks:
        for name in self._order:
            self._write_node(self._nodes[name])
        for reference in self._graph.outputs:
            k = self._buffer(reference, self._device(split_reference(reference)[0]))
            if k is not None:
                self._buffers[k]["kept"] = True
        arguments: dict[str, int] = {}
        for name in self._graph.inputs:
            device = self._device(name)
            arguments[device] = arguments.get(device, 0) + sum(map(bytes_of, self._sizes[name]))
        buffers = [Buffer(**{**b, "readers": tuple(b["readers"])}) for b in self._buffers]
        return GraphTasks(
            tuple(self._tasks),
            tuple(self._placed),
            tuple(buffers),
            self._routes.resources(),
            arguments,
            tuple(self._unknown),
        )

    def _device(self, name: str) -> str:
        return str(self._nodes[name].device) or self._plan.home

    def _write_node(self, node: Any) -> None:
        device, after = self._device(node.name), []
        data = [reference for reference in node.input if reference[0] != "^"]
        for reference in data:
            after.append(self._arrival(reference, device))
        for reference in node.input:
            if reference[0] == "^":
                after.append(self._signal(reference[1:], device))
        work, seconds = self._work(node)
        kind = "wait" if work.family == FREE or not seconds else "compute"
        uses = (self._routes.computes_on(device),) if kind == "compute" else ()
        if "stream" in "".join(uses) and not self._on_gpu(node):
            uses = (f"threads of host {self._machine.host_of(device)}",)
        own = self._add(node.name, uses, seconds, after, self._rank[node.name], Placed(device, kind, str(node.op)))
        self._at[node.name] = own
        for reference in data:
            k = self._buffer(reference, device)
            if k is not None:
                self._buffers[k]["readers"].append(own)
        self._write_buffers(node, device, own, work, data)

    def _on_gpu(self, node: Any) -> bool:
        return "GPU" in kernel_devices(node)

    def _add(
        self,
        name: str,
        uses: tuple[str, ...],
        seconds: float,
        after: Sequence[int],
        rank: int,
        placed: Placed,
        delay_s: float = 0.0,
    ) -> int:
        self._tasks.append(Task(name, uses, seconds, tuple(dict.fromkeys(after)), delay_s, rank))
        self._placed.append(placed)
        return len(self._tasks) - 1

    def _work(self, node: Any) -> tuple[Work, float]:
        """Return what a node does, and how long it takes: shards of as many rows are alike, and asked once."""
        origin = self._graph.origins[node.name]
        if origin.op is None or origin.role != "op":
            return self._work_of_node(node)
        rows = self._plan.rows[origin.shard] if origin.shard is not None and self._plan.rows else origin.shard
        key = (origin.op, rows)
        if key not in self._works:
            op = self._plan.program.ops[origin.op]
            if op.bodies:
                time = self._bodies(op, origin.shard)
                self._note(time.unknown)
                self._works[key] = Work("other"), time.seconds
            else:
                self._works[key] = self._work_of_node(node)
        return self._works[key]

    def _work_of_node(self, node: Any) -> tuple[Work, float]:
        reads, makes = self._sizes.inputs_of(node), self._sizes[node.name]
        work = work_of(node.op, _attributes(node), reads, makes, self._costs.unknown_size)
        if work.family in (FREE, PASSED_ON):
            return work, self._costs.seconds(work)
        if work.is_least:
            self._note(f"the sizes of {node.op} {node.name!r} are known only when it runs")
        return work, self._costs.seconds(work, sample_key(node, reads, makes))

    def _note(self, unknown: str) -> None:
        if unknown:
            self._unknown[unknown] = None

    def _bodies(self, op: Any, shard: int | None) -> BodyTime:
        """Return how long a loop or branch takes; that of a shard, or one whose turns are split over the shards."""
        step = self._plan.steps[op.index]
        if shard is None and step.bodies:
            return self._split_turns(op, step.bodies)
        plans = step.shards.bodies if shard is not None and step.shards else {}
        return seconds_of_bodies(op, plans, self._plan.rows, shard if plans else None, self._costs)

    def _split_turns(self, op: Any, bodies: Any) -> BodyTime:
        seconds = 0.0
        for plan in bodies.values():
            inner = tasks_of(plan, emit(plan), self._machine, self._costs)
            seconds += replay(inner.tasks, inner.resources).seconds
            self._unknown.update(dict.fromkeys(inner.unknown))
        turns = turns_of(op)
        if turns is None:
            return BodyTime(seconds, f"how often {op.type} {op.name!r} turns is known only when it runs")
        return BodyTime(turns.number * seconds)

    def _arrival(self, reference: str, device: str) -> int:
        """Return the task after which a tensor can be read on a device: its maker, or what sends it there, once."""
        name, _ = split_reference(reference)
        source = self._device(name)
        tensor = self._sizes.of(reference)
        if source == device or tensor[1] in (tf.resource, tf.variant):
            return self._at[name]
        key = (reference.removesuffix(":0"), device)
        if key not in self._sent:
            self._sent[key] = self._send(reference, name, source, device)
        return self._sent[key]

    def _send(self, reference: str, name: str, source: str, device: str) -> int:
        tensor = self._sizes.of(reference)
        count, route = bytes_of(tensor, self._costs.unknown_size), self._routes.between(source, device)
        if not is_known(tensor) and self._costs.unknown_size is None:
            self._note(f"the size of {reference!r}, which is sent, is known only when it runs")
        busy = route.busy_s + count / route.bytes_per_s
        role = self._graph.origins[name].role
        rank = self._routes.rank(source, device) * len(self._nodes) + self._rank[name]
        placed = Placed(source, "send", role if role != "op" else "send", count, device)
        own = self._add(reference, route.uses, busy, [self._at[name]], rank, placed, route.latency_s)
        k = self._buffer(reference, source)
        if k is not None:
            self._buffers[k]["readers"].append(own)
        if route.copies:
            self._new_buffer(reference, device, count, own, (reference.removesuffix(":0"), device))
        elif k is not None:
            self._buffer_of[reference.removesuffix(":0"), device] = k
        return own

    def _signal(self, name: str, device: str) -> int:
        """Return the task after which a node may run that waits for another one: elsewhere, a signal is sent."""
        source = self._device(name)
        if source == device:
            return self._at[name]
        key = (f"^{name}", device)
        if key not in self._sent:
            route = self._routes.between(source, device)
            placed = Placed(source, "wait", "signal", 0, device)
            self._sent[key] = self._add(
                f"^{name}", (), 0.0, [self._at[name]], 0, placed, route.latency_s + route.busy_s
            )
        return self._sent[key]

    def _buffer(self, reference: str, device: str) -> int | None:
        """Return the buffer from which a reference is read on a device; None for what takes none."""
        return self._buffer_of.get((reference.removesuffix(":0"), device))

    def _new_buffer(
        self, name: str, device: str, size: int, maker: int, key: tuple[str, str], onto: Sequence[int] = ()
    ) -> None:
        self._buffer_of[key] = len(self._buffers)
        made = {"name": name, "device": device, "bytes": size, "maker": maker, "readers": [], "onto": tuple(onto)}
        self._buffers.append(made)

    def _write_buffers(self, node: Any, device: str, own: int, work: Work, data: Sequence[str]) -> None:
        if node.op in _NO_BUFFER:
            return
        if node.op in _SAME_BUFFER and data:
            k = self._buffer(data[0], device)
            for index in range(len(self._sizes[node.name])) if k is not None else ():
                self._buffer_of[_reference(node.name, index), device] = k  # type: ignore[assignment]
            return
        for index, tensor in enumerate(self._sizes[node.name]):
            size = bytes_of(tensor, self._costs.unknown_size)
            operands = [self._buffer(reference, device) for reference in data] if work.family == _OVERWRITES else []
            onto = [k for k in operands if k is not None and self._buffers[k]["bytes"] == size]
            reference = _reference(node.name, index)
            self._new_buffer(reference, device, size, own, (reference, device), onto)


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


_NO_ATTRIBUTE = tf.compat.v1.AttrValue()


def _attributes(node: Any) -> Any:
    return lambda name: node.attr.get(name, _NO_ATTRIBUTE)
