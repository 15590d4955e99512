"""Memory: how many bytes are alive on each device at a time, while a plan runs once in its own order.

Counted is what operations make, activations and gradients, and what moves consist of (`transfers`): pieces, sums, and
what a device is sent. Arguments, variables and constants are there before. What a kernel needs besides is not known,
and an operation that writes its result over its operand is counted with both.

Everything is made when it is first needed, and there until it is needed last; but of a sum that shards of one device
give to in turns there is one buffer, to which each adds as it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from graphsplit.core.layouts import Layout, SingleDevice
from graphsplit.planning.communication.transfers import Own, Read, Relay, Sum
from graphsplit.planning.decisions import Decisions, flow_of
from graphsplit.planning.schedule.phases import find_phases
from graphsplit.planning.schedule.turns import find_turns
from graphsplit.program.program import COPIES, Op, Tensor

_SAME_BUFFER = frozenset(
    {
        *("CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze"),
        *("StopGradient", COPIES),
    }
)
_NO_BUFFER = frozenset({"Const", "Placeholder", "ReadVariableOp", "Sizes"})


def live_bytes(plan: Decisions, shards: Collection[int] | None = None) -> dict[str, int]:
    """Return the most bytes that are alive at a time on each device; sizes that are not known count as planned.

    Args:
      plan: what runs.
      shards: which of them run, beside what runs once; None: all.
    """
    lifetimes = _Lifetimes(plan, range(plan.mesh.shards) if shards is None else shards)
    lifetimes.run()
    return lifetimes.most(None if shards is None else _devices(plan, shards))


def _devices(plan: Decisions, shards: Collection[int]) -> set[str]:
    """Return the devices of some shards, and of what runs once."""
    places = {(op.stage, op.provenance.column): op for op in plan.sharded_ops}.values()
    return {plan.home, *plan.owners.of_ops, *[plan.shard_device(op, d) for op in places for d in shards]}


def held_bytes(plan: Decisions) -> int:
    """Return the most bytes that the shards hold while all of them wait for each other."""
    level = {i: phase.level for phase in plan.phases for i in phase.ops}
    last: dict[Tensor, int] = {}
    for op in plan.sharded_ops:
        for tensor in _own(plan, op):
            last[tensor] = max(level[op.index], last.get(tensor, 0))
    held = [(level[t.op], p, plan.program.bytes(t)) for t, p in last.items() if _has_buffer(plan.program.ops[t.op])]
    waits = sorted({phase.level for phase in plan.phases})
    return max([sum([size for first, p, size in held if first <= wait < p]) for wait in waits], default=0)


def _has_buffer(op: Op) -> bool:
    return op.type not in _NO_BUFFER and op.type not in _SAME_BUFFER


def _own(plan: Decisions, op: Op) -> Iterator[Tensor]:
    """Return what a shard reads of what it made itself."""
    shards = plan.steps[op.index].shards
    assert shards is not None
    for i, (tensor, want) in enumerate(zip(op.inputs, shards.wants, strict=True)):
        made = plan.steps[tensor.op].shards
        if i not in shards.makes and made is not None and made.gives[tensor.index] == want:
            yield tensor


class _Made(NamedTuple):
    """What an operation makes: a shard's, or (None) once."""

    tensor: Tensor
    shard: int | None


class _Moved(NamedTuple):
    """A value of a collective, by the numbers of both, where it is or on a device that is sent it."""

    collective: int
    value: int
    device: str


class _Copy(NamedTuple):
    """A variable's value on a device that is sent it because it has no copy of its own."""

    tensor: Tensor
    device: str


_Buffer = _Made | _Moved | _Copy


