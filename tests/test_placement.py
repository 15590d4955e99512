"""Requested placement: hand-made graphs whose counts and bytes are known."""

from __future__ import annotations

import keras
import networkx as nx
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.errors import PlacementError
from graphsplit.inspect import Edge, PlacedOp, Placement, placement_of_graph
from graphsplit.inspect.graph import topological_order
from tests.helpers.placements import placeholder, synthetic, two_device_graph

pytestmark = pytest.mark.sampled(quick=12)


@pytest.fixture
def two_devices():
    return placement_of_graph(two_device_graph())


def test_every_op_has_device_shapes_bytes_and_flops(two_devices):
    product = two_devices.ops["product"]
    assert product.device == "/device:CPU:1"
    assert product.shapes == ((8, 4),)
    assert product.dtypes == ("float32",)
    assert product.output_bytes == 8 * 4 * 4
    assert product.flops == 2 * 8 * 16 * 4
    assert two_devices.ops["relu"].device == "/device:CPU:0"


def test_totals_by_device(two_devices):
    cpu0, cpu1 = two_devices.devices["/device:CPU:0"], two_devices.devices["/device:CPU:1"]
    assert (cpu0.ops, cpu1.ops) == (4, 2)
    assert (cpu0.flops, cpu1.flops) == (32 + 32 + 128, 1024)
    assert (cpu0.activation_bytes, cpu1.activation_bytes) == (128 + 128 + 512, 128)
    assert (cpu0.sent_bytes, cpu1.sent_bytes) == (512, 128)
    assert (cpu0.received_bytes, cpu1.received_bytes) == (128, 512)
    assert two_devices.balance == pytest.approx(1024 / ((1024 + 192) / 2))


def test_a_tensor_crosses_once_however_many_read_it(two_devices):
    first, second = two_devices.transfers
    assert (first.source, first.bytes, first.readers) == ("x", 512, ("product",))
    assert (second.source, second.bytes, second.readers) == ("product", 128, ("relu", "twice"))
    assert str(second) == "product:0 /device:CPU:1 -> /device:CPU:0 for relu and 1 more"


def test_sent_bytes_of_edges_add_up_to_what_is_sent(two_devices):
    sent = [data["sent_bytes"] for *_, data in two_devices.graph.edges(data=True)]
    assert sum(sent) == sum(transfer.bytes for transfer in two_devices.transfers) == 512 + 128


def test_networkx_graph(two_devices):
    graph = two_devices.graph
    assert isinstance(graph, nx.MultiDiGraph)
    assert graph.nodes["product"]["device"] == "/device:CPU:1"
    assert graph.number_of_edges("product", "twice") == 2
    [edge] = graph.get_edge_data("x", "product").values()
    assert edge == {"bytes": 512, "dtype": "float32", "output": 0, "control": False, "crosses": True, "sent_bytes": 512}
    [control] = graph.get_edge_data("relu", "short").values()
    assert control["control"]


def test_assert_on(two_devices):
    two_devices.assert_on("MatMul", "CPU:1")
    two_devices.assert_on("re*", "cpu:0")
    with pytest.raises(PlacementError, match=r"1 of the 1 operations that match 'product' are not on CPU:0:\n.*CPU:1"):
        two_devices.assert_on("product", "CPU:0")
    with pytest.raises(PlacementError) as error:
        two_devices.assert_on("nothing", "CPU:0")
    assert str(error.value) == "No operation of graph matches 'nothing'."
    with pytest.raises(PlacementError) as error:
        two_devices.assert_on("produkt", "CPU:0")
    assert str(error.value) == "No operation of graph matches 'produkt'. Similar names: 'product'."


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", [keras, tf_keras])
def test_layers_are_called_as_in_their_model(module):
    """Keras 3 calls the scopes of the layers `dense` and `dense_1` `dense_1` and `dense_1_2`."""
    module.backend.clear_session()
    layers = module.layers
    model = module.Sequential([layers.Input((4,)), layers.Dense(3), layers.Dense(2)])
    parallel = gs.parallelize(lambda x: model(x), devices=2)
    placement = parallel.placement(tf.zeros((5, 4)))
    widths = {
        p: {op.shapes[0][1] for op in placement.select(p) if op.type == "MatMul"} for p in ("dense/*", "dense_1/*")
    }
    assert widths == {"dense/*": {3}, "dense_1/*": {2}}
    placement.assert_on("shard_1/*/dense/*", "CPU:1")
    with pytest.raises(PlacementError, match=r"No operation of .* matches 'dence/\*'\. Similar names: 'dense/\*'"):
        placement.assert_on("dence/*", "CPU:0")


