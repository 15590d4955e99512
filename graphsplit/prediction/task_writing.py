"""Tasks of an emitted graph, written node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.core.protos.graphdefs import inputs_of, source_of
from graphsplit.costs.families import FREE
from graphsplit.costs.machine import Machine
from graphsplit.costs.seconds import Costs
from graphsplit.costs.work import bytes_of, is_known
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.graph.graph import Graph
from graphsplit.planning.memory import ALIGNED_BYTES
from graphsplit.planning.plan import Plan
from graphsplit.prediction.buffers import SAME_BUFFER, Buffer, allocated
from graphsplit.prediction.compiled_work import run_graph
from graphsplit.prediction.node_times import NodeTime, NodeTimes
from graphsplit.prediction.replay import Resource, Task, replay
from graphsplit.prediction.routes import Routes
from graphsplit.prediction.threads import Threads


class Placed(NamedTuple):
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
      sent_bytes: that are sent between devices.
      unknown: what could only be estimated from below, one sentence each.
      given: how many tensors a call gives to the graph, the handles of variables among them.
    """

    tasks: tuple[Task, ...] = field(repr=False)
    placed: tuple[Placed, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    resources: dict[str, Resource | Threads] = field(repr=False)
    arguments: dict[str, int]
    sent_bytes: int = 0
    unknown: tuple[str, ...] = ()
    given: int = 0


_NO_BUFFER = frozenset({"Const", "Placeholder", "ReadVariableOp"})
_GIVEN = "Placeholder"
_OVERWRITES = "elementwise"


class _Operands(NamedTuple):
    """Which operand of an operation is what it cuts, and which the axis."""

    value: int
    axis: int


_CUTS = {"Split": _Operands(1, 0), "SplitV": _Operands(0, 2)}


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
        self._run = run_graph(graph)
        self._nodes = Graph(self._run.nodes) if self._run.calls else graph.by_name
        self._sizes = sizes_of(plan, graph)
        for name, call in self._run.calls.items():
            self._sizes.add(name, call.returned)
        self._unknown: dict[str, None] = {}
        self._times = NodeTimes(plan, self._run, self._sizes, costs, self._note, self._seconds_of_turn)
        devices = dict.fromkeys([*plan.devices, *[node.device for node in graph.nodes if node.device], plan.home])
        kind = f"device:{machine.device.kind}:"
        self._routes = Routes(machine, [device for device in devices if kind in device])
        self._tasks: list[Task] = []
        self._placed: list[Placed] = []
        self._at: dict[str, int] = {}  # the task of each node
        self._sent: dict[tuple[str, str], int] = {}
        self._buffers: list[dict[str, Any]] = []
        self._buffer_of: dict[tuple[str, str], int] = {}  # what a reference is read from on a device
        self._devices = {node.name: str(node.device) or plan.home for node in self._run.nodes}
        self._rank = self._nodes.place

    def write(self) -> GraphTasks:
        for name in self._nodes.order:
            self._write_node(self._nodes[name])
        for reference in self._run.outputs:
            k = self._buffer(reference, self._device(source_of(reference)))
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
            sum(placed.bytes for placed in self._placed if placed.kind == "send"),
            tuple(self._unknown),
            sum(node.op == _GIVEN for node in self._run.nodes),
        )

    def _device(self, name: str) -> str:
        return self._devices[name]

    def _write_node(self, node: Any) -> None:
        device, (data, waits) = self._device(node.name), inputs_of(node)
        after = [self._arrival(reference, device) for reference in data]
        after += [self._signal(reference[1:], device) for reference in waits]
        time = self._times.of(node)
        kind = "wait" if time.family == FREE or not time.seconds else "compute"
        uses: tuple[str, ...] = ()
        if kind == "compute":
            uses = (self._routes.computes_on(device),)
            if uses[0].startswith("stream") and "GPU" not in kernel_devices(node):
                uses = (f"threads of host {self._machine.host_of(device)}",)
        placed = Placed(device, kind, str(node.op))
        own = self._add(node.name, uses, time.seconds, after, self._rank[node.name], placed, family=time.family)
        self._at[node.name] = own
        for reference in data:
            k = self._buffer(reference, device)
            if k is not None:
                self._buffers[k]["readers"].append(own)
        self._write_buffers(node, device, own, time, data)

    def _add(
        self,
        name: str,
        uses: tuple[str, ...],
        seconds: float,
        after: Sequence[int],
        rank: int,
        placed: Placed,
        delay_s: float = 0.0,
        family: str = "",
    ) -> int:
        host = self._machine.host
        on_threads = bool(uses) and uses[0].startswith("threads")
        slowdown = host.slowdown_of.get(family, host.slowdown) if on_threads else (1.0,)
        sends = placed.kind == "send"
        self._tasks.append(Task(name, uses, seconds, tuple(dict.fromkeys(after)), delay_s, rank, slowdown, sends))
        self._placed.append(placed)
        return len(self._tasks) - 1

    def _note(self, unknown: str) -> None:
        if unknown:
            self._unknown[unknown] = None

    def _seconds_of_turn(self, plan: Plan) -> float:
        """Return how long a body takes whose work is split over the devices."""
        inner = tasks_of(plan, emit(plan), self._machine, self._costs)
        self._unknown.update(dict.fromkeys(inner.unknown))
        return replay(inner.tasks, inner.resources).seconds

    def _arrival(self, reference: str, device: str) -> int:
        """Return the task after which a tensor can be read on a device: its maker, or what sends it there, once."""
        name = source_of(reference)
        source = self._device(name)
        if source == device or self._sizes.of(reference)[1] in (tf.resource, tf.variant):
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
        role = self._run.origins[name].role
        rank = self._rank_of_send(name, source, device)
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

    def _rank_of_send(self, name: str, source: str, device: str) -> int:
        return self._routes.rank(source, device) * len(self._run.nodes) + self._rank[name]

    def _signal(self, name: str, device: str) -> int:
        """Return the task after which a node may run that waits for another one: elsewhere, a signal is sent."""
        source = self._device(name)
        if source == device:
            return self._at[name]
        key = (f"^{name}", device)
        if key not in self._sent:
            route = self._routes.between(source, device)
            uses = route.uses if route.busy_s else ()  # (threads send and receive it; links carry it beside all else)
            placed = Placed(source, "send" if uses else "wait", "signal", 0, device)
            rank = self._rank_of_send(name, source, device)
            self._sent[key] = self._add(f"^{name}", uses, route.busy_s, [self._at[name]], rank, placed, route.latency_s)
        return self._sent[key]

    def _buffer(self, reference: str, device: str) -> int | None:
        """Return the buffer from which a reference is read on a device; None for what takes none."""
        return self._buffer_of.get((reference.removesuffix(":0"), device))

    def _new_buffer(
        self, name: str, device: str, size: int, maker: int, key: tuple[str, str], onto: Sequence[int] = ()
    ) -> None:
        self._buffer_of[key] = len(self._buffers)
        made = {
            "name": name,
            "device": device,
            "bytes": allocated(size),
            "maker": maker,
            "readers": [],
            "onto": tuple(onto),
        }
        self._buffers.append(made)

    def _write_buffers(self, node: Any, device: str, own: int, time: NodeTime, data: Sequence[str]) -> None:
        if node.op in _NO_BUFFER:
            return
        if time.held_bytes:
            self._new_buffer(f"inside of {node.name}", device, time.held_bytes, own, (f"{node.name}:held", device))
        if data and (node.op in SAME_BUFFER or self._cuts_rows(node)):
            k = self._buffer(data[_CUTS[node.op].value if node.op in _CUTS else 0], device)
            for index in range(len(self._sizes[node.name])) if k is not None else ():
                self._buffer_of[_reference(node.name, index), device] = k  # type: ignore[assignment]
            return
        lists = self._times.bytes_in_lists(node)
        for index, tensor in enumerate(self._sizes[node.name]):
            size = lists.get(index, 0) or bytes_of(tensor, self._costs.unknown_size)
            operands = [self._buffer(reference, device) for reference in data] if time.family == _OVERWRITES else []
            onto = [k for k in operands if k is not None and self._buffers[k]["bytes"] == allocated(size)]
            reference = _reference(node.name, index)
            self._new_buffer(reference, device, size, own, (reference, device), onto)

    def _cuts_rows(self, node: Any) -> bool:
        """Return whether what a node makes are pieces of the buffer that it reads.

        TensorFlow copies none if each row begins where buffers may begin (`split_v_op.cc`, `ComputeEasyCases`).
        """
        if node.op not in _CUTS:
            return False
        axis = self._sizes.constant(node, _CUTS[node.op].axis)
        shape, dtype = self._sizes.inputs_of(node)[_CUTS[node.op].value]
        if axis is None or int(axis) != 0 or not shape or None in shape:
            return False
        return bytes_of((shape[1:], dtype)) % ALIGNED_BYTES == 0


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name
