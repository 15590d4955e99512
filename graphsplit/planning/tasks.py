"""Tasks: what a plan runs, in an order: operations at their places, what moves consist of, and what is sent.

A task is on one device and makes results there. What it reads is on its device, too: another device's result is sent
first, to each device once, by a task of its own. It is the one description of what runs where: what is alive at a time,
what is sent, and what a machine takes for it follow from it, and emission prints it.

A move's values are made when they are first read; but a sum that shards of one device give to in turns takes in each
part as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, Replicate, Shard, SingleDevice, group_of, is_whole
from graphsplit.errors import CheckError
from graphsplit.planning.alike_shards import AlikeShards, find_alike_shards, kinds_of_shards
from graphsplit.planning.communication.transfers import Own, Slice, Sum, Value
from graphsplit.planning.costs.buffers import kept_each_iteration
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.schedule.phases import find_phases, find_turns
from graphsplit.planning.steps import spread
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import iterations_of

OPERATION, HANDED_ON, SEND, COPY = "op", "handed on", "sent", "copy"  # (a move may be a "send")


Copy = int | str | None
"""Which copy of an operation: a shard's, that on a device of a group, or (None) the one that runs once."""


class Result(NamedTuple):
    """One of the results of a task, by the number of both."""

    task: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody calls on these


class PlannedTask(NamedTuple):
    """What runs once, on one device.

    Attributes:
      kind: `"op"`; `"handed on"`, for a result of a loop or branch that another column has; `"sent"`; of what a move
        consists of, the kind of the move.
      device: where it runs; of something sent, where that goes.
      reads: of an operation one for each operand, None for what every device has or makes for itself.
      bytes: of each result; of a list of tensors that a loop returns, of what its iterations have put into it.
      op: the operation that it is, or whose result is handed on, moved or sent; None for what moves several together.
      shard: whose copy of the operation it is; None for what runs once.
      value: of a move, the first that it makes; all pieces of what is split are made together.
      sent_for: the kind of move that something is sent for; `"op"` for none, `"copy"` for a copy of a variable.
    """

    kind: str
    device: str
    reads: tuple[Result | None, ...]
    bytes: tuple[int, ...]
    op: int | None = None
    shard: int | None = None
    value: Value | None = None
    sent_for: str = ""

    def copy(self, plan: Decisions) -> Copy:
        """Return which copy of its operation it is."""
        return self.device if self.shard is None and self.op in plan.owners.groups else self.shard

    @property
    def is_made(self) -> bool:
        """Whether an operation makes its results, where it is or in another column; else they are moved."""
        return self.kind in (OPERATION, HANDED_ON)


@dataclass(frozen=True)
class Tasks:
    """All tasks of a plan.

    Attributes:
      tasks: each after those that it reads.
      outputs: what the plan returns, and the result that it is; None for what every device has.
      alike: the shards whose tasks are not among them, as they are those of others.
      values: which result each value of a collective is that is read, by the number of both; None as in `outputs`.
      operands: what each operation reads, by its position and whether it is a shard's: see `operands_of`.
    """

    tasks: tuple[PlannedTask, ...]
    outputs: tuple[tuple[Operand, Result | None], ...]
    alike: AlikeShards = field(default_factory=AlikeShards)
    values: Mapping[tuple[int, int], Result | None] = field(default_factory=dict)
    operands: Mapping[tuple[int, bool], Sequence[Operand | None]] = field(default_factory=dict)

    @property
    def returned(self) -> tuple[Result, ...]:
        """The results that the plan returns."""
        return tuple([result for _, result in self.outputs if result is not None])


def tasks_of(plan: Decisions, *, in_phases: bool = True) -> Tasks:
    """Return what a plan runs: in the order in which memory counts, or (that is cheaper) in the program's."""
    return _tasks_of(plan, AlikeShards(), in_phases=in_phases)


def few_tasks_of(plan: Decisions) -> Tasks:
    """Return what a plan runs, of shards that are alike only what tells it of all: see `alike_shards`."""
    return _tasks_of(plan, find_alike_shards(plan))


