"""`transpile_graph_def`: frozen graphs and TensorFlow 1 training graphs, run in sessions; and the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.serving import files
from graphsplit.serving.graphs import transpile_and_plan
from graphsplit.serving.options import TranspileOptions
from tests.helpers.messages import message
from tests.helpers.saved_model_cases import two_signatures

v1 = tf.compat.v1
ROWS = 7
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}


def training_graph(optimizer: str, resource: bool, rows: int | None = ROWS) -> tuple[Any, Any]:
    """Return a graph as TensorFlow 1 users built it, with initializer, saver and summary, and its saver's names."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        x = v1.placeholder(tf.float32, [rows, 4], name="x")
        y = v1.placeholder(tf.float32, [rows, 1], name="y")
        rate = v1.placeholder_with_default(1.0, [], name="rate")
        with v1.variable_scope("net", use_resource=resource):
            w = v1.get_variable("w", shape=[4, 8])
            b = v1.get_variable("b", shape=[8], initializer=v1.zeros_initializer())
            u = v1.get_variable("u", shape=[8, 1])
        hidden = tf.nn.relu(tf.matmul(x, w) + b, name="hidden")
        prediction = tf.matmul(hidden, u, name="prediction")
        loss = tf.reduce_mean(tf.square(prediction - y), name="loss")
        step = v1.train.get_or_create_global_step()
        OPTIMIZERS[optimizer]().minimize(loss * rate, global_step=step, name="train")
        v1.summary.histogram("activations", hidden)
        v1.global_variables_initializer()
        saver = v1.train.Saver()
    return graph.as_graph_def(), saver.saver_def


