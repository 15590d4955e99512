"""Sentences and sounds of any length, in batches of any size: one trace, equal to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import graphsplit as gs
from graphsplit.core.layouts import Shard
from graphsplit.core.sizes import STAND_IN
from graphsplit.rules import Declined, answer, answer_for_output
from graphsplit.rules.registry import Rule
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_close, assert_law
from tests.helpers.trainings import start_elsewhere
from tests.helpers.unknown_sizes import last_plan

__all__ = ["float64"]


@pytest.mark.sampled(quick="all")
def test_unknown_lengths_as_well() -> None:
    """Sentences of any length in batches of any size."""

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32)])
    def f(tokens):
        table = tf.reshape(tf.range(40.0), (10, 4))
        words = tf.gather(table, tokens)
        mask = tf.cast(tokens > 0, tf.float32)[:, :, None]
        return tf.reduce_sum(words * mask, 1) / (1 + tf.reduce_sum(mask, 1))

    parallel = gs.parallelize(f, devices=3)
    for rows, words in ((5, 4), (2, 7), (1, 1), (4, 2)):
        tokens = np.random.default_rng(rows).integers(0, 10, (rows, words)).astype(np.int32)
        assert_close(parallel(tokens), f(tokens))
    plan = parallel.plan(tokens)
    assert len(parallel._traces.planned) == 1
    assert not plan.unsharded_ops, str(plan)


def sentences() -> tuple[keras.Model, int]:
    inputs = keras.Input((None, 8))
    h = layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
    h = layers.Dense(5, activation="relu")(layers.LayerNormalization()(inputs + h))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(h))), 8


def sounds() -> tuple[keras.Model, int]:
    inputs = keras.Input((None, 3))
    h = layers.LSTM(4)(layers.LSTM(4, return_sequences=True)(inputs))
    return keras.Model(inputs, layers.Dense(1)(h)), 3


def shapes_by_hand() -> tuple[Any, int]:
    class Attention(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.random.normal((8, 8), dtype=tf.float64))

        def __call__(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            rows, steps = tf.unstack(tf.shape(x))[:2]
            y = tf.reshape(tf.reshape(x, [-1, 8]) @ self.w, [rows, steps, 2, 4])
            y = tf.transpose(y, [0, 2, 1, 3])
            mixed = tf.nn.softmax(tf.matmul(y, y, transpose_b=True)) @ y
            mixed += tf.random.stateless_normal(tf.shape(mixed), [1, 2], dtype=tf.float64)
            return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [rows, steps * 8])[:, :5]

    return Attention(), 8


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("network", [sentences, sounds, shapes_by_hand], ids=lambda f: f.__name__)
def test_training_on_sequences_of_any_length(network: Callable[[], tuple[Any, int]], rows: int | None) -> None:
    """In batches of any size, or of one: one trace, everything on the shards, equal to one device."""

    def make() -> tuple[Callable[..., Any], Any]:
        keras.utils.set_random_seed(1)
        model, channels = network()
        start_elsewhere(model.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec((rows, None, channels), tf.float64)])
        def step(x):
            with tf.GradientTape() as tape:
                y = model(x, training=True)
                loss = tf.reduce_mean(y**2)
            variables = model.trainable_variables
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss, y

        return step, model.trainable_variables

    rng, channels = np.random.default_rng(0), network()[1]
    sizes = [(rows or count, steps) for count, steps in ((5, 4), (1, 3), (2, 6), (7, 1))]
    calls = [(tf.constant(rng.standard_normal((*size, channels))),) for size in sizes]
    plan = assert_law(make, calls, devices=3, tolerance=EXACT)
    assert len(plan.program.symbols) == (2 if rows is None else 1)
    assert "x.shape[1]" in str(plan)


@pytest.mark.long
@pytest.mark.usefixtures("float64", "plain_oracle")
def test_gradients_from_outside_of_sequences_of_any_length() -> None:
    results: list[list[tf.Tensor]] = []
    for split in (False, True):
        keras.utils.set_random_seed(3)
        model, channels = sentences()
        forward = gs.parallelize(lambda x, model=model: model(x), devices=3) if split else model

        @tf.function(input_signature=[tf.TensorSpec((None, None, channels), tf.float64)])
        def gradients(x, forward=forward, model=model):
            with tf.GradientTape() as tape:
                y = forward(x)
            found = tape.gradient(y, model.trainable_variables, tf.cos(y))
            return y, tf.concat([tf.reshape(g, [-1]) for g in found], 0)

        rng = np.random.default_rng(0)
        sizes = [(5, 4), (1, 2), (3, 6)]
        results.append([gradients(tf.constant(rng.standard_normal((*size, channels)))) for size in sizes])
    assert_close(results[1], results[0], tolerance=EXACT)
    plan = last_plan(forward)
    assert len(plan.program.symbols) == 2
    assert not plan.unsharded_ops, str(plan)


def test_lengths_that_depend_on_each_other() -> None:
    """Tokens and their mask have one length in all calls; where that is not known, one is left open."""

    @tf.function(input_signature=[tf.TensorSpec((None, None)), tf.TensorSpec((None, None))])
    def f(x, mask):
        return tf.nn.softmax(x * mask)

    parallel = gs.parallelize(f, devices=2)
    for rows, words in ((3, 4), (2, 5)):
        assert_close(parallel(tf.ones((rows, words)), tf.ones((rows, words))), tf.fill((rows, words), 1 / words))
    inside = tf.function(parallel, input_signature=f.input_signature)
    assert_close(inside(tf.ones((3, 4)), tf.ones((3, 4))), tf.fill((3, 4), 1 / 4))
    known, unknown = parallel.plan(tf.ones((3, 4)), tf.ones((3, 4))), parallel._traces.all()[-1].plan
    assert [len(plan.program.symbols) for plan in (known, unknown)] == [2, 2]
    assert not known.program.notes
    assert any(note.startswith("shapes do not follow for every mask.shape[1]") for note in unknown.program.notes)
    for plan in (known, unknown):
        assert {op.type for op in plan.sharded_ops} >= {"Mul", "Softmax"}, str(plan)


def test_channels_of_which_nobody_knows_whether_they_are_in_groups() -> None:
    """A filter for one channel makes groups of all others: samples are cut, whatever becomes of the channels."""

    @tf.function(input_signature=[tf.TensorSpec((None, 5, 6, None))])
    def f(x):
        return tf.nn.conv2d(x, tf.ones((3, 3, 1, 2 * tf.shape(x)[3])), 1, "SAME")

    parallel = gs.parallelize(f, devices=2)
    for rows, channels in ((3, 1), (2, 4), (1, 3)):
        x = tf.reshape(tf.range(30.0 * rows * channels), (rows, 5, 6, channels))
        assert_close(parallel(x), f(x))
    plan = parallel.plan(x)
    assert len(plan.program.symbols) == 2
    assert [op.type for op in plan.sharded_ops if op.type == "Conv2D"], str(plan)


def test_lengths_that_are_broadcast_to_rows() -> None:
    """One row may meet many of something else: the result has neither as many rows, nor their product."""

    @tf.function(input_signature=[tf.TensorSpec((None, 4)), tf.TensorSpec((None, 4))])
    def f(x, y):
        z = x * y
        return tf.zeros([tf.shape(z)[0], 2]) + z[:, :2], tf.reshape(z, [-1])

    parallel = gs.parallelize(f, devices=2, split={"y": None})
    for rows, others in ((5, 1), (1, 3), (4, 4)):
        x, y = tf.ones((rows, 4)), tf.ones((others, 4))
        assert_close(parallel(x, y), f(x, y))


def test_lengths_that_are_cut() -> None:
    """At most six words: for more, the answer is not that of as many."""

    @tf.function(input_signature=[tf.TensorSpec((None, None))])
    def f(x):
        x = x[:, :6]
        return tf.zeros([tf.shape(x)[1], 1]) + tf.transpose(x), tf.shape(x), x[:, 1:] * 2

    parallel = gs.parallelize(f, devices=2)
    for rows, words in ((3, 4), (2, 9)):
        x = tf.random.stateless_normal((rows, words), [1, 2])
        assert_close(parallel(x), f(x))


def test_an_end_beyond_the_stand_in_is_still_an_end() -> None:
    f = tf.function(lambda x: x[:30_000] + 1, input_signature=[tf.TensorSpec((None,))])
    parallel = gs.parallelize(f, devices=2)
    for rows in (4, 30_001):
        assert_close(parallel(tf.zeros(rows)), f(tf.zeros(rows)))
    assert parallel.plan(tf.zeros(4)).program.batch_is_unknown


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + tf.zeros([STAND_IN, 1]),
        lambda x: tf.concat([x, tf.zeros([STAND_IN, 2])], 0),
        lambda x: tf.pad(x, [[STAND_IN, 0], [0, 0]]),
        lambda x: tf.split(tf.concat([x, x], 0), [tf.shape(x)[0], -1])[1],
        lambda x: tf.pad(tf.concat([x, x], 0), [[0, STAND_IN], [0, 0]])[-STAND_IN:],
        lambda x: tf.tile(x, [STAND_IN, 1])[:3],
    ],
)
def test_nothing_is_taken_for_the_number_that_it_is_planned_with(mix: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """As many rows as the stand-in has are no batch: of one row, this is broadcast, joined and padded.

    (Nor does anything lie in as many pieces: see the last.)
    """
    f = tf.function(lambda x: mix(tf.nn.relu(x)), input_signature=[tf.TensorSpec((None, 2))])
    parallel = gs.parallelize(f, devices=2)
    x = tf.ones((1, 2))
    assert_close(parallel(x), f(x))
    # (the first fits one row, and as many as the stand-in has: so shapes do not follow for every batch)
    program = parallel.plan(x).program
    assert program.batch_is_unknown or any("input shapes: [55440,2], [27720,1]" in note for note in program.notes)


def test_what_rules_cannot_know_is_said() -> None:
    """One that asks has declined, and says what it asked."""
    parallel = gs.parallelize(tf.function(tf.nn.relu, input_signature=[tf.TensorSpec((None, 2))]), devices=2)
    plan = parallel.plan(tf.ones((4, 2)))
    (op,) = [op for op in plan.program.ops if op.type == "Relu"]
    for asked, reason in {
        lambda op: range(op.in_shapes[0][0]): "how large rows is",
        lambda op: op.in_shapes[0][0] == 5: "whether rows is 5, or how far from it",
        lambda op: op.in_shapes[0][0] % 2: "whether rows is a multiple of 2",
    }.items():
        found = answer(Rule(asked), op, [Shard(0)], [8])
        assert found == Declined(f"it depends on {reason}, which is only known when it runs")
        assert answer_for_output(Rule(asked), op, 0, Shard(0)) is None


def test_shapes_that_do_not_follow_are_kept_at_home() -> None:
    """Pairs of rows: an odd batch fails on one device too."""

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def f(x):
        return tf.reduce_sum(tf.reshape(x, [-1, 6]), 1)

    parallel = gs.parallelize(f, devices=2)
    assert_close(parallel(tf.ones((6, 2))), f(tf.ones((6, 2))))
    note = next(note for note in parallel.plan(tf.ones((6, 2))).program.notes)
    assert note.startswith("shapes do not follow for every batch size, so everything runs on one device: ")