def test_titles_are_names():
    concrete = tf.function(named).get_concrete_function(tf.TensorSpec([4, 2]))
    for fn in (named, tf.function(named), concrete, gs.parallelize(named, devices=2)):
        assert gs.placement(fn, tf.TensorSpec([4, 2])).title == "named"


def named(x):
    return tf.tanh(x)


def test_a_graph_that_is_there_takes_what_it_takes():
    concrete = tf.function(named).get_concrete_function(tf.TensorSpec([None, 2], name="x"))
    assert gs.placement(concrete, tf.TensorSpec([4, 2])).title == "named"
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.placement(concrete, tf.TensorSpec([2]))
    assert str(error.value) == ("named does not take these arguments:\n  - x must be float32[?,2], got float32[2]")
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.placement(concrete, tf.TensorSpec([4, 2]), tf.TensorSpec([4, 2]))
    assert str(error.value) == "named does not take these arguments:\n  - it takes 1 tensor, got 2"


def test_a_transpiled_model_is_not_warned_of(tmp_path):
    """Before its sizes are known, few operations have FLOPs, and these are at home."""
    module = tf.Module()
    module.w = tf.Variable(tf.ones((4, 3)))
    spec = tf.TensorSpec([None, 4], tf.float32, "x")
    module.serve = tf.function(lambda x: {"y": tf.nn.softmax(x @ module.w)}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=module.serve)
    gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "two", 3)
    found = gs.placement(tmp_path / "two").warnings
    assert [warning for warning in found if not warning.startswith("sizes of ")] == []


def test_diff(two_devices):
    graph = two_device_graph()
    graph.node[3].device = "/device:CPU:2"
    del graph.node[5]
    changes = two_devices.diff(placement_of_graph(graph))
    assert [str(change) for change in changes] == [
        "relu: device /device:CPU:0 -> /device:CPU:2",
        "short: operation Neg -> none",
    ]
    assert two_devices.diff(two_devices) == []


def test_table_fits_a_terminal(two_devices):
    text = str(two_devices)
    assert max(map(len, text.splitlines())) <= 100
    assert "CPU:1" in text
    assert "512 B  CPU:0 -> CPU:1  x" in text
    assert "84% of the FLOPs run on CPU:1" in text


def test_warnings_are_sentences():
    ops = [
        PlacedOp("a", "MatMul", "/device:GPU:0", shard=0, flops=900, shapes=((None, 4),), dtypes=("float32",)),
        PlacedOp("b", "MatMul", "/device:GPU:1", shard=1, flops=100, output_bytes=2_000_000),
        PlacedOp(
            "u",
            "Unique",
            "/device:GPU:0",
            unsharded_reason="no rule for Sum",
            gathered_bytes=12_000_000,
            source="model.py:31",
        ),
    ]
    placement = Placement(ops, [Edge("b", "u", 0, 2_000_000, "float32")], rows=[4, 4])
    assert placement.warnings == (
        "90% of the FLOPs run on GPU:0",
        "a shard has 4 rows: likely launch-bound",
        "12.0 MB gathered on one device by Unique, called at model.py:31: no rule for Sum; write it in operations that "
        "have a rule, or move it into dataset.map",
        "2.0 MB move between devices, most of all b (2.0 MB from GPU:1 to GPU:0)",
        "sizes of 1 operation are not known before the run; their bytes and FLOPs count as 0",
    )
    assert [op.name for op in placement.unsharded_ops] == ["u"]


