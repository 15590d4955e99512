"""From a plan to nodes that each name their device.

What enters: a plan. What leaves: an emitted graph, whose nodes say which operation, shard and role they have; and a
check that follows every input back through the nodes and compares what it finds with the plan.
"""

from graphsplit.emission.checks import check_emitted
from graphsplit.emission.emitted_graph import EmittedGraph, Origin
from graphsplit.emission.emitter import emit

__all__ = ["EmittedGraph", "Origin", "check_emitted", "emit"]
