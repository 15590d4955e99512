"""Waits: for which tasks of a plan others wait whose results they do not read.

Operations wait for those before which they must not run, and shards of one device for the end of each other's turns.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphsplit.planning.communication.transfers import Sum
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.schedule.phases import Turn, followed
from graphsplit.planning.tasks import OPERATION, Copy, PlannedTask, Tasks, is_together, tasks_of
from graphsplit.program.graph.graph import in_order
from graphsplit.program.program import Op

TURN = "turn"
"""The kind of task that is the end of a shard's turn: it computes nothing."""

At = Mapping[tuple[int, Copy], int]
"""The task of each operation, by which copy of it that is."""


@dataclass(frozen=True, eq=False)
class OrderedTasks(Tasks):
    """The tasks of a plan, then the ends of turns, with all that keeps them in order.

    Attributes:
      waits: for which others each waits, besides those that it reads.
    """

    waits: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def of_shards(self) -> Mapping[int | None, Sequence[int]]:
        """The tasks that are operations, or ends of turns, by the shard whose they are; None for what runs once."""
        numbers: dict[int | None, list[int]] = {}
        for n, task in enumerate(self.tasks):
            if task.kind in (OPERATION, TURN):
                numbers.setdefault(task.shard, []).append(n)
        return numbers

    @cached_property
    def sources(self) -> Sequence[Sequence[int]]:
        """The tasks that each task reads or waits for."""
        pairs = zip(self.tasks, self.waits, strict=True)
        return [tuple(dict.fromkeys([*[r.task for r in task.reads if r], *waits])) for task, waits in pairs]

    @cached_property
    def positions_in_order(self) -> Sequence[int]:
        """The tasks, each behind its sources, in the order in which emission writes them: operation by operation."""

        def place(n: int) -> tuple[int, ...]:
            task = self.tasks[n]
            is_op = task.is_made and task.op is not None
            return (task.op, -1 if task.shard is None else task.shard) if is_op else (len(self.tasks),)  # type: ignore[return-value]

        order = sorted(range(len(self.tasks)), key=place)
        number = {n: k for k, n in enumerate(order)}
        return [order[k] for k in in_order([[number[s] for s in self.sources[n]] for n in order])]


_KNOWN: weakref.WeakKeyDictionary[Decisions, OrderedTasks] = weakref.WeakKeyDictionary()


def ordered_tasks_of(plan: Decisions) -> OrderedTasks:
    """Return what a plan runs, where, and what waits for what. Emission prints it, predictions replay it."""
    if plan not in _KNOWN:
        _KNOWN[plan] = _with_waits(plan, tasks_of(plan, in_phases=False))
    return _KNOWN[plan]


def _with_waits(plan: Decisions, tasks_found: Tasks) -> OrderedTasks:
    numbered = [(n, task) for n, task in enumerate(tasks_found.tasks) if task.kind == OPERATION]
    at = {(task.op, task.copy(plan)): n for n, task in numbered if task.op is not None}
    waiting = {op.index for op in plan.program.ops if op.controls or op.index in plan.order}
    waits = {n: list(_before(plan, plan.program.ops[i], d, at)) for (i, d), n in at.items() if i in waiting}
    tasks, sums = list(tasks_found.tasks), _sums_in_turns(plan, tasks_found)
    phase_of = {i: p for p, phase in enumerate(plan.phases) for i in phase.starts}
    ends: dict[Turn, int] = {}
    for (p, d), turn in followed(plan.turns).items() if plan.mesh.has_turns else ():
        if turn not in ends:
            ends[turn] = len(tasks)
            waits[len(tasks)] = list(_ended(plan, turn, at, sums))
            tasks.append(PlannedTask(TURN, _place(plan, turn), (), (), None, turn.shard))
        for i in plan.phases[p].starts:
            if phase_of[i] == p and (i, d) in at:
                waits.setdefault(at[i, d], []).append(ends[turn])
    waits_by_task = tuple([tuple(dict.fromkeys(waits[n])) if n in waits else () for n in range(len(tasks))])
    return OrderedTasks(**{**vars(tasks_found), "tasks": tuple(tasks)}, waits=waits_by_task)


def _before(plan: Decisions, op: Op, d: Copy, at: At) -> Iterator[int]:
    """Yield the tasks before which a copy of an operation must not run."""
    for c in op.controls:
        if plan.program.ops[c].type == "Placeholder":
            continue
        if (copies := plan.owners.groups.get(c)) and plan.steps[c].once:
            yield from (at[c, device] for device in ([d] if d in copies.devices else copies.devices))
        elif plan.steps[c].once or is_together(plan, c):
            yield at[c, None]
        elif isinstance(d, int):
            yield at[c, d]
        else:
            yield from (at[c, shard] for shard in range(plan.mesh.shards))
    if isinstance(d, int) and op.index in plan.order:
        yield at[plan.order[op.index], d]


def _ended(plan: Decisions, turn: Turn, at: At, sums: Mapping[tuple[int, int], int]) -> Iterator[int]:
    """Yield the tasks that have run when a turn has ended."""
    phase = plan.phases[turn.phase]
    yield from (at[i, turn.shard] for i in phase.ends)
    number = {id(move): c for c, collective in enumerate(plan.collectives) for move in collective.moves}
    for move in phase.sums:
        if (number[id(move)], turn.shard) in sums:
            yield sums[number[id(move)], turn.shard]


def _sums_in_turns(plan: Decisions, tasks: Tasks) -> dict[tuple[int, int], int]:
    """Return the tasks that take in what a shard gives to a sum, by the collective and the shard."""
    value_results = [(c, plan.collectives[c].values[i], result) for (c, i), result in tasks.values.items() if result]
    return {(c, v.turn): result.task for c, v, result in value_results if isinstance(v, Sum) and v.turn is not None}


def _place(plan: Decisions, turn: Turn) -> str:
    """Return the device on which a turn ends: of a stage, the stage's."""
    ops: Sequence[int] = plan.phases[turn.phase].ops
    places = Counter([plan.places.on(plan.program.ops[i], turn.shard) for i in ops])
    return places.most_common(1)[0][0]
