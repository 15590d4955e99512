"""Compiled calls: the nodes of each cluster replaced by one call of a function, the same for shards of equal size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.protos.graphdefs import (
    NodeDef,
    function_definition,
    make_node,
    output_type,
    source_of,
    split_reference,
    with_inputs,
)
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.emission.clusters import XlaCluster, find_clusters
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.program.graph.function_calls import named_by_content
from graphsplit.program.graph.graph import Graph
from graphsplit.program.graph.inlining import XLA_ATTRIBUTE


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
    found = graph.graph_def()
    if graph.compiled:
        compiled = compile_clusters(graph, graph.nodes, graph.outputs, graph.effects)
        del found.node[:]
        found.node.extend(compiled.nodes)
        found.library.function.extend(compiled.functions)
    return found


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
        self._calls = [_call_name(graph.scope, cluster) for cluster in clusters]
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
        left = [self._renamed(node) for node in self._nodes if node.name not in self._cluster_of]
        return CompiledNodes(
            (*left, *calls),
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
        found: list[set[str]] = [set() for _ in self._clusters]
        read = [(self._cluster_of.get(node.name), node.input) for node in self._nodes]
        for reader, references in (*read, (None, outputs)):
            for reference in references:
                name, index = split_reference(reference)  # (no cluster has a node by the name of what is waited for)
                c = self._cluster_of.get(name)
                if c is not None and c != reader:
                    found[c].add(f"{name}:{index}")
        places = {node.name: k for cluster in self._clusters for k, node in enumerate(cluster.nodes)}
        return [sorted(references, key=lambda r: (places[source_of(r)], r)) for references in found]

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
            found = inner.get(reference)
            if found is None:  # it waits for something, or reads a later output
                sign, (name, index) = "^" * (reference[0] == "^"), split_reference(reference.lstrip("^"))
                found = f"{sign}{names[name]}{f':{index}' if index else ''}" if name in names else ""
                inner[reference] = found
            return found

        members = []
        for node in (*constants, *cluster.nodes):
            read = () if node.op == "Const" else tuple([name_of(r) for r in node.input])
            members.append((names[node.name], tuple([r for r in read if r]), _attributes(node)))
        types = tuple([self._type(reference) for reference in inputs])
        return _ClusterContent(types, tuple(members), tuple(map(name_of, returned)))

    def _function(self, cluster: XlaCluster, content: _ClusterContent) -> Any:
        stand_ins = [f"{self._graph.scope}/input_{i}" for i in range(len(content.types))]
        pairs = zip(stand_ins, content.types, strict=True)
        nodes = [make_node(name, "Placeholder", [], dtype=tf.as_dtype(dtype)) for name, dtype in pairs]
        for name, read, attributes in content.members:
            node = NodeDef()
            node.ParseFromString(attributes)
            node.name = name
            node.input.extend(read)
            nodes.append(node)
        members = [name for name, _, _ in content.members][-len(cluster.nodes) :]
        named = zip(members, cluster.nodes, strict=True)
        effects = [name for name, node in named if op_definition(node.op).is_stateful]
        function = function_definition("cluster", nodes, stand_ins, content.returned, effects)
        function.attr[XLA_ATTRIBUTE].b = True
        return named_by_content(function)

    def _constants(self, cluster: XlaCluster) -> list[Any]:
        read = dict.fromkeys(source_of(r) for node in cluster.nodes for r in node.input if r[0] != "^")
        return [with_inputs(self._by_name[name], ()) for name in read if self._by_name[name].op == "Const"]

    def _type(self, reference: str) -> int:
        name, index = split_reference(reference)
        return output_type(self._by_name[name], index)

    def _call(self, c: int, function: Any, inputs: Sequence[str], controls: Sequence[str]) -> Any:
        op_type = "StatefulPartitionedCall" if function.signature.is_stateful else "PartitionedCall"
        waits = [self._reference(r) for r in controls]
        given = [*map(self._reference, inputs), *dict.fromkeys(waits)]
        node = make_node(self._calls[c], op_type, given, self._clusters[c].key.device, **{XLA_ATTRIBUTE: True})
        node.attr["Tin"].list.type.extend(argument.type for argument in function.signature.input_arg)
        node.attr["Tout"].list.type.extend(argument.type for argument in function.signature.output_arg)
        node.attr["f"].func.name = function.signature.name
        return node

    def _renamed(self, node: Any) -> Any:
        """Return a node that reads calls instead of what is in them, and waits once for each."""
        found = list(map(self._reference, node.input))
        return node if found == list(node.input) else with_inputs(node, found)


def _attributes(node: Any) -> bytes:
    """Return what a node is apart from its name, its device and what it reads."""
    copy = with_inputs(node, ())
    copy.ClearField("name")
    copy.ClearField("device")
    return bytes(copy.SerializeToString(deterministic=True))
