"""What docs/migration.md says of lines of a script under a strategy: they stay, go, or raise what the page says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close

X = tf.random.stateless_normal((7, 4), [0, 1])
Y = tf.zeros((7, 1))
DEVICES = ["CPU:0", "CPU:1"]


def of_replicas(w: tf.Variable) -> Callable[..., Any]:
    def step(x, y):
        context, strategy = tf.distribute.get_replica_context(), tf.distribute.get_strategy()
        losses = tf.reduce_sum((x @ w - y) ** 2, 1)
        loss = context.all_reduce("sum", tf.reduce_mean(losses))
        return loss, tf.nn.compute_average_loss(losses), context.num_replicas_in_sync, strategy.num_replicas_in_sync

    return step


def test_lines_about_replicas_may_stay():
    """There is one replica, the whole batch, and the step is divided all the same."""
    step = of_replicas(tf.Variable(tf.ones((4, 1))))
    parallel = gs.parallelize(step, devices=2)
    loss, average, *counts = parallel(X, Y)
    assert_close((loss, average), tf.function(step)(X, Y)[:2])
    assert_close(loss, average)
    assert counts == [1, 1]
    assert parallel.plan(X, Y).sharded_fraction > 0.9


def test_an_average_under_the_strategy_is_of_replicas():
    """The page says that 4 and 3 of 7 rows count as halves."""

    def average(x):
        return tf.nn.compute_average_loss(tf.reduce_sum(x**2, 1))

    strategy = tf.distribute.MirroredStrategy(DEVICES)
    pieces = [X[:4], X[4:]]
    distributed = strategy.experimental_distribute_values_from_function
    rows = distributed(lambda context: pieces[context.replica_id_in_sync_group])
    summed = strategy.reduce("sum", tf.function(lambda piece: strategy.run(average, (piece,)))(rows), axis=None)
    halves = (tf.reduce_mean(tf.reduce_sum(X[:4] ** 2, 1)) + tf.reduce_mean(tf.reduce_sum(X[4:] ** 2, 1))) / 2
    assert_close(summed, halves)
    mean = gs.parallelize(average, devices=2)(X)
    assert_close(mean, average(X))
    assert abs(float(summed) - float(mean)) > 1e-3


def test_a_strategy_that_is_kept_reduces_results_as_the_page_says():
    strategy = tf.distribute.MirroredStrategy(DEVICES)
    assert strategy.num_replicas_in_sync == 2
    result = gs.parallelize(lambda x: tf.reduce_mean(x**2), devices=2)(X)
    assert_close(strategy.reduce("mean", result, axis=None), result)
    with pytest.raises(ValueError, match=r"A non-DistributedValues value .* cannot be reduced"):
        strategy.reduce("sum", result, axis=None)


def trained(scope: Any, parallel: bool) -> tuple[list[float], Any]:
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    run = gs.parallelize(step, devices=2) if parallel else tf.function(step)
    return [float(run(X, Y)) for _ in range(3)], model


def test_a_model_that_was_made_in_a_scope_trains_with_all_its_copies():
    losses, model = trained(tf.device("CPU:0"), parallel=False)
    mirrored, made_there = trained(tf.distribute.MirroredStrategy(DEVICES).scope(), parallel=True)
    assert mirrored == pytest.approx(losses, rel=1e-5)
    copies = made_there.layers[0].kernel.value.values
    assert [copy.device[-5:] for copy in copies] == DEVICES
    for copy in copies:
        assert_close(copy.numpy(), model.layers[0].kernel.numpy())
    with pytest.raises(gs.errors.UnsupportedError, match=r"was made, compiled or wrapped under a tf\.distribute"):
        gs.multi_gpu_model(made_there, gpus=2)


def test_averaged_gradients_of_equal_parts_are_those_of_all_rows():
    """As `hvd.DistributedGradientTape` averages them."""
    w = tf.Variable(tf.ones((4, 1)))

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        return tape.gradient(loss, w)

    whole = gs.parallelize(gradient, devices=2)(X[:6])
    assert_close(whole, np.mean([gradient(X[:3]), gradient(X[3:6])], axis=0))
