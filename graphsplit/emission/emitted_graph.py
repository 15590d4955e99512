"""EmittedGraph: the multi-device graph, as nodes that each name their device and know where they come from.

A `Draft` is an emitted graph while it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from graphsplit.core.protos import GraphDef, NodeDef, copied, in_order_of_inputs, source_of, split_reference
from graphsplit.emission.node_sides import NodeSides, find_sides
from graphsplit.errors import CheckError
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.graph import Graph, reached
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import MERGE, SWITCH

RELAY_ROLE, ORDER_ROLE = "relay", "order"
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
        between two hosts once, or signals between two devices as one.
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
      shards: those of which there are copies: all, or the one that runs the body of a loop by itself.
      scope: a name scope that no operation of the program is in.
      present: for each shard that may turn out to have no rows, the reference of whether it has. If not, whatever
        depends on its `Switch`es is dead, up to a `Merge`.
      beside_variables: names of nodes without a device of their own: their variable's, wherever a loader puts that, or
        that of the loop whose body it is.
      compiled: whether XLA compiles what runs between moves, when the graph is made to run.
      uncompiled: positions of operations that are left out of that.
      bodies: of functions of loops and branches whose iterations are split, by name: the plans, and what was emitted.
      predicates: of each `Switch` of the program, by position: `program/sides.py`.
    """

    nodes: tuple[Any, ...] = field(repr=False)
    inputs: tuple[str, ...]
    captures: tuple[str, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    origins: Mapping[str, Origin] = field(repr=False)
    shards: Sequence[int]
    library: Any = field(repr=False)
    versions: Any = field(repr=False)
    scope: str = "graphsplit"
    present: tuple[str, ...] = ()
    beside_variables: frozenset[str] = frozenset()
    prefixes: Mapping[int | str, str] = field(default_factory=dict, repr=False)
    compiled: bool = False
    uncompiled: frozenset[int] = frozenset()
    bodies: Mapping[str, tuple[Plan, EmittedGraph]] = field(default_factory=dict, repr=False)
    predicates: Mapping[int, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def by_name(self) -> Graph:
        """The nodes by name, and who reads whom."""
        return Graph(self.nodes)

    @cached_property
    def names_of_operations(self) -> Mapping[tuple[int | None, int | None], str]:
        """The names of the nodes that are operations, by the operation's position and the shard."""
        return {(origin.op, origin.shard): name for name, origin in self.origins.items() if origin.role == "op"}

    @cached_property
    def sides(self) -> NodeSides:
        """On which sides of branches the nodes are."""
        return sides_of_nodes(self.by_name, self.origins, self.predicates)

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
        return self._dead(self.nodes if nodes is None else nodes, 1)

    def dead_with(self, nodes: Sequence[Any] | None = None) -> dict[str, str]:
        """Return the nodes that are dead if a shard has rows: what stands in for it. See `dead_without`."""
        return self._dead(self.nodes if nodes is None else nodes, 0)

    def _dead(self, nodes: Sequence[Any], output: int) -> dict[str, str]:
        """Return the nodes behind an output of the `Switch`es, each with what decides there."""
        decider_by_node: dict[str, str] = {}
        if not self.present:
            return decider_by_node
        relayed = self.relayed()
        switches = {f"{n.name}:{output}": relayed.get(n.input[1], n.input[1]) for n in nodes if n.op == SWITCH}
        switches = {name: present for name, present in switches.items() if not self._is_op(source_of(name))}
        readers: dict[str, list[str]] = {}
        for node in nodes:
            ends = node.op == "ControlTrigger" or (node.op == MERGE and not self._is_op(node.name))
            for reference in () if ends else node.input:
                name, index = split_reference(reference)
                behind = f"{name}:{index}"
                readers.setdefault(behind if behind in switches else source_of(reference), []).append(node.name)
        for switch, present in reversed(switches.items()):
            new = reached(
                readers.get(switch, ()), lambda name: [r for r in readers.get(name, ()) if r not in decider_by_node]
            )
            decider_by_node.update({name: decider_by_node.get(name, present) for name in new})
        return decider_by_node

    def _is_op(self, name: str) -> bool:
        return name in self.origins and self.origins[name].role == "op"

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


def sides_of_nodes(graph: Graph, origins: Mapping[str, Origin], predicates: Mapping[int, Tensor]) -> NodeSides:
    """Return on which sides of branches nodes are; `predicates` as in `EmittedGraph`."""
    ops = [(name, origin.op) for name, origin in origins.items() if origin.role == "op" and origin.op is not None]
    switches = {name: predicates[position] for name, position in ops if position in predicates}
    return find_sides(graph, switches, {name for name, _ in ops if switches and graph[name].op == MERGE})


SIZES_ROLE = "sizes"


class Draft:
    """The nodes of a plan as they are written.

    Args:
      program: what is written.
      shards: how many there are.
      only: the one of which copies are written, if they are of one: their names then begin as those of any other's, so
        that shards of equal size share the function that is written.

    Attributes:
      nodes: what has been written.
      origins: where every node comes from, by name.
      shards: the shards that are written.
      prefixes: how the names begin of the copies of each shard, and of each device of a group.
      scope: how the names of all other nodes begin that are no operation of the program.
      helper: how what an operation needs besides is called, below its own name, if not below any of the program.
    """

    def __init__(self, program: Program, shards: int, only: int | None = None):
        self.program = program
        self.nodes: list[Any] = []
        self.origins: dict[str, Origin] = {}
        self.shards = range(shards) if only is None else range(only, only + 1)
        base = _unused(program, "shard", "_")
        self.prefixes: dict[int | str, str] = {
            d: f"{base}_{d}/" if only is None else f"{base}_/" for d in range(shards)
        }
        self.scope = _unused(program, "graphsplit", "/")
        self.helper = _unused_below(program, "graphsplit_")
        self._devices: dict[str, str] = {}
        self._bare: dict[int, Any] = {}  # operations that are copied, without what they read

    def add_groups(self, devices: Iterable[str]) -> None:
        """Let devices have copies of what runs once."""
        base = _unused(self.program, "copy", "_")
        self.prefixes.update({device: f"{base}_{k}/" for k, device in enumerate(dict.fromkeys(devices))})

    def add(self, node: Any, origin: Origin) -> None:
        """Write a node."""
        self.nodes.append(node)
        self.origins[node.name] = origin
        self._devices[node.name] = node.device

    def add_sizes(self, node: Any, shard: int | None) -> None:
        """Write a node that counts rows for a shard, or (None) for what runs once."""
        self.add(node, Origin(None, shard, SIZES_ROLE))

    def device_of(self, reference: str) -> str:
        """Return the device of the node that a reference names."""
        return self._devices[source_of(reference)]

    def write_op(
        self, op: Op, name: str, device: str, inputs: Sequence[str], shard: int | None, role: str = "op"
    ) -> Any:
        """Write an operation under a name, for a shard or (None) once, and return its node.

        Args:
          op: which.
          name: of the node.
          device: of the node.
          inputs: references of what it reads, and of what it waits for.
          shard: for which it runs.
          role: see `Origin`.
        """
        if shard is None:
            node = copied(op.node, name, inputs)
        else:  # one of several
            if op.index not in self._bare:
                self._bare[op.index] = copied(op.node, "", ())
            node = NodeDef()
            node.CopyFrom(self._bare[op.index])
            node.name = name
            node.input.extend(in_order_of_inputs(inputs))
        node.device = device
        self.add(node, Origin(op.index, shard, role))
        return node


def _unused(program: Program, base: str, end: str) -> str:
    """Return a beginning of names, up to `end`, that no name of the program has."""
    while any(op.name.startswith(f"{base}{end}") for op in program.ops):
        base += "_"
    return base


def _unused_below(program: Program, helper: str) -> str:
    """Return a beginning of last parts of names that none has: one that was written for another axis has the first."""
    while any(f"/{helper}" in op.name for op in program.ops):
        helper += "_"
    return helper
