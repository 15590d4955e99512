"""Functions with `jit_compile=True` inside a parallelized one: compiled for every shard, or once at home."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law, compiled_calls

pytestmark = pytest.mark.sampled(quick=2)


def rows(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [shape[0], 3], dtype=tf.float64)


def test_compiled_for_every_shard_with_variables():
    w = tf.Variable(rows(3, 3))

    @tf.function(jit_compile=True)
    def dense(x):
        return tf.nn.softmax(tf.tanh(x @ w))

    def f(x):
        return dense(x) * 2, tf.reduce_sum(dense(x + 1))

    parallel = gs.parallelize(f, devices=3)
    assert_close(parallel(rows(7, 3)), f(rows(7, 3)))
    assert compiled_calls(parallel, rows(7, 3)) == {f"/device:CPU:{d}" for d in range(3)}
    assert not parallel.plan(rows(7, 3)).unsharded_ops


def test_a_training_step_with_a_compiled_model():
    def make():
        w = tf.Variable(rows(3, 2))

        @tf.function(jit_compile=True)
        def model(x):
            return tf.tanh(x @ w)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    assert_law(make, [(rows(7, 3), rows(7, 2))] * 3, sharded=["PartitionedCall"])


def test_rows_that_couple_are_compiled_at_home():
    @tf.function(jit_compile=True)
    def centre(x):
        return x - tf.reduce_mean(x, 0)

    parallel = gs.parallelize(lambda x: centre(tf.square(x)), devices=3)
    assert_close(parallel(rows(7, 3)), centre(tf.square(rows(7, 3))))
    plan = parallel.plan(rows(7, 3))
    ((op, reason),) = plan.unsharded_ops
    assert op.type == "PartitionedCall"
    assert reason == "Mean in it: its rows would be exchanged between devices each time"
    assert compiled_calls(parallel, rows(7, 3)) == {"/device:CPU:0"}


def test_gradient_from_outside():
    @tf.function(jit_compile=True)
    def cube(x):
        return x**3

    parallel = gs.parallelize(cube, devices=3)
    x = rows(7, 3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(parallel(x))
    assert_close(tape.gradient(y, x), 3 * x**2)


def test_a_compiled_function_that_changes_variables_says_so():
    weights, count = tf.Variable(tf.ones((4, 3))), tf.Variable(0.0)

    @tf.function(jit_compile=True)
    def counted(x):
        count.assign_add(1.0)
        return tf.tanh(x @ weights)

    plan = gs.parallelize(lambda x: tf.reduce_sum(counted(x)), devices=3).plan(tf.ones((7, 4)))
    [(_, reason)] = plan.unsharded_ops
    assert "it changes variables or has other effects, and XLA compiles it as a whole" in str(reason)
    assert "      -> take jit_compile=True off it and give that to parallelize" in str(plan).splitlines()
