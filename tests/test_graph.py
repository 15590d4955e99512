"""`Graph`: who reads whom, what is made from what, in which order, in graphs and in the bodies of functions."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import (
    GraphDef,
    functions_named,
    make_node,
    prefixed,
    set_inputs,
    source_of,
    with_inputs,
    with_prefix,
)
from graphsplit.program.graph.function_calls import functions_called, inline_calls
from graphsplit.program.graph.graph import Graph, in_order, reached, readers_of

HUGE = 200_000


def graph_of(**reads: str) -> Graph:
    """Return a graph of nodes by name, each with what it reads."""
    return Graph([make_node(name, "AddN", references.split()) for name, references in reads.items()])


DIAMOND = {"d": "b c:1 ^late", "late": "^a", "c": "a a:2", "b": "a:1", "a": "", "alone": ""}


def test_who_reads_whom():
    graph = graph_of(**DIAMOND)
    assert list(graph) == list(DIAMOND)
    assert graph["c"].name == "c"
    assert "c" in graph
    assert "c:1" not in graph
    names = {name: [list(graph)[k] for k in graph.sources[graph.place[name]]] for name in graph}
    assert names == {"d": ["b", "c", "late"], "late": ["a"], "c": ["a"], "b": ["a"], "a": [], "alone": []}
    assert [list(graph)[k] for k in graph.readers[graph.place["a"]]] == ["late", "c", "b"]


def test_what_is_made_from_what():
    graph = graph_of(**DIAMOND)
    assert graph.after(["c", "alone"]) == {"c", "d", "alone"}
    assert graph.before(["c", "b"]) == {"a", "b", "c"}
    assert graph.after(["a"]) == set(DIAMOND) - {"alone"}, "a wait counts as reading"
    assert graph.before([]) == set()


def test_order_is_as_listed_but_behind_what_is_read():
    assert graph_of(**DIAMOND).order == ["a", "b", "c", "late", "d", "alone"]
    sorted_already = graph_of(a="", b="a", c="", d="^b a")
    assert sorted_already.order == ["a", "b", "c", "d"]
    assert in_order([[], [2], [0], [1, 2]]) == [0, 2, 1, 3]


@pytest.mark.parametrize("reads", [{"a": "c", "b": "a", "c": "^b"}, {"a": "a:1", "b": "a", "c": "a"}])
def test_nodes_that_wait_for_each_other_are_named(reads: dict[str, str]):
    graph = graph_of(before="", **reads, behind="a")
    with pytest.raises(gs.errors.CheckError, match=r"Nodes of a graph wait for each other: .*'a'.*\.") as caught:
        assert graph.order
    assert not {"'before'", "'behind'"} & set(str(caught.value).replace(",", " ").split())
    assert graph.after(["a"]) == {*reads, "behind"}, "only an order needs that there are no circles"


def test_what_is_not_sound():
    with pytest.raises(gs.errors.CheckError, match=r"The node 'a' reads '\^nobody', which does not exist\."):
        graph_of(a="^nobody").check()
    with pytest.raises(gs.errors.CheckError, match=r"Two nodes have the same name: 'a'\."):
        Graph([make_node("a", "NoOp", []), make_node("b", "NoOp", []), make_node("a", "NoOp", [])]).check()
    graph_of(**DIAMOND).check()
    Graph([]).check()


def test_random_graphs_are_as_networkx_has_them():
    rng = np.random.default_rng(0)
    for _ in range(20):
        reads = [[f"n{s}" for s in rng.choice(k, min(k, rng.integers(0, 4)), replace=False)] for k in range(30)]
        graph = Graph([make_node(f"n{k}", "AddN", reads[k]) for k in rng.permutation(30)])
        expected = nx.DiGraph([(source, f"n{k}") for k, own in enumerate(reads) for source in own])
        expected.add_nodes_from(graph)
        place = {name: k for k, name in enumerate(graph.order)}
        assert all(place[a] < place[b] for a, b in expected.edges)
        for name in graph:
            assert graph.after([name]) == nx.descendants(expected, name) | {name}
            assert graph.before([name]) == nx.ancestors(expected, name) | {name}


def test_bodies_of_functions():
    @tf.function(input_signature=[tf.TensorSpec([2]), tf.TensorSpec([2])])
    def body(x, y):
        first, _ = tf.split(tf.exp(x), 2, name="halves")
        return tf.add(first, 1.0, name="sum"), tf.tanh(y)

    definition = body.get_concrete_function().function_def
    graph = Graph.of_function(definition)
    [total] = [node.name for node in definition.node_def if node.op == "AddV2"]
    assert {graph[name].op for name in graph.before([total])} >= {"Exp", "Split", "AddV2"}
    assert "Tanh" not in {graph[name].op for name in graph.before([total])}
    assert set(graph.order) == {node.name for node in definition.node_def}
    with pytest.raises(gs.errors.CheckError, match="reads 'x', which does not exist"):
        Graph(definition.node_def).check()


def test_functions_that_functions_call():
    inner = tf.function(lambda x: x + 1.0)

    @tf.function(input_signature=[tf.TensorSpec([])])
    def outer(x):
        return tf.while_loop(lambda v: v < 9.0, lambda v: (inner(v),), [tf.cond(x > 0.0, lambda: x, lambda: inner(x))])

    graph = outer.get_concrete_function().graph.as_graph_def()
    library = {function.signature.name: function for function in graph.library.function}
    [loop] = [node for node in graph.node if node.op in ("While", "StatelessWhile")]
    named = functions_named([loop], library)
    assert sorted(named) == sorted(loop.attr[which].func.name for which in ("body", "cond"))
    called = [function.signature.name for function in functions_called([loop], library)]
    assert len(called) == len(set(called)) == 3
    assert set(named) < set(called)
    assert {f.signature.name for f in functions_called(graph.node, library)} == set(library)
    by_name = make_node("call", called[-1], [])
    assert functions_named([by_name], library) == [called[-1]], "a node may have a function as its type"


def test_nodes_that_read_something_else():
    node = make_node("a", "AddN", ["x", "y:1", "^w"])
    copy = with_inputs(node, ["^v", "z", "^w", "^v"])
    assert (list(copy.input), list(node.input)) == (["z", "^v", "^w"], ["x", "y:1", "^w"])
    set_inputs(node, [])
    assert list(node.input) == []
    moved = with_prefix(copy, "p/")
    assert (moved.name, list(moved.input)) == ("p/a", ["p/z", "^p/v", "^p/w"])
    assert prefixed("p/", "x:1") == "p/x:1"
    assert [*map(source_of, ("x", "x:1", "^x", "x:output:0"))] == ["x"] * 4


def test_walks_over_anything():
    assert list(reached("a", {"a": "bc", "b": "d", "c": "d", "d": "a"}.__getitem__)) == ["a", "b", "c", "d"]
    assert list(reached([], lambda _: [1])) == []
    assert readers_of([[1], [], [1, 0]]) == [[2], [0, 2], []]


def test_a_huge_chain_backwards_needs_no_deep_stack():
    nodes = [make_node(f"n{k}", "Identity", [f"n{k + 1}"] if k + 1 < HUGE else []) for k in range(HUGE)]
    graph = Graph(nodes)
    assert graph.order == [node.name for node in reversed(nodes)]
    assert len(graph.before(["n0"])) == len(graph.after([f"n{HUGE - 1}"])) == HUGE


def nested_calls() -> Any:
    """Return a graph that calls a function, which calls another one with an effect, for which something waits."""
    counter = tf.Variable(0.0)

    @tf.function
    def inner(x):
        counter.assign_add(1.0)
        return x, x * 2.0

    @tf.function
    def outer(x):
        same, twice = inner(x)
        return same, twice + 1.0

    @tf.function(input_signature=[tf.TensorSpec([2], name="x")], autograph=False)
    def function(x):
        before = tf.no_op(name="before")
        with tf.control_dependencies([before]):
            same, more = outer(x)
        with tf.control_dependencies([same.op]):
            return tf.add(more, same, name="total")

    return function.get_concrete_function().graph.as_graph_def()


def test_calls_inside_of_calls_are_inlined_and_effects_keep_their_order():
    graph_def = nested_calls()
    [call] = [node.name for node in graph_def.node if node.op.endswith("PartitionedCall")]
    nodes, results = inline_calls(graph_def, ["total:0", f"^{call}"])
    graph = Graph(nodes)
    graph.check()
    assert not any(node.op.endswith("PartitionedCall") for node in nodes)
    [write] = [node.name for node in nodes if node.op == "AssignAddVariableOp"]
    assert write in graph.before(["total"]), "what waited for the call waits for its effects"
    assert {"before", f"{call}/begin"} <= graph.before([write]), "which wait for what the call waited for"
    assert results[0] == "total:0"
    assert f"^{write}" in results[1:]
    assert graph.order.index(write) < graph.order.index("total")


def test_a_call_of_a_function_that_is_not_there_stays():
    node = make_node("call", "PartitionedCall", ["x"])
    node.attr["f"].func.name = "nobody"
    nodes, results = inline_calls(GraphDef(node=[make_node("x", "Placeholder", []), node]), ["call:0"])
    assert ([n.name for n in nodes], results) == (["x", "call"], ["call:0"])
