"""Actual placement: what TensorFlow ran, compared with what was asked for, and the reasons for every difference."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.errors import PlacementError
from graphsplit.inspect import PlacedOp
from graphsplit.inspect.actual import Facts, RanNode, match_op, plain_name, require_graphs
from tests.helpers.keras_cases import CASES

CPU0, GPU0 = "/device:CPU:0", "/device:GPU:0"


def make_step(towers=()):
    """A training step of a small network; with `towers`, its forward pass placed on them by hand."""
    initial = [np.random.RandomState(i).normal(size=s).astype(np.float32) for i, s in enumerate([(6, 16), (16, 1)])]
    w1, w2 = (tf.Variable(value) for value in initial)
    count = tf.Variable(0)

    def loss_of(x, y):
        return tf.reduce_mean((tf.nn.relu(x @ w1) @ w2 - y) ** 2)

    def step(x, y):
        with tf.GradientTape() as tape:
            if towers:
                losses = []
                for device, a, b in zip(towers, tf.split(x, len(towers)), tf.split(y, len(towers)), strict=True):
                    with tf.device(device):
                        losses.append(loss_of(a, b))
                loss = tf.add_n(losses) / len(losses)
            else:
                loss = loss_of(x, y)
        for variable, gradient in zip([w1, w2], tape.gradient(loss, [w1, w2]), strict=True):
            variable.assign_sub(0.1 * gradient)
        count.assign_add(1)
        return loss

    return step, [w1, w2, count]


def data(rows=8):
    return tf.random.normal([rows, 6]), tf.random.normal([rows, 1])


def backward_products(placement):
    return [op for op in placement.select("MatMul") if op.backward and op.ran]


@pytest.mark.parametrize("actual", [False, True])
def test_towers_by_hand_have_their_backward_pass_on_device_0(actual):
    step, _ = make_step(["CPU:1", "CPU:2"])
    placement = gs.placement(step, *data(), actual=actual)
    products = backward_products(placement)
    assert len(products) == 6
    assert {op.device for op in products} == {CPU0}
    assert {op.requested for op in products} == {""}
    assert {op.device for op in placement.select("MatMul") if not op.backward} == {"/device:CPU:1", "/device:CPU:2"}
    with pytest.raises(PlacementError, match=r"backward operations are not with the forward operation"):
        placement.assert_colocated_gradients()
    assert any("backward operations are not on the device of their forward" in text for text in placement.warnings)


@pytest.mark.parametrize("actual", [False, True])
def test_parallelize_has_every_backward_op_on_its_shard(actual):
    step, _ = make_step()
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    placement = gs.parallelize(step, devices=devices, tuning={"default_device": "CPU:0"}).placement(
        *data(), actual=actual
    )
    products = backward_products(placement)
    assert sorted((op.shard, op.device) for op in products) == [
        (d, f"/device:{device}") for d, device in enumerate(devices) for _ in range(3)
    ]
    for op in placement.ops.values():
        if op.backward and op.ran and op.shard is not None:
            assert op.device == f"/device:{devices[op.shard]}", op
    assert len([pair for pair in placement.gradients if pair.backward.shard is not None]) >= 12
    placement.assert_colocated_gradients()
    placement.assert_on("shard_1/*", "CPU:2")
    assert not placement.unsharded_ops
    assert placement.rows == (3, 3, 2)


def test_actual_is_requested_and_state_is_restored():
    step, variables = make_step()
    parallel = gs.parallelize(step, devices=3)
    before = [variable.numpy() for variable in variables]
    placement = parallel.placement(*data(), actual=True)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert placement.moved == ()
    assert placement.missing == ()
    assert "every operation ran where it was asked to" in str(placement)
    assert all(op.actual for op in placement.ops.values() if op.ran)


def test_a_function_that_has_been_called_before_is_reported_all_the_same():
    step, _ = make_step()
    arguments = data()
    parallel, function = gs.parallelize(step, devices=2), tf.function(lambda x: tf.nn.relu(x) @ tf.ones([6, 2]))
    for _ in range(2):
        parallel(*arguments)
        function(arguments[0])
    assert parallel.placement(*arguments, actual=True).select("MatMul")[0].actual
    assert gs.placement(function, arguments[0], actual=True).select("MatMul")[0].actual == CPU0


def test_without_partition_graphs_the_error_says_the_way_out():
    with pytest.raises(
        gs.GraphsplitError, match=r"first instantiates a function.*gs.placement\(fn, \*args, actual=True"
    ):
        require_graphs([], {"MatMul"})


def test_actual_needs_tensors_and_eager_code():
    spec = tf.TensorSpec([2, 3])
    assert gs.placement(tf.square, spec).select("Square")
    with pytest.raises(gs.errors.ArgumentError, match="needs tensors, not specifications"):
        gs.placement(tf.square, spec, actual=True)

    @tf.function
    def inside(x):
        gs.placement(tf.square, x, actual=True)

    with pytest.raises(gs.errors.ArgumentError, match=r"outside of tf.function"):
        inside(tf.ones([2]))


def test_loops_and_branches_ran_where_asked():
    w = tf.Variable(tf.ones([4, 4]))

    def fn(x, n):
        with tf.device("CPU:2"):
            _, x = tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, tf.tanh(x @ w)), [0, x])
        with tf.device("CPU:3"):
            return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.sin(x))

    placement = gs.placement(fn, tf.ones([3, 4]), tf.constant(2), actual=True)
    actual = {op.type: op.actual for op in placement.ops.values() if op.type in ("MatMul", "Tanh", "Exp", "Sin")}
    assert actual == {
        "MatMul": "/device:CPU:2",
        "Tanh": "/device:CPU:2",
        "Exp": "/device:CPU:3",
        "Sin": "/device:CPU:3",
    }
    [read] = placement.select("ReadVariableOp")
    assert (read.requested, read.actual) == ("/device:CPU:2", CPU0)
    assert read.reason == "must run on the device of the variable or table that it uses: CPU:0"


def test_a_device_that_is_not_there_is_reported_as_moved():
    def fn(x):
        with tf.device("GPU:7"):
            return tf.strings.length(tf.strings.as_string(x))

    placement = gs.placement(fn, tf.ones([3]), actual=True)
    moved = {op.type: op for op in placement.moved}
    assert set(moved) >= {"AsString", "StringLength"}
    assert moved["StringLength"].actual == CPU0
    assert moved["StringLength"].reason == (
        "GPU:7 does not exist in this process; TensorFlow's soft placement chose CPU:0"
    )
    assert any("asked for GPU:7" in warning for warning in placement.warnings)


def test_an_op_without_a_kernel_is_reported_as_moved():
    """The kernels are TensorFlow's own; only the graph that ran is made up, for want of a GPU."""
    from graphsplit.core.gpus import kernel_devices
    from graphsplit.core.protos import make_node

    op = PlacedOp("length", "StringLength", GPU0)
    facts = Facts(
        ran={"length": RanNode("length", "StringLength", CPU0)},
        devices={CPU0, GPU0},
        kernels={"length": kernel_devices(make_node("length", "StringLength", ["x"]))},
    )
    placed = match_op(op, facts)
    assert placed.moved
    assert placed.reason == ("no GPU kernel for StringLength with these types; TensorFlow's soft placement chose CPU:0")


