"""What a plan says of the nodes that are written into somebody's model, noted on them for those who look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphsplit.core.marks import mark
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.plan import Plan


def noting(plan: Plan, graph: EmittedGraph) -> Callable[[Any], Any]:
    """Return what notes on a node of an emitted graph, wherever it is put, what the plan says of it; see `mark`."""
    reasons = {op.name: reason for op, reason in plan.stayed_home}
    return lambda node: mark(node, graph.shard_of(node.name), reasons.get(node.name, ""), graph.serves(node.name))