def run(
    graph_def: Any, saver: Any, *, batches: Sequence[int] = (ROWS,) * 4, save: str = "", restore: str = ""
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Train, and return the fetched losses and predictions, and the variables by the names in a checkpoint."""
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 3})) as session:
            if restore:
                session.run(saver.restore_op_name, {saver.filename_tensor_name: restore})
            else:
                session.run("init")
            rng, fetched = np.random.default_rng(0), []
            for rows in batches:
                feeds = {"x:0": rng.standard_normal([rows, 4]), "y:0": rng.standard_normal([rows, 1]), "rate:0": 0.5}
                *values, _ = session.run(["loss:0", "prediction:0", "hidden:0", "train"], feeds)
                fetched += values
            assert session.run("activations:0", feeds)  # a part that was not transpiled, of one that was
            session.run(saver.save_tensor_name, {saver.filename_tensor_name: save})
    names = [name for name, _ in tf.train.list_variables(save)]
    return fetched, {name: tf.train.load_variable(save, name) for name in names}


def assert_near(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "old"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(optimizer: str, resource: bool, tmp_path: Path):
    graph_def, saver = training_graph(optimizer, resource)
    before = graph_def.SerializeToString(deterministic=True)
    many, plan = transpile_and_plan(graph_def, ["x", "y"], ["loss", "train", "prediction"], TranspileOptions(3))
    assert graph_def.SerializeToString(deterministic=True) == before
    assert plan.rows == (3, 2, 2)
    assert not plan.unsharded_ops
    assert {"MatMul", "Relu", "ReluGrad"} <= {op.type for op in plan.sharded_ops}
    single, state = run(graph_def, saver, save=str(tmp_path / "single"))
    split, split_state = run(many, saver, save=str(tmp_path / "split"))
    assert_near(split, single)
    assert sorted(state) == sorted(split_state)
    assert_near([split_state[name] for name in state], state.values())
    # a checkpoint of either is one of the other
    resumed, _ = run(many, saver, restore=str(tmp_path / "single"), save=str(tmp_path / "again"))
    expected, _ = run(graph_def, saver, restore=str(tmp_path / "single"), save=str(tmp_path / "again"))
    assert_near(resumed, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "old"])
def test_training_with_any_number_of_rows(resource: bool, tmp_path: Path):
    graph_def, saver = training_graph("adam", resource, rows=None)
    many, plan = transpile_and_plan(graph_def, ["x", "y"], ["loss", "train", "prediction"], TranspileOptions(3))
    assert plan.program.batch_is_unknown
    assert not plan.unsharded_ops, str(plan)
    assert {"MatMul", "Relu", "ReluGrad"} <= {op.type for op in plan.sharded_ops}
    batches = (7, 1, 2, 3, 8)
    single, state = run(graph_def, saver, batches=batches, save=str(tmp_path / "single"))
    split, split_state = run(many, saver, batches=batches, save=str(tmp_path / "split"))
    assert_near(split, single)
    assert_near([split_state[name] for name in state], state.values())


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_frozen_graph(devices: int):
    rng = np.random.default_rng(0)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [5, 3], name="x")
        kept = v1.placeholder(tf.float32, [5, 3], name="kept")
        values, _ = tf.nn.top_k(tf.matmul(x, tf.constant(rng.standard_normal([3, 6]), tf.float32)), 2, name="top")
        tf.identity(values[:, :1] + tf.reduce_sum(kept), name="total")
    graph_def = graph.as_graph_def()
    many = gs.serving.transpile_graph_def(graph_def, ["x:0", "kept"], ["top:1", "total"], devices, split={"kept": None})
    assert len({node.device for node in many.node if node.op == "MatMul"}) == devices
    feeds = {"x:0": rng.standard_normal([5, 3]), "kept:0": rng.standard_normal([5, 3])}
    results = []
    for definition in (graph_def, many):
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(definition, name="")
            with v1.Session(config=v1.ConfigProto(device_count={"CPU": devices})) as session:
                results.append(session.run(["top:0", "top:1", "total:0"], feeds))
    assert_near(results[1], results[0])
    np.testing.assert_array_equal(results[1][1], results[0][1])


def test_large_weights_of_a_frozen_graph_are_written_once():
    weights = np.random.default_rng(0).standard_normal([128, 64]).astype(np.float32)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 128], name="x")
        tf.matmul(x, tf.constant(weights, name="weights"), name="y")
        tf.identity(graph.get_tensor_by_name("weights:0"), name="beside")
    graph_def = graph.as_graph_def()
    many = gs.serving.transpile_graph_def(graph_def, "x", ["y", "weights"], 8)
    assert len({node.device for node in many.node if node.op == "MatMul"}) == 8
    assert many.ByteSize() < 1.9 * graph_def.ByteSize()
    rows = np.random.default_rng(1).standard_normal([11, 128])
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(many, name="")
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 8})) as session:
            y, kept, beside = session.run(["y:0", "weights:0", "beside:0"], {"x:0": rows})
    np.testing.assert_allclose(y, rows @ weights, atol=1e-4)
    np.testing.assert_array_equal(kept, weights)
    np.testing.assert_array_equal(beside, weights)


def test_inputs_inside_of_a_graph_and_tables(tmp_path: Path):
    with tf.Graph().as_default() as graph:
        raw = v1.placeholder(tf.string, [6], name="raw")
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), 0.0)
        numbers = tf.identity(table.lookup(raw), name="numbers")
        tf.sqrt(numbers + 1.0, name="y")
        v1.tables_initializer(name="tables")
    graph_def = graph.as_graph_def(add_shapes=True)
    for inputs in ("raw", "numbers"):
        many = gs.serving.transpile_graph_def(graph_def, inputs, "y", 3)
        devices = {node.device for node in many.node if node.op == "Sqrt"}
        assert len(devices) == 3
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(many, name="")
            with v1.Session(config=v1.ConfigProto(device_count={"CPU": 3})) as session:
                session.run("tables")
                found = session.run("y:0", {"raw:0": ["a", "b", "c", "a", "a", "b"]})
        np.testing.assert_allclose(found, np.sqrt([2, 3, 1, 2, 2, 3]), rtol=1e-6)


def test_what_is_refused():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [6, 2], name="x")
        tf.unique(x[:, 0], name="unique")
        switch, _ = tf.raw_ops.Switch(data=x, pred=True)
        tf.raw_ops.Merge(inputs=[switch, x], name="merge")
    graph_def = graph.as_graph_def()
    found = message(gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, "z", ["y", "unique"], 2)
    assert "The graph has no node for:\n  - inputs 'z'\n  - outputs 'y'\nIts placeholders are: x." in found
    assert "outputs is empty" in message(gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, "x", [], 2)
    found = message(
        gs.errors.ArgumentError, gs.serving.transpile_graph_def, graph_def, "x", "unique", 2, split={"y": 0}
    )
    assert "split names 'y', which are no inputs; inputs are x." in found
    found = message(gs.errors.UnsupportedError, gs.serving.transpile_graph_def, graph_def, "x", "merge", 2)
    assert "TensorFlow 1 control flow:\n  - Merge 'merge'\n  - Switch 'Switch'" in found
    assert "enable_control_flow_v2" in found
    found = message(gs.errors.StrictError, gs.serving.transpile_graph_def, graph_def, "x", "unique", 2, strict=True)
    assert "Unique" in found
    graph_def.node.add(name="mine", op="MyOwnOp")
    assert "MyOwnOp (node 'mine')" in message(
        gs.errors.UnsupportedError, gs.serving.transpile_graph_def, graph_def, "x", "unique", 2
    )


def command(*arguments: object) -> tuple[int, str]:
    """Run a command in this process, where TensorFlow has started."""
    done = CliRunner().invoke(app, ["transpile", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_files_of_graphs_on_the_command_line(tmp_path: Path):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [5, 3], name="x")
        tf.nn.softmax(x * 2.0, name="y")
    source, target = tmp_path / "in.pbtxt", tmp_path / "out.pb"
    tf.io.write_graph(graph, str(tmp_path), "in.pbtxt")
    code, output = command(source, target, "--devices", "CPU:0,CPU:1")
    assert code == 0, output
    assert "From x to y" in output
    assert "shard 1: CPU:1, 2 rows" in output
    many = files.read_graph_def(str(target))
    assert {node.device for node in many.node if node.op == "Softmax"} == {"/device:CPU:0", "/device:CPU:1"}
    assert command(source, target, "--devices", "2")[0] == 2
    assert command(source, target, "--devices", "2", "--overwrite", "--inputs", "x", "--outputs", "y")[0] == 0
    code, output = command(target, tmp_path / "plain.pbtxt", "--strip-devices")
    assert code == 0
    assert "Removed" in output
    assert "device" not in (tmp_path / "plain.pbtxt").read_text().replace("shard", "")
    code, output = command(source, tmp_path / "folder", "--devices", "2")
    assert code == 2
    assert "ends neither in .pb nor .pbtxt" in output
    assert command(source, target, "--devices", "2", "--signatures", "a")[0] == 2
    assert command(source, target, "--devices", "2", "--split", "x=first")[0] == 2


def test_saved_models_on_the_command_line(tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    two_signatures(str(source))
    code, output = command(source, target, "--devices", "GPU:0,GPU:1", "--signatures", "fixed", "--replicate-weights")
    assert code == 0, output
    assert "Transpiled for 2 devices: GPU:0, GPU:1" in output
    assert "encode: kept as it is: not asked for" in output
    assert "weights: 48 B, a copy on every device, 96 B of memory in all; no weight is sent per request" in output
    assert f"Written: {target}" in output
    code, output = command(source, target, "--devices", "2", "--strict")
    assert code == 2
    assert "exists" in output
    code, output = command(source, target, "--devices", "2", "--overwrite", "--split", "x=1")
    assert code == 0
    assert command(target, tmp_path / "plain", "--strip-devices", "--devices", "2")[0] == 2
    assert command(source, tmp_path / "plain", "--inputs", "x")[0] == 2
