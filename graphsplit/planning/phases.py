"""Phases: what the shards of one device do one after the other.

What a shard computes needs its own rows only, until something needs the rows of all: the mean of a BatchNormalization,
the other rows of a batch of pairs. There all shards wait. What lies between two such waits is a phase, and of a phase
each shard of a device runs all, forward and backward, before the next shard begins. So what it keeps alive is alive
for one shard at a time, apart from what a later phase reads.

An operation may belong to several phases: it can run as soon as what it reads is there, or wait until it is needed.
It waits with those that read it, so that little is held between phases. What only leads to values that no shard reads
again, the gradient of a weight, runs at once: that frees what it reads.

No circle can arise. All that an operation depends on is of an earlier phase, or of its own phase and its own shard; and
shards wait for an earlier shard of the same phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import Layout, Partial, Shard, is_whole
from graphsplit.planning.scheduling import seeds_of
from graphsplit.planning.state import State
from graphsplit.planning.steps import Bucket, Move, Step
from graphsplit.program.program import Op, Program, Tensor


@dataclass(frozen=True)
class Phase:
    """Operations that every shard runs before the next shard of its device begins.

    Attributes:
      ops: their positions, in order.
      starts: those that depend on no other one of the phase: they wait for the shard before.
      ends: those on which no other one of the phase depends: for them the next shard waits.
      sums: moves that add up what the phase makes; for this shard's addition the next shard waits, too. Of a bucket it
        is the first, in the phase in which the last of its tensors is made.
    """

    ops: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    sums: tuple[Move, ...] = ()


class Source(NamedTuple):
    """What an operation depends on.

    Attributes:
      op: its position.
      on_shards: whether it is the shards' copies, or what runs once.
      of_all: whether those of all shards, put together; not only the shard's own.
    """

    op: int
    on_shards: bool
    of_all: bool


def find_phases(flow: Flow, moves: Sequence[Move], buckets: Sequence[Bucket]) -> tuple[Phase, ...]:
    """Return the phases, none of which depends on a later one.

    Args:
      flow: what depends on what.
      moves: all moves.
      buckets: which of them are made as one.
    """
    program, steps = flow.program, flow.steps
    levels, seeds = _Levels(flow).shards, seeds_of(program)
    members: dict[tuple[int, frozenset[int]], list[int]] = {}
    for op in program.ops:
        if steps[op.index].shards:
            members.setdefault((levels[op.index], seeds[op.index]), []).append(op.index)
    ordered = sorted(members, key=lambda key: (key[0], len(key[1]), members[key][0]))
    sums = _sums({i: p for p, key in enumerate(ordered) for i in members[key]}, moves, buckets)
    return tuple([_phase(flow, members[key], sums.get(p, ())) for p, key in enumerate(ordered)])


def _sums(number: Mapping[int, int], moves: Sequence[Move], buckets: Sequence[Bucket]) -> dict[int, list[Move]]:
    """Return by phase the moves that add up what shards give, given the phase of each operation."""
    bucket_of = {move: bucket for bucket in buckets for move in bucket.moves}
    found: dict[int, list[Move]] = {}
    for move in moves:
        together = bucket_of[move].moves if move in bucket_of else (move,)
        if isinstance(move.source, Partial) and move == together[0]:
            found.setdefault(max([number[m.tensor.op] for m in together]), []).append(move)
    return found


def _phase(flow: Flow, ops: Sequence[int], sums: Sequence[Move]) -> Phase:
    own, starts, continued = set(ops), [], set()
    for i in ops:
        inside = [s.op for s in flow.of_shard(i) if s.on_shards and not s.of_all and s.op in own]
        continued.update(inside)
        if not inside:
            starts.append(i)
    return Phase(tuple(ops), tuple(starts), tuple([i for i in ops if i not in continued]), tuple(sums))


def meeting_points(flow: Flow) -> list[Op]:
    """Return the operations on the shards for which, on all of them, something on the shards waits."""
    leading: set[int] = set()  # what runs once, and is read by the shards in the end
    found: set[int] = set()
    for op in reversed(flow.program.ops):
        step = flow.steps[op.index]
        sources = list(flow.of_shard(op.index)) if step.shards else []
        sources += flow.of_whole(op.index) if step.home and op.index in leading else ()
        for source in sources:
            meets = source.of_all and source.on_shards
            found.update([source.op] if meets else ())
            leading.update([source.op] if not source.on_shards else ())
    return [flow.program.ops[i] for i in sorted(found)]


@dataclass(frozen=True)
class Flow:
    """What depends on what, once it is decided what runs on the shards.

    Attributes:
      program, steps: what runs where.
      state: where lives what the program does not compute.
      order: operations on the shards that wait, each for another one.
    """

    program: Program
    steps: Sequence[Step]
    state: State
    order: Mapping[int, int] = field(default_factory=dict)

    def of_shard(self, position: int) -> Iterator[Source]:
        """Return what a shard's copy of an operation depends on."""
        op, shards = self.program.ops[position], self.steps[position].shards
        assert shards is not None
        for i, (tensor, want) in enumerate(zip(op.inputs, shards.wants, strict=True)):
            if i not in shards.makes:
                yield from self._read(tensor, want)
        for control in op.controls:
            yield from self._ended(control)
        if position in self.order:
            yield Source(self.order[position], True, False)

    def of_whole(self, position: int) -> Iterator[Source]:
        """Return what an operation that runs once depends on."""
        op = self.program.ops[position]
        for i in op.sources:
            step = self.steps[i]
            if step.home or step.shards:
                yield Source(i, not step.home, not step.home)

    def _read(self, tensor: Tensor, layout: Layout) -> Iterator[Source]:
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        if step.shards and step.shards.gives[tensor.index] == layout:
            yield Source(tensor.op, True, False)
        elif (op.type == "Const" and isinstance(layout, Shard)) or (is_whole(layout) and self.state.is_everywhere(op)):
            return
        elif step.home:
            yield Source(tensor.op, False, False)
        elif step.shards:
            yield Source(tensor.op, True, True)

    def _ended(self, position: int) -> Iterator[Source]:
        step = self.steps[position]
        if step.home:
            yield Source(position, False, False)
        elif step.shards:
            yield Source(position, True, False)