def kept_on(plan: Decisions, op: Op, d: int | None) -> dict[int, int]:
    """Return the bytes that an iteration puts into lists, on a shard or (None) once: `kept_each_iteration`."""
    shards = plan.steps[op.index].shards if d is not None else None

    def size_of(body: Program, reader: Op, operand: int) -> int:
        local = shards.bodies.get(function_names(op.node)[1]) if shards is not None else None
        size, sharded = body.bytes(reader.inputs[operand]), None if local is None else local.steps[reader.index].shards
        return size if sharded is None or d is None else plan.mesh.bytes_of(d, size, sharded.wants[operand])

    return kept_each_iteration(op, size_of)


@collection_paused()
def _tasks_of(plan: Decisions, alike: AlikeShards, *, in_phases: bool = True) -> Tasks:
    writer = _TaskWriter(plan, alike)
    writer.expect_sums()
    for i, d in _order(plan, alike) if in_phases else _program_order(plan):
        writer.run(i, d)  # (unless others have needed it before)
    outputs = [(operand, writer.given(operand, None)) for operand in _outputs_of(plan)]
    return Tasks(tuple(writer.tasks), tuple(outputs), alike, writer.values, writer.operands)


def _program_order(plan: Decisions) -> Iterator[tuple[int, int | None]]:
    for i, step in enumerate(plan.steps):
        if step.once:
            yield i, None
        yield from ((i, d) for d in range(plan.mesh.shards if step.shards else 0))


def _order(plan: Decisions, alike: AlikeShards) -> Iterator[tuple[int, int | None]]:
    """Return what runs, in order: what runs once as soon as the shards are ready for it, then phase by phase."""
    flow, phases, turns = plan.flow, plan.phases, plan.turns
    if not phases:
        phases = find_phases(flow, plan.collectives)
        turns = find_turns(plan.program, phases, plan.mesh, {})
    level = {i: phase.level for phase in phases for i in phase.ops}
    joined = {move.tensor: bucket for bucket in plan.buckets for move in bucket.moves}  # what is there, or not, with it
    after, once = [-1] * len(plan.program.ops), list[tuple[int, int]]()
    for op in plan.ops_once:
        levels = [level[s.op] if s.on_shards else after[s.op] for s in flow.of_whole(op.index)]
        buckets = {id(joined[tensor]): joined[tensor] for tensor in op.inputs if tensor in joined}.values()
        levels += [level.get(move.tensor.op, -1) for bucket in buckets for move in bucket.moves]
        after[op.index] = max(levels, default=-1)
        once.append((after[op.index], op.index))
    once.sort(reverse=True)
    for turn in [turn for turn in turns if turn.shard not in alike.told_by]:
        while once and once[-1][0] < phases[turn.phase].level:
            yield once.pop()[1], None
        yield from ((i, turn.shard) for i in phases[turn.phase].ops)
    yield from ((i, None) for _, i in reversed(once))


class Operand(NamedTuple):
    """Which tensor is read in which layout.

    Attributes:
      by: the shard whose own it is; None for the reader's.
    """

    tensor: Tensor
    layout: Layout = SINGLE_DEVICE
    by: int | None = None


def operands_of(plan: Decisions, op: Op, on_shards: bool) -> Sequence[Operand | None]:
    """Return what an operation reads: None for what its shard makes for itself.

    What all shards run as one, a loop of an axis, reads of each operand what each of them has.
    """
    shards = plan.steps[op.index].shards
    if is_together(plan, op.index) and shards is not None:
        return _of_each(plan, op.inputs, shards.wants)
    owner_layouts = [plan.places.layout(op)] * len(op.inputs)
    wants, makes = (shards.wants, shards.makes) if on_shards and shards is not None else (owner_layouts, ())
    pairs = enumerate(zip(op.inputs, wants, strict=True))
    return [None if i in makes else _operand(plan, tensor, want) for i, (tensor, want) in pairs]


