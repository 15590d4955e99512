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

from graphsplit.emission.clusters import find_clusters
from graphsplit.emission.emitter import emit
from graphsplit.planning.costs.families import FREE, PASSED_ON
from graphsplit.planning.costs.work import Work
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import OPERATION, Result
from graphsplit.planning.waits import ordered_tasks_of
from graphsplit.program.graph.walks import in_order

ASSUMED = (
    "XLA: a compiled part is launched once, elementwise operations are fused, other kernels are as fast as without "
    "XLA: a lower bound"
)
_FUSED = frozenset({"elementwise", "movement", FREE})


def compiled_together(plan: Plan) -> list[tuple[int, ...]]:
    """Return the tasks of a plan, those that become one call together, each behind what it needs."""
    found = ordered_tasks_of(plan)
    groups: dict[object, list[int]] = {}
    clusters = _clusters(plan) if plan.jit_compile else {}
    for n in found.positions_in_order:
        task = found.tasks[n]
        cluster = clusters.get((task.op, task.shard)) if task.kind == OPERATION else None
        groups.setdefault(n if cluster is None else (cluster,), []).append(n)
    if len(groups) == len(found.tasks):
        return [(n,) for n in found.positions_in_order]
    together = [tuple(own) for own in groups.values()]
    number = {n: g for g, own in enumerate(together) for n in own}
    sources = [{number[source] for n in own for source in found.sources[n]} - {g} for g, own in enumerate(together)]
    return [together[g] for g in in_order([sorted(own) for own in sources])]


def _clusters(plan: Plan) -> dict[tuple[int | None, int | None], int]:
    """Return the cluster of each operation that is in one, on a shard or (None) once: see `emission/clusters.py`."""
    graph = emit(plan)
    functions = {function.signature.name: function for function in graph.library.function}
    clusters = find_clusters(graph, graph.by_name, graph.outputs, functions)
    inside = [(graph.origins[node.name], c) for c, cluster in enumerate(clusters) for node in cluster.nodes]
    return {(origin.op, origin.shard): c for origin, c in inside if origin.role == "op"}


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
