"""Compiled work: what a call of XLA's takes, by the operations that are in it.

Assumed is what XLA is for: a call is started once, and operations that go over tensors entry by entry are fused with
each other, so that what one of them makes for another one is neither written nor read. Products, convolutions and
reductions are kernels of their own, at the rates that they have uncompiled. It is the least that a call takes: XLA does
not fuse all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graphsplit.core.protos.graphdefs import inputs_of, source_of, split_reference
from graphsplit.costs.families import FREE, PASSED_ON, family_of
from graphsplit.costs.work import Work
from graphsplit.emission.compiled_calls import compile_clusters
from graphsplit.emission.emitted_graph import EmittedGraph, Origin

ASSUMED = (
    "what XLA compiles is started once and fuses all that goes entry by entry; kernels are no faster: a compiled call "
    "takes that or more"
)
_FUSED = frozenset({"elementwise", "movement", FREE})


class CompiledCall(NamedTuple):
    """What a compiled call consists of.

    Attributes:
      members: the nodes that are in it.
      returned: the references that it returns, as they are named in the emitted graph.
    """

    members: tuple[Any, ...]
    returned: Sequence[str]


@dataclass(frozen=True)
class RunGraph:
    """What is run of an emitted graph.

    Attributes:
      nodes: with calls in place of what XLA compiles.
      outputs: references of what is returned.
      origins: of all nodes, the calls among them.
      calls: by name.
    """

    nodes: tuple[Any, ...]
    outputs: tuple[str, ...]
    origins: Mapping[str, Origin]
    calls: Mapping[str, CompiledCall]


def run_graph(graph: EmittedGraph) -> RunGraph:
    """Return what is run of an emitted graph: all of its nodes, or calls in place of clusters if it is compiled."""
    if not graph.compiled:
        return RunGraph(graph.nodes, graph.outputs, graph.origins, {})
    found = compile_clusters(graph, graph.nodes, graph.outputs, graph.effects)
    members: dict[str, list[Any]] = {}
    for node in graph.nodes:
        if node.name in found.inside:
            members.setdefault(found.inside[node.name], []).append(node)
    origins = {
        **graph.origins,
        **{name: Origin(None, graph.shard_of(own[0].name), "op") for name, own in members.items()},
    }
    calls = {name: CompiledCall(tuple(own), found.returned[name]) for name, own in members.items()}
    return RunGraph(found.nodes, found.outputs, origins, calls)


class CallWork(NamedTuple):
    """What a compiled call takes.

    Attributes:
      seconds: that the device works for it.
      held_bytes: the most that is alive at a time of what it makes for itself.
    """

    seconds: float
    held_bytes: int


class Pricing(NamedTuple):
    """What is asked about single operations.

    Attributes:
      work: of a node.
      seconds: that the device works for a node, or, without one, for work.
      bytes: of a reference.
      is_same: whether a node of a type passes on what it reads.
    """

    work: Callable[[Any], Work]
    seconds: Callable[[Any, Work | None], float]
    bytes: Callable[[str], int]
    is_same: Callable[[str], bool]


def work_of_call(call: CompiledCall, pricing: Pricing) -> CallWork:
    """Return what a compiled call takes."""
    return _CallWork(call, pricing).found()


class _CallWork:
    def __init__(self, call: CompiledCall, pricing: Pricing):
        self._pricing = pricing
        self._place = {node.name: k for k, node in enumerate(call.members)}
        self._nodes = call.members
        self._reads = [self._read_by(node) for node in call.members]
        self._returned = {self._source(reference) for reference in call.returned}
        self._readers: dict[str, list[int]] = {}
        for k, references in enumerate(self._reads):
            for reference in references:
                self._readers.setdefault(reference, []).append(k)
        self._is_fused = [family_of(node.op) in _FUSED for node in call.members]
        self._made: list[list[str]] = [[] for _ in call.members]  # what others read of each, or is returned
        for reference in dict.fromkeys([*self._readers, *sorted(self._returned)]):
            place = self._place.get(source_of(reference))
            if place is not None:
                self._made[place].append(reference)

    def found(self) -> CallWork:
        """Return the seconds and bytes of all members."""
        seconds, loaded = 0.0, set[str]()
        for k, node in enumerate(self._nodes):
            if family_of(node.op) == PASSED_ON:
                continue
            if not self._is_fused[k]:
                seconds += self._pricing.seconds(node, None)
                continue
            work = self._pricing.work(node)
            new = {reference for reference in self._reads[k] if not self._comes_from_fused(reference)} - loaded
            loaded |= new
            moved = sum(map(self._pricing.bytes, new)) + sum(map(self._pricing.bytes, self._written(k)))
            if work.flops or moved:
                fused = replace(work, family="elementwise", bytes=float(moved))
                seconds += self._pricing.seconds(None, fused)
        return CallWork(seconds, self._held())

    def _read_by(self, node: Any) -> list[str]:
        if self._pricing.is_same(node.op):
            return []
        return list(dict.fromkeys([self._source(reference) for reference in inputs_of(node)[0]]))

    def _source(self, reference: str) -> str:
        """Return the reference of the tensor that is passed on under another name."""
        while True:
            name, index = split_reference(reference)
            place = self._place.get(name)
            if place is None or not self._pricing.is_same(self._nodes[place].op):
                return f"{name}:{index}"
            reference = self._nodes[place].input[0]

    def _comes_from_fused(self, reference: str) -> bool:
        place = self._place.get(source_of(reference))
        return place is not None and self._is_fused[place]

    def _written(self, k: int) -> list[str]:
        """Return what a fused member makes for others than fused ones."""
        return [r for r in self._made[k] if r in self._returned or not self._is_read_by_fused_only(r)]

    def _is_read_by_fused_only(self, reference: str) -> bool:
        return all(self._is_fused[k] for k in self._readers.get(reference, ()))

    def _held(self) -> int:
        """Return the most bytes that are alive at a time of what is written and not returned."""
        ends: dict[str, int] = {}
        for k in reversed(range(len(self._nodes))):  # what is fused reads its operands where its result is needed
            later = max([ends.get(r, k) for r in self._made[k]], default=k) if self._is_fused[k] else k
            for reference in self._reads[k]:
                ends[reference] = max(ends.get(reference, 0), later)
        changes = [0] * (len(self._nodes) + 1)
        for k in range(len(self._nodes)):
            if family_of(self._nodes[k].op) in (PASSED_ON, FREE):
                continue
            written = self._written(k) if self._is_fused[k] else self._made[k]
            for reference in written:
                if reference not in self._returned:
                    size = self._pricing.bytes(reference)
                    changes[k] += size
                    changes[ends.get(reference, k) + 1] -= size
        live = most = 0
        for change in changes:
            live += change
            most = max(most, live)
        return most
