"""What other devices wait for goes first."""

from __future__ import annotations

import dataclasses

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import emit
from graphsplit.planning.steps import Step
from tests.helpers.law import assert_close, assert_law, rows
from tests.helpers.regression import regression_step

pytestmark = pytest.mark.sampled(quick="all")


def training(normalized: bool):
    """Return a training step of three layers of each kind, with or without sums over the batch between them."""
    keras.utils.set_random_seed(3)
    layers: list[keras.Layer] = [keras.Input((6, 6, 2))]
    for _ in range(3):
        layers.append(keras.layers.Conv2D(3, 3, padding="same", activation="tanh"))
        layers += [keras.layers.BatchNormalization()] if normalized else []
    layers += [keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dense(3)]
    return regression_step(keras.Sequential(layers))


def images_and_labels(batch: int) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(rows(batch, 6, 6, 2), tf.float32), tf.cast(rows(batch, 3), tf.float32)


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    given = images_and_labels(7)
    return assert_law(lambda: training(True), [given, given], sharded=["Conv2DBackpropFilter", "MatMul"])


def test_gradients_of_weights_wait_for_those_that_lead_on(plan: gs.inspect.Plan):
    ops = plan.program.ops
    pairs = sorted((ops[later].type, ops[first].type) for later, first in plan.order.items())
    assert pairs == [("Conv2DBackpropFilter", "Conv2DBackpropInput")] * 2 + [("MatMul", "MatMul")] * 2
    for later, first in plan.order.items():
        assert set(ops[later].inputs) & set(ops[first].inputs)
    assert "4 operations run late, so that other devices need not wait" in str(plan)
    waiting = {node.name: [r for r in node.input if r[0] == "^"] for node in emit(plan).nodes}
    for later, first in plan.order.items():
        for d in range(3):
            assert f"^shard_{d}/{ops[first].name}" in waiting[f"shard_{d}/{ops[later].name}"]


def test_where_nobody_waits_nothing_is_ordered():
    step, _ = training(False)
    assert not gs.parallelize(step, devices=3).plan(*images_and_labels(7)).order
    step, _ = training(True)
    assert not gs.parallelize(step, devices=1).plan(*images_and_labels(7)).order


def test_a_broken_order_is_seen(plan: gs.inspect.Plan):
    [later, first] = next(iter(plan.order.items()))
    ops = plan.program.ops
    [shared] = set(ops[later].inputs) & set(ops[first].inputs)
    with pytest.raises(gs.errors.CheckError, match="which follows from it"):
        dataclasses.replace(plan, order={shared.op: first}).check()
    steps = list(plan.steps)
    steps[first] = Step(once=True)
    with pytest.raises(gs.errors.CheckError):
        dataclasses.replace(plan, steps=tuple(steps), order={later: first}).check()


def test_gradients_from_outside_come_when_they_come():
    """What is returned cannot wait for what follows from its own gradient, though both read the same rows."""

    def f(h):
        x = tf.tanh(h - tf.reduce_mean(h * h, 0))
        return tf.linalg.matmul(x, x, transpose_a=True)

    h, found = rows(7, 4), []
    for function in (f, gs.parallelize(f, devices=3)):
        with tf.GradientTape() as tape:
            tape.watch(h)
            y = function(h)
        found.append((y, tape.gradient(y, h)))
    assert_close(found[1], found[0])
