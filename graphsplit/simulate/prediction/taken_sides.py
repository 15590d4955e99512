"""Which sides of branches run in a prediction: of each branch the one that takes longer.

Of a branch whose operations are the program's (`program/sides.py`) one side runs; which, follows from data. So a step
takes of each the side that takes longer by itself, inner branches first, and what the other one would do takes no time.

Memory has to be enough whichever sides are taken. So there are other choices, until each side is taken by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphsplit.planning.chains import SIGNAL
from graphsplit.program.program import Tensor
from graphsplit.program.sides import Side
from graphsplit.simulate.prediction.buffers import Buffer
from graphsplit.simulate.prediction.replay import Resource, Task, replay

TakenSides = Mapping[Tensor, int]
"""Which side of branches is taken, 0 or 1, by their predicates."""


def longer_sides(tasks: Sequence[Task], sides: Sequence[Side], resources: Mapping[str, Resource]) -> dict[Tensor, int]:
    """Return of each branch the side that takes longer if nothing else runs.

    Args:
      tasks: those of all sides.
      sides: on which each of them is.
      resources: what they use.
    """
    depth: dict[Tensor, int] = {}
    for side in set(sides):
        depth.update({predicate: min(len(side), depth.get(predicate, len(side))) for predicate, _ in side})
    choice: dict[Tensor, int] = {}
    for predicate in sorted(depth, key=lambda predicate: (-depth[predicate], predicate)):
        seconds = []
        for number in (0, 1):
            choice[predicate] = number
            on_side = [n for n, side in enumerate(sides) if (predicate, number) in side and _may_run(side, choice)]
            seconds.append(_seconds_alone(tasks, on_side, resources))
        choice[predicate] = int(seconds[1] >= seconds[0])
    return choice


def other_choices(sides: Sequence[Side], choice: TakenSides) -> list[dict[Tensor, int]]:
    """Return choices by which each side is taken once that is not by this one."""
    is_possible = {side: len(dict(side)) == len(side) for side in set(sides)}
    sides_left = sorted([side for side in is_possible if is_possible[side] and not _may_run(side, choice)], key=sorted)
    choices = []
    while sides_left:
        taken: dict[Tensor, int] = {}
        for side in sides_left:
            if _may_run(side, taken):
                taken.update(side)
        choices.append({**choice, **taken})
        sides_left = [side for side in sides_left if not _may_run(side, choices[-1])]
    return choices


def with_sides_taken(
    tasks: Sequence[Task], buffers: Sequence[Buffer], sides: Sequence[Side], choice: TakenSides
) -> tuple[tuple[Task, ...], tuple[Buffer, ...]]:
    """Return tasks and what they make; those on sides that are not taken take no time, and make nothing.

    Nobody waits for them either: a `Merge` returns what there is.
    """
    is_left_out = [not _may_run(side, choice) for side in sides]
    taken_tasks = []
    for task, is_off in zip(tasks, is_left_out, strict=True):
        after = tuple([n for n in task.after if not is_left_out[n]])
        is_idle = is_off or (task.type == SIGNAL and not after)
        taken_tasks.append(_idle(task) if is_idle else task._replace(after=after))
    filled = [buffer._replace(bytes=0) if is_left_out[buffer.maker] else buffer for buffer in buffers]
    return tuple(taken_tasks), tuple(filled)


def _idle(task: Task) -> Task:
    return Task(task.name, device=task.device, kind="wait", type="NoOp")


def _may_run(side: Side, choice: TakenSides) -> bool:
    """Return whether something on a side runs, as far as sides are chosen."""
    return all(choice.get(predicate, number) == number for predicate, number in side)


def _seconds_alone(tasks: Sequence[Task], numbers: Sequence[int], resources: Mapping[str, Resource]) -> float:
    """Return what some tasks take if others take no time."""
    place = {n: k for k, n in enumerate(numbers)}
    alone = [tasks[n]._replace(after=tuple([place[k] for k in tasks[n].after if k in place])) for n in numbers]
    return replay(alone, resources).seconds
