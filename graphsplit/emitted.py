"""EmittedGraph: the multi-device graph, as nodes that each name their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphsplit.errors import CheckError
from graphsplit.graphdefs import GraphDef, split_reference


@dataclass(frozen=True, eq=False)
class EmittedGraph:
    """The multi-device graph.

    Attributes:
      nodes: every node with its device; placeholders of arguments and captures included.
      inputs, captures: names of those placeholders.
      outputs: references of the returned tensors.
      effects: names of nodes that must run.
      shard_of: the shard of every node that runs on the shards; home nodes are absent.
      present: of shards that may turn out to have no rows: a reference to whether it has. Without, its nodes are dead.
    """

    nodes: tuple[Any, ...] = field(repr=False)
    inputs: tuple[str, ...]
    captures: tuple[str, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    shard_of: Mapping[str, int] = field(repr=False)
    library: Any = field(repr=False)
    versions: Any = field(repr=False)
    present: Mapping[int, str] = field(default_factory=dict)

    def graph_def(self) -> Any:
        """Return the graph as a `GraphDef`."""
        graph = GraphDef(versions=self.versions, library=self.library)
        graph.node.extend(self.nodes)
        return graph

    def check(self) -> None:
        """Raise `CheckError` unless names are unique, references exist and every node has a device."""
        names = {node.name for node in self.nodes}
        if len(names) != len(self.nodes):
            raise CheckError("Two emitted nodes have the same name.")
        for node in self.nodes:
            if not node.device:
                raise CheckError(f"Emitted node {node.name!r} has no device.")
            for reference in node.input:
                if split_reference(reference.lstrip("^"))[0] not in names:
                    raise CheckError(f"Emitted node {node.name!r} reads {reference!r}, which does not exist.")
        for reference in (*self.outputs, *self.effects, *self.inputs, *self.captures, *self.present.values()):
            if split_reference(reference)[0] not in names:
                raise CheckError(f"The emitted graph names {reference!r}, which does not exist.")