def test_a_placement_of_nothing():
    assert "0 operations" in str(Placement([], []))


def test_a_graph_with_a_loop_of_version_1_has_an_order():
    ops = [PlacedOp(name, kind) for name, kind in (("e", "Enter"), ("m", "Merge"), ("n", "NextIteration"))]
    placement = Placement(ops, [Edge("e", "m"), Edge("m", "n"), Edge("n", "m")])
    assert topological_order(placement.graph) == ["e", "m", "n"]


def test_unknown_sizes_count_as_zero_and_are_said():
    graph = tf.compat.v1.GraphDef()
    graph.node.append(placeholder("x", [None, 3], ""))
    placement = placement_of_graph(graph)
    assert placement.ops["x"].shapes == ((None, 3),)
    assert placement.ops["x"].output_bytes == 0
    assert "not known" in placement.warnings[0]


def test_bodies_of_calls_loops_and_branches_are_included():
    w = tf.Variable(tf.ones([8, 8]))

    @tf.function
    def inner(x):
        return x @ w

    @tf.function
    def outer(x, n):
        with tf.device("CPU:1"):
            a = inner(x)
        with tf.device("CPU:2"):
            _, b = tf.while_loop(lambda i, c: i < n, lambda i, c: (i + 1, inner(c)), [0, a])
        return tf.cond(tf.reduce_sum(b) > 0, lambda: inner(b) * 2.0, lambda: b @ w)

    placement = gs.placement(outer, tf.ones([4, 8]), tf.constant(3))
    products = {op.name: op for op in placement.select("MatMul")}
    assert {name: op.device[-5:] for name, op in products.items()} == {
        "StatefulPartitionedCall/matmul": "CPU:1",
        "while/body/while/StatefulPartitionedCall/matmul": "CPU:2",
        "cond/then/cond/StatefulPartitionedCall/matmul": "CPU:0",
        "cond/else/cond/matmul": "CPU:0",
    }
    assert all(op.flops == 2 * 4 * 8 * 8 for op in products.values())
    assert products["while/body/while/StatefulPartitionedCall/matmul"].body_of == "while"
    assert "test_placement.py" in products["cond/else/cond/matmul"].source
    assert placement.ops["while"].shapes[3] == (4, 8)
    assert nx.has_path(placement.graph, "x", "cond/else/cond/matmul")
    assert placement.devices["/device:CPU:0"].parameter_bytes == 8 * 8 * 4


def test_keras_model_and_saved_model(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3, name="dense")])
    placement = gs.placement(model, tf.ones([2, 5]))
    assert placement.select("MatMul")[0].flops == 2 * 2 * 5 * 3
    assert [op.parameter_bytes for op in placement.ops.values() if "kernel" in op.variable] == [5 * 3 * 4]
    model.export(str(tmp_path), verbose=False)
    saved = gs.placement(str(tmp_path))
    assert saved.select("MatMul")[0].shapes == ((None, 3),)
    assert "serving_default" in saved.title
    with pytest.raises(gs.errors.ArgumentError, match=r"has no signature 'other'; it has .*'serving_default'"):
        gs.placement(str(tmp_path), signature="other")
    with pytest.raises(gs.errors.ArgumentError, match=r"does not exist; give the directory of a SavedModel"):
        gs.placement(str(tmp_path / "nowhere"))


def test_not_a_function():
    with pytest.raises(gs.errors.ArgumentError, match="takes a function"):
        gs.placement(3)


@pytest.mark.long
def test_large_placement_has_answers():
    placement = synthetic(20_002)
    assert len(placement.ops) == 20_002
    assert placement.balance == pytest.approx(1.0, rel=1e-3)
