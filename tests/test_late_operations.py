"""What could run long before it is read waits, and so is not held meanwhile."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning import passes, planner
from graphsplit.planning.schedule.scheduling import find_order
from graphsplit.program.program import Tensor
from graphsplit.simulate.prediction.predictions import Prediction
from tests.helpers.law import assert_close, assert_law
from tests.helpers.recomputation import training as step_of

WIDTH = 2000  # five rows of it are more than what is too small to wait


def training(normalized: bool = True):
    """Return a training step with momentum, and with means over the batch between layers or without."""
    keras.utils.set_random_seed(3)
    layers: list[keras.Layer] = [keras.Input((8,))]
    for _ in range(4 if normalized else 12):
        layers.append(
            keras.layers.Dense(WIDTH if normalized else 150, "tanh", use_bias=not normalized, dtype="float64")
        )
        layers += [keras.layers.BatchNormalization(dtype="float64")] if normalized else []
        layers += [keras.layers.Dense(8, use_bias=False, dtype="float64")] if normalized else []
    model = keras.Sequential([*layers, keras.layers.Dense(3, dtype="float64")])
    step = step_of(model, 0.01)
    return step, step.variables


def given(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    x, y = (tf.random.stateless_normal((rows, width), [1, width], dtype=tf.float64) for width in (8, 3))
    return x, y


def waiting(plan: gs.inspect.Plan) -> dict[str, list[str]]:
    """Return by type which operations wait for others that make something."""
    found: dict[str, list[str]] = {}
    for op in plan.program.ops:
        kept = [plan.program.ops[i].type for i in op.controls]
        if set(kept) - {"ReadVariableOp", "NoOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}:
            found.setdefault(op.type, []).append(op.name)
    return found


def predicted(monkeypatch: pytest.MonkeyPatch, normalized: bool, wait: bool) -> Prediction:
    if not wait:
        monkeypatch.setattr(planner, "PASSES", [p for p in planner.PASSES if p is not passes.wait_for_readers])
    step, _ = training(normalized)
    return gs.predict(step, *given(7), machine="cpu", devices=1)


def test_what_the_backward_pass_makes_of_the_forward_pass_waits():
    plan = assert_law(lambda: training(), [given(7), given(5)], sharded=["MatMul", "Sub"])
    names = waiting(plan)["Sub"]
    assert len(names) >= 3
    assert all("gradient_tape" in name and "moments" in name for name in names)
    plan.check()


@pytest.mark.long
def test_what_an_optimizer_makes_of_what_it_keeps_waits():
    plan = assert_law(lambda: training(normalized=False), [given(7), given(5)], sharded=["MatMul"])
    shapes = [plan.program.ops[op.index].out_shapes[0] for op in plan.program.ops if op.name in waiting(plan)["Mul"]]
    assert set(shapes) == {(150, 150)}, "of kernels; what is as small as a bias runs whenever it can"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("normalized", [True, False])
def test_less_is_alive(normalized: bool, monkeypatch: pytest.MonkeyPatch):
    late, soon = [predicted(monkeypatch, normalized, wait).memory["/device:CPU:0"] for wait in (True, False)]
    assert late.live_bytes < 0.9 * soon.live_bytes


def test_nothing_waits_for_gradients_from_outside():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.BatchNormalization()])
    x = tf.cast(given(7)[0], tf.float32)
    forward = gs.parallelize(lambda x: tf.reduce_mean(model(x, training=True) ** 3), devices=3)

    def gradients(function):
        with tf.GradientTape() as tape:
            loss = function(x)
        return tape.gradient(loss, model.trainable_variables)

    expected = gradients(lambda x: tf.reduce_mean(model(x, training=True) ** 3))
    assert_close(gradients(forward), expected, tolerance=1e-4)  # a mean's gradient is the rest of a difference


def test_no_order_against_what_waits():
    """Of two products of a tensor, the one that other devices wait for goes first, unless it waits for the other."""

    def of(w: tf.Variable, waits: bool):
        def step(x: tf.Tensor) -> tf.Tensor:
            y = tf.tanh(x)
            by_weight = tf.matmul(x, y, transpose_a=True)
            with tf.control_dependencies([by_weight] if waits else []):
                by_input = tf.matmul(y, w)
            w.assign_sub(by_weight)
            return tf.tanh(by_input - tf.reduce_mean(by_input, 0))

        return step

    for waits in (False, True):
        plan = gs.parallelize(of(tf.Variable(tf.eye(8, dtype=tf.float64)), waits), devices=3).plan(given(7)[0])
        [mean] = [op.index for op in plan.program.ops if op.type == "Mean"]
        assert bool(find_order(plan.program, plan.steps, {Tensor(mean, 0)})) != waits


def test_casts_of_weights_that_shards_read_wait_for_nobody():
    """A weight in another precision is made once and sent: behind a layer of the shards, all would wait for it."""
    weights = [tf.Variable(tf.random.stateless_normal((300, 300), [k, 1])) for k in range(14)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = tf.cast(x, tf.bfloat16)
            for w in weights:
                y = tf.tanh(y @ tf.cast(w, tf.bfloat16))
            loss = tf.reduce_mean(tf.cast(y, tf.float32) ** 2)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    plan = gs.parallelize(step, devices=3, variables="home").plan(tf.ones((6, 300)))
    casts = [op for op in plan.program.ops if op.type == "Cast" and op.out_shapes[0] == (300, 300)]
    read_by_shards = {t.op for op, s in zip(plan.program.ops, plan.steps, strict=True) if s.shards for t in op.inputs}
    sent = [op for op in casts if op.index in read_by_shards and plan.steps[op.index].once]
    assert len(sent) == len(weights)
    assert not any(op.controls for op in sent)
