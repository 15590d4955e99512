"""Stages with devices of their own: where they ran, forward and backward, and that nothing else changed."""

from __future__ import annotations

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from tests.helpers.law import assert_close, assert_law
from tests.helpers.stages_on_devices import (
    LEAKY,
    OUTER,
    STAGE,
    TANH,
    devices_by_type,
    expected,
    network,
    on,
    rows,
    training,
)

pytestmark = pytest.mark.sampled(quick=4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "of_shards"), [(STAGE, STAGE), ("CPU:4", ["CPU:4"] * 2), ("CPU:1", ["CPU:1"] * 2)])
def test_a_stage_of_a_training_step_runs_on_its_devices(stage, of_shards):
    step, _ = training(on(stage))
    parallel = gs.parallelize(step, devices=OUTER)
    with partition_graphs() as graphs:
        parallel(rows(5))
    assert devices_by_type(graphs, TANH) == expected(TANH, of_shards)
    assert devices_by_type(graphs, LEAKY) == expected(LEAKY, OUTER)
    placement = parallel.placement(rows(5))
    in_calls = [op for op in placement.select("MatMul") if "PartitionedCall" in op.name]
    products = {(op.backward, op.shard, op.device) for op in in_calls}
    assert products == {(b, d, f"/device:{name}") for b in (False, True) for d, name in enumerate(of_shards)}
    placement.assert_colocated_gradients()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [STAGE, "CPU:4", ["CPU:3", "CPU:0"]])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_training_equals_the_unsplit_function(stage, count):
    kinds = ["Tanh", "TanhGrad", "LeakyRelu", "LeakyReluGrad", "MatMul"]
    place = on(stage)
    made = itertools.cycle([training(), training(place)])
    assert_law(lambda: next(made), [(rows(count, seed=s),) for s in range(4)], devices=OUTER, sharded=kinds)


def test_gradients_from_outside_run_on_the_stages_devices():
    forward, variables = network(on(STAGE))
    plain, plain_variables = network()
    parallel = gs.parallelize(forward, devices=OUTER)

    def gradients(call, sources):
        x = rows(7)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) ** 2)
        return tape.gradient(loss, [x, *sources])

    with partition_graphs() as graphs:
        found = gradients(parallel, variables)
    assert_close(found, gradients(plain, plain_variables))
    assert devices_by_type(graphs, TANH) == expected(TANH, STAGE)
    assert devices_by_type(graphs, LEAKY) == expected(LEAKY, OUTER)


def test_by_itself_forward_backward_and_variables_are_on_the_device():
    dense = keras.layers.Dense(4, activation="tanh", dtype="float64")
    placed = gs.on_device(dense, "CPU:2")

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.leaky_relu(placed(x)))
        return loss, tape.gradient(loss, dense.trainable_variables)

    placed(rows())  # builds the layer
    assert device_names(dense.variables) == {"CPU:2"}
    with partition_graphs() as graphs:
        found = gradients(rows())
    assert {(kind, device) for kind, _, device in devices_by_type(graphs, TANH)} == {(k, "CPU:2") for k in TANH}
    assert {device for _, _, device in devices_by_type(graphs, LEAKY)} == {"CPU:0"}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.leaky_relu(dense(rows())))
    assert_close(found, (loss, tape.gradient(loss, dense.trainable_variables)))


def test_by_itself_on_several_devices_it_splits_its_batch():
    encode = gs.on_device(tf.tanh, STAGE)
    expectation = tf.tanh(rows(3))
    with partition_graphs() as graphs:
        found = encode(rows(3))
    assert_close(found, expectation)
    assert devices_by_type(graphs, ["Tanh"]) == expected(["Tanh"], STAGE)
    assert encode.plan(rows(3)).rows == (2, 1)


def test_variables_whole_operations_and_sums_are_on_the_stages_first_device():
    def make(place):
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense(4, dtype="float64")

        def encoder(x):
            return dense(tf.sort(x, axis=0))  # which needs all rows

        encode = place(encoder)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.leaky_relu(encode(x)) * x[:, :4])
            for v, g in zip(dense.trainable_variables, tape.gradient(loss, dense.trainable_variables), strict=True):
                v.assign_sub(0.1 * g)
            return loss

        return step, dense

    (step, dense), (plain, plain_dense) = make(on(STAGE)), make(lambda fn: fn)
    parallel = gs.parallelize(step, devices=OUTER)
    for count in (5, 3):
        assert_close(parallel(rows(count)), plain(rows(count)))
    assert_close([v.numpy() for v in dense.variables], [v.numpy() for v in plain_dense.variables])
    assert device_names(dense.variables) == {"CPU:2"}
    placement = parallel.placement(rows(), actual=True)
    whole = [op for op in placement.ops.values() if op.ran and op.type in ("TopKV2", "AssignVariableOp")]
    assert {(op.type, op.device) for op in whole} == {
        ("TopKV2", "/device:CPU:2"),
        ("AssignVariableOp", "/device:CPU:2"),
    }
    sums = [op for op in placement.ops.values() if op.name.startswith("graphsplit/reduce_") and op.shapes[0]]
    assert {op.device for op in sums} == {"/device:CPU:2"}  # of the gradients; that of the loss is outside
    assert sums


def device_names(variables):
    return {v.value.device.rsplit("device:", 1)[-1] for v in variables}