class _Lifetimes:
    """Every operation in the order of the plan, and when what it makes is needed first and last."""

    def __init__(self, plan: Decisions, shards: Collection[int]):
        self._plan = plan
        self._shards = shards
        self._ops = plan.program.ops
        self._first: dict[_Buffer, int] = {}  # in this order
        self._last: dict[_Buffer, int] = {}
        self._reads: Mapping[tuple[Tensor, Layout], tuple[int, tuple[Read, ...]]] = {
            (move.tensor, move.target): (c, reads)
            for c, collective in enumerate(plan.collectives)
            for move, reads in zip(collective.moves, collective.reads, strict=True)
        }
        self._adding: dict[_Made, list[_Moved]] = {}  # sums that take in what a shard makes when it is there
        self._missing: dict[_Moved, int] = {}  # how much of that is not there yet

    def _expect_sums(self) -> None:
        """Find what sums take in as it comes."""
        for c, collective in enumerate(self._plan.collectives):
            for i, value in enumerate(collective.values):
                if isinstance(value, Sum) and value.turn is not None:
                    own = [_Made(own.tensor, own.by) for own in self._owns(c, value.of[1])]
                    total = _Moved(c, i, value.device)
                    self._missing[total] = len(own)
                    for made in own:
                        self._adding.setdefault(made, []).append(total)

    def _owns(self, c: int, i: int) -> Iterator[Own]:
        """Return what a value consists of."""
        value = self._plan.collectives[c].values[i]
        if isinstance(value, Own):
            yield value
        for k in value.of:
            yield from self._owns(c, k)

    def run(self) -> None:
        """Find out when everything is needed."""
        self._expect_sums()
        for n, (i, d) in enumerate(self._copies()):
            op = self._ops[i]
            for buffer in self._read(op, d):
                self._need(buffer, n)
            for k in range(len(op.out_shapes)):
                made = _Made(Tensor(i, k), d)
                self._need(made, n)
                for total in self._adding.get(made, ()):
                    self._missing[total] -= 1
                    if not self._missing[total]:
                        self._need(total, n)

    def most(self, devices: Collection[str] | None) -> dict[str, int]:
        """Return the most bytes on each device, or on some."""
        alive: dict[str, int] = {}
        most: dict[str, int] = {}
        ends: dict[int, list[tuple[str, int]]] = {}
        now = 0
        for buffer, first in self._first.items():
            for n in range(now, first):
                for device, size in ends.pop(n, ()):
                    alive[device] -= size
            now = first
            device, size = self._size(buffer)
            if devices is None or device in devices:
                alive[device] = alive.get(device, 0) + size
                most[device] = max(most.get(device, 0), alive[device])
                ends.setdefault(self._last[buffer], []).append((device, size))
        return most

    def _copies(self) -> Iterator[tuple[int, int | None]]:
        """Return what runs, in order: what runs once as soon as the shards are ready for it, then phase by phase."""
        plan = self._plan
        flow, phases, turns = flow_of(plan), plan.phases, plan.turns
        if not phases:
            phases = find_phases(flow, plan.collectives)
            turns = find_turns(plan.program, phases, plan.mesh, {})
        level = {i: phase.level for phase in phases for i in phase.ops}
        after, once = [-1] * len(self._ops), list[tuple[int, int]]()
        for op in plan.home_ops:
            found = [level[s.op] if s.on_shards else after[s.op] for s in flow.of_whole(op.index)]
            after[op.index] = max(found, default=-1)
            once.append((after[op.index], op.index))
        once.sort(reverse=True)
        for turn in turns:
            while once and once[-1][0] < phases[turn.phase].level:
                yield once.pop()[1], None
            if turn.shard in self._shards:
                yield from ((i, turn.shard) for i in phases[turn.phase].ops)
        yield from ((i, None) for _, i in reversed(once))

    def _read(self, op: Op, d: int | None) -> Iterator[_Buffer]:
        """Return what an operation reads that is a buffer, on a shard or (None) where it runs once."""
        if d is None:
            own = SingleDevice(self._plan.owners.of_ops[op.index])
            inputs = [self._plan.program.nearest(op, own.device)] if op.type == COPIES else op.inputs
            yield from [buffer for tensor in inputs for buffer in self._read_in(tensor, own, None)]
            return
        shards = self._plan.steps[op.index].shards
        assert shards is not None
        if op.type == COPIES:
            device = self._plan.shard_device(op, d)
            tensor = self._plan.program.nearest(op, device)
            is_here = self._plan.program.places[tensor.op] == device
            yield _Made(tensor, None) if is_here else _Copy(tensor, device)
            return
        for i, tensor in enumerate(op.inputs):
            if i not in shards.makes:
                yield from self._read_in(tensor, shards.wants[i], d)

    def _read_in(self, tensor: Tensor, layout: Layout, d: int | None) -> Iterator[_Buffer]:
        """Yield what is read of a tensor in a layout: what was made, or what moved; nothing of what is everywhere."""
        step = self._plan.steps[tensor.op]
        if d is not None and step.shards and step.shards.gives[tensor.index] == layout:
            yield _Made(tensor, d)
        elif (tensor, layout) in self._reads:
            c, reads = self._reads[tensor, layout]
            read = reads[d or 0]
            yield _Moved(c, read.value, read.device)
        elif step.home:
            yield _Made(tensor, None)
        elif d is None and layout != (here := SingleDevice(self._plan.owners.of(tensor))):
            yield from self._read_in(tensor, here, None)  # wherever it is put together

    def _need(self, buffer: _Buffer, n: int) -> None:
        """Note that something is needed, and, the first time, what it is made of."""
        root = self._root(buffer)
        if root is None:
            return
        if root not in self._first:
            for source in self._sources(root):
                self._need(source, n)
            self._first[root] = n
        self._last[root] = n

    def _sources(self, buffer: _Buffer) -> Iterator[_Buffer]:
        """Return what is there while something moves."""
        if isinstance(buffer, _Moved):
            value = self._plan.collectives[buffer.collective].values[buffer.value]
            if value.device != buffer.device:
                yield _Moved(buffer.collective, buffer.value, value.device)
            else:
                yield from (_Moved(buffer.collective, i, value.device) for i in value.of)

    def _root(self, buffer: _Buffer) -> _Buffer | None:
        """Return the buffer that a value shares; None for what has none."""
        found: _Buffer | None = buffer
        while found is not None:
            buffer, found = found, self._shared(found)
            if found == buffer:
                return found
        return None

    def _shared(self, buffer: _Buffer) -> _Buffer | None:
        """Return of which buffer a value is another name: itself, if it has one of its own; None if there is none."""
        if isinstance(buffer, _Copy):
            return buffer
        if isinstance(buffer, _Made):
            op, d = self._ops[buffer.tensor.op], buffer.shard
            if op.type in _SAME_BUFFER:
                return next(self._read(op, d), None)
            return buffer if op.type not in _NO_BUFFER and (d is None or d in self._shards) else None
        value = self._plan.collectives[buffer.collective].values[buffer.value]
        if value.device != buffer.device:
            return buffer
        if isinstance(value, Own):
            return next(self._read_in(value.tensor, value.layout, value.by), None)
        if isinstance(value, Relay) or (isinstance(value, Sum) and value.turn is not None):
            return _Moved(buffer.collective, value.of[0], value.device)
        return buffer

    def _size(self, buffer: _Buffer) -> tuple[str, int]:
        """Return the device of a buffer, and its bytes."""
        plan = self._plan
        if isinstance(buffer, _Moved):
            return buffer.device, plan.collectives[buffer.collective].values[buffer.value].bytes
        size = plan.program.bytes(buffer.tensor)
        if isinstance(buffer, _Copy):
            return buffer.device, size
        if buffer.shard is None:
            return plan.owners.of_ops[buffer.tensor.op] or plan.home, size
        shards = plan.steps[buffer.tensor.op].shards
        assert shards is not None
        size = plan.mesh.bytes_of(buffer.shard, size, shards.gives[buffer.tensor.index])
        return plan.shard_device(self._ops[buffer.tensor.op], buffer.shard), size
