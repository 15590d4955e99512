"""Compiled work: which tasks XLA compiles together, and what a call of them takes.

Assumed is what XLA is for: a call is started once, and operations that go over tensors entry by entry are fused with
each other, so that what one of them makes for another one is neither written nor read. Products, convolutions and
reductions are kernels of their own, at the rates that they have uncompiled. It is the least that a call takes: XLA does
not fuse all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphsplit.costs.families import FREE, PASSED_ON
from graphsplit.costs.work import Work
from graphsplit.emission.clusters import FEWEST, LEFT_OUT, TRIVIAL, Key, kind_of_device, levels_of
from graphsplit.graph.compilability import holds_variants, why_not_compiled
from graphsplit.graph.inlining import is_compiled
from graphsplit.graph.walks import in_order
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import OPERATION, PlannedTask, Result
from graphsplit.planning.waits import OrderedTasks
from graphsplit.program.program import COPIES, SIZES

ASSUMED = (
    "what XLA compiles is started once and fuses all that goes entry by entry; kernels are no faster: a compiled call "
    "takes that or more"
)
_FUSED = frozenset({"elementwise", "movement", FREE})


def compiled_together(plan: Plan, found: OrderedTasks) -> list[tuple[int, ...]]:
    """Return the tasks of a plan, those that become one call together, each behind what it needs.

    See `emission/clusters.py`.
    """
    ops, tasks = plan.program.ops, found.tasks
    keys = list(_keys(plan, tasks)) if plan.jit_compile else []
    if not any(keys):
        return [(n,) for n in found.positions_in_order]
    returned = {result.task for result in found.returned}
    types = [ops[task.op].type if task.kind == OPERATION and task.op is not None else "" for task in tasks]
    for n, task in enumerate(tasks):  # who reads a variable for others hands on the value as it is
        for read in task.reads:
            if read is not None and types[read.task] == "ReadVariableOp" and keys[read.task] is not keys[n]:
                keys[read.task] = None
    keys = [None if types[n] == "ReadVariableOp" and n in returned else key for n, key in enumerate(keys)]
    plain = [types[n] not in ("", COPIES, SIZES) for n in range(len(tasks))]
    holding = {n for n, task in enumerate(tasks) if plain[n] and holds_variants(ops[task.op or 0].node)}
    levels = levels_of(found, returned, holding, keys)
    groups: dict[object, list[int]] = {}
    for n in found.positions_in_order:
        key = keys[n]
        groups.setdefault(n if key is None else (key, levels[n]), []).append(n)
    trivial = TRIVIAL | {COPIES, SIZES}
    together: list[tuple[int, ...]] = []
    for own in groups.values():
        is_worth_it = sum(types[n] not in trivial for n in own) >= FEWEST
        together += [tuple(own)] if is_worth_it else [(n,) for n in own]
    number = {n: g for g, own in enumerate(together) for n in own}
    sources = [{number[source] for n in own for source in found.sources[n]} - {g} for g, own in enumerate(together)]
    return [together[g] for g in in_order([sorted(own) for own in sources])]


def _keys(plan: Plan, tasks: Sequence[PlannedTask]) -> Sequence[Key | None]:
    """Return what tells the clusters of tasks apart; None for those that XLA does not compile."""
    functions = {function.signature.name: function for function in plan.program.library.function}
    answers: dict[tuple[int, str], bool] = {}
    same: dict[Key, Key] = {}
    keys: list[Key | None] = []
    for task in tasks:
        op = plan.program.ops[task.op] if task.kind == OPERATION and task.op is not None else None
        if op is None or op.type in LEFT_OUT or op.index in plan.turns_split:
            keys.append(None)
            continue
        asked = op.index, kind_of_device(task.device)
        if asked not in answers:
            is_plain = op.type in (COPIES, SIZES)
            answers[asked] = is_plain or not (is_compiled(op.node) or why_not_compiled(op.node, functions, asked[1]))
        key = Key(task.device, task.shard, "")
        keys.append(same.setdefault(key, key) if answers[asked] else None)
    return keys


class CallWork(NamedTuple):
    """What a compiled call takes.

    Attributes:
      seconds: that the device works for it.
      held_bytes: the most that is alive at a time of what it makes for itself.
    """

    seconds: float
    held_bytes: int


class Member(NamedTuple):
    """An operation that is compiled with others.

    Attributes:
      family: of its work.
      reads: the results that it reads.
      own_s: how long the device works for it alone.
      work: of it.
      is_same: whether it passes on what it reads.
    """

    family: str
    reads: tuple[Result, ...]
    own_s: float = 0.0
    work: Work = Work(FREE)
    is_same: bool = False


def work_of_call(
    members: Mapping[int, Member],
    returned: Sequence[Result],
    bytes_of: Callable[[Result], int],
    seconds: Callable[[Work], float],
) -> CallWork:
    """Return what a compiled call takes.

    Args:
      members: by the number of the task, in order.
      returned: what others read.
      bytes_of: the size of a result, of others' too.
      seconds: that the device works.
    """
    given = {_source(result, members) for result in returned}
    reads = {n: _read_by(member, members) for n, member in members.items()}
    readers: dict[Result, list[int]] = {}
    for n, results in reads.items():
        for result in results:
            readers.setdefault(result, []).append(n)
    made: dict[int, list[Result]] = {n: [] for n in members}
    for result in dict.fromkeys([*readers, *sorted(given)]):
        if result.task in members:
            made[result.task].append(result)
    return _CallWork(members, given, reads, readers, made, bytes_of, seconds).found()


def _read_by(member: Member, members: Mapping[int, Member]) -> list[Result]:
    return [] if member.is_same else list(dict.fromkeys([_source(result, members) for result in member.reads]))


def _source(result: Result, members: Mapping[int, Member]) -> Result:
    """Return the result that is passed on under another name."""
    while result.task in members and members[result.task].is_same:
        result = members[result.task].reads[0]
    return result


@dataclass(frozen=True)
class _CallWork:
    """The members of a call, and who reads what.

    Attributes:
      members: see `work_of_call`.
      returned: what others than members read.
      reads: the results that each member reads, as they are made.
      readers: the members that read each.
      made: of each member, what others read of it, or is returned.
      bytes_of, seconds_of: see `work_of_call`.
    """

    members: Mapping[int, Member]
    returned: Set[Result]
    reads: Mapping[int, Sequence[Result]]
    readers: Mapping[Result, Sequence[int]]
    made: Mapping[int, Sequence[Result]]
    bytes_of: Callable[[Result], int]
    seconds_of: Callable[[Work], float]

    def found(self) -> CallWork:
        """Return the seconds and bytes of all members."""
        seconds, loaded = 0.0, set[Result]()
        for n, member in self.members.items():
            if member.family == PASSED_ON:
                continue
            if not self._is_fused(n):
                seconds += member.own_s
                continue
            new = {result for result in self.reads[n] if not self._is_fused(result.task)} - loaded
            loaded |= new
            moved = sum(map(self.bytes_of, new)) + sum(map(self.bytes_of, self._written(n)))
            if member.work.flops or moved:
                seconds += self.seconds_of(replace(member.work, family="elementwise", bytes=float(moved)))
        return CallWork(seconds, self._held())

    def _is_fused(self, n: int) -> bool:
        return n in self.members and self.members[n].family in _FUSED

    def _written(self, n: int) -> list[Result]:
        """Return what a fused member makes for others than fused ones."""
        return [r for r in self.made[n] if r in self.returned or not all(map(self._is_fused, self.readers[r]))]

    def _held(self) -> int:
        """Return the most bytes that are alive at a time of what is written and not returned."""
        place = {n: k for k, n in enumerate(self.members)}
        ends: dict[Result, int] = {}
        for n in reversed(place):  # what is fused reads its operands where its result is needed
            k = place[n]
            later = max([ends.get(r, k) for r in self.made[n]], default=k) if self._is_fused(n) else k
            for result in self.reads[n]:
                ends[result] = max(ends.get(result, 0), later)
        changes = [0] * (len(place) + 1)
        for n, k in place.items():
            if self.members[n].family in (PASSED_ON, FREE):
                continue
            for result in self._written(n) if self._is_fused(n) else self.made[n]:
                if result not in self.returned:
                    size = self.bytes_of(result)
                    changes[k] += size
                    changes[ends.get(result, k) + 1] -= size
        live = most = 0
        for change in changes:
            live += change
            most = max(most, live)
        return most
