"""Convolutions whose channels are cut along an axis of a mesh: used where their parts are, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.helpers.mesh_cases import Made, assert_law, numbers, sgd, variable

READ, MADE, LAST = 3, 10, 5  # indivisible by two and three


def residual() -> Made:
    """Two convolutions with BatchNormalization between them, of which the first makes the channels that are cut."""
    first, second = variable("first", 3, 3, READ, MADE), variable("second", 3, 3, MADE, LAST, seed=1)
    scale, moving, bias = (
        tf.Variable(tf.ones(MADE, tf.float64), name="scale"),
        variable("moving", MADE),
        variable("bias", LAST),
    )

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            h = tf.nn.conv2d(x, first, strides=2, padding="SAME")
            mean, variance = tf.nn.moments(h, [0, 1, 2])
            h = tf.nn.relu(tf.nn.batch_normalization(h, mean, variance, moving, scale, 1e-3))
            y = tf.nn.bias_add(tf.nn.conv2d(h, second, strides=1, padding="SAME"), bias)
            loss = tf.reduce_mean(tf.tanh(y) ** 2)
        moving.assign(0.9 * moving + 0.1 * mean)
        return loss, sgd([first, second, scale, bias], loss, tape), y

    return [first, second, scale, moving, bias], step


def volumes() -> Made:
    first, second = variable("first", 2, 2, 2, READ, MADE), variable("second", 1, 1, 1, MADE, LAST, seed=1)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.nn.conv3d(x[:, None], first, [1] * 5, "SAME"))
            loss = tf.reduce_mean(tf.nn.conv3d(h, second, [1] * 5, "VALID") ** 2)
        return loss, sgd([first, second], loss, tape)

    return [first, second], step


ALONG: dict[tuple[int, str], Any] = {
    **{(rank, "first"): (*[None] * (rank - 1), "model") for rank in (4, 5)},
    **{(rank, "second"): (*[None] * (rank - 2), "model") for rank in (4, 5)},
    (1, "scale"): ("model",),
    (1, "moving"): ("model",),
    (1, "bias"): "home",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"batch": 1, "model": 2}, {"batch": 2, "model": 2}, {"model": 3}], ids=str)
@pytest.mark.parametrize("make", [residual, volumes])
def test_channels(make: Any, mesh: dict[str, int]):
    layout = {own.name[:-2]: ALONG[len(own.shape), own.name[:-2]] for own in make()[0]}
    batches = [tf.constant(numbers(rows, 7, 6, READ)) for rows in (5, 1)]
    plan = assert_law(make, layout, mesh, batches).plan(batches[0])
    assert not plan.state.gathered
    assert "computed in place" in str(plan)
    assert "gathered before it is used" not in str(plan)
    [sent] = [line for line in str(plan).splitlines() if "along 'model': " in line]
    assert "gather" not in sent  # sums of what the second makes, and of what the first is given


def test_groups_are_whole():
    """Filters for a part of the channels each; the law holds, and the plan says that they are gathered."""

    def grouped() -> Made:
        filters, deep = variable("filters", 3, 3, 2, 8), variable("deep", 2, 2, 8, 1)

        def step(x: tf.Tensor) -> tf.Tensor:  # (TensorFlow has no gradient of groups on CPUs)
            return tf.nn.depthwise_conv2d(tf.nn.conv2d(x, filters, strides=1, padding="SAME"), deep, [1] * 4, "SAME")

        return [filters, deep], step

    layout, mesh = {"filters": (None, None, None, "model"), "deep": (None, None, "model")}, {"batch": 2, "model": 2}
    plan = assert_law(grouped, layout, mesh, [tf.constant(numbers(3, 5, 5, 4))]).plan(tf.constant(numbers(3, 5, 5, 4)))
    assert str(plan).count("gathered before it is used") == 2
