"""Pipelines: which slot of a schedule each operation belongs to.

Stages follow each other as the shards run through them. What stands beside all stages belongs to the stage that it
follows, forward or backward: a loss, to the last stage forward. Of the operations of a stage backward those belong to
the weights' part from which no earlier stage and no other costly operation follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.flow import Flow
from graphsplit.planning.schedule.schedules import Schedule, make_schedule
from graphsplit.planning.schedule.scheduling import COSTLY
from graphsplit.program.program import Program
from graphsplit.program.stages import Stage


class StageTask(NamedTuple):
    """What a stage does in a slot.

    Attributes:
      place: its place on the way of a shard through all stages and back.
      stage: the number of the stage.
      kind: forward `F`, backward `B`, or the weights' part of it, `W`.
    """

    place: tuple[int, int]
    stage: int
    kind: str


def stages_in_order(program: Program) -> list[Stage]:
    """Return the stages that do something forward, in the order in which they were cut, or are first called."""
    forward = {op.stage for op in program.ops if not op.provenance.backward}
    return [stage for stage in program.stages if stage in forward]


def make_schedules(kind: str, program: Program, mesh: Mesh) -> dict[int, Schedule]:
    """Return a schedule for each number of shards that a device has.

    Raises:
      ArgumentError: if the program has no stages, or not those that the kind needs.
    """
    stages = stages_in_order(program)
    if not stages:
        raise ArgumentError(
            f"schedule={kind!r} is the order in which shards go through stages, and the function has none. Have it cut "
            "into some by stages=, give layers or functions that it calls devices of their own with "
            "graphsplit.on_device, or drop schedule."
        )
    devices = list(dict.fromkeys(stage.default_device for stage in stages))
    chunks = len(stages) // len(devices) if kind == "interleaved" else 1
    in_turns = [devices[number % len(devices)] for number in range(len(stages))]
    if kind == "interleaved" and (chunks < 2 or in_turns != [stage.default_device for stage in stages]):
        lines = [f"stage {number}: {stage}" for number, stage in enumerate(stages)]
        raise ArgumentError(
            "schedule='interleaved' needs several stages on each device, which take turns: CPU:0, CPU:1, CPU:0, CPU:1. "
            f"The function has\n{bullet_list(lines)}\nPlace them like that, or choose '1f1b'."
        )
    counts = {mesh.positions.count(position) for position in mesh.positions}
    return {count: make_schedule(kind, len(stages), count, chunks) for count in sorted(counts)}


def find_tasks(flow: Flow, kind: str) -> list[StageTask | None]:
    """Return what each operation on the shards belongs to; None for others.

    Args:
      flow: what depends on what.
      kind: of the schedule.

    Raises:
      ArgumentError: if a stage is called again behind a later one.
    """
    ops, steps = flow.program.ops, flow.steps
    sources = [[s.op for s in flow.of_shard(op.index) if s.on_shards] if steps[op.index].shards else [] for op in ops]
    tasks = _tasks_in_order(flow.program, sources, [op.index for op in ops if steps[op.index].shards])
    begins = [task is None for task in tasks]
    for op in reversed(ops):  # what comes before all stages comes with the first that reads it
        task = tasks[op.index]
        for i in sources[op.index]:
            if begins[i] and task is not None:
                tasks[i] = min(task, tasks[i] or task)
    first = StageTask((0, 0), 0, "F")
    tasks = [(task or first) if steps[op.index].shards else None for op, task in zip(ops, tasks, strict=True)]
    return _with_weights_apart(flow.program, sources, tasks) if kind == "zero-bubble" else tasks


def _tasks_in_order(
    program: Program, sources: Sequence[Sequence[int]], sharded: Sequence[int]
) -> list[StageTask | None]:
    """Return the tasks of what stages do, and of what follows beside them."""
    stages = stages_in_order(program)
    tasks: list[StageTask | None] = [None] * len(program.ops)
    for position in sharded:
        op = program.ops[position]
        stage, task_before = op.stage, max([t for i in sources[position] if (t := tasks[i])], default=None)
        if stage is None or stage not in stages:
            tasks[position] = task_before
            continue
        number, is_backward = stages.index(stage), op.provenance.backward
        place = 2 * len(stages) - 1 - number if is_backward else number
        tasks[position] = task = StageTask((place, 0), number, "B" if is_backward else "F")
        if task_before is not None and task_before > task:
            raise ArgumentError(
                f"A schedule lets shards go through the stages once, and {stage} reads at {op.name!r} what "
                f"follows from {stages[task_before.stage]}, a later stage. Give the second call a stage of its own, or "
                "drop schedule."
            )
    return tasks


def _with_weights_apart(
    program: Program, sources: Sequence[Sequence[int]], tasks: Sequence[StageTask | None]
) -> list[StageTask | None]:
    """Return the tasks with what only leads to gradients of weights apart."""
    result = list(tasks)
    costly = [0] * len(program.ops)  # operations on the longest way from one to its end
    leads_on = [False] * len(program.ops)  # to what is not a weights' part
    for op in reversed(program.ops):
        task = result[op.index]
        if task is None:
            continue
        costly[op.index] += family_of(op.type) in COSTLY
        is_weights = task.kind == "B" and costly[op.index] <= 1 and not leads_on[op.index]
        if is_weights:
            result[op.index] = StageTask((task.place[0], 1), task.stage, "W")
        for i in sources[op.index]:
            costly[i] = max(costly[i], costly[op.index])
            leads_on[i] = leads_on[i] or not is_weights
    return result
