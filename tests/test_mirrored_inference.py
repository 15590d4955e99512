"""Mirrored weights and inference: in `predict`, in `map` and in transpiled SavedModels no weight is sent anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission.emitter import emit
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import crossing, keras_model, numbers

DEVICES = 3


def sent(graphs: Sequence[Any]) -> set[str]:
    """Return the nodes whose results TensorFlow's own partitions send from device to device."""
    nodes = [node for graph in graphs for node in graph.node]
    return {node.input[0] for node in nodes if node.op in ("_Send", "_HostSend")}


def reads(graphs: Sequence[Any]) -> dict[str, set[str]]:
    """Return the devices on which variables are read, and the nodes that follow from nothing else."""
    nodes = {node.name: node for graph in graphs for node in graph.node}
    weights = {name for name, node in nodes.items() if node.op == "ReadVariableOp"}
    for name, node in nodes.items():  # casts, transpositions and copies of weights are weights
        if node.op in ("Identity", "Cast", "Transpose", "Reshape") and node.input[0].split(":")[0] in weights:
            weights.add(name)
    return {"nodes": weights, "devices": {nodes[name].device for name in weights}}


def assert_weights_stay(graphs: Sequence[Any]) -> None:
    found = reads(graphs)
    assert len(found["devices"]) == DEVICES
    assert not {name.split(":")[0] for name in sent(graphs)} & found["nodes"]


def test_predict():
    template = keras_model()
    x = numbers(8, 6, 6, 3).numpy()
    expected = template.predict(x, verbose=0)
    model = gs.multi_gpu_model(template, gpus=DEVICES, variables="mirrored")
    with partition_graphs() as graphs:
        found = model.predict(x, verbose=0, batch_size=8)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert crossing(graphs)  # rows are sent
    assert_weights_stay(graphs)


def test_map():
    weights = [tf.Variable(numbers(64, 64, seed=k)) for k in range(3)]
    gs.set_variable_layout(weights, "mirrored", DEVICES)

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
    model = keras_model()
    model.export(tmp_path / "one", verbose=False)
    report = gs.transpile_saved_model(tmp_path / "one", tmp_path / "many", DEVICES, replicate_weights=True)
    plan = report.plans["serve"]
    assert f"variables mirrored: {len(plan.state.copied)}, on CPU:0, CPU:1, CPU:2" in str(plan)
    assert len(plan.state.copied) == len([v for v in model.variables if "seed" not in v.path])
    assert report.signatures[0].sent_bytes == 0
    plan.check()
    emit(plan).check()
    loaded, x = tf.saved_model.load(str(tmp_path / "many")), numbers(8, 6, 6, 3)
    with partition_graphs() as graphs:
        found = loaded.signatures["serve"](x)
    np.testing.assert_allclose(next(iter(found.values())), model(x), atol=1e-5)
    assert_weights_stay(graphs)


def test_sizes_of_a_mirrored_variable():
    """The shape of a copy is that of the variable."""
    weight = tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "mirrored", DEVICES)
    shape = gs.parallelize(lambda x: (x, tf.raw_ops.VariableShape(input=weight.handle)), devices=DEVICES)
    assert shape(numbers(5, 3))[1].numpy().tolist() == [30, 40]
    assert not shape.plan(numbers(5, 3)).state.whole
