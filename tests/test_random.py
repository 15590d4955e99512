"""Random numbers: exactly one device's, drawn on the shards; or each shard's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law

pytestmark = pytest.mark.sampled(quick=7)

DRAWS: dict[str, Callable[[list[int], Any], tf.Tensor]] = {
    "uniform": lambda shape, seed: tf.random.stateless_uniform(shape, seed),
    "uniform64": lambda shape, seed: tf.random.stateless_uniform(shape, seed, dtype=tf.float64),
    "uniform16": lambda shape, seed: tf.random.stateless_uniform(shape, seed, dtype=tf.float16),
    "normal": lambda shape, seed: tf.random.stateless_normal(shape, seed),
    "normal64": lambda shape, seed: tf.random.stateless_normal(shape, seed, dtype=tf.float64),
    "normal16": lambda shape, seed: tf.random.stateless_normal(shape, seed, dtype=tf.bfloat16),
    "truncated": lambda shape, seed: tf.random.stateless_truncated_normal(shape, seed),
    "truncated64": lambda shape, seed: tf.random.stateless_truncated_normal(shape, seed, dtype=tf.float64),
    "ints": lambda shape, seed: tf.random.stateless_uniform(shape, seed, 0, 99, tf.int32),
    "ints64": lambda shape, seed: tf.random.stateless_uniform(shape, seed, 0, 99, tf.int64),
    "full ints": lambda shape, seed: tf.random.stateless_uniform(shape, seed, None, None, tf.uint32),
    "full ints64": lambda shape, seed: tf.random.stateless_uniform(shape, seed, None, None, tf.uint64),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", list(DRAWS))
@pytest.mark.parametrize("rest", [[], [1], [3], [4], [2, 5]])
def test_stateless_numbers_are_those_of_one_device(kind: str, rest: list[int]):
    def draws(x, seed):
        numbers = DRAWS[kind]([x.shape[0], *rest], seed)
        return tf.where(tf.reshape(x, [-1, *[1] * len(rest)]) > -9, numbers, tf.zeros_like(numbers))

    parallel = gs.parallelize(draws, devices=4)
    x, seed = tf.range(11.0), tf.constant([3, 4])
    np.testing.assert_array_equal(parallel(x, seed).numpy(), draws(x, seed).numpy())
    drawn = [op.type for op in parallel.plan(x, seed).sharded_ops]
    whole = draws(x, seed)
    if whole.shape.num_elements() * whole.dtype.size > 24:  # else sending the numbers is cheaper than their key
        assert any(op_type.startswith("Stateless") for op_type in drawn), drawn


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Dropout(0.4, seed=2, dtype="float64"),
        lambda: keras.layers.GaussianNoise(0.4, seed=2, dtype="float64"),
        lambda: keras.layers.GaussianDropout(0.4, seed=2, dtype="float64"),
        lambda: keras.layers.SpatialDropout1D(0.4, seed=2, dtype="float64"),
        lambda: keras.layers.AlphaDropout(0.4, seed=2, dtype="float64"),
    ],
)
def test_keras_layers(layer: Callable[[], keras.layers.Layer]):
    def make():
        made = layer()

        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = made(x, training=True)
                loss = tf.reduce_sum(y**2)
            return y, tape.gradient(loss, x)

        return step, made.variables

    x = tf.random.stateless_normal((7, 3, 5), [1, 2], dtype=tf.float64)
    plan = assert_law(make, [(x,)] * 3, devices=3)
    assert any(op.type.startswith("StatelessRandom") for op in plan.sharded_ops)


def test_tf_dropout_generator_and_augmentation():
    def make():
        generator = tf.random.Generator.from_seed(3)
        flip = keras.layers.RandomFlip(seed=1)

        def step(x):
            noisy = x + generator.normal(tf.shape(x))
            dropped = tf.nn.experimental.stateless_dropout(noisy, 0.3, seed=[1, 2])
            return dropped, flip(x, training=True)

        return step, [generator.state]

    assert_law(make, [(tf.random.stateless_normal((7, 4, 4, 3), [1, 2]),)] * 2, at_home=None)


def masks(parallel: gs.ParallelFunction) -> list[np.ndarray]:
    x = tf.ones((12, 50))
    rows = parallel.plan(x).rows
    return np.split(parallel(x).numpy() > 0, np.cumsum(rows)[:-1])


def test_masks_differ_between_shards():
    def dropped(x):
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[5, 6])

    shards = masks(gs.parallelize(dropped, devices=3))
    assert not np.array_equal(shards[0], shards[1])
    assert not np.array_equal(shards[1], shards[2])
    assert 0.4 < np.mean(np.concatenate(shards)) < 0.6
    np.testing.assert_array_equal(np.concatenate(shards), dropped(tf.ones((12, 50))).numpy() > 0)


def test_numbers_for_joined_batches_are_not_drawn_in_pieces():
    def both(x, y):
        joined = tf.concat([x, y], 0)
        return joined + tf.random.stateless_uniform(joined.shape, [1, 2])

    x, y = tf.ones((7, 5)), tf.zeros((7, 5))
    parallel = gs.parallelize(both, devices=3)
    assert_close(parallel(x, y), both(x, y))
    kinds = {op.type for op in parallel.plan(x, y).sharded_ops}
    assert "ConcatV2" in kinds
    assert "StatelessRandomUniformV2" not in kinds


def test_stateful_ops_that_stay_kernels_run_at_home():
    """In a graph that somebody else runs, which keeps what they drew."""
    parallel = gs.parallelize(lambda x: x + tf.random.normal(x.shape, seed=3), devices=3)
    around = tf.function(lambda x: parallel(x) + parallel(x))
    first, second = around(tf.zeros((6, 4))), around(tf.zeros((6, 4)))
    assert np.abs(first - second).max() > 0.1
    plan = parallel._traces.all()[0].plan
    assert "RandomStandardNormal" in {op.type for op in plan.ops_once}
    assert "AddV2" in {op.type for op in plan.sharded_ops}
