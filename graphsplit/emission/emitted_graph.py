"""EmittedGraph: the multi-device graph, as nodes that each name their device and know where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from graphsplit.core.protos.graphdefs import GraphDef, source_of
from graphsplit.errors import CheckError
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.graph import Graph
from graphsplit.program.graph.walks import reached

RELAY_ROLE = "relay"
_OF_OPERATIONS = frozenset({"op", "part", "shift", "constant"})


class Origin(NamedTuple):
    """Where a node comes from.

    Attributes:
      op: the position of the operation of the program that it is, or belongs to, or whose tensor it moves; None for
        what belongs to none.
      shard: the shard that it belongs to, or None.
      role: `"op"` for the operation itself; the kind of a move, `"scatter"`, `"reduce"`, ...; `"constant"` for a copy
        of a constant; `"part"` for what an operation needs besides; `"sizes"` for counting rows;
        `"order"` for what lets a shard wait for another one of its device; `"relay"` for what lets something pass
        between two hosts once.
    """

    op: int | None
    shard: int | None
    role: str


@dataclass(frozen=True, eq=False)
class EmittedGraph:
    """The multi-device graph.

    Attributes:
      nodes: every node with its device; placeholders of arguments and captures included.
      inputs, captures: names of those placeholders.
      outputs: references of the returned tensors.
      effects: names of nodes that must run.
      origins: of every node, by name.
      scope: a name scope that no operation of the program is in.
      present: for each shard that may turn out to have no rows, the reference of whether it has. If not, whatever
        depends on its `Switch`es is dead, up to a `Merge`.
      beside_variables: names of nodes without a device of their own: their variable's, wherever a loader puts that.
      compiled: whether XLA compiles what runs between moves, when the graph is made to run.
      uncompiled: positions of operations that are left out of that.
      bodies: of functions of loops and branches whose turns are split, by name: the plans, and what was emitted.
    """

    nodes: tuple[Any, ...] = field(repr=False)
    inputs: tuple[str, ...]
    captures: tuple[str, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    origins: Mapping[str, Origin] = field(repr=False)
    library: Any = field(repr=False)
    versions: Any = field(repr=False)
    scope: str = "graphsplit"
    present: tuple[str, ...] = ()
    beside_variables: frozenset[str] = frozenset()
    prefixes: Mapping[int | str, str] = field(default_factory=dict, repr=False)
    compiled: bool = False
    uncompiled: frozenset[int] = frozenset()
    bodies: Mapping[str, tuple[Plan, EmittedGraph]] = field(default_factory=dict, repr=False)

    @cached_property
    def by_name(self) -> Graph:
        """The nodes by name, and who reads whom."""
        return Graph(self.nodes)

    @cached_property
    def names_of_operations(self) -> Mapping[tuple[int | None, int | None], str]:
        """The names of the nodes that are operations, by the operation's position and the shard."""
        return {(origin.op, origin.shard): name for name, origin in self.origins.items() if origin.role == "op"}

    def shard_of(self, name: str) -> int | None:
        """Return the shard that a node belongs to, or None."""
        return self.origins[name].shard

    def serves(self, name: str) -> str:
        """Return what a node is there for that is no operation of the program, nor beside one on a shard; "" else."""
        role = self.origins[name].role if name in self.origins else ""
        return "" if role in _OF_OPERATIONS else role

    def graph_def(self) -> Any:
        """Return the graph as a `GraphDef`."""
        graph = GraphDef(versions=self.versions, library=self.library)
        graph.node.extend(self.nodes)
        return graph

    def relayed(self) -> dict[str, str]:
        """Return what is sent on within hosts: the references that stand there for those of other hosts, and these."""
        sent_on = [n for n in self.nodes if self.origins[n.name].role == RELAY_ROLE and n.op == "Identity"]
        return {node.name: node.input[0] for node in sent_on}

    def dead_without(self, nodes: Sequence[Any] | None = None) -> dict[str, str]:
        """Return the nodes that are dead if a shard has no rows, each with the reference of whether it has.

        Args:
          nodes: with calls in place of clusters; None for the graph as it was emitted.
        """
        nodes = self.nodes if nodes is None else nodes
        found: dict[str, str] = {}
        if not self.present:
            return found
        relayed = self.relayed()
        switches = {f"{n.name}:1": relayed.get(n.input[1], n.input[1]) for n in nodes if n.op == "Switch"}
        readers: dict[str, list[str]] = {}
        for node in nodes:
            for reference in node.input if node.op not in ("Merge", "ControlTrigger") else ():
                readers.setdefault(reference if reference in switches else source_of(reference), []).append(node.name)
        for switch, present in reversed(switches.items()):
            new = reached(readers.get(switch, ()), lambda name: [r for r in readers.get(name, ()) if r not in found])
            found.update({name: found.get(name, present) for name in new})
        return found

    def check(self) -> None:
        """Raise `CheckError` unless names are unique, references exist and every node has a device and an origin."""
        for node in self.nodes:
            if not node.device and node.name not in self.beside_variables:
                raise CheckError(f"Emitted node {node.name!r} has no device.")
            if node.name not in self.origins:
                raise CheckError(f"Nobody knows where the emitted node {node.name!r} comes from.")
        for reference in (*self.outputs, *self.effects, *self.inputs, *self.captures, *self.present):
            if source_of(reference) not in self.by_name:
                raise CheckError(f"The emitted graph names {reference!r}, which does not exist.")
        self.by_name.check()
