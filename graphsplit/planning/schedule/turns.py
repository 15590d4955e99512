"""Turns: in which order the shards of a device run the phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphsplit.errors import CheckError
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.schedule.phases import Phase
from graphsplit.planning.schedule.schedules import Schedule, Slot
from graphsplit.planning.schedule.scheduling import seeds_of
from graphsplit.program.program import Program


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
    found = []
    for d, position in enumerate(mesh.positions):
        turn = d - mesh.positions.index(position)
        schedule = schedules.get(mesh.positions.count(position))
        for p, phase in enumerate(phases):
            time, lane = turn, 0
            if schedule is not None and phase.task is not None:
                time = schedule.starts[Slot(phase.task.stage, phase.task.kind, turn)]
                lane = phase.task.stage % schedule.devices
            number = numbers[groups[p]]
            found.append(((number, time, p, d), Turn(p, d, (number, position, lane))))
    return tuple([turn for _, turn in sorted(found)])


def followed(turns: Sequence[Turn]) -> dict[tuple[int, int], Turn]:
    """Return for each phase and shard the turn that it follows, if there is one."""
    last: dict[tuple[int, ...], Turn] = {}
    found = {}
    for turn in turns:
        if turn.lane in last:
            found[turn.phase, turn.shard] = last[turn.lane]
        last[turn.lane] = turn
    return found


def check_turns_taken(phases: Sequence[Phase], mesh: Mesh, turns: Sequence[Turn]) -> None:
    """Raise `CheckError` unless each shard runs each phase once, in their order."""
    if sorted((turn.phase, turn.shard) for turn in turns) != [
        (p, d) for p in range(len(phases)) for d in range(mesh.shards)
    ]:
        raise CheckError("A shard runs a phase twice, or not at all.")
    place = {(turn.phase, turn.shard): number for number, turn in enumerate(turns)}
    before = 0
    for p, phase in enumerate(phases):
        for d in range(mesh.shards):
            if place[before, d] > place[p, d]:
                raise CheckError(f"Shard {d} runs phase {p} before phase {before}, on which it may depend.")
        if phase.task is None or phase.task.kind != "W":  # nothing depends on what only leads to gradients of weights
            before = p