def test_fused_folded_pruned_and_merged_ops_say_so():
    w, b = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8]))

    def fn(x):
        unused = tf.sin(x, name="unused")
        del unused
        y = tf.nn.relu(tf.nn.bias_add(x @ w, b, name="bias"))
        return (
            tf.identity(y) * tf.constant(2.0) * (tf.constant(3.0) + 1.0)
            + tf.cos(x, name="one")
            - tf.exp(tf.cos(x, name="two"))
        )

    placement = gs.placement(fn, tf.ones([4, 8]), actual=True)
    reasons = {op.name: op.reason for op in placement.ops.values()}
    assert reasons["unused"] == "pruned: no result and no effect depends on it"
    assert reasons["matmul"].startswith("fused into Relu (_")
    assert placement.ops["matmul"].ran
    assert placement.ops["matmul"].actual == CPU0
    assert {reasons["one"], reasons["two"]} & {
        "merged with two, which computes the same",
        "merged with one, which computes the same",
    }
    assert any(reason.startswith("folded away") for reason in reasons.values())


def test_saved_model_runs():
    class Doubler(tf.Module):
        def __init__(self):
            self.calls = tf.Variable(0)

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def __call__(self, x):
            self.calls.assign_add(1)
            with tf.device("CPU:1"):
                return {"y": tf.nn.relu(x) * 2.0}

    doubler = Doubler()
    placement = gs.placement(doubler.__call__, tf.ones([3, 2]), actual=True)
    assert doubler.calls.numpy() == 0
    placement.assert_on("Relu", "CPU:1")