def _operand(plan: Decisions, tensor: Tensor, want: Layout) -> Operand:
    """Return how a tensor is read: what is whole, of a group's copies if there are some."""
    step, copies = plan.steps[tensor.op], plan.copies.get(tensor)
    is_made = step.shards is not None and step.shards.gives[tensor.index] == want
    return Operand(tensor, want if copies is None or is_made or not is_whole(want) else copies)


def _outputs_of(plan: Decisions) -> Sequence[Operand]:
    """Return what a plan returns: of what lies along an axis what each shard has."""
    outputs = plan.program.outputs
    return _of_each(plan, outputs, plan.output_layouts or [SINGLE_DEVICE] * len(outputs))


def _of_each(plan: Decisions, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Operand]:
    return [
        _operand(plan, tensor, layout)._replace(by=d)
        for tensor, layout in zip(tensors, layouts, strict=True)
        for d in ([None] if layout == SINGLE_DEVICE else range(plan.mesh.shards))
    ]


def is_together(plan: Decisions, position: int) -> bool:
    """Return whether all shards run an operation as one."""
    shards = plan.steps[position].shards
    return shards is not None and shards.together


def _nothing(_: Copy) -> None:
    """What every device has, or makes for itself."""


class _Reader(NamedTuple):
    """An operand: found once for all copies of what reads it.

    Attributes:
      given: what gives it to a shard or (None) to what runs once.
      travels: whether it is sent to other devices. (Handles are not.)
      kind: of the move that brings it; `"op"` for none, `"copy"` for a copy of a variable.
      devices: where the mesh has columns, the device to which that move brings it for each shard: it goes on from there
        to other columns.
      copies: of a group, of which the nearest is given.
      beside: the tensor, if each shard reads what it has made on the same device.
    """

    given: Callable[[Copy], Result | None]
    travels: bool
    kind: str
    devices: Sequence[str] = ()
    copies: Replicate | None = None
    beside: Tensor | None = None


class _Copies(NamedTuple):
    """An operation on the shards, or once: found once for all of its copies.

    Attributes:
      devices: of each copy.
      readers: of its operands; None for what the device makes for itself.
    """

    op: Op
    devices: Sequence[str]
    readers: Sequence[_Reader | None]


