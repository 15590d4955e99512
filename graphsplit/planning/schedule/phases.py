"""Phases: what the shards of one device do one after the other; and the turns in which they run them.

What a shard computes needs its own rows only, until something needs the rows of all: the mean of a BatchNormalization,
the other rows of a batch of pairs. There all shards wait. What lies between two such waits is a phase, and of a phase
each shard of a device runs all, forward and backward, before the next shard begins. So what it keeps alive is alive
for one shard at a time, apart from what a later phase reads. In a pipeline, phases are finer: each stage forward, each
stage backward.

No circle can arise. All that an operation depends on is of an earlier level, or of its own level and its own shard, and
an earlier task; and shards take turns within a level, as a schedule of all tasks says.

Levels: how often all shards have waited for each other before an operation runs.

An operation may belong to several levels: it can run as soon as what it reads is there, or wait until it is needed.
It waits with those that read it, so that little is held between levels. What only leads to values that no shard reads
again, the gradient of a weight, runs at once: that frees what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphsplit.errors import CheckError
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.costs.families import FREE, PASSED_ON, family_of
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.flow import Flow, Source
from graphsplit.planning.schedule.pipelines import StageTask, find_tasks
from graphsplit.planning.schedule.schedules import Schedule, Slot
from graphsplit.planning.schedule.scheduling import seeds_of
from graphsplit.planning.steps import Move
from graphsplit.program.program import Op, Program


def levels_on_shards(flow: Flow, waiting: bool = True) -> list[int]:
    """Return the number of waits before what runs on the shards, by position; 0 for others.

    Args:
      flow: what depends on what.
      waiting: whether operations wait with those that read them; else each runs as early as it can.
    """
    return _Levels(flow).find(waiting)


class _Levels:
    def __init__(self, flow: Flow):
        self._flow = flow
        self._ops = flow.program.ops
        self._seeds = seeds_of(flow.program)
        self._wanted: dict[tuple[int, bool], int] = {}
        self._whole, self._shards = [0] * len(self._ops), [0] * len(self._ops)

    def find(self, waiting: bool) -> list[int]:
        self._count()
        if waiting and any(self._shards):
            self._look_back()
            self._count()
        return self._shards

    def _copies(self, op: Op) -> Iterator[tuple[bool, list[Source]]]:
        """Return how an operation runs, on the shards or once, and what it then depends on."""
        step = self._flow.steps[op.index]
        if step.once:
            yield False, list(self._flow.of_whole(op.index))
        if step.shards:
            yield True, list(self._flow.of_shard(op.index))

    def _level(self, position: int, on_shards: bool) -> int:
        return (self._shards if on_shards else self._whole)[position]

    def _count(self) -> None:
        """Count the waits: as few as can be, or as many as are wanted."""
        first = len(self._ops) + 1  # what comes from outside comes after all that runs before
        seeds = set(self._flow.program.inputs[len(self._flow.program.inputs) - self._flow.program.seeds :])
        for op in self._ops:
            for on_shards, sources in self._copies(op):
                least = self._wanted.get((op.index, on_shards), first if op.index in seeds else 0)
                levels = [self._level(s.op, s.on_shards) + s.of_all for s in sources]
                (self._shards if on_shards else self._whole)[op.index] = max([least, *levels])

    def _look_back(self) -> None:
        """Find which operations can wait with what reads them."""
        wanted = self._wanted
        for op in reversed(self._ops):
            for on_shards, sources in self._copies(op):
                wanted_level = wanted.get((op.index, on_shards))
                for source in sources:
                    if self._seeds[source.op] == self._seeds[op.index]:
                        self._let_wait(source, wanted_level, self._level(op.index, on_shards) if on_shards else None)

    def _let_wait(self, source: Source, wanted: int | None, level: int | None) -> None:
        """Note what a reader says of its source: when it is wanted; or at its own level, if that is a later one.

        Args:
          source: what is read.
          wanted: when the reader is wanted, if anybody says.
          level: the reader's, if it is on the shards.
        """
        source_level = self._level(source.op, source.on_shards)
        if wanted is None and level is not None and (level > source_level or not source.on_shards):
            wanted = level
        if wanted is not None:
            key = (source.op, source.on_shards)
            self._wanted[key] = min(self._wanted.get(key, wanted), wanted - source.of_all)


@dataclass(frozen=True)
class Phase:
    """Operations that every shard runs before the next shard of its device begins.

    Attributes:
      ops: their positions, in order.
      starts: those that depend on no other one of the phase: they wait for the shard before.
      ends: those on which no other one of the phase depends: for them the next shard waits.
      level: how often all shards have waited for each other before.
      sums: moves that add up what the phase makes; for this shard's addition the next shard waits, too. Of a bucket it
        is the first, in the phase in which the last of its tensors is made.
      task: what of a pipeline it is, if there is one.
    """

    ops: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    level: int = 0
    sums: tuple[Move, ...] = ()
    task: StageTask | None = None


def find_phases(flow: Flow, collectives: Sequence[Collective], schedule: str = "") -> tuple[Phase, ...]:
    """Return the phases, none of which depends on a later one.

    Args:
      flow: what depends on what.
      collectives: what carries out all moves.
      schedule: the kind of schedule by which shards go through stages; "" for none.
    """
    program, levels, seeds = flow.program, levels_on_shards(flow), seeds_of(flow.program)
    tasks = find_tasks(flow, schedule) if schedule else [None] * len(program.ops)
    members: dict[tuple[int, frozenset[int], StageTask | None], list[int]] = {}
    for op in program.ops:
        if flow.steps[op.index].shards:
            members.setdefault((levels[op.index], seeds[op.index], tasks[op.index]), []).append(op.index)

    def place(key: tuple[int, frozenset[int], StageTask | None]) -> tuple[object, ...]:
        level, waits, task = key
        return level, len(waits), sorted(waits), task.place if task else (), members[key][0]

    ordered = sorted(members, key=place)
    sums = _sums({i: p for p, key in enumerate(ordered) for i in members[key]}, collectives)
    return tuple([_phase(flow, members[key], key[0], sums.get(p, ()), key[2]) for p, key in enumerate(ordered)])


def _sums(number: Mapping[int, int], collectives: Sequence[Collective]) -> dict[int, list[Move]]:
    """Return by phase the moves that add up what shards give, given the phase of each operation."""
    moves_by_phase: dict[int, list[Move]] = {}
    for collective in collectives:
        if collective.adds_up:
            last = max([number[move.tensor.op] for move in collective.moves])
            moves_by_phase.setdefault(last, []).append(collective.moves[0])
    return moves_by_phase


def _phase(flow: Flow, ops: Sequence[int], level: int, sums: Sequence[Move], task: StageTask | None) -> Phase:
    op_set, starts, continued = set(ops), [], set()
    for i in ops:
        inside = [s.op for s in flow.of_shard(i) if s.on_shards and not s.of_all and s.op in op_set]
        continued.update(inside)
        if not inside:
            starts.append(i)
    ends = [i for i in ops if i not in continued]
    return Phase(tuple(ops), tuple(starts), tuple(ends), level, tuple(sums), task)


def check_phases(flow: Flow, collectives: Sequence[Collective], phases: Sequence[Phase]) -> None:
    """Raise `CheckError` if a shard would wait for what waits for it, or would not wait for what it should."""
    program, steps, number = flow.program, flow.steps, {i: p for p, phase in enumerate(phases) for i in phase.ops}
    missing = [op.name for op in program.ops if steps[op.index].shards and op.index not in number]
    if missing:
        raise CheckError(f"{missing[0]!r} runs on the shards and is of no phase.")
    whole = [-1] * len(program.ops)  # the last level that must have ended, on all shards, before what runs once
    for op in program.ops:
        if steps[op.index].shards:
            for source in flow.of_shard(op.index):
                _check_source(flow, op, phases, number, source, whole)
        if steps[op.index].once:
            levels = [phases[number[s.op]].level if s.on_shards else whole[s.op] for s in flow.of_whole(op.index)]
            whole[op.index] = max(levels, default=-1)
    sums = _sums(number, collectives)
    for p, phase in enumerate(phases):
        if phase != _phase(flow, sorted(phase.ops), phase.level, sums.get(p, ()), phase.task):
            raise CheckError(f"The phase of {program.ops[phase.ops[0]].name!r} begins or ends with other operations.")


def _check_source(
    flow: Flow, op: Op, phases: Sequence[Phase], number: Mapping[int, int], source: Source, whole: Sequence[int]
) -> None:
    phase = phases[number[op.index]]
    if source.on_shards and not source.of_all:
        is_earlier = number[source.op] <= number[op.index] and phases[number[source.op]].level <= phase.level
    else:
        is_earlier = (phases[number[source.op]].level if source.on_shards else whole[source.op]) < phase.level
    if not is_earlier:
        name = flow.program.ops[source.op].name
        raise CheckError(f"{op.name!r} depends on {name!r}, which is not of an earlier phase.")


class Turn(NamedTuple):
    """A shard runs a phase.

    Attributes:
      lane: turns of one lane follow each other: those of a device; in a pipeline those of its stages there.
    """

    phase: int
    shard: int
    lane: tuple[int, ...]


def find_turns(
    program: Program, phases: Sequence[Phase], mesh: Mesh, schedules: Mapping[int, Schedule]
) -> tuple[Turn, ...]:
    """Return all turns, each behind those on which it depends and which it follows.

    Args:
      program: what is planned.
      phases: see `find_phases`.
      mesh: the shards.
      schedules: by which shards go through stages, for each number of shards on a device; empty for none.
    """
    seeds = seeds_of(program)
    groups = [(phase.level, len(seeds[phase.ops[0]]), tuple(sorted(seeds[phase.ops[0]]))) for phase in phases]
    numbers = {group: number for number, group in enumerate(sorted(set(groups)))}
    ordered_turns = []
    for d, position in enumerate(mesh.positions):
        turn = d - mesh.positions.index(position)
        schedule = schedules.get(mesh.positions.count(position))
        for p, phase in enumerate(phases):
            time, lane = turn, 0
            if schedule is not None and phase.task is not None:
                time = schedule.starts[Slot(phase.task.stage, phase.task.kind, turn)]
                lane = phase.task.stage % schedule.devices
            number = numbers[groups[p]]
            ordered_turns.append(((number, time, p, d), Turn(p, d, (number, position, lane))))
    return tuple([turn for _, turn in sorted(ordered_turns)])


def as_taken(
    schedule: Schedule, program: Program, phases: Sequence[Phase], mesh: Mesh, turns: Sequence[Turn], position: int
) -> Schedule:
    """Return a schedule as the shards of a device can follow it that wait for each other inside of its stages.

    Between two waits each shard runs what it can, stage after stage. Where none waits it is the schedule itself. Phases
    that only pass on what others have made are no slots.

    Args:
      schedule: of pipelines whose shards do not wait.
      program, phases, mesh, turns: see `find_turns`.
      position: of the device.
    """
    works = [any(family_of(program.ops[i].type) not in (FREE, PASSED_ON) for i in phase.ops) for phase in phases]
    drawn = {number for number, phase in enumerate(phases) if phase.task is not None and works[number]}
    turns_of_device = [turn for turn in turns if mesh.positions[turn.shard] == position and turn.phase in drawn]
    groups = sorted({turn.lane[0] for turn in turns_of_device})
    if len(groups) < 2:
        return schedule
    starts: dict[Slot, int] = {}
    free, first = [0] * schedule.devices, mesh.positions.index(position)
    for waits, group in enumerate(groups):
        border, ended = max(starts.values(), default=-1) + 1, dict[int, int]()
        for turn in [turn for turn in turns_of_device if turn.lane[0] == group]:
            task, shard = phases[turn.phase].task, turn.shard - first
            assert task is not None
            device, slot = task.stage % schedule.devices, Slot(task.stage, task.kind, shard, waits)
            starts[slot] = max(border, free[device], ended.get(shard, 0))
            free[device] = starts[slot] + 1
            if task.kind != "W":  # nothing waits for what only leads to gradients of weights
                ended[shard] = free[device]
    return replace(schedule, starts=starts)


def followed(turns: Sequence[Turn]) -> dict[tuple[int, int], Turn]:
    """Return for each phase and shard the turn that it follows, if there is one."""
    last: dict[tuple[int, ...], Turn] = {}
    turn_before = {}
    for turn in turns:
        if turn.lane in last:
            turn_before[turn.phase, turn.shard] = last[turn.lane]
        last[turn.lane] = turn
    return turn_before


def check_turns_taken(phases: Sequence[Phase], mesh: Mesh, turns: Sequence[Turn]) -> None:
    """Raise `CheckError` unless each shard runs each phase once, in their order."""
    if sorted((turn.phase, turn.shard) for turn in turns) != [
        (p, d) for p in range(len(phases)) for d in range(mesh.shards)
    ]:
        raise CheckError("A shard runs a phase twice, or not at all.")
    place = {(turn.phase, turn.shard): number for number, turn in enumerate(turns)}
    phase_before = 0
    for p, phase in enumerate(phases):
        for d in range(mesh.shards):
            if place[phase_before, d] > place[p, d]:
                raise CheckError(f"Shard {d} runs phase {p} before phase {phase_before}, on which it may depend.")
        if phase.task is None or phase.task.kind != "W":  # nothing depends on what only leads to gradients of weights
            phase_before = p
