"""Clusters: what a shard, or the default device, computes between two moves, as one call that XLA compiles.

The nodes of one shard and device that XLA compiles get levels: as many as there are borders (moves, effects, other
shards) on the longest way to them; those that only later ones of their own shard read, the level of these. Nodes of one
level form a cluster. No way leads from a cluster out and back into it, since levels only rise along it, and there are
no more clusters than a step has to wait for others.

The nodes of each cluster are replaced by one call of a function, the same for shards of equal size.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.protos import (
    NodeDef,
    function_definition,
    make_node,
    output_type,
    source_of,
    split_reference,
    with_inputs,
)
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.program.graph.compilability import holds_variants, why_not_compiled
from graphsplit.program.graph.function_calls import XLA_ATTRIBUTE, is_compiled, named_by_content
from graphsplit.program.graph.graph import Graph
from graphsplit.program.sides import MERGE, SWITCH, Side

_COMPUTING = frozenset({"op", "part", "shift", "constant"})  # roles; all others move, count rows or keep an order
_ADDED_UP = "all-reduce"  # by each shard that needs it: part of what that computes
# they compute nothing that XLA could do better
TRIVIAL = frozenset(
    {"Identity", "IdentityN", "ReadVariableOp", "Reshape", "Squeeze", "ExpandDims", "Cast", "Shape", "AssignVariableOp"}
)
# (a `ControlTrigger` runs when what it waits for is dead; a call with it inside would be dead as well)
LEFT_OUT = frozenset({"Placeholder", "NoOp", "Const", "ControlTrigger", SWITCH, MERGE})
FEWEST = 2  # operations that are worth a call


class ClusterKey(NamedTuple):
    """What the nodes of a cluster have in common.

    Attributes:
      device: where they run.
      shard: which they belong to; None for what runs once.
      present: the reference of whether that shard has rows, if it may have none.
      side: on which sides of branches they are.
    """

    device: str
    shard: int | None
    present: str
    side: Side


@dataclass(frozen=True, eq=False)
class XlaCluster:
    """Nodes that become one call.

    Attributes:
      key: what they have in common.
      level: how many borders lie before it, on the longest way.
      nodes: in the program's order, so that those of shards that do the same are the same.
    """

    key: ClusterKey
    level: int
    nodes: tuple[Any, ...]


def find_clusters(
    graph: EmittedGraph, web: Graph, outputs: Sequence[str], functions: Mapping[str, Any]
) -> list[XlaCluster]:
    """Return the clusters of some of an emitted graph's nodes.

    Args:
      graph: where the nodes come from.
      web: the nodes.
      outputs: references of what they return.
      functions: all functions that they may call, by name.
    """
    nodes = web.nodes
    keys = _keys(graph, nodes, functions)
    returned = {web.place[source_of(reference)] for reference in outputs}
    _leave_out_reads_for_others(web, returned, keys)
    levels = _levels_of(web, returned, {k for k, node in enumerate(nodes) if holds_variants(node)}, keys)
    groups: dict[tuple[ClusterKey, int], list[Any]] = {}
    placed_nodes = [
        (graph.origins[node.name].op or 0, node.name, k) for k, node in enumerate(nodes) if keys[k] is not None
    ]
    for _, _, k in sorted(placed_nodes):
        key = keys[k]
        assert key is not None
        groups.setdefault((key, levels[k]), []).append(nodes[k])
    return [
        XlaCluster(key, level, tuple(members))
        for (key, level), members in groups.items()
        if sum(node.op not in TRIVIAL for node in members) >= FEWEST
    ]


def _levels_of(web: Graph, returned: Set[int], holding: Set[int], keys: list[ClusterKey | None]) -> list[int]:
    """Return the levels; nodes with the same key and level form a cluster.

    Args:
      web: who reads whom.
      returned: nodes of which something is returned.
      holding: nodes that read or make lists of tensors.
      keys: of the nodes, equal ones one object. Those that hand lists over the border of a cluster lose theirs.
    """
    while True:
        levels = _levels(web, keys)
        _sink(web, returned, keys, levels)
        torn = _torn_variants(web, returned, holding, keys, levels)
        if not torn:
            return levels
        for k in torn:
            keys[k] = None


@functools.cache
def kind_of_device(device: str) -> str:
    """Return for which kind of device XLA compiles what runs on this one."""
    return "GPU" if "GPU" in device.upper() else "CPU"


def _keys(graph: EmittedGraph, nodes: Sequence[Any], functions: Mapping[str, Any]) -> list[ClusterKey | None]:
    """Return the keys of the nodes, None for those that XLA does not compile; equal ones are one object."""
    dead = graph.dead_without()
    keys: list[ClusterKey | None] = []
    same_keys: dict[ClusterKey, ClusterKey] = {}
    answers: dict[tuple[Any, ...], bool] = {}  # of the same operation on several shards
    for node in nodes:
        name, device, op_type = node.name, node.device, node.op
        origin = graph.origins.get(name)
        keys.append(None)
        if origin is None or op_type in LEFT_OUT or not device:
            continue
        if origin.role not in _COMPUTING and not (origin.role == _ADDED_UP and origin.shard is not None):
            continue
        if origin.op in graph.uncompiled:
            continue
        same = (origin.op, origin.role, op_type, kind_of_device(device))
        if same not in answers:
            answers[same] = not is_compiled(node) and not why_not_compiled(node, functions, same[-1])
        if answers[same]:
            key = ClusterKey(device, origin.shard, dead.get(name, ""), graph.sides.of_node(name))
            keys[-1] = same_keys.setdefault(key, key)
    return keys


def _levels(web: Graph, keys: Sequence[ClusterKey | None]) -> list[int]:
    levels = [0] * len(keys)
    for k in web.positions_in_order:
        key, level = keys[k], 0
        for source in web.sources[k]:
            other = keys[source]
            source_level = levels[source] + (other is not None and other is not key)
            level = max(source_level, level)
        levels[k] = level
    return levels


def _leave_out_reads_for_others(web: Graph, returned: Set[int], keys: list[ClusterKey | None]) -> None:
    """Leave out what reads variables for others: they get the value as it is, where XLA would copy it for them."""
    values = {n.name: k for k, n in enumerate(web.nodes) if n.op == "ReadVariableOp" and keys[k] is not None}
    for_others = {k for k in values.values() if k in returned}
    for node, key in zip(web.nodes, keys, strict=True):
        for reference in node.input:
            k = values.get(reference.removesuffix(":0"))  # (none for what only waits)
            if k is not None and keys[k] is not key:
                for_others.add(k)
    for k in for_others:
        keys[k] = None


def _sink(web: Graph, returned: Set[int], keys: Sequence[ClusterKey | None], levels: list[int]) -> None:
    """Put what only nodes of the same shard wait for where the first of them is: nobody else waits longer for it."""
    for k in reversed(web.positions_in_order):
        key, readers = keys[k], web.readers[k]
        if key is not None and readers and k not in returned and all(keys[reader] is key for reader in readers):
            levels[k] = min([levels[reader] for reader in readers])


def _torn_variants(
    web: Graph, returned: Set[int], holding: Set[int], keys: Sequence[ClusterKey | None], levels: Sequence[int]
) -> set[int]:
    """Return the nodes that hand lists of tensors to others, or get them, across the border of a cluster."""
    torn = {k for k in holding & returned if keys[k] is not None}
    for k in holding:
        for source in web.sources[k]:
            together = keys[source] is not None and keys[source] is keys[k] and levels[source] == levels[k]
            if source in holding and not together:
                torn |= {end for end in (source, k) if keys[end] is not None}
    return torn


@dataclass(frozen=True, eq=False)
class CompiledNodes:
    """Nodes with calls in place of clusters.

    Attributes:
      nodes: all that are left, calls included.
      functions: what the calls call.
      outputs, effects: as they are named now.
      inside: the call that each node of a cluster became part of.
      returned: of each call, those that it returns, as they were named.
    """

    nodes: tuple[Any, ...]
    functions: tuple[Any, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    inside: Mapping[str, str]
    returned: Mapping[str, Sequence[str]]


def compile_clusters(
    graph: EmittedGraph, nodes: Sequence[Any], outputs: Sequence[str], effects: Sequence[str]
) -> CompiledNodes:
    """Return some of an emitted graph's nodes with each cluster as one call.

    Args:
      graph: where the nodes come from.
      nodes: the nodes.
      outputs: references of what they return.
      effects: names of nodes that must run.
    """
    functions = {function.signature.name: function for function in graph.library.function}
    web = Graph(nodes)
    return _CallWriter(graph, web, find_clusters(graph, web, outputs, functions)).write(outputs, effects)


def graph_def_that_runs(graph: EmittedGraph) -> Any:
    """Return an emitted graph as the `GraphDef` that is run: with calls in place of clusters, if it is compiled."""
    graph_def = graph.graph_def()
    if graph.compiled:
        compiled = compile_clusters(graph, graph.nodes, graph.outputs, graph.effects)
        del graph_def.node[:]
        graph_def.node.extend(compiled.nodes)
        graph_def.library.function.extend(compiled.functions)
    return graph_def


class _ClusterContent(NamedTuple):
    """What is in a cluster's function.

    Attributes:
      types: of its arguments.
      members: of each node its name there, what it reads there, and all else.
      returned: references.
    """

    types: tuple[int, ...]
    members: tuple[tuple[str, tuple[str, ...], bytes], ...]
    returned: tuple[str, ...]


def _call_names(scope: str, clusters: Sequence[XlaCluster]) -> list[str]:
    """Return names of the calls; those of one device, shard and level that run under other conditions are numbered."""
    counts, names = Counter[str](), list[str]()
    for name in [_call_name(scope, cluster) for cluster in clusters]:
        names.append(f"{name}/{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return names


def _call_name(scope: str, cluster: XlaCluster) -> str:
    who = "home" if cluster.key.shard is None else f"shard_{cluster.key.shard}"
    device = re.sub(r"\W+", "_", cluster.key.device.removeprefix("/").replace("device:", ""))
    return f"{scope}/compiled/{who}/{device}/{cluster.level}"


class _CallWriter:
    def __init__(self, graph: EmittedGraph, web: Graph, clusters: Sequence[XlaCluster]):
        self._graph = graph
        self._nodes = web.nodes
        self._clusters = clusters
        self._by_name = web
        self._cluster_of = {node.name: c for c, cluster in enumerate(clusters) for node in cluster.nodes}
        self._calls = _call_names(graph.scope, clusters)
        self._references: dict[str, str] = {}  # of what a cluster returns, as it was and as it is

    def write(self, outputs: Sequence[str], effects: Sequence[str]) -> CompiledNodes:
        returned = self._returned(outputs)
        for call, references in zip(self._calls, returned, strict=True):
            self._references.update({r: f"{call}:{k}" for k, r in enumerate(references)})
        functions: dict[Any, Any] = {}  # by what is in them: shards that do the same call the same
        calls = []
        for c, cluster in enumerate(self._clusters):
            inputs, controls = self._given(cluster)
            content = self._content(cluster, inputs, returned[c])
            if content not in functions:
                functions[content] = self._function(cluster, content)
            calls.append(self._call(c, functions[content], inputs, controls))
        other_nodes = [self._renamed(node) for node in self._nodes if node.name not in self._cluster_of]
        return CompiledNodes(
            (*other_nodes, *calls),
            tuple({function.signature.name: function for function in functions.values()}.values()),
            tuple(map(self._reference, outputs)),
            tuple(dict.fromkeys(self._reference(f"^{effect}")[1:] for effect in effects)),
            {name: self._calls[c] for name, c in self._cluster_of.items()},
            dict(zip(self._calls, returned, strict=True)),
        )

    def _reference(self, reference: str) -> str:
        """Return how a reference is called outside of clusters now."""
        if reference[0] == "^":
            c = self._cluster_of.get(reference[1:])
            return reference if c is None else f"^{self._calls[c]}"
        name, index = split_reference(reference)
        return self._references.get(f"{name}:{index}", reference)

    def _returned(self, outputs: Sequence[str]) -> list[list[str]]:
        """Return of each cluster what others read."""
        references_by_cluster: list[set[str]] = [set() for _ in self._clusters]
        inputs_by_reader = [(self._cluster_of.get(node.name), node.input) for node in self._nodes]
        for reader, references in (*inputs_by_reader, (None, outputs)):
            for reference in references:
                name, index = split_reference(reference)  # (no cluster has a node by the name of what is waited for)
                c = self._cluster_of.get(name)
                if c is not None and c != reader:
                    references_by_cluster[c].add(f"{name}:{index}")
        places = {node.name: k for cluster in self._clusters for k, node in enumerate(cluster.nodes)}
        return [sorted(references, key=lambda r: (places[source_of(r)], r)) for references in references_by_cluster]

    def _given(self, cluster: XlaCluster) -> tuple[list[str], list[str]]:
        """Return the references that a cluster reads and what it waits for, as they were called."""
        inside = {node.name for node in cluster.nodes}
        inputs: dict[str, None] = {}
        controls: dict[str, None] = {}
        for node in cluster.nodes:
            for reference in node.input:
                name, index = split_reference(reference.lstrip("^"))
                if name in inside:
                    continue
                source = self._by_name[name]
                if reference[0] == "^":
                    controls[reference] = None
                elif source.op == "Const":  # each cluster has its own
                    controls.update(dict.fromkeys(source.input))
                else:
                    inputs[f"{name}:{index}"] = None
        return list(inputs), list(controls)

    def _content(self, cluster: XlaCluster, inputs: Sequence[str], returned: Sequence[str]) -> _ClusterContent:
        prefix = "" if cluster.key.shard is None else self._graph.prefixes[cluster.key.shard]
        inner = {reference: f"{self._graph.scope}/input_{i}" for i, reference in enumerate(inputs)}
        inner.update({r.removesuffix(":0"): stand_in for r, stand_in in inner.items() if r.endswith(":0")})
        constants = self._constants(cluster)  # (may be another shard's, of the same device)
        names = {node.name: f"{self._graph.scope}/constant_{i}" for i, node in enumerate(constants)}
        names.update({node.name: node.name.removeprefix(prefix) for node in cluster.nodes})
        inner.update(names)

        def name_of(reference: str) -> str:
            inner_name = inner.get(reference)
            if inner_name is None:  # it waits for something, or reads a later output
                sign, (name, index) = "^" * (reference[0] == "^"), split_reference(reference.lstrip("^"))
                inner_name = f"{sign}{names[name]}{f':{index}' if index else ''}" if name in names else ""
                inner[reference] = inner_name
            return inner_name

        members = []
        for node in (*constants, *cluster.nodes):
            references = () if node.op == "Const" else tuple([name_of(r) for r in node.input])
            members.append((names[node.name], tuple([r for r in references if r]), _attributes(node)))
        types = tuple([self._type(reference) for reference in inputs])
        return _ClusterContent(types, tuple(members), tuple(map(name_of, returned)))

    def _function(self, cluster: XlaCluster, content: _ClusterContent) -> Any:
        stand_ins = [f"{self._graph.scope}/input_{i}" for i in range(len(content.types))]
        pairs = zip(stand_ins, content.types, strict=True)
        nodes = [make_node(name, "Placeholder", [], dtype=tf.as_dtype(dtype)) for name, dtype in pairs]
        for name, inputs, attributes in content.members:
            node = NodeDef()
            node.ParseFromString(attributes)
            node.name = name
            node.input.extend(inputs)
            nodes.append(node)
        members = [name for name, _, _ in content.members][-len(cluster.nodes) :]
        named = zip(members, cluster.nodes, strict=True)
        effects = [name for name, node in named if op_definition(node.op).is_stateful]
        function = function_definition("cluster", nodes, stand_ins, content.returned, effects)
        function.attr[XLA_ATTRIBUTE].b = True
        return named_by_content(function)

    def _constants(self, cluster: XlaCluster) -> list[Any]:
        sources = dict.fromkeys(source_of(r) for node in cluster.nodes for r in node.input if r[0] != "^")
        return [with_inputs(self._by_name[name], ()) for name in sources if self._by_name[name].op == "Const"]

    def _type(self, reference: str) -> int:
        name, index = split_reference(reference)
        return output_type(self._by_name[name], index)

    def _call(self, c: int, function: Any, inputs: Sequence[str], controls: Sequence[str]) -> Any:
        op_type = "StatefulPartitionedCall" if function.signature.is_stateful else "PartitionedCall"
        waits = [self._reference(r) for r in controls]
        inputs_and_waits = [*map(self._reference, inputs), *dict.fromkeys(waits)]
        node = make_node(
            self._calls[c], op_type, inputs_and_waits, self._clusters[c].key.device, **{XLA_ATTRIBUTE: True}
        )
        node.attr["Tin"].list.type.extend(argument.type for argument in function.signature.input_arg)
        node.attr["Tout"].list.type.extend(argument.type for argument in function.signature.output_arg)
        node.attr["f"].func.name = function.signature.name
        return node

    def _renamed(self, node: Any) -> Any:
        """Return a node that reads calls instead of what is in them, and waits once for each."""
        references = list(map(self._reference, node.input))
        return node if references == list(node.input) else with_inputs(node, references)


def _attributes(node: Any) -> bytes:
    """Return what a node is apart from its name, its device and what it reads."""
    copy = with_inputs(node, ())
    copy.ClearField("name")
    copy.ClearField("device")
    return bytes(copy.SerializeToString(deterministic=True))
