"""cuDNN's recurrent kernels on the shards. They have no CPU kernels: what they compute is put in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from tests.helpers.cudnn_on_cpu import STEPS, cudnn
from tests.helpers.law import assert_close, squares_step

KERNELS = ["CudnnRNNV3", "CudnnRNNBackpropV3"]


def rows(count: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(count).standard_normal((count, STEPS, 3)), tf.float32)


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(4, "tanh"), layers.LSTM(6, return_sequences=True), layers.LSTM(4)]
    return keras.Sequential([layers.Input((STEPS, 3)), *hidden, layers.Dense(2)])


def training() -> tuple[Callable[..., Any], Any]:
    return squares_step(network())


def sharded(plan: gs.inspect.Plan) -> list[str]:
    plan.check()
    check_emitted(plan, emit(plan))
    return [op.type for op in plan.sharded_ops if op.type.startswith("Cudnn")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"tuning": {"reduce_retracing": True}}], ids=["known rows", "any rows"])
def test_training(options: dict[str, Any]):
    (single, expected), (many, actual) = training(), training()
    plain, calls = tf.function(single), [rows(count) for count in (7, 2)]
    for x in calls:  # Keras chooses its kernels when it is traced
        plain.get_concrete_function(x)
    with cudnn():
        parallel = gs.parallelize(many, devices=3, **options)
        for x in calls:
            assert_close(parallel(x), plain(x))
            for a, b in zip(actual, expected, strict=True):
                assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-5)
        plan = parallel.plan(rows(7))
    assert sharded(plan) == [KERNELS[0], KERNELS[0], KERNELS[1], KERNELS[1]]
    assert not plan.unsharded_ops
    assert "on the shards: 98" in str(plan) or options


def test_tapes_outside():
    model = network()

    def gradients(fn: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(fn(x) ** 3)
        return tape.gradient(loss, [x, *model.trainable_variables])

    expected = gradients(model, rows(7))
    with cudnn():
        parallel = gs.parallelize(lambda x: model(x), devices=3)
        assert_close(gradients(parallel, rows(7)), expected)
        assert sharded(parallel.gradient_plan(rows(7))) == [KERNELS[0], KERNELS[0], KERNELS[1], KERNELS[1]]


def kernel(x: tf.Tensor, **options: Any) -> Any:
    """One layer of four units over sequences of three features, in the first version's order: steps, then rows."""
    given = {"rnn_mode": "lstm", "time_major": True, **options}
    axis = 1 if given["time_major"] else 0
    count, axes = tf.shape(x)[axis], [1, -1, 4] if axis else [-1, 1, 4]
    state = tf.reshape(tf.zeros([count * 4]), axes)
    lengths = tf.fill([count], tf.shape(x)[1 - axis])
    c = state if given["rnn_mode"] == "lstm" else tf.zeros([])
    return tf.raw_ops.CudnnRNNV3(
        input=x, input_h=state, input_c=c, params=tf.ones([144]), sequence_lengths=lengths, **given
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_relu"])
@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_only_the_batch_is_cut(axis: int, time_major: bool, mode: str):
    def fn(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = kernel(x, rnn_mode=mode, time_major=time_major).output
        return result, tape.gradient(result, x)

    plan = gs.parallelize(fn, devices=3, split=axis).plan(tf.ones((7, 8, 9)))
    batch = axis == int(time_major)
    assert sharded(plan) == (KERNELS if batch else [])
    reasons = {reason for op, reason in plan.unsharded_ops if op.type in KERNELS}
    why = "its sequences are not cut, and what cuDNN keeps of them for the gradient cannot be"
    assert reasons == (set() if batch else {why})


@pytest.mark.long
@pytest.mark.parametrize("axis", [0, 1])
def test_both_kernels_are_cut_or_neither(axis: int):
    """Only what the gradient begins with is cut, by rows or by units; the sequences are a constant."""
    model, x = network(), rows(7)

    def fn(weights: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(model(x, training=True)) * weights)
        return tape.gradient(loss, model.trainable_variables)

    weights = tf.constant(np.random.default_rng(0).standard_normal((7, 2)), tf.float32)
    expected = fn(weights)
    with cudnn():
        parallel = gs.parallelize(fn, devices=2, split=axis)
        assert_close(parallel(weights), expected)
        found = sharded(parallel.plan(weights))
    assert found.count(KERNELS[0]) == found.count(KERNELS[1])


def test_what_drops_out_draws_numbers_and_runs_once():
    plan = gs.parallelize(lambda x: kernel(x, dropout=0.5).output, devices=3, split=1).plan(tf.ones((8, 7, 3)))
    assert sharded(plan) == []
    [reason] = [reason for op, reason in plan.unsharded_ops if op.type in KERNELS]
    assert reason == "it has side effects, which happen once"


@pytest.mark.parametrize("version", ["", "V2"])
def test_older_versions(version: str):
    def fn(x: tf.Tensor) -> Any:
        state = tf.zeros([1, tf.shape(x)[1], 4])
        run = getattr(tf.raw_ops, f"CudnnRNN{version}")
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = run(input=x, input_h=state, input_c=state, params=tf.ones([144]), rnn_mode="lstm").output
        return tape.gradient(result, x)

    plan = gs.parallelize(fn, devices=3, split=1).plan(tf.ones((8, 7, 3)))
    assert sharded(plan) == [f"CudnnRNN{version}", f"CudnnRNNBackprop{version}"]
