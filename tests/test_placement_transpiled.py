"""Placements of what was transpiled: graphsplit's shards are told apart in graphs that others load."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.inspect.views.pages import page_data
from graphsplit.inspect.views.summaries import page_paths
from tests.helpers.processes import python
from tests.helpers.saved_model_cases import tensorflow_1


def shards(placement: gs.inspect.Placement, op_type: str) -> dict[int | None, int]:
    """Return how many operations of a type each shard has."""
    return dict(Counter(op.shard for op in placement.ops.values() if op.type == op_type))


def test_shards_of_a_saved_model(tmp_path: Path):
    layers = [keras.layers.Dense(4, "relu", name="encoder"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input((6,), name="rows"), *layers], name="net")
    model.export(str(tmp_path / "one"), verbose=False)
    gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "four", 4)
    before, after = (gs.placement(str(tmp_path / name)) for name in ("one", "four"))
    assert shards(before, "MatMul") == {None: 2}
    assert shards(after, "MatMul") == {0: 2, 1: 2, 2: 2, 3: 2}
    alike = [lane["together"] for lane in page_data(after)["lanes"] if lane["alike"] == 4]
    assert alike == ["shards 0 to 3 \N{MULTIPLICATION SIGN} 4"] * 4
    for placement in (before, after):
        paths = {tuple(path[:-1]) for name, path in page_paths(placement).items() if "MatMul" in name}
        assert paths == {("net_1", "encoder_1"), ("net_1", "head_1")}


def test_what_a_shard_calls_belongs_to_it(tmp_path: Path):
    """A loop's body is not marked itself."""

    @tf.function(input_signature=[tf.TensorSpec((6, 3), tf.float32, "x")])
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.tanh(x)
        return x

    module = tf.Module()
    module.loop = loop
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=loop)
    gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "two", 2)
    assert shards(gs.placement(str(tmp_path / "two")), "Tanh") == {0: 1, 1: 1}


def test_why_something_is_at_home(tmp_path: Path):
    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32, "x")])
    def distinct(x: tf.Tensor) -> tf.Tensor:
        return tf.unique(tf.tanh(tf.reshape(x, [-1]))).y

    module = tf.Module()
    module.distinct = distinct
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=distinct)
    gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "two", 2)
    placement = gs.placement(str(tmp_path / "two"))
    assert [op.type for op in placement.unsharded_ops] == ["Unique"]
    assert placement.warnings[0] == (
        "rows gathered on one device by Unique: which entries are new depends on all rows; leave it out if it only "
        "saves lookups, or call it in dataset.map, pad its values and pass them with split={...: None}"
    )


def test_shards_of_a_graph():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [5, 2], name="x")
        tf.tanh(x, name="y")
    with tf.Graph().as_default() as split:
        tf.graph_util.import_graph_def(gs.serving.transpile_graph_def(graph.as_graph_def(), "x", "y", 2), name="loaded")
    placement = gs.placement(split)
    assert shards(placement, "Tanh") == {0: 1, 1: 1}


@pytest.mark.long
def test_shards_of_a_model_of_tensorflow_1(tmp_path: Path):
    requests = tensorflow_1(str(tmp_path / "one"))
    gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "three", 3)
    placement = gs.placement(str(tmp_path / "three"), signature=next(iter(requests)))
    assert {0, 1, 2} <= shards(placement, "MatMul").keys()


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_three")
    net = keras.Sequential([keras.Input((6,), name="rows"), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    net.export(str(folder / "one"), verbose=False)
    gs.serving.transpile_saved_model(folder / "one", folder / "three", 3)
    return folder / "three"


def inspected(*arguments: str) -> str:
    """Return what `graphsplit inspect` prints in a process of its own."""
    done = python("-m", "graphsplit.cli", "inspect", *arguments)
    return done.stdout + done.stderr


@pytest.mark.long
def test_inspect_without_a_specification_counts_some_rows(on_three: Path):
    printed = inspected(str(on_three), "--actual")
    assert "Bytes and FLOPs are those of float32[32,6]; --spec says otherwise." in printed
    assert re.findall(r"^  CPU:\d .*? (\d+)%", printed, re.MULTILINE) == ["35", "34", "31"]
    assert "every operation ran where it was asked to" in printed


@pytest.mark.long
def test_inspect_splits_nothing_twice(on_three: Path):
    assert (
        f"'{on_three}' was transpiled before, for CPU:0, CPU:1, CPU:2. Leave --devices out to see that, or name the "
        "original."
    ) in " ".join(inspected(str(on_three), "--devices", "2").split())


def test_a_device_that_is_missing_is_why_a_fused_operation_ran_elsewhere(on_three: Path, tmp_path: Path):
    gs.serving.transpile_saved_model(on_three.parent / "one", tmp_path / "gpus", ["GPU:0", "GPU:1"])
    loaded = tf.saved_model.load(str(tmp_path / "gpus"))
    placement = gs.placement(loaded.signatures["serving_default"], rows=tf.ones((5, 6)), actual=True)
    reasons = {op.reason.split(";")[0] for op in placement.select("MatMul") if op.moved}
    assert reasons == {f"GPU:{d} does not exist in this process" for d in range(2)}


def test_signatures_come_in_one_order(tmp_path: Path):
    module = tf.Module()
    functions = {
        name: tf.function(lambda x: {"y": tf.tanh(x)}, input_signature=[tf.TensorSpec((None, 3), tf.float32, "x")])
        for name in ("serve", "b", "serving_default", "a")
    }
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=functions)
    report = gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "two", 2)
    assert [signature.name for signature in report.signatures] == ["a", "b", "serve", "serving_default"]


def test_replicated_weights_do_not_seem_to_travel(tmp_path: Path):
    net = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64)])
    net.export(str(tmp_path / "one"), verbose=False)
    devices = [f"GPU:{d}" for d in range(3)]
    gs.serving.transpile_saved_model(
        str(tmp_path / "one"), str(tmp_path / "three"), devices=devices, replicate_weights=True
    )
    placement = gs.placement(str(tmp_path / "three"), tf.TensorSpec((32, 20)))
    weights = 4 * (20 * 64 + 64)
    assert {d: placement.devices[f"/device:{d}"].parameter_bytes for d in devices} == dict.fromkeys(devices, weights)
    assert not [sent for sent in placement.transfers if "ReadVariableOp" in sent.source]
