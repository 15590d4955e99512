"""Bytes of devices while a plan runs once: how many are alive at a time, and how many leave and reach each device.

Alive is what operations make, activations and gradients, what loops keep in lists for their gradients, and what moves
consist of (`transfers`): pieces, sums, and what a device is sent. Arguments, variables and constants are there before.
What a kernel needs besides is not known, and an operation that writes its result over its operand is counted with both.

Everything is there from the task that makes it to the last one that reads it (`tasks`), and what is returned to the
end; but of a sum that shards of one device give to in turns there is one buffer, to which each adds as it comes.

A loop or branch holds, while it runs, what its functions hold, by their plans.

Of a branch whose operations are the program's (`program/sides.py`), what one side makes is never there together with
what the other makes. So at each time that side counts which has more.

Traffic is what the plan's moves send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphsplit.core.hosts import host_name
from graphsplit.core.intervals import alive
from graphsplit.planning.communication.transfers import Relay, Slice, Sum
from graphsplit.planning.costs.buffers import NO_BUFFER, SAME_BUFFER
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.steps import Step
from graphsplit.planning.tasks import COPY, OPERATION, SEND, PlannedTask, Tasks, few_tasks_of, tasks_of
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Tensor
from graphsplit.program.reading.trip_counts import times_run
from graphsplit.program.sides import EVERYWHERE, MERGE, Side, Sides, choice, sides_of

_AXIS = {"Split": 0, "SplitV": 2}  # which operand is the axis along which an operation cuts
_ALIGNED_BYTES = 64


class LiveBuffer(NamedTuple):
    """What is alive on a device for a while.

    Attributes:
      device: which.
      bytes: how large it is.
      task: what makes it.
      first, last: the numbers of the tasks that make it, and that read it last.
      side: the innermost side of a branch without which it is not there: a predicate, and its value, 0 or 1.
    """

    device: str
    bytes: int
    task: PlannedTask
    first: int
    last: int
    side: tuple[Tensor, int] | None = None


@dataclass(frozen=True)
class Alive:
    """What is alive on a device when that is most.

    Attributes:
      buffers: all of it.
    """

    buffers: tuple[LiveBuffer, ...] = ()

    @property
    def bytes(self) -> int:
        """How much that is."""
        return sum([buffer.bytes for buffer in self.buffers])

    @property
    def activations(self) -> int:
        """How much of it operations have made; the rest is moved."""
        return sum([buffer.bytes for buffer in self.buffers if buffer.task.is_made])


def live_bytes(plan: Decisions) -> dict[str, int]:
    """Return the most bytes that are alive at a time on each device; sizes that are not known count as planned."""
    return {device: alive.bytes for device, alive in alive_on(plan, few_tasks_of(plan)).items()}


def alive_on(plan: Decisions, tasks: Tasks) -> dict[str, Alive]:
    """Return what is alive on each device when most is.

    Args:
      plan: what runs.
      tasks: of the plan.
    """
    buffers: dict[str, list[LiveBuffer]] = {}
    for buffer in _buffers(plan, tasks):
        buffers.setdefault(buffer.device, []).append(buffer)
    most = {device: _most(buffers_of_device) for device, buffers_of_device in buffers.items()}
    return {name: alive for device, alive in most.items() for name in tasks.alike.devices.get(device, (device,))}


class ResultBuffers(NamedTuple):
    """In which buffers the results of tasks lie.

    Attributes:
      made: the task that makes each, and which of its results it is.
      of: of each task the number of each result's buffer; None for what takes none.
    """

    made: list[tuple[int, int]]
    of: list[list[int | None]]


def result_buffers(
    plan: Decisions, tasks: Sequence[PlannedTask], is_copied: Callable[[PlannedTask], bool] = lambda _: True
) -> ResultBuffers:
    """Return in which buffers the results of tasks lie; several names of one value in one.

    Args:
      plan: what runs.
      tasks: each behind those that it reads.
      is_copied: whether what is sent takes memory where it arrives.
    """
    buffers: list[tuple[int, int]] = []
    of: list[list[int | None]] = []
    for n, task in enumerate(tasks):
        if is_copied(task) if task.kind == SEND else _has_own(plan, task):
            of.append(list(range(len(buffers), len(buffers) + len(task.bytes))))
            buffers += [(n, k) for k in range(len(task.bytes))]
            continue
        reads = () if _has_none(plan, task) else [of[read.task][read.index] for read in task.reads if read is not None]
        of.append([next((k for k in reads if k is not None), None)] * len(task.bytes))
    return ResultBuffers(buffers, of)


def _buffers(plan: Decisions, tasks: Tasks) -> list[LiveBuffer]:
    """Return all buffers, by who makes them."""
    results, of = result_buffers(plan, tasks.tasks)
    last = [n for n, _ in results]
    reads = [(read, n) for n, task in enumerate(tasks.tasks) for read in task.reads if read is not None]
    for read, n in [*reads, *[(read, len(tasks.tasks)) for read in tasks.returned]]:
        k = of[read.task][read.index]
        if k is not None:
            last[k] = n
    _let_pieces_wait(plan, tasks, of, last)
    _let_both_sides_wait(plan, tasks, of, last)
    inner = [max(side, default=None) for side in sides_of_tasks(plan, tasks.tasks) or [EVERYWHERE] * len(tasks.tasks)]
    made = [
        LiveBuffer(task.device, task.bytes[k] * _times(tasks, task), task, n, end, inner[n])
        for (n, k), end in zip(results, last, strict=True)
        if (task := tasks.tasks[n]).bytes[k]
    ]
    inside = held_inside(plan, tasks.tasks)
    return [*made, *[LiveBuffer(device, size, tasks.tasks[n], n, n, inner[n]) for n, device, size in inside]]


def held_inside(plan: Decisions, tasks: Sequence[PlannedTask]) -> Iterator[tuple[int, str, int]]:
    """Yield what loops and branches hold while they run: the task, a device, and the most bytes in any function.

    Nothing is known of functions that have no plan: they run on one device, as they are.
    """
    bytes_by_op: dict[int, dict[int | None, dict[str, int]]] = {}
    for n, task in enumerate(tasks):
        if task.kind == OPERATION and task.op is not None and plan.program.ops[task.op].bodies:
            if task.op not in bytes_by_op:
                bytes_by_op[task.op] = _inside(plan.steps[task.op])
            sizes = bytes_by_op[task.op].get(task.shard, {}).items()
            yield from ((n, device or task.device, size) for device, size in sizes if size)


def _inside(step: Step) -> dict[int | None, dict[str, int]]:
    """Return the most that the functions of a loop or branch hold, by shard and device; "" is where the loop is."""
    most: dict[int | None, dict[str, int]] = {}
    for body in (*step.bodies.values(), *(step.shards.bodies.values() if step.shards else ())):
        by_place: dict[tuple[int | None, str], list[LiveBuffer]] = {}
        for buffer in _buffers(body, tasks_of(body)):
            shard = None if body.default_device else buffer.task.shard  # (of what runs as one, all is in one call)
            by_place.setdefault((shard, buffer.device), []).append(buffer)
        for (shard, device), buffers in by_place.items():
            of_device = most.setdefault(shard, {})
            of_device[device] = max(_most(buffers).bytes, of_device.get(device, 0))
    return most


def _let_both_sides_wait(plan: Decisions, tasks: Tasks, of: Sequence[Sequence[int | None]], last: list[int]) -> None:
    """Let what a `Merge` reads be there as long as what it returns: that is one of them."""
    for task in reversed(tasks.tasks):
        if task.kind == OPERATION and task.op is not None and plan.program.ops[task.op].type == MERGE:
            buffers = [k for r in task.reads if r is not None and (k := of[r.task][r.index]) is not None]
            end = max([last[k] for k in buffers], default=0)
            for k in buffers:
                last[k] = end


def _times(tasks: Tasks, task: PlannedTask) -> int:
    """Return how many of what a task makes are there: of what is received as many as those that the sender tells of."""
    source = task.reads[0] if task.kind == SEND else None
    return 1 if source is None else tasks.alike.times(tasks.tasks[source.task].device)


def _let_pieces_wait(plan: Decisions, tasks: Tasks, of: Sequence[Sequence[int | None]], last: list[int]) -> None:
    """Let the pieces of shards whose tasks are not listed be there as long as that of the shard that tells of them."""
    if not tasks.alike.told_by:
        return
    for n, task in enumerate(tasks.tasks):
        if isinstance(task.value, Slice) and task.value.split.layout is not None and not task.value.split.shards:
            for k, buffer in enumerate(of[n]):
                d = k % plan.mesh.shards
                if buffer is not None and task.bytes[k] and d in tasks.alike.told_by:
                    teller = of[n][k - d + tasks.alike.told_by[d]]
                    last[buffer] = last[buffer if teller is None else teller]


def _has_none(plan: Decisions, task: PlannedTask) -> bool:
    return task.kind == OPERATION and task.op is not None and plan.program.ops[task.op].type in NO_BUFFER


def _has_own(plan: Decisions, task: PlannedTask) -> bool:
    """Return whether what a task makes is no other name of what it reads."""
    if task.kind == OPERATION and task.op is not None:
        return _has_buffer(op := plan.program.ops[task.op]) and not _cuts_rows(op)
    value = task.value
    if isinstance(value, Slice) and task.op is not None and value.split.axis == 0:
        return not _are_rows(plan.program.ops[task.op])
    return not isinstance(value, Relay) and not (isinstance(value, Sum) and value.turn is not None)


def _cuts_rows(op: Op) -> bool:
    """Return whether an operation cuts rows, and what it makes are pieces of the buffer that it reads."""
    return op.type in _AXIS and int(op.constants.get(_AXIS[op.type], 1)) == 0 and _are_rows(op)


def _are_rows(op: Op) -> bool:
    """Return whether pieces of a tensor are pieces of its buffer.

    TensorFlow copies none if each row begins where buffers may begin (`split_v_op.cc`, `ComputeEasyCases`).
    """
    shape = op.out_shapes[0]
    if shape is None or None in shape:
        return False
    return int(math.prod([size or 0 for size in shape[1:]])) * int(op.out_dtypes[0].size or 1) % _ALIGNED_BYTES == 0


def _most(buffers: list[LiveBuffer]) -> Alive:
    """Return what is alive when most is; of the two sides of a branch that which has more then."""
    times = sorted({time for b in buffers for time in (b.first, b.last + 1)})
    places = {time: k for k, time in enumerate(times)}
    nothing = np.zeros(len(times), np.int64)
    changes: dict[tuple[Tensor, int] | None, np.ndarray] = {}
    for b in buffers:
        changes_of_side = changes.setdefault(b.side, nothing.copy())
        changes_of_side[places[b.first]] += b.bytes
        changes_of_side[places[b.last + 1]] -= b.bytes
    sizes = {side: np.cumsum(changes_of_side) for side, changes_of_side in changes.items()}
    pairs = {side[0]: [sizes.get((side[0], n), nothing) for n in (0, 1)] for side in sizes if side is not None}
    k = int(np.argmax(sum([np.maximum(*pair) for pair in pairs.values()], sizes.get(None, nothing))))
    larger_sides = {None, *[(which, int(pair[1][k] > pair[0][k])) for which, pair in pairs.items()]}
    return Alive(tuple([b for b in buffers if b.side in larger_sides and b.first <= times[k] <= b.last]))


def held_bytes(plan: Decisions) -> int:
    """Return the most bytes that the shards hold while all of them wait for each other."""
    level = {i: phase.level for phase in plan.phases for i in phase.ops}
    last: dict[Tensor, int] = {}
    for op in plan.sharded_ops:
        for tensor in _own(plan, op):
            last[tensor] = max(level[op.index], last.get(tensor, 0))
    spans = [(level[t.op], p, plan.program.bytes(t)) for t, p in last.items() if _has_buffer(plan.program.ops[t.op])]
    return max([size for _, size in alive(spans)], default=0)


def _has_buffer(op: Op) -> bool:
    return op.type not in NO_BUFFER and op.type not in SAME_BUFFER


def _own(plan: Decisions, op: Op) -> Iterator[Tensor]:
    """Return what a shard reads of what it made itself."""
    shards = plan.steps[op.index].shards
    assert shards is not None
    for i, (tensor, want) in enumerate(zip(op.inputs, shards.wants, strict=True)):
        maker = plan.steps[tensor.op].shards
        if i not in shards.makes and maker is not None and maker.gives[tensor.index] == want:
            yield tensor


STAGES = "between stages"


def sides_of_tasks(plan: Decisions, tasks: Sequence[PlannedTask]) -> list[Side]:
    """Return on which sides of branches each task is; nothing for a program without a `Switch`."""
    planned, sides = sides_of(plan.program), list[Side]()
    for task in tasks if planned.predicates else ():
        sides_read = [sides[r.task] | _choice(planned, tasks[r.task], r.index) for r in task.reads if r is not None]
        is_operation = task.kind == OPERATION and task.op is not None
        sides.append(planned.of_op(task.op or 0) if is_operation else EVERYWHERE.union(*sides_read))
    return sides


def on_smaller_sides(plan: Decisions, tasks: Sequence[PlannedTask]) -> set[int]:
    """Return the tasks on those sides of branches for which less is sent than for the other one."""
    sides = sides_of_tasks(plan, tasks)
    sent: dict[tuple[Tensor, int], int] = {}
    for task, side in zip(tasks, sides, strict=False):
        for one_side in side if task.kind == SEND else ():
            sent[one_side] = sent.get(one_side, 0) + task.bytes[0]
    smaller = {
        one_side
        for one_side in sent
        if (sent[one_side], one_side[1]) < (sent.get((one_side[0], 1 - one_side[1]), 0), 1 - one_side[1])
    }
    return {n for n, side in enumerate(sides) if not smaller.isdisjoint(side)}


def _choice(sides: Sides, task: PlannedTask, index: int) -> Side:
    is_operation = task.kind == OPERATION and task.op is not None
    return choice(sides.predicates, Tensor(task.op or 0, index)) if is_operation else EVERYWHERE


@dataclass(frozen=True)
class Traffic:
    """Bytes by device, full names.

    Attributes:
      sent: what leaves it for other devices.
      received: what reaches it from other devices.
      between_hosts: how much of all that passes from host to host.
      by_kind: all that is sent, by the kind of move, and of what is sent between columns by the axis: see `along`.
      unknown: the kinds of which something is sent whose size follows from data. It counts as no bytes.
      giving: devices of which only arguments come, within their host.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    between_hosts: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    giving: frozenset[str] = frozenset()

    @property
    def within_hosts(self) -> int:
        """The bytes that devices send to others of their host."""
        return sum(self.sent.values()) - self.between_hosts

    @property
    def through(self) -> dict[str, tuple[int, int]]:
        """What each device sends and receives, without their host's memory, to which each has a link."""
        devices = [device for device in dict.fromkeys([*self.sent, *self.received]) if device not in self.giving]
        return {device: (self.sent.get(device, 0), self.received.get(device, 0)) for device in devices}

    @property
    def busiest(self) -> tuple[str, int, int]:
        """The device through which most bytes go, the bytes that it sends, and those that it receives."""
        through = self.through
        device = max(through, key=lambda device: sum(through[device]), default="")
        return (device, *through.get(device, (0, 0)))

    def with_more(self, other: Traffic, times: int, *, is_least: bool) -> Traffic:
        """Return this and what something sends so many times, or more often (`is_least`)."""
        sent, received, by_kind = (
            {key: present.get(key, 0) + times * added.get(key, 0) for key in {**present, **added}}
            for present, added in (
                (self.sent, other.sent),
                (self.received, other.received),
                (self.by_kind, other.by_kind),
            )
        )
        between_hosts = self.between_hosts + times * other.between_hosts
        growing = [kind for kind, size in other.by_kind.items() if size] if is_least else []
        return Traffic(sent, received, between_hosts, by_kind, self.unknown | other.unknown | {*growing}, self.giving)