@pytest.mark.long
def test_one_lstm_for_two_inputs_each_on_its_own_devices():
    def make(places):
        keras.utils.set_random_seed(1)
        shared = keras.layers.LSTM(4, dtype="float64", name="shared")
        shared.build((None, 5, 3))
        encode_a, encode_b = (place(shared) for place in places)

        def step(a, b):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((encode_a(a) - encode_b(b)) ** 2)
            gradients = tape.gradient(loss, shared.trainable_variables)
            for v, g in zip(shared.trainable_variables, gradients, strict=True):
                v.assign_sub(0.1 * g)
            return loss

        return step, shared.variables

    def sequences(count):
        return tuple(tf.random.stateless_normal([count, 5, 3], [count, s], dtype=tf.float64) for s in range(2))

    made = itertools.cycle([make([lambda fn: fn] * 2), make([on(STAGE), on("CPU:4")])])
    plan = assert_law(
        lambda: next(made), [sequences(7)] * 2 + [sequences(3)], devices=OUTER, sharded=["StatelessWhile"]
    )
    printed = str(plan)
    assert "stage shared on CPU:2, CPU:3: " in printed
    assert "stage shared on CPU:4: " in printed
    step, _ = make([on(STAGE), on("CPU:4")])
    with partition_graphs() as graphs:
        gs.parallelize(step, devices=OUTER)(*sequences(7))
    inside = {
        (int(node.name.split("shard_")[1][0]), node.device.rsplit("device:", 1)[-1])
        for graph in graphs
        for node in graph.node
        if "MatMul" in node.op and "shard_" in node.name
    }
    assert inside == {(0, "CPU:2"), (1, "CPU:3"), (0, "CPU:4"), (1, "CPU:4")}


def test_results_keep_their_structure():
    encode = gs.on_device(lambda x, name: {"y": (tf.tanh(x), None), "name": name, "count": 3}, "CPU:2")
    found = gs.parallelize(lambda x: (encode(x, name="a"), x), devices=OUTER)(rows())[0]
    assert found["name"] == "a"
    assert found["count"] == 3
    assert found["y"][1] is None
    assert_close(found["y"][0], tf.tanh(rows()))


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_keras_model_with_a_stage_trains_as_without(wrapped):
    class Net(keras.Model):
        def __init__(self, place):
            super().__init__()
            self.encoder, self.head = keras.layers.Dense(8, "tanh", name="encoder"), keras.layers.Dense(2)
            with tf.device("CPU:2"):
                self.encoder.build((None, 5))
            self.encode = place(self.encoder)

        def call(self, x):
            return self.head(self.encode(x))

    def train(place):
        keras.utils.set_random_seed(1)
        template = Net(place)
        template(x)
        model = gs.multi_gpu_model(template, OUTER) if wrapped and place else template
        model.compile("adam", "mse", **({} if wrapped else {"jit_compile": False}))
        return model, model.fit(x, x[:, :2], batch_size=6, epochs=2, verbose=0, shuffle=False).history["loss"]

    x = rows(23, 5).numpy().astype("float32")
    (model, losses), (_, plain_losses) = train(on(STAGE if wrapped else "CPU:2")), train(lambda fn: fn)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert device_names(model.encoder.variables) == {"CPU:2"}
    if wrapped:
        assert "stage encoder on CPU:2, CPU:3: " in str(model.train_function.plan())
    with partition_graphs() as graphs:
        model.train_on_batch(x[:7], x[:7, :2])
    assert {device for _, _, device in devices_by_type(graphs, TANH)} == set(STAGE if wrapped else ["CPU:2"])


def test_a_functional_keras_model_cannot_have_a_stage():
    with pytest.raises(gs.errors.UnsupportedError) as error:
        gs.on_device(keras.layers.Dense(3, name="encoder"), "CPU:2")(keras.Input((4,)))
    assert str(error.value) == (
        "encoder, which on_device returned, is called on a symbolic Keras tensor. A functional model keeps layers, not "
        "their devices. Call it in the `call` method of a layer or model, or in a function."
    )


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_devices_than_the_function_around_is_refused(count):
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(network(on(STAGE))[0], devices=count)(rows())
    assert str(error.value) == (
        f"The function runs on {count} device{'s' if count != 1 else ''}, but on_device gives stages of it other "
        "numbers of devices:\n  - encoder on CPU:2, CPU:3: 2 devices\nGive a stage one device for each device of the "
        "function, or a single one for all shards."
    )


@pytest.mark.parametrize(
    ("fn", "device", "message"),
    [
        (3, "CPU:0", "on_device takes a layer or function and its device, got 3 to place."),
        (tf.tanh, 1, "on_device takes the name of a device, 'GPU:1', or a list of names, got 1."),
        (tf.tanh, "CPU", "device: 'CPU' is not a device name; write it like 'GPU:0'."),
        (tf.tanh, [], "device is an empty list; name at least one device."),
        (tf.tanh, ["CPU:1", "cpu:1"], "device names a device more than once: CPU:1."),
    ],
)
def test_what_is_no_stage_is_refused(fn, device, message):
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.on_device(fn, device)
    assert str(error.value) == message


def test_a_device_that_does_not_exist():
    with pytest.raises(gs.errors.DeviceError, match=r"^device='CPU:9': CPU:9 does not exist\. This process has:"):
        gs.on_device(tf.tanh, "CPU:9")(rows())
    with pytest.raises(
        gs.errors.DeviceError, match=r"^device=\['CPU:1', 'CPU:9'\]: CPU:9 does not exist\. This process has:"
    ):
        gs.on_device(tf.tanh, ["CPU:1", "CPU:9"])(rows())


def test_a_plan_with_other_positions_than_shards_is_refused():
    plan = gs.parallelize(network(on(STAGE))[0], devices=OUTER).plan(rows())
    plan.check()
    with pytest.raises(gs.errors.CheckError, match="positions"):
        dataclasses.replace(plan, mesh=dataclasses.replace(plan.mesh, positions=(0,))).check()