class _TaskWriter:
    """Writes tasks, and of each those first that it reads of moves."""

    def __init__(self, plan: Decisions, alike: AlikeShards):
        self.tasks: list[PlannedTask] = []
        self._left_out = {plan.mesh.devices[d] for d in alike.told_by}
        self._plan = plan
        self._ops = plan.program.ops
        self._together = {i for i, step in enumerate(plan.steps) if step.shards is not None and step.shards.together}
        self._at: list[dict[Copy, int]] = [{} for _ in self._ops]
        self._copies: dict[tuple[int, bool], _Copies] = {}
        self._givers: dict[tuple[Operand, bool], Callable[[Copy], Result | None]] = {}
        self._kinds = kinds_of_shards(plan)
        self._sizes: dict[tuple[int, int | None], tuple[int, ...]] = {}
        self._elsewhere: dict[tuple[int, int, int], Result] = {}
        self._sent: dict[tuple[Result, str], Result] = {}
        self.values: dict[tuple[int, int], Result | None] = {}
        self.operands: dict[tuple[int, bool], Sequence[Operand | None]] = {}
        self._splits: dict[tuple[object, ...], int] = {}
        self._moves = {
            (move.tensor, move.target): (c, reads)
            for c, collective in enumerate(plan.collectives)
            for move, reads in zip(collective.moves, collective.reads, strict=True)
        }
        self._giving: dict[tuple[int, Copy], list[tuple[int, int]]] = {}  # to which sums a shard's operation
        self._missing: dict[tuple[int, int], int] = {}  # how many of those a sum waits for

    def expect_sums(self) -> None:
        """Find what sums take in as it comes."""
        for c, collective in enumerate(self._plan.collectives):
            for i, value in enumerate(collective.values):
                if isinstance(value, Sum) and value.turn is not None and value.device not in self._left_out:
                    giving = {(giving.tensor.op, giving.by) for giving in self._owns(c, value.of[1])}
                    self._missing[c, i] = len(giving)
                    for giver in giving:
                        self._giving.setdefault(giver, []).append((c, i))

    def _owns(self, c: int, i: int) -> Iterator[Own]:
        """Return what a value consists of."""
        value = self._plan.collectives[c].values[i]
        if isinstance(value, Own):
            yield value
        for k in value.of:
            yield from self._owns(c, k)

    def run(self, i: int, d: Copy) -> None:
        """Write an operation, on a shard or (None) once, on all devices of its group if it has one, unless it is there.

        Or on one of these devices.
        """
        if d is None and i in self._plan.owners.groups:
            for device_of_group in self._plan.places.once(self._ops[i]):
                self.run(i, device_of_group)
            return
        d, numbers = None if i in self._together else d, self._at[i]
        if d in numbers:
            return
        shard = d if isinstance(d, int) else None
        key = i, shard is not None
        if key not in self._copies:
            self._copies[key] = self._copies_of(self._ops[i], shard is not None)
        op, devices, readers = self._copies[key]
        device = d if isinstance(d, str) else devices[d or 0]
        arguments, results = self._plan.places.passed(op, shard, device) if op.bodies else ((), ())
        pairs = zip(readers, [*[device] * (len(readers) - len(arguments)), *arguments], strict=True)
        reads = tuple([reader and self._read(reader, d, place) for reader, place in pairs])
        sizes = self._sizes_of(op, shard)
        numbers[d] = self._add(PlannedTask(OPERATION, device, reads, sizes, i, shard))
        for k, place in enumerate(results):
            if shard is not None and place != device:  # each where its column has it
                task = PlannedTask(HANDED_ON, place, (Result(numbers[d], k),), (sizes[k],), i, shard)
                self._elsewhere[i, k, shard] = Result(self._add(task))
        for c, k in self._giving.get((i, d), ()):
            self._missing[c, k] -= 1
            if not self._missing[c, k]:
                self._value(c, k)

    def _read(self, reader: _Reader, d: Copy, device: str) -> Result | None:
        """Return what a copy of an operation reads, where it is."""
        if reader.beside is not None:  # (nine of ten)
            i, k = reader.beside
            if d not in self._at[i]:
                self.run(i, d)
            return Result(self._at[i][d], k)
        result = reader.given(d if reader.copies is None else reader.copies.nearest(device))
        return result and self._here(result, device, reader, d)

    def _copies_of(self, op: Op, on_shards: bool) -> _Copies:
        once = [self._plan.default_device] if is_together(self._plan, op.index) else self._plan.places.once(op)
        devices = self._plan.places.on_shards(op) if on_shards else once
        operands = self.operands[op.index, on_shards] = operands_of(self._plan, op, on_shards)
        readers = [operand and self._reader(operand, on_shards) for operand in operands]
        if on_shards:
            beside = [operand and self._beside(operand, devices) for operand in operands]
            readers = [r and r._replace(beside=tensor) for r, tensor in zip(readers, beside, strict=True)]
        return _Copies(op, devices, readers)

    def _beside(self, operand: Operand, devices: Sequence[str]) -> Tensor | None:
        """Return the tensor that is read if shards that run on these devices have made it there themselves."""
        (i, k), shards = operand.tensor, self._plan.steps[operand.tensor.op].shards
        if operand.by is not None or shards is None or shards.gives[k] != operand.layout:
            return None
        is_there = self._plan.places.on_shards(self._ops[i]) == devices
        return operand.tensor if is_there and not shards.together and not self._ops[i].has_columns else None

    def _add(self, task: PlannedTask) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _sizes_of(self, op: Op, d: int | None) -> tuple[int, ...]:
        """Return the bytes of each result."""
        key = op.index, None if d is None else self._kinds[d]
        if key not in self._sizes:
            shards, mesh, iterations, sizes = (
                self._plan.steps[op.index].shards,
                self._plan.mesh,
                iterations_of(op),
                op.out_bytes,
            )
            if is_together(self._plan, op.index) and shards is not None:
                outputs = zip(op.out_bytes, shards.gives, spread(shards.gives, mesh.shards), strict=True)
                sizes = tuple(
                    [mesh.bytes_of(k, n, layout) for n, layout, numbers in outputs for k in range(len(numbers))]
                )
            elif d is not None and shards is not None:
                pairs = zip(op.out_bytes, shards.gives, strict=True)
                sizes = tuple([mesh.bytes_of(d, size, layout) for size, layout in pairs])
            if iterations is not None:
                kept_bytes = kept_on(self._plan, op, d)
                sizes = tuple([size + int(iterations.number) * kept_bytes.get(k, 0) for k, size in enumerate(sizes)])
            self._sizes[key] = sizes
        return self._sizes[key]

    def _reader(self, operand: Operand, on_shards: bool) -> _Reader:
        giver, layout = self._giver(operand, on_shards), operand.layout
        travels = self._plan.program.dtype(operand.tensor) not in (tf.resource, tf.variant)
        c, reads = self._moves.get((operand.tensor, layout), (0, ()))
        if isinstance(layout, Replicate) and layout.devices:
            return _Reader(giver, travels, self._plan.collectives[c].kind if reads else COPY, (), layout)
        goes_on = reads and self._plan.mesh.columns and on_shards and not isinstance(layout, SingleDevice)
        kind = self._plan.collectives[c].kind if reads else OPERATION
        return _Reader(giver, travels, kind, tuple([read.device for read in reads]) if goes_on else ())

    def _here(self, result: Result, device: str, reader: _Reader, d: Copy = None) -> Result:
        """Return a result where a device has it; of another one, what that is sent."""
        maker = self.tasks[result.task]
        if maker.device == device or not reader.travels:
            return result
        if (result, device) not in self._sent:
            goes_on = reader.devices and reader.devices[d if isinstance(d, int) else 0] != device
            why = OPERATION if goes_on else reader.kind
            task = PlannedTask(SEND, device, (result,), (maker.bytes[result.index],), maker.op, maker.shard, None, why)
            self._sent[result, device] = Result(self._add(task))
        return self._sent[result, device]

    def given(self, operand: Operand, d: Copy) -> Result | None:
        """Return what a reader, shard `d` or (None) one that runs once, is given; None for what its device has."""
        return self._giver(operand, isinstance(d, int))(d)

    def _giver(self, operand: Operand, on_shards: bool) -> Callable[[Copy], Result | None]:
        """Return what gives an operand to a shard, or (None) to what runs once; it is found once for all shards."""
        if operand.by is not None:
            giver_of_shard, by = self._giver(operand._replace(by=None), True), operand.by
            return lambda _: giver_of_shard(by)
        key = operand, on_shards
        if key not in self._givers:
            self._givers[key] = self._giver_of(operand.tensor, operand.layout, on_shards)
        return self._givers[key]

    def _giver_of(self, tensor: Tensor, layout: Layout, on_shards: bool) -> Callable[[Copy], Result | None]:
        """Return what gives a tensor in a layout: what made it, or the move into that layout."""
        plan, op, step = self._plan, self._ops[tensor.op], self._plan.steps[tensor.op]
        gives = step.shards.gives[tensor.index] if step.shards else None
        is_everywhere = plan.state.is_everywhere(op)
        if on_shards and gives == layout:
            return self._maker_of(tensor)
        once = plan.places.layout(op)
        if isinstance(layout, Replicate) and layout.devices and not is_everywhere:
            is_made, nearest = step.once and layout == once, layout.nearest(plan.default_device)
            giver = self._maker_of(tensor) if is_made else self._mover_of(tensor, layout)
            return lambda d: giver(d if isinstance(d, str) else nearest)
        if not isinstance(layout, SingleDevice):
            if (op.type == "Const" and isinstance(layout, Shard)) or (is_whole(layout) and is_everywhere):
                return _nothing
            return self._mover_of(tensor, layout)
        if step.once and (layout == once or not layout.device):
            maker = self._maker_of(tensor)
            return lambda _: maker(None)
        if is_everywhere:
            return _nothing
        if not layout.device and gives is not None and is_whole(gives):
            return lambda _: self._made(tensor, 0)
        target = layout if layout.device else plan.places.whole(tensor)
        return self._mover_of(tensor, target)

    def _maker_of(self, tensor: Tensor) -> Callable[[Copy], Result]:
        """Return what makes a tensor, on a shard or (None) once."""
        i, k = tensor
        numbers = self._at[i]
        if self._ops[i].has_columns or is_together(self._plan, i):
            return lambda d: self._made(tensor, d)

        def made(d: Copy) -> Result:
            if d not in numbers:
                self.run(i, d)
            return Result(numbers[d], k)

        return made

    def _made(self, tensor: Tensor, d: Copy) -> Result:
        """Return what a loop or branch makes that runs in columns, or on all shards as one."""
        self.run(tensor.op, d)
        if is_together(self._plan, tensor.op) and (shards := self._plan.steps[tensor.op].shards):
            numbers = spread(shards.gives, self._plan.mesh.shards)[tensor.index]
            return Result(self._at[tensor.op][None], numbers[min(d if isinstance(d, int) else 0, len(numbers) - 1)])
        if isinstance(d, int) and (elsewhere := self._elsewhere.get((tensor.op, tensor.index, d))):
            return elsewhere
        return Result(self._at[tensor.op][d], tensor.index)

    def _mover_of(self, tensor: Tensor, layout: Layout) -> Callable[[Copy], Result | None]:
        """Return what makes a tensor by a move, for a shard if that makes something for each."""
        if (tensor, layout) not in self._moves:
            name = self._ops[tensor.op].name
            raise CheckError(f"{name!r} is read as {layout}, and no move of the plan makes that.")
        c, reads = self._moves[tensor, layout]
        if isinstance(layout, SingleDevice):
            return lambda _: self._value(c, reads[0].value)
        group = group_of(layout)
        return lambda d: self._value(c, reads[group.index(d) if isinstance(d, str) else d or 0].value)

    def _value(self, c: int, i: int) -> Result | None:
        """Return a value of a collective; the first time, write what makes it."""
        if (c, i) not in self.values:
            self.values[c, i] = self._write_value(c, i)
        return self.values[c, i]

    def _write_value(self, c: int, i: int) -> Result | None:
        collective = self._plan.collectives[c]
        value = collective.values[i]
        if isinstance(value, Own):
            return self.given(Operand(value.tensor, value.layout), value.by)
        if isinstance(value, Slice):
            key = (c, value.of[0], value.split, value.device)
            if key not in self._splits:
                alike = [v for v in collective.values if isinstance(v, Slice) and v.of[0] == value.of[0]]
                sizes = {v.piece: v.bytes for v in alike if (v.split, v.device) == key[2:]}
                self._splits[key] = self._add_value(c, value, [sizes.get(k, 0) for k in range(max(sizes) + 1)])
            return Result(self._splits[key], value.piece)
        return Result(self._add_value(c, value, [value.bytes]))

    def _add_value(self, c: int, value: Value, sizes: Sequence[int]) -> int:
        collective = self._plan.collectives[c]
        of = [self._value(c, k) for k in value.of if collective.values[k].device not in self._left_out]
        reader = self._reader(Operand(collective.moves[0].tensor, collective.moves[0].target), False)
        reads = tuple([part and self._here(part, value.device, reader) for part in of])
        op = None if collective.is_bucket else collective.moves[0].tensor.op
        return self._add(PlannedTask(collective.kind, value.device, reads, tuple(sizes), op, value.shard, value))
