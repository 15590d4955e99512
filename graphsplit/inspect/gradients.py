"""Which forward operation a backward operation belongs to, from names and from what it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphsplit.inspect.records import PlacedOp

if TYPE_CHECKING:
    import networkx as nx

_NOT_WORK = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp", "Identity", "NoOp", "Shape"})


@dataclass(frozen=True)
class GradientPair:
    """A backward operation and the forward operation that it differentiates."""

    backward: PlacedOp
    forward: PlacedOp

    @property
    def colocated(self) -> bool:
        """Return whether both run on the same device."""
        return self.backward.device == self.forward.device

    def __str__(self) -> str:
        return (
            f"{self.backward.name} on {self.backward.device or 'no device'}, "
            f"{self.forward.name} on {self.forward.device or 'no device'}"
        )


def pair_gradients(ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> list[GradientPair]:
    """Return every backward operation that does work with its forward operation, where that can be told.

    By name: `gradient_tape/dense/MatMul/MatMul_1` and `gradients/dense/MatMul_grad/MatMul_1` differentiate
    `dense/MatMul`, within the same shard; the backward function of a call differentiates the call whose results it
    reads. Else by data: an operation that reads a forward operation's result (`ReluGrad` its `Relu`) belongs to it.
    """
    calls = _calls_of_backward_functions(ops, graph)
    pairs = []
    for op in ops.values():
        if not op.backward or op.type in _NOT_WORK or not op.ran:
            continue
        forward = _by_name(op, ops, calls) or _by_data(op, ops, graph)
        if forward is None or not forward.ran:
            continue
        if op.shard is None and forward.shard is not None and not op.home_reason:
            continue  # a value without rows of the batch, made once for all shards
        pairs.append(GradientPair(op, forward))
    return pairs


def _split(name: str) -> tuple[str, str, str] | None:
    """Split a backward operation's name into what is before `gradients`, that word, and what is after."""
    parts = name.split("/")
    for i, part in enumerate(parts):
        if part in ("gradient_tape", "gradients"):
            return "/".join(parts[:i]), part, "/".join(parts[i + 1 :])
    return None


def _by_name(op: PlacedOp, ops: Mapping[str, PlacedOp], calls: Mapping[str, list[str]]) -> PlacedOp | None:
    split = _split(op.name)
    if split is None:
        return None
    before, _, after = split
    scope = after.rpartition("/")[0]
    candidates = [scope, scope.removesuffix("_grad"), *(c for c in [scope.rpartition("_grad/")[0]] if c)]
    for candidate in filter(None, candidates):
        for prefix in (before, *calls.get(before, ())):
            name = f"{prefix}/{candidate}" if prefix else candidate
            if name in ops and not ops[name].backward:
                return ops[name]
    return None


def _by_data(op: PlacedOp, ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> PlacedOp | None:
    forward = [
        ops[source]
        for source in graph.predecessors(op.name)
        if not ops[source].backward and ops[source].type not in _NOT_WORK and ops[source].shard == op.shard
    ]
    named = [f for f in forward if f.type + "Grad" == op.type]
    found = named or forward
    return found[0] if found else None


def _calls_of_backward_functions(ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> dict[str, list[str]]:
    """Return, for the name of each call of a backward function, the forward calls whose results it reads."""
    calls: dict[str, set[str]] = defaultdict(set)
    for op in ops.values():
        split = _split(op.name) if op.backward else None
        if split is None or split[1] != "gradients":
            continue
        for source in graph.predecessors(op.name):
            if not ops[source].backward and "/" in source and ops[source].type not in _NOT_WORK:
                for end in range(1, source.count("/") + 1):
                    calls[split[0]].add("/".join(source.split("/")[:end]))
    return {call: sorted(found, key=lambda name: (-name.count("/"), name)) for call, found in calls.items()}
