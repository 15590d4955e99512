"""`transpile_graph_def` of graphs that are as files have them, not as a trace makes them: library, names, attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import op_definition

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
    many = gs.transpile_graph_def(graph_def, ["x", "flag"], "y", 3)
    assert graph_def.SerializeToString(deterministic=True) == before
    assert len({node.device for node in many.node if node.op == "StatelessIf"}) == 3
    assert len({node.device for node in many.node if node.op == "Mul"}) == 3  # of the statistics
    rows = np.random.default_rng(0).standard_normal([7, 2, 2, 4]).astype(np.float32)
    for flag in (True, False):
        feeds = {"x:0": rows, "flag:0": np.array(flag)}
        np.testing.assert_allclose(run(many, "y:0", feeds), run(graph_def, "y:0", feeds), rtol=0, atol=1e-5)
