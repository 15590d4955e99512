"""Whole values are made where they belong: an optimizer's arithmetic beside its variable, wherever that is."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import split_reference
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import emit
from graphsplit.runtime.feeding import make_fed_executable
from tests.helpers.law import assert_close, assert_law, rows

VARIABLES = 16
WEIGHT_BYTES = 6 * 6 * 4


def round_robin(optimizer: str, clip: bool = False):
    """Return a training step over variables on four devices in turn, and all its variables."""
    weights = []
    for i in range(VARIABLES):
        with tf.device(f"CPU:{i % 4}"):
            weights.append(tf.Variable(tf.sin(tf.reshape(tf.range(36.0), (6, 6)) * (i + 1.0)) / 3))
    slots: list[tf.Variable] = []
    for weight in weights:
        with tf.device(weight.device):
            slots += [tf.Variable(tf.zeros_like(weight)) for _ in range(2 if optimizer == "adam" else 1)]

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean(y**2)
        gradients = tape.gradient(loss, weights)
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if optimizer == "momentum":
                slots[i].assign(0.9 * slots[i] + gradient)
                weight.assign_sub(0.1 * slots[i])
            else:
                first, second = slots[2 * i], slots[2 * i + 1]
                first.assign(0.9 * first + 0.1 * gradient)
                second.assign(0.99 * second + 0.01 * gradient**2)
                weight.assign_sub(0.1 * first / (tf.sqrt(second) + 1e-7))
        return loss

    return step, [*weights, *slots]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_stay_with_their_variables(optimizer: str, clip: bool):
    x = tf.cast(rows(7, 6), tf.float32)
    plan = assert_law(lambda: round_robin(optimizer, clip), [(x,), (x,)], devices=4, sharded=["MatMul"])
    of_size = [m for m in plan.moves if m.kind == "send" and plan.program.bytes(m.tensor) >= WEIGHT_BYTES]
    assert not of_size, "a whole weight, gradient or slot goes from one device to another"
    homes = {plan.owners.of_ops[op.index] for op in plan.ops_once if op.type in ("AssignVariableOp", "Sub", "Sqrt")}
    assert homes >= {f"/device:CPU:{d}" for d in range(4)}
    assert "once, on CPU:3" in str(plan)


def test_no_state_crosses_devices():
    """In the graphs that TensorFlow runs: what is sent are rows, weights to the shards, and gradients from them."""
    step, _ = round_robin("adam")
    x = tf.cast(rows(8, 6), tf.float32)
    function = gs.parallelize(step, devices=4)
    plan = function.plan(x)
    origins = emit(plan).origins
    with partition_graphs() as graphs:
        function(x)
    large: Counter[str] = Counter()
    for node in (node for graph in graphs for node in graph.node if node.op in ("_Send", "_HostSend")):
        name, index = split_reference(node.input[0])
        origin = origins.get(name)
        if origin is not None and origin.role == "op" and origin.op is not None:
            op = plan.program.ops[origin.op]
            if op.out_bytes and op.out_bytes[index] >= WEIGHT_BYTES:  # (without results: a mere signal)
                large[op.type] += 1
    # each weight to the three other devices, each gradient's addends from them
    assert large == {"ReadVariableOp": VARIABLES * 3, "MatMul": VARIABLES * 3}


def test_what_serves_several_devices_runs_where_its_inputs_are():
    step, _ = round_robin("momentum", clip=True)
    plan = gs.parallelize(step, devices=4).plan(tf.cast(rows(7, 6), tf.float32))
    norms = [op for op in plan.ops_once if op.type in ("L2Loss", "Square") and sum(op.out_bytes) < WEIGHT_BYTES]
    assert len(norms) == VARIABLES
    assert {plan.owners.of_ops[op.index] for op in norms} == {f"/device:CPU:{d}" for d in range(4)}


def test_a_norm_of_its_own_does_not_take_a_gradient_away():
    """Numbers that serve all devices are made of gradients; the gradients still go to their own variables alone."""

    def make():
        weights = round_robin("momentum")[1][:VARIABLES]

        def clipped(x):
            with tf.GradientTape() as tape:
                y = x
                for weight in weights:
                    y = tf.tanh(y @ weight)
                loss = tf.reduce_mean(y**2)
            gradients = [tf.tanh(gradient) for gradient in tape.gradient(loss, weights)]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(tf.where(finite, gradient, 0.0))
            return loss

        return clipped, weights

    x = tf.cast(rows(7, 6), tf.float32)
    plan = assert_law(make, [(x,)], devices=4, sharded=["MatMul"])
    of_size = [m for m in plan.moves if m.kind == "send" and plan.program.bytes(m.tensor) >= WEIGHT_BYTES]
    assert not of_size, "a whole gradient goes from one device to another"


def test_keras_optimizers_beside_their_variables():
    keras.utils.set_random_seed(0)
    with tf.device("CPU:2"):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    x, y = (tf.cast(rows(7, n), tf.float32) for n in (6, 1))
    function = gs.parallelize(step, devices=3)
    report = gs.verify(function, x, y)
    assert report.largest < 1e-3  # Adam divides small gradients by their size
    plan = function.plan(x, y)
    sent = sum(plan.program.bytes(m.tensor) for m in plan.moves if m.kind == "send")
    assert sent <= 16, str(plan)  # the loss's count of steps and the like, no weights


def test_variables_at_home_have_one_owner():
    w = tf.Variable(np.ones((3, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    plan = gs.parallelize(step, devices=3).plan(rows(7, 3))
    assert set(plan.owners.of_ops) == {"/device:CPU:0"}
    assert not any(move.kind == "send" for move in plan.moves)


def test_a_name_scope_of_our_name_changes_nothing():
    def f(x):
        with tf.name_scope("graphsplit"), tf.name_scope("shard_0"):
            return tf.tanh(x) @ tf.transpose(x)

    function = gs.parallelize(f, devices=3)
    x = rows(7, 3)
    assert_close(function(x), f(x))
    for batch, result in zip([x, x], function.map([x, x]), strict=True):
        assert_close(result, f(batch))
    planned = function._planned((x,), {}, runs=True)
    feed, _ = make_fed_executable(planned.trace, planned.plan, "f")
    pieces = feed([x])
    assert sorted(piece.shape[0] for piece in pieces if piece.shape.rank == 2) == [2, 2, 3]
