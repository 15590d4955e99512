"""`transpile_graph_def` of graphs as files have them, not as a trace makes them: their functions, names, attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import function_definition, make_node
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.planning.control_flow import ControlFlowAnswers
from tests.helpers.messages import message

v1 = tf.compat.v1


def bodies(graph_def: Any) -> Iterator[Any]:
    """Yield all nodes of a graph, those of its functions included."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def without_defaults(graph_def: Any) -> Any:
    """Return a graph as SavedModels store it: attributes that are what their op says by default are left out."""
    result = v1.GraphDef.FromString(graph_def.SerializeToString())
    for node in bodies(result):
        for attribute in op_definition(node.op).attr:
            if attribute.HasField("default_value") and node.attr[attribute.name] == attribute.default_value:
                del node.attr[attribute.name]
    return result


def run(graph_def: Any, fetch: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 3})) as session:
            return session.run(fetch, feeds)


def test_attributes_that_were_left_out_are_defaults_in_functions_too():
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)

    def normalised(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=zeros, mean=zeros, variance=ones)[0]

    @tf.function
    def marked(x: tf.Tensor) -> tf.Tensor:
        marks = tf.raw_ops.OneHot(indices=tf.argmax(x[:, 0, 0], -1), depth=4, on_value=1.0, off_value=0.0)
        return x * marks[:, None, None]

    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 2, 2, 4], name="x")
        flag = v1.placeholder(tf.bool, [], name="flag")
        y = tf.cond(flag, lambda: marked(x), lambda: x)
        y = tf.function(normalised)(y)
        tf.add(y, tf.cond(flag, lambda: tf.zeros(4), lambda: normalised(y)), name="y")
    graph_def = without_defaults(graph.as_graph_def())
    assert not any("is_training" in node.attr for node in bodies(graph_def))
    before = graph_def.SerializeToString(deterministic=True)
    many = gs.serving.transpile_graph_def(graph_def, ["x", "flag"], "y", 3)
    assert graph_def.SerializeToString(deterministic=True) == before
    assert len({node.device for node in many.node if node.op == "StatelessIf"}) == 3
    assert len({node.device for node in many.node if node.op == "Mul"}) == 3  # of the statistics
    rows = np.random.default_rng(0).standard_normal([7, 2, 2, 4]).astype(np.float32)
    for flag in (True, False):
        feeds = {"x:0": rows, "flag:0": np.array(flag)}
        np.testing.assert_allclose(run(many, "y:0", feeds), run(graph_def, "y:0", feeds), rtol=0, atol=1e-5)