def test_partial_requests():
    assert not PlacedOp("a", "Relu", "/device:CPU:*", "/device:CPU:1").moved
    assert PlacedOp("a", "Relu", "/device:GPU:*", "/device:CPU:1").moved
    called = gs.placement(lambda x: tf.py_function(lambda y: y * 2, [x], tf.float32), tf.ones([3]), actual=True)
    assert called.moved == ()


def test_compiled_calls_and_tables_say_so():
    compiled = tf.function(lambda x: tf.sin(x) * 2.0, jit_compile=True)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)

    def fn(x, s):
        with tf.device("CPU:1"):
            return compiled(x), table.lookup(s)

    placement = gs.placement(fn, tf.ones([3]), tf.constant(["a"]), actual=True)
    assert placement.select("Sin")[0].reason == "compiled by XLA as part of PartitionedCall"
    assert "variable or table" in placement.select("LookupTableFindV2")[0].reason


def test_what_stays_at_home_is_a_warning_with_its_line():
    placement = gs.parallelize(lambda x: tf.unique(tf.reshape(x, [-1])).y, devices=2).placement(tf.ones([6, 2]))
    [op] = placement.unsharded_ops
    assert (op.type, op.gathered_bytes) == ("Unique", 6 * 2 * 4)
    [warning] = [text for text in placement.warnings if "Unique" in text]
    assert warning.startswith("48 B gathered on one device by Unique, called at test_placement_actual.py:")


def test_names_of_inlined_bodies():
    assert plain_name("while/body/_5/while/cond/then/_35/cond/MatMul") == "while/body/while/cond/then/cond/MatMul"
    assert plain_name("a/_5/b") == "a/_5/b"


def test_sends_in_the_partition_graphs_are_the_transfers():
    """TensorFlow's own `_Send` nodes, one for each tensor and receiving device, are what `transfers` says."""
    from graphsplit.inspect.actual import run_and_collect
    from graphsplit.inspect.sources import source_of_function

    def fn(x):
        with tf.device("CPU:1"):
            y = tf.exp(x)
        with tf.device("CPU:2"):
            z = tf.sin(y) + tf.cos(y)
        with tf.device("CPU:0"):
            return tf.reduce_sum(z) + tf.reduce_sum(tf.tan(y))

    x = tf.ones([3, 4])
    source, arguments = source_of_function(fn, [x], {})
    sends = set()
    for graph in run_and_collect(source, arguments):
        for node in graph.node:
            if node.op == "_Send" and node.attr["T"].type == tf.float32.as_datatype_enum:
                route = [node.attr[key].s.decode()[-5:] for key in ("send_device", "recv_device")]
                sends.add((node.input[0].split(":")[0], *route))
    placement = gs.placement(fn, x, actual=True)
    found = {(t.source, t.source_device[-5:], t.target_device[-5:]) for t in placement.transfers}
    renamed = {(("x" if name.startswith("a0") or name == "x" else name), a, b) for name, a, b in sends}
    assert {(a, b) for _, a, b in found} == {(a, b) for _, a, b in renamed}
    assert len(found) == len(renamed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_every_model_runs_where_it_was_asked_to(name):
    case = CASES[name]
    model = case.model()
    inputs, _ = case.data()

    def step(x):
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(x, training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(output)) for output in outputs])
        return loss, tape.gradient(loss, model.trainable_variables)

    placement = gs.parallelize(step, devices=3).placement(inputs, actual=True)
    assert placement.moved == ()
    assert {op.device for op in placement.ops.values() if op.shard is not None} == {
        f"/device:CPU:{d}" for d in range(3)
    }
    assert [op.name for op in placement.missing if not op.reason] == []
    assert placement.missing or name != "recurrent"  # of loops' bodies, TensorFlow drops what is only passed on
    placement.assert_colocated_gradients()
    assert max(map(len, str(placement).splitlines())) <= 100
