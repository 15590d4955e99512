"""Whole values that are split because the work that follows pays for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from graphsplit.core.layouts import OtherRows, Shard
from graphsplit.core.polynomials import Polynomial
from graphsplit.core.sizes import Size, length
from graphsplit.planning.mesh import mesh_of
from graphsplit.planning.propagation.cuts import _Hopeful
from tests.helpers.law import assert_law, rows

DEVICES = [1, 2, 3, 4, 5]


def weights(*shape: int, seed: int = 0) -> tf.Variable:
    return tf.Variable(0.3 * np.random.default_rng(seed).normal(size=shape))


def network(hidden: int = 16) -> tuple[Callable[[Any], Any], Sequence[tf.Variable]]:
    """Return a small network and its weights, the same every time."""
    w, u = weights(6, hidden), weights(hidden, 4, seed=1)
    return (lambda x: tf.tanh(x @ w) @ u), (w, u)


def descend(variables: Sequence[tf.Variable], tape: tf.GradientTape, loss: tf.Tensor) -> None:
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.1 * gradient)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", DEVICES)
def test_rows_that_are_drawn_inside_are_split(devices: int):
    def make():
        apply, variables = network()

        def step(x):
            z = tf.random.stateless_normal((tf.shape(x)[0], 6), (1, 2), dtype=tf.float64)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(apply(z)))
            descend(variables, tape, loss)
            return loss, tf.reduce_sum(x)

        return step, variables

    plan = assert_law(
        make,
        [(rows(13, 3),), (rows(7, 3),)],
        devices=devices,
        sharded=["StatelessRandomNormalV2", "MatMul"] * (devices > 1),
    )
    assert devices == 1 or "MatMul" not in {op.type for op in plan.ops_once}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", DEVICES)
def test_two_players_of_a_game(devices: int):
    """The generator's rows are drawn inside; its weights and the critic's are trained in the same step."""

    def make():
        (generate, ours), (judge, theirs) = network(), (lambda x: tf.tanh(x @ critic) @ head, ())
        critic, head = weights(4, 8, seed=2), weights(8, 1, seed=3)
        theirs = (critic, head)

        def step(real):
            with tf.GradientTape() as mine, tf.GradientTape() as yours:
                fake = generate(tf.random.stateless_uniform((tf.shape(real)[0], 6), (3, 4), dtype=tf.float64))
                scores = judge(tf.concat([real, fake], 0))
                first, second = tf.split(scores, 2)
                loss, other = -tf.reduce_mean(second), tf.reduce_mean(second) - tf.reduce_mean(first)
            descend(ours, mine, loss)
            descend(theirs, yours, other)
            return loss, other

        return step, (*ours, *theirs)

    plan = assert_law(make, [(rows(11, 4),)], devices=devices)
    assert devices == 1 or "MatMul" not in {op.type for op in plan.ops_once}


@pytest.mark.parametrize("devices", [2, 3])
def test_what_follows_an_operation_at_home_is_split_again(devices: int):
    def make():
        apply, variables = network()

        def step(x):
            ranked = tf.sort(x, axis=0)  # needs all rows
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(apply(ranked)))
            descend(variables, tape, loss)
            return loss

        return step, variables

    plan = assert_law(make, [(rows(13, 6),)], devices=devices, sharded=["MatMul", "Tanh"], at_home=None)
    assert devices == 1 or "MatMul" not in {op.type for op in plan.ops_once}


def test_all_kinds_of_rows_that_are_born_inside():
    """Fills, ranges, one row for all, captured rows, constants: each begins a network of its own."""

    def make():
        apply, variables = network()
        captured = rows(11, 6)

        def step(x):
            count = tf.shape(x)[0]
            numbered = tf.cast(tf.range(count)[:, None] + tf.range(6), tf.float64)
            learned = tf.tile(variables[0][:1, :6], [count, 1])
            filled = tf.fill([count, 6], 0.5 + tf.reduce_sum(variables[1]))
            values = [numbered, learned, filled, captured, tf.constant(np.ones((11, 6)))]
            return [tf.reduce_mean(apply(0.1 * value)) for value in values], tf.reduce_sum(x)

        return step, variables

    plan = assert_law(make, [(rows(11, 3),)], devices=3, sharded=["MatMul"])
    assert len([op for op in plan.sharded_ops if op.type == "MatMul"]) >= 8, str(plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("others", [10, 39, 6, 2])
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_arguments_with_other_numbers_of_rows(others: int, devices: int):
    """Labelled and unlabelled rows go through one network: each alone, and joined."""

    def make():
        apply, variables = network()

        def step(labelled, unlabelled):
            with tf.GradientTape() as tape:
                both = apply(tf.concat([labelled, tf.square(unlabelled)], 0))
                first, second = both[: tf.shape(labelled)[0]], both[tf.shape(labelled)[0] :]
                loss = tf.reduce_mean(tf.square(first)) + tf.reduce_mean(tf.abs(second))
                loss += tf.reduce_max(apply(unlabelled)) + tf.reduce_mean(tf.nn.softmax(both))
            descend(variables, tape, loss)
            return loss, both

        return step, variables

    plan = assert_law(make, [(rows(13, 6), rows(others, 6))], devices=devices, sharded=["MatMul"], at_home=None)
    if others >= devices:
        assert not [op for op in plan.ops_once if op.type == "MatMul"], str(plan)


def test_other_rows_follow_the_shares_of_the_devices():
    def make():
        apply, variables = network()
        return (lambda x, other: (apply(x), tf.reduce_mean(apply(other)))), variables

    plan = assert_law(make, [(rows(12, 6), rows(18, 6))], devices=3, shares=[1, 2, 3])
    assert plan.rows == (2, 4, 6)


def test_what_does_not_pay_stays_whole():
    """Arithmetic of an optimizer, on weights that have as many rows as the batch by chance."""

    def make():
        w, slot = weights(8, 8), tf.Variable(tf.zeros((8, 8), tf.float64))

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ w))
            gradient = tape.gradient(loss, w)
            slot.assign(0.9 * slot + gradient)
            w.assign_sub(0.1 * slot / (tf.sqrt(tf.square(slot) + 1.0)))
            return loss

        return step, (w, slot)

    plan = assert_law(make, [(rows(8, 8),)], devices=2)
    assert not {"Sqrt", "AssignVariableOp"} & {op.type for op in plan.sharded_ops}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_rows_that_are_turned_into_columns(devices: int):
    """CLIP's other half: each text is compared with all images, by what is cut along the images."""

    def make():
        (apply, ours), w = network(), weights(5, 4, seed=5)

        def step(images, texts):
            with tf.GradientTape() as tape:
                scores = apply(images) @ tf.transpose(texts @ w)
                right = tf.range(tf.shape(images)[0])
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(right, scores)
                other = tf.nn.sparse_softmax_cross_entropy_with_logits(right, tf.transpose(scores))
                more = tf.nn.softmax(tf.transpose(scores)) * tf.nn.log_softmax(scores)
                total = tf.reduce_mean(loss + other) + tf.reduce_mean(more)
            descend((*ours, w), tape, total)
            return total

        return step, (*ours, w)

    plan = assert_law(make, [(rows(13, 6), rows(13, 5))], devices=devices, at_home=None)
    home = {op.type for op in plan.ops_once}
    assert devices == 1 or not {"SparseSoftmaxCrossEntropyWithLogits", "Softmax", "LogSoftmax"} & home, str(plan)


def test_open_sizes_are_no_other_rows():
    """How many of them each shard would have is not known when planning: no cut by what they are planned with."""
    hopeful = SimpleNamespace(mesh=mesh_of(["a", "b"], 6))
    edges = Size(Polynomial.of(length(0, "edges.shape[0]")))
    assert _Hopeful._of_other_rows(hopeful, 0, 1009) == Shard(0, (1,), OtherRows(1009))
    assert _Hopeful._of_other_rows(hopeful, 0, edges) is None