class _Levels:
    """The number of waits before each operation.

    Attributes:
      shards: before what runs on the shards, by position; 0 for others.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        self._ops = flow.program.ops
        self._seeds = seeds_of(flow.program)
        self._wanted: dict[tuple[int, bool], int] = {}
        self.whole, self.shards = [0] * len(self._ops), [0] * len(self._ops)
        self._count()
        if any(self.shards):
            self._look_back()
            self._count()

    def _copies(self, op: Op) -> Iterator[tuple[bool, list[Source]]]:
        """Return how an operation runs, on the shards or once, and what it then depends on."""
        step = self._flow.steps[op.index]
        if step.home:
            yield False, list(self._flow.of_whole(op.index))
        if step.shards:
            yield True, list(self._flow.of_shard(op.index))

    def _level(self, position: int, on_shards: bool) -> int:
        return (self.shards if on_shards else self.whole)[position]

    def _count(self) -> None:
        """Count the waits: as few as can be, or as many as are wanted."""
        first = len(self._ops) + 1  # what comes from outside comes after all that runs before
        given = set(self._flow.program.inputs[len(self._flow.program.inputs) - self._flow.program.seeds :])
        for op in self._ops:
            for on_shards, sources in self._copies(op):
                least = self._wanted.get((op.index, on_shards), first if op.index in given else 0)
                before = [self._level(s.op, s.on_shards) + s.of_all for s in sources]
                (self.shards if on_shards else self.whole)[op.index] = max([least, *before])

    def _look_back(self) -> None:
        """Find which operations can wait with what reads them."""
        wanted = self._wanted
        for op in reversed(self._ops):
            for on_shards, sources in self._copies(op):
                own = wanted.get((op.index, on_shards))
                for source in sources:
                    if self._seeds[source.op] == self._seeds[op.index]:
                        self._let_wait(source, own, self._level(op.index, on_shards) if on_shards else None)

    def _let_wait(self, source: Source, wanted: int | None, level: int | None) -> None:
        """Note what a reader says of its source: when it is wanted; or at its own level, if that is a later one.

        Args:
          source: what is read.
          wanted: when the reader is wanted, if anybody says.
          level: the reader's, if it is on the shards.
        """
        own = self._level(source.op, source.on_shards)
        if wanted is None and level is not None and (level > own or not source.on_shards):
            wanted = level
        if wanted is not None:
            key = (source.op, source.on_shards)
            self._wanted[key] = min(self._wanted.get(key, wanted), wanted - source.of_all)


def check_phases(flow: Flow, moves: Sequence[Move], buckets: Sequence[Bucket], phases: Sequence[Phase]) -> None:
    """Raise `CheckError` if a shard would wait for what waits for it, or would not wait for what it should."""
    program, steps, number = flow.program, flow.steps, {i: p for p, phase in enumerate(phases) for i in phase.ops}
    missing = [op.name for op in program.ops if steps[op.index].shards and op.index not in number]
    if missing:
        raise CheckError(f"{missing[0]!r} runs on the shards and is of no phase.")
    whole = [-1] * len(program.ops)  # the last phase that must have ended, on all shards, before what runs once
    for op in program.ops:
        if steps[op.index].shards:
            for source in flow.of_shard(op.index):
                _check_source(program, op, number, source, whole)
        if steps[op.index].home:
            found = [number[s.op] if s.on_shards else whole[s.op] for s in flow.of_whole(op.index)]
            whole[op.index] = max(found, default=-1)
    sums = _sums(number, moves, buckets)
    for p, phase in enumerate(phases):
        if phase != _phase(flow, sorted(phase.ops), sums.get(p, ())):
            raise CheckError(f"The phase of {program.ops[phase.ops[0]].name!r} begins or ends with other operations.")


def _check_source(program: Program, op: Op, number: Mapping[int, int], source: Source, whole: Sequence[int]) -> None:
    before = number[source.op] if source.on_shards else whole[source.op]
    meets = source.of_all or not source.on_shards
    if before > number[op.index] or (meets and before == number[op.index]):
        raise CheckError(f"{op.name!r} depends on {program.ops[source.op].name!r}, which is not of an earlier phase.")