def by_a_flag(_: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
    return flag


def by_all_rows(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(x) > 0.0


def nested(depth: int, decides: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Any:
    """Return a graph of branches in branches."""
    with tf.Graph().as_default() as graph:
        flag = v1.placeholder(tf.bool, [], name="flag")

        def build(x: tf.Tensor, depth: int) -> tf.Tensor:
            return tf.cond(decides(x, flag), lambda: build(x + 1.0, depth - 1), lambda: x) if depth else tf.tanh(x)

        tf.identity(build(v1.placeholder(tf.float32, [None, 4], name="x"), depth), name="y")
    return graph.as_graph_def()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("decides", "devices"), [(by_a_flag, 3), (by_all_rows, 1)])
def test_each_level_of_nested_branches_is_planned_a_few_times(
    decides: Any, devices: int, monkeypatch: pytest.MonkeyPatch
):
    depth, planned, find = 12, list[str](), ControlFlowAnswers._found

    def found(self: ControlFlowAnswers, op: Any, layouts: Any) -> Any:
        planned.append(op.name)
        return find(self, op, layouts)

    monkeypatch.setattr(ControlFlowAnswers, "_found", found)
    graph_def = nested(depth, decides)
    many = gs.serving.transpile_graph_def(graph_def, ["x", "flag"], "y", 3)
    assert depth <= len(planned) <= depth * depth
    assert len({node.device for node in many.node if node.op == "StatelessIf"}) == devices
    feeds = {"x:0": np.random.default_rng(0).uniform(0, 1, [7, 4]), "flag:0": np.array(True)}
    np.testing.assert_allclose(run(many, "y:0", feeds), run(graph_def, "y:0", feeds), rtol=0, atol=1e-6)


def chain(kind: str, names: Sequence[str], last: str = "") -> Any:
    """Return a graph that calls functions of these names, each of which calls the next, and the end `last` or Tanh."""
    graph_def = v1.GraphDef()
    arguments = [
        make_node("flag", "Placeholder", [], dtype=tf.bool),
        make_node("x", "Placeholder", [], dtype=tf.float32),
    ]
    types, branches = [tf.bool, tf.float32], ("then_branch", "else_branch")
    for name, called in zip(["", *names], [*names, last], strict=True):
        chooses = kind == "StatelessIf" and bool(called)
        inputs = ["flag"] * chooses + ["flag", "x"] if called else ["x"]
        node = make_node("y", kind if called else "Tanh", inputs, **({} if called else {"T": tf.float32}))
        for attribute in (branches if chooses else ("f",)) if called else ():
            node.attr[attribute].func.name = called
        if called:
            node.attr["Tin"].list.type.extend([dtype.as_datatype_enum for dtype in types])
            node.attr["Tout"].list.type.append(tf.float32.as_datatype_enum)
        if chooses:
            node.attr["Tcond"].type = tf.bool.as_datatype_enum
        if name:
            function = function_definition(name, [*arguments, node], ["flag", "x"], ["y"], ())
            graph_def.library.function.append(function)
        else:
            graph_def.node.extend([*arguments, node])
    return graph_def


def test_calls_are_inlined_however_deep_they_are_and_branches_to_a_depth():
    assert gs.serving.transpile_graph_def(
        chain("PartitionedCall", [f"f{k}" for k in range(1100)]), ["x", "flag"], "y", 2
    )
    levels = [f"f{k}" for k in range(51)]
    assert gs.serving.transpile_graph_def(chain("StatelessIf", levels[:50]), ["x", "flag"], "y", 2)
    found = message(
        gs.errors.UnsupportedError, gs.serving.transpile_graph_def, chain("StatelessIf", levels), ["x", "flag"], "y", 2
    )
    assert "nested more than 50 levels deep, down to the function 'f50'" in found


@pytest.mark.parametrize("kind", ["PartitionedCall", "StatelessIf"])
def test_functions_that_call_themselves_are_named(kind: str):
    graph_def = chain(kind, ["f", "g", "h"], last="g")
    found = message(gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, ["x", "flag"], "y", 2)
    assert "call themselves, which TensorFlow cannot run: " in found
    assert any(circle in found for circle in ("'g' -> 'h' -> 'g'.", "'h' -> 'g' -> 'h'."))


def test_what_is_damaged_is_named():
    graph_def = chain("StatelessIf", ["f", "g"])
    graph_def.node.add().CopyFrom(make_node("x", "NoOp", ()))
    f, g = graph_def.library.function
    f.node_def[0].input[2] = "nowhere:y:0"
    g.signature.name = "other"
    found = message(gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, ["x", "flag"], "y", 2)
    assert found == (
        "The graph is damaged:\n  - several nodes have the name 'x'\n"
        "  - 'y' of function 'f' reads 'nowhere:y:0', which is not there\n"
        "  - 'y' of function 'f' calls 'g', which is not there\n"
        "  - 'y' of function 'f' calls 'g', which is not there"
    )


def lost_result(function: Any) -> None:
    del function.ret["r0"]


def lost_effect(function: Any) -> None:
    function.control_ret["effect"] = "nowhere"


def unknown_output(function: Any) -> None:
    function.ret["r0"] = "y:activations:0"


def no_such_output(function: Any) -> None:
    function.ret["r0"] = "y:y:1"


def reads_unknown_output(function: Any) -> None:
    function.node_def.add().CopyFrom(make_node("after", "Tanh", ["y:z:0"], T=tf.float32))


def circle(function: Any) -> None:
    for name, read in (("a", "b:y:0"), ("b", "a:y:0")):
        function.node_def.add().CopyFrom(make_node(name, "Tanh", [read], T=tf.float32))
    function.ret["r0"] = "b:y:0"


DAMAGED_BODIES: dict[Callable[[Any], None], str] = {
    lost_result: "function 'g' returns nothing as 'r0'",
    lost_effect: "function 'g' returns '^nowhere', which is not there",
    unknown_output: "function 'g' returns 'y:activations:0', which is not there",
    no_such_output: "function 'g' returns 'y:y:1', which is not there",
    reads_unknown_output: "'after' of function 'g' reads 'y:z:0', which is not there",
    circle: "nodes of function 'g' wait for each other: 'a' -> 'b' -> 'a'",
}


@pytest.mark.parametrize("damage", DAMAGED_BODIES)
@pytest.mark.parametrize("kind", ["PartitionedCall", "StatelessIf"])
def test_what_is_damaged_in_a_function_is_named(kind: str, damage: Callable[[Any], None]):
    graph_def = chain(kind, ["f", "g"])
    damage(graph_def.library.function[1])
    found = message(gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, ["x", "flag"], "y", 2)
    assert found == f"The graph is damaged:\n  - {DAMAGED_BODIES[damage]}"
