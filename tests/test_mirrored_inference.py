"""Mirrored weights and inference: in `predict`, in `map` and in transpiled SavedModels no weight is sent anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import emit
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import crossing, keras_model, numbers

DEVICES = 3


def sent(graphs: Sequence[Any]) -> set[str]:
    """Return the nodes whose results TensorFlow's own partitions send from device to device."""
    nodes = [node for graph in graphs for node in graph.node]
    return {node.input[0] for node in nodes if node.op in ("_Send", "_HostSend")}


_OF_WEIGHTS = ("Identity", "Cast", "Transpose", "Reshape", "MatMul")


def follow_from_weights(graphs: Sequence[Any]) -> dict[str, str]:
    """Return the nodes that read variables or follow from nothing but these, with their devices."""
    nodes = {node.name: node for graph in graphs for node in graph.node}
    found = {name: node.device for name, node in nodes.items() if node.op == "ReadVariableOp"}
    before = 0
    while len(found) > before:
        before = len(found)
        for name, node in nodes.items():
            sources = {source.split(":")[0] for source in node.input if source[0] != "^"}
            if node.op in _OF_WEIGHTS and sources <= found.keys():
                found[name] = node.device
    return found


def assert_weights_stay(graphs: Sequence[Any]) -> None:
    found = follow_from_weights(graphs)
    assert len(set(found.values())) == DEVICES
    assert not {name.split(":")[0] for name in sent(graphs)} & found.keys()


def test_predict():
    template = keras_model()
    x = numbers(8, 6, 6, 3).numpy()
    expected = template.predict(x, verbose=0)
    model = gs.multi_gpu_model(template, gpus=DEVICES, variables="replicated")
    with partition_graphs() as graphs:
        found = model.predict(x, verbose=0, batch_size=8)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert crossing(graphs)  # rows are sent
    assert_weights_stay(graphs)


def test_map():
    # (sums of 64 entries of about 1: larger weights make the rounding of one layer larger in the next)
    weights = [tf.Variable(numbers(64, 64, seed=k) / 8) for k in range(3)]
    gs.set_variable_layout(weights, "replicated", DEVICES)

    def forward(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = tf.tanh(x @ weight)
        return x

    apply = gs.parallelize(forward, devices=DEVICES)
    batches = [numbers(9, 64, seed=k) for k in range(3)]
    with partition_graphs() as graphs:
        found = list(apply.map(batches))
    for actual, batch in zip(found, batches, strict=True):
        assert_close(actual, forward(batch))
    assert_weights_stay(graphs)


def test_a_transpiled_saved_model(tmp_path: Path):
    """Its weights are mirrored as others are, what follows from weights alone is computed by each device."""
    model = tf.Module()
    model.weights = [tf.Variable(numbers(20, 20, seed=k)) for k in range(2)]

    def serve(x: tf.Tensor) -> dict[str, tf.Tensor]:
        first, second = model.weights
        return {"y": tf.tanh(x @ tf.cast(tf.cast(first, tf.float64), tf.float32)) @ tf.matmul(first, second)}

    signature = tf.function(serve, input_signature=[tf.TensorSpec((None, 20), name="x")])
    tf.saved_model.save(model, str(tmp_path / "one"), signatures={"serve": signature})
    report = gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "many", DEVICES, replicate_weights=True)
    plan = report.plans["serve"]
    assert "variables replicated: 2, on CPU:0, CPU:1, CPU:2" in str(plan)
    assert report.signatures[0].sent_bytes == 0
    plan.check()
    emit(plan).check()
    loaded, x = tf.saved_model.load(str(tmp_path / "many")), numbers(8, 20)
    with partition_graphs() as graphs:
        found = loaded.signatures["serve"](x)
    assert_close(found, serve(x))
    assert_weights_stay(graphs)


def test_sizes_of_a_mirrored_variable():
    """The shape of a copy is that of the variable."""
    weight = tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "replicated", DEVICES)
    shape = gs.parallelize(lambda x: (x, tf.raw_ops.VariableShape(input=weight.handle)), devices=DEVICES)
    assert shape(numbers(5, 3))[1].numpy().tolist() == [30, 40]
    assert not shape.plan(numbers(5, 3)).state.whole