def traffic(plan: Decisions, tasks: Tasks | None = None) -> Traffic:
    """Return the bytes that one call moves between devices.

    A tensor that several operations of a device read is sent there once, as TensorFlow's runtime does. Sizes that are
    not known count as planned. What loops that run once move in each iteration is not in it: see `traffic_of_call`. Of
    a branch whose operations are the program's, that side counts for which more is sent.

    Args:
      plan: which.
      tasks: of the plan; None: they are made.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    between_hosts, by_kind, unknown = 0, {COPY: 0}, set[str]()
    plan_tasks = tasks or few_tasks_of(plan)
    left_out = on_smaller_sides(plan, plan_tasks.tasks)
    for n, task in enumerate(plan_tasks.tasks):
        size = task.bytes[0] if task.kind == SEND else 0
        if task.kind != SEND or task.reads[0] is None or n in left_out:
            continue
        source = plan_tasks.tasks[task.reads[0].task].device
        kind = _kind(plan, source, task)
        if not size and _follows_from_data(plan, task):
            unknown.add(kind)
        if size:
            senders, receivers = plan_tasks.alike.times(source), plan_tasks.alike.times(task.device)
            by_kind[kind] = by_kind.get(kind, 0) + size * senders * receivers
            sent[source] = sent.get(source, 0) + size * receivers
            received[task.device] = received.get(task.device, 0) + size * senders
            between_hosts += size * senders * receivers if host_name(source) != host_name(task.device) else 0
    hosts = set(map(host_name, plan.devices))
    giving = frozenset([device for device in giving_devices(plan) if host_name(device) in hosts])
    return Traffic(
        _of_each(sent, plan_tasks), _of_each(received, plan_tasks), between_hosts, by_kind, frozenset(unknown), giving
    )


def traffic_of_call(plan: Decisions, tasks: Tasks | None = None) -> Traffic:
    """Return the bytes that one call moves between devices, those of all iterations of loops that run once included.

    Iterations that nobody knows the number of count once, and what they send as unknown; of branches counts the one
    that sends most.

    Args:
      plan, tasks: as in `traffic`.
    """
    total = traffic(plan, tasks)
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        inside = [traffic_of_call(body) for body in step.bodies.values()]
        if inside and not CONTROL_FLOW[op.type].loops:
            inside = [max(inside, key=lambda body_traffic: sum(body_traffic.sent.values()))]
        times = times_run(op)
        for body_traffic in inside:
            total = total.with_more(body_traffic, 1 if times is None else times, is_least=times is None)
    return total


def giving_devices(plan: Decisions) -> frozenset[str]:
    """Return the devices of which only arguments come: the host's memory, to which each device has a link."""
    places, arguments = plan.places, set(plan.program.inputs)
    running = {device for op in plan.ops_once if op.index not in arguments for device in places.once(op)}
    lying = {device for i in arguments for device in places.once(plan.program.ops[i])}
    return frozenset(lying - running - places.computing(plan.program))


def _follows_from_data(plan: Decisions, task: PlannedTask) -> bool:
    """Return whether something is sent of an operation that makes tensors whose shapes follow from data."""
    shapes = () if task.op is None else plan.program.ops[task.op].out_shapes
    return any(shape is None or None in shape for shape in shapes)


def _of_each(amounts: Mapping[str, int], tasks: Tasks) -> dict[str, int]:
    """Return amounts by device, those also of devices for which others stand."""
    devices = tasks.alike.devices
    return dict(sorted((name, size) for device, size in amounts.items() for name in devices.get(device, (device,))))


def along(*axes: str) -> str:
    """Return what sends along an axis, or several at once, are called: no kind of move is, whatever axes are called."""
    return f"along {' and '.join(map(repr, axes))}"


def _kind(plan: Decisions, source: str, task: PlannedTask) -> str:
    """Return the kind of move for which something is sent from a device, or between which places of a shard."""
    if task.sent_for != OPERATION:
        return task.sent_for
    return along(*plan.places.axes_between(source, task.device)) if plan.mesh.columns else STAGES
