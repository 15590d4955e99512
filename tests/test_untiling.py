"""Arithmetic on tiled tensors: same bits, less of it."""

from __future__ import annotations

from collections import Counter

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, rows

pytestmark = pytest.mark.sampled(quick=17)


def kinds(plan: gs.inspect.Plan) -> tuple[Counter, Counter]:
    """Return how many ops of each type run on the shards and at home."""
    return Counter(op.type for op in plan.sharded_ops), Counter(op.type for op in plan.ops_once)


def tile(x: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.tile(x, [like.shape[0], 1])


CASES = {
    "divided": lambda x, row: tile(row, x) / 3.0 + x,
    "divides": lambda x, row: 3.0 / tile(row, x) + x,
    "multiplied": lambda x, row: 3.0 * tile(row, x) + x,
    "times the batch": lambda x, row: tile(row, x) * x,
    "both": lambda x, row: tile(row, x) / 3.0 * 2.0 * x,
    "twice": lambda x, row: tile(row, x) * tile(row, x) * x,
    "the batch, tiled": lambda x, row: tf.tile(x, [1, 2]) / 3.0 * tf.concat([x, x], 1),
    "the batch, repeated": lambda x, row: tf.tile(x, [2, 1]) / 3.0,
    "waits": lambda x, row: waiting(tile(row, x)) + x,
    "integers": lambda x, row: tf.cast(tf.tile(tf.cast(row, tf.int32), [x.shape[0], 1]) * 3, tf.float64) + x,
}


def waiting(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.constant(True), data=[tf.constant("is true")])]):
        return x / 3.0


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("count", "devices"), [(1, 2), (5, 3), (7, 4)])
def test_same_bits(name: str, count: int, devices: int):
    function = CASES[name]
    x, row = rows(count, 3) + 2.0, rows(1, 3) + 2.0
    parallel = gs.parallelize(function, devices=devices, split={"x": 0, "row": None})
    assert_close(parallel(x, row), function(x, row), name, 0.0)
    parallel.plan(x, row).program.check()
    if count > 1:
        assert parallel.plan(x, row).sharded_ops


def test_what_need_not_be_tiled_is_not():
    x, row = rows(7, 3), rows(1, 3)
    plan = gs.parallelize(CASES["both"], devices=3, split={"x": 0, "row": None}).plan(x, row)
    sharded, home = kinds(plan)
    assert sharded["Mul"] == home["RealDiv"] == home["Mul"] == 1
    assert not sharded["Tile"] + home["Tile"] + sharded["RealDiv"]


def test_a_normalization_divides_numbers_of_channels_not_activations():
    layer = keras.layers.BatchNormalization(dtype="float64")
    layer.build((None, 4, 4, 3))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.exp(layer(x, training=True)))
        return tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    x = tf.reshape(rows(7, 48), [7, 4, 4, 3])
    parallel = gs.parallelize(step, devices=3)
    assert_close(parallel(x), step(x))
    sharded, home = kinds(parallel.plan(x))
    assert home["RealDiv"] == 2
    assert not sharded["RealDiv"]
    assert sharded["Tile"] == 1  # of the two, the other one is only multiplied
    assert not any(op.type == "Reshape" and op.in_shapes[0] == op.out_shapes[0] for op in parallel.plan(x).ops_once)


def test_a_deep_chain_of_constants_is_planned():
    def f(x):
        small = tf.constant([2.0], tf.float64)
        for _ in range(1500):
            small = tf.sin(small)
        return x * small

    x = rows(7, 3)
    parallel = gs.parallelize(tf.autograph.experimental.do_not_convert(f), devices=3)
    assert_close(parallel(x), f(x))
    assert parallel.plan(x).sharded_ops
