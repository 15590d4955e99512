"""On which sides of branches the nodes of a graph are: what may be dead because a side is not taken."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from graphsplit.core.protos import split_reference
from graphsplit.program.graph.graph import Graph
from graphsplit.program.program import Tensor
from graphsplit.program.sides import EVERYWHERE, MERGE, Side, merged_side


@dataclass(frozen=True, eq=False)
class NodeSides:
    """On which sides of branches nodes are, by what they read.

    Attributes:
      switches: the names of nodes that are a `Switch` of the program, each with its predicate there. (Others let
        nothing pass of shards without rows.)
      of_nodes: of each node, by name; empty without a `Switch`.
    """

    switches: Mapping[str, Tensor]
    of_nodes: dict[str, Side] = field(default_factory=dict)

    def of_node(self, name: str) -> Side:
        """Return on which sides a node is."""
        return self.of_nodes.get(name, EVERYWHERE)

    def of(self, reference: str) -> Side:
        """Return on which sides what a reference names is, or (for `^node`) ends."""
        name, index = split_reference(reference.lstrip("^"))
        if reference[0] == "^" or name not in self.switches:
            return self.of_node(name)
        return self.of_node(name) | {(self.switches[name], index)}


def find_sides(graph: Graph, switches: Mapping[str, Tensor], merges: Set[str]) -> NodeSides:
    """Return on which sides of branches nodes are.

    Args:
      graph: the nodes.
      switches: as in `NodeSides`.
      merges: the names of those that are a `Merge` of the program.
    """
    sides = NodeSides(switches)
    for k in graph.positions_in_order if switches else ():
        node = graph.nodes[k]
        sides_read = [sides.of(reference) for reference in node.input if reference[0] != "^"]
        if node.name in merges:
            sides.of_nodes[node.name] = merged_side(node.name, sides_read)
        else:
            joins = node.op == MERGE  # (of rows that a shard has, or of nothing)
            sides.of_nodes[node.name] = frozenset.intersection(*sides_read) if joins else EVERYWHERE.union(*sides_read)
    return sides
