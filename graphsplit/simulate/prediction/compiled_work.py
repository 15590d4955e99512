"""Compiled work: which tasks XLA compiles together, and what a call of them takes.

Assumed is what XLA is for: a call is started once, and operations that go over tensors entry by entry are fused with
each other, so that what one of them makes for another one is neither written nor read. Products, convolutions and
reductions are kernels of their own, at the rates that they have uncompiled. It is the least that a call takes: XLA does
not fuse all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphsplit.core.intervals import alive
from graphsplit.emission.clusters import find_clusters
from graphsplit.emission.emitter import emit
from graphsplit.planning.costs.families import FREE, PASSED_ON
from graphsplit.planning.costs.work import Work
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import OPERATION, Result
from graphsplit.planning.waits import ordered_tasks_of
from graphsplit.program.graph.graph import in_order

ASSUMED = (
    "XLA: a compiled part is launched once, elementwise operations are fused, other kernels are as fast as without "
    "XLA: a lower bound"
)
_FUSED = frozenset({"elementwise", "movement", FREE})


def compiled_together(plan: Plan) -> list[tuple[int, ...]]:
    """Return the tasks of a plan, those that become one call together, each behind what it needs."""
    ordered = ordered_tasks_of(plan)
    groups: dict[object, list[int]] = {}
    clusters = _clusters(plan) if plan.jit_compile else {}
    for n in ordered.positions_in_order:
        task = ordered.tasks[n]
        cluster = clusters.get((task.op, task.shard)) if task.kind == OPERATION else None
        groups.setdefault(n if cluster is None else (cluster,), []).append(n)
    if len(groups) == len(ordered.tasks):
        return [(n,) for n in ordered.positions_in_order]
    together = [tuple(members) for members in groups.values()]
    number = {n: g for g, members in enumerate(together) for n in members}
    sources = [
        {number[source] for n in members for source in ordered.sources[n]} - {g} for g, members in enumerate(together)
    ]
    return [together[g] for g in in_order([sorted(members) for members in sources])]


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
    """Return what a compiled call takes: all that is fused together, and each other kernel.

    Args:
      members: by the number of the task, in order.
      returned: what others read.
      bytes_of: the size of a result, of others' too.
      seconds: that the device works.
    """
    wanted_outside = {_source(result, members) for result in returned}
    reads = {
        n: {_source(r, members): None for r in member.reads} for n, member in members.items() if not member.is_same
    }
    fused = {n: members[n] for n in reads if members[n].family in _FUSED}
    kernels = {n: members[n] for n in reads if n not in fused and members[n].family != PASSED_ON}
    loaded = {result for n in fused for result in reads[n] if result.task not in fused}
    wanted = wanted_outside.union(*[reads[n] for n in reads if n not in fused])
    stored = {result for result in wanted if result.task in fused}
    flops, moved = sum([member.work.flops for member in fused.values()]), sum(map(bytes_of, loaded | stored))
    works = [member.work for member in fused.values() if member.work.dtype] if flops or moved else []
    together = [replace(work, family="elementwise", flops=flops, bytes=float(moved)) for work in works[:1]]
    all_s = sum([member.own_s for member in kernels.values()]) + sum(map(seconds, together))
    results = dict.fromkeys([*wanted_outside, *[result for operands in reads.values() for result in operands]])
    held_results = {r for r in results if r not in wanted_outside and (r in stored or r.task in kernels)}
    return CallWork(all_s, _most_held(list(members), reads, fused, results, held_results, bytes_of))


def _source(result: Result, members: Mapping[int, Member]) -> Result:
    """Return the result that is passed on under another name."""
    while result.task in members and members[result.task].is_same:
        result = members[result.task].reads[0]
    return result


def _most_held(
    order: Sequence[int],
    reads: Mapping[int, Iterable[Result]],
    fused: Container[int],
    results: Iterable[Result],
    held_results: Collection[Result],
    bytes_of: Callable[[Result], int],
) -> int:
    """Return the most bytes that are alive at a time of results that are held: from their makers to the last readers.

    (What is fused reads its operands where its result is needed.)
    """
    made_by: dict[int, list[Result]] = {}
    for result in results:
        made_by.setdefault(result.task, []).append(result)
    ends: dict[Result, int] = {}
    for k, n in reversed(list(enumerate(order))):
        later = max([ends.get(r, k) for r in made_by.get(n, ())], default=k) if n in fused else k
        ends.update({result: max(ends.get(result, 0), later) for result in reads.get(n, ())})
    pairs = [(k, result) for k, n in enumerate(order) for result in made_by.get(n, ()) if result in held_results]
    spans = [(k, ends.get(result, k) + 1, bytes_of(result)) for k, result in pairs]
    return max([size for _, size in alive(spans)], default=0)
