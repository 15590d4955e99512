"""Loops over rows: `tf.map_fn`, and TensorArrays that are read and written row by row."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.law import assert_law
from tests.test_parallelize import rows

DEVICES = [1, 2, 3, 5]


def law(apply, *calls, devices, looped=True, at_home=0, learns=True):
    def make():
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 6)))

        def step(x, *more):
            with tf.GradientTape() as tape:
                y = apply(x, w, *more)
                loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float64)))
            if learns:
                w.assign_sub(0.1 * tape.gradient(loss, w))
            return y, loss

        return step, (w,)

    plan = assert_law(make, calls, devices=devices, at_home=at_home)
    if looped and devices > 1:
        assert "StatelessWhile" in {op.type for op in plan.sharded_ops}, str(plan)
        assert "StatelessWhile" not in {op.type for op in plan.home_ops}, str(plan)
    return plan


@pytest.mark.parametrize("devices", DEVICES)
def test_map(devices: int):
    law(
        lambda x, w: tf.map_fn(lambda row: tf.tanh(row[None] @ w)[0], x), (rows(13, 6),), (rows(7, 6),), devices=devices
    )


@pytest.mark.parametrize("devices", [2, 3])
def test_map_over_several_arguments_with_results_of_several_shapes(devices: int):
    def apply(x, w, y):
        both = tf.map_fn(
            lambda pair: (pair[0] @ w * pair[1], tf.reduce_sum(pair[0])),
            (tf.reshape(x, [-1, 2, 6]), y),
            fn_output_signature=(tf.float64, tf.float64),
        )
        return tf.reduce_sum(both[0], [1, 2]) + both[1]

    law(apply, (rows(22, 6), rows(11)), devices=devices, looped=False, at_home=None)
    law(lambda x, w, y: apply(tf.concat([x, 2.0 * x], 1), w, y), (rows(11, 6), rows(11)), devices=devices)


@pytest.mark.parametrize("devices", DEVICES)
def test_an_array_that_is_written_row_by_row(devices: int):
    """The number of a row is also a number: it is that of the whole batch."""

    def apply(x, w):
        count = x.shape[0]
        read, made = tf.TensorArray(tf.float64, count).unstack(x), tf.TensorArray(tf.float64, count)
        for i in tf.range(count):
            made = made.write(i, tf.linalg.matvec(w, read.read(i)) * tf.cast(i, tf.float64))
        return made.stack()

    law(apply, (rows(13, 6),), (rows(5, 6),), devices=devices)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_sum_over_rows(devices: int):
    """What each row adds to is a partial sum."""

    def apply(x, w):
        read, total = tf.TensorArray(tf.float64, x.shape[0]).unstack(x), tf.ones((6,), tf.float64)
        for i in tf.range(x.shape[0]):
            total += tf.tanh(tf.linalg.matvec(w, read.read(i)))
        return total

    law(apply, (rows(13, 6),), devices=devices)


@pytest.mark.parametrize("kind", ["scan", "reversed", "half", "twice", "neighbour"])
def test_loops_that_are_not_row_by_row(kind: str):
    """They stay one loop, and right."""

    def apply(x, w):
        count = x.shape[0]
        if kind == "scan":
            return tf.scan(lambda before, row: tf.tanh(row + tf.linalg.matvec(w, before)), x)
        read, made = (
            tf.TensorArray(tf.float64, count, clear_after_read=False).unstack(x),
            tf.TensorArray(tf.float64, count),
        )
        for i in tf.range(count // 2 if kind == "half" else count):
            at = {"reversed": count - 1 - i, "neighbour": tf.maximum(i - 1, 0)}.get(kind, i)
            row = read.read(at) + (read.read(count - 1 - i) if kind == "twice" else 0.0)
            made = made.write(i, tf.linalg.matvec(w, row))
        return made.stack()[: count // 2]

    law(apply, (rows(8, 6),), devices=3, looped=False, at_home=None)


def test_what_a_loop_counts_to_is_known():
    def f(x):
        turns, y = tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, tf.tanh(y) + x), [0, x])
        return turns, y, tf.ones((turns, 2)) + tf.cast(x[0, 0], tf.float32)

    assert_law(lambda: (f, ()), [(rows(7, 3),)], devices=3, at_home=None)


@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_by_rows_that_are_mapped(devices: int):
    """Each turn adds a list with the gradient of its row; of what a loop picks from each row, too."""
    picked = tf.constant(np.random.default_rng(2).integers(0, 6, (13, 3)))

    def apply(x, w, i):
        hidden = tf.tanh(x @ w)
        return tf.map_fn(lambda pair: tf.gather(tf.sin(pair[0]), pair[1]), (hidden, i), fn_output_signature=tf.float64)

    plan = law(apply, (rows(13, 6), picked), (rows(7, 6), picked[:7]), devices=devices)
    assert devices == 1 or [op.type for op in plan.sharded_ops].count("StatelessWhile") == 2


@pytest.mark.parametrize("length", [11, 14])
def test_a_table_that_is_read_by_the_row_and_elsewhere(length: int):
    """It stays whole, whose entries have the numbers that they have."""
    table = rows(length, 6)

    def apply(x, w):
        read, made = tf.TensorArray(tf.float64, 11).unstack(x), tf.TensorArray(tf.float64, 11)
        known = tf.TensorArray(tf.float64, length, clear_after_read=False).unstack(table)
        for i in tf.range(11):
            made = made.write(i, tf.linalg.matvec(w, read.read(i)) * known.read(i) + known.read(0))
        return made.stack()

    law(apply, (rows(11, 6),), devices=3, looped=False, at_home=None)


@pytest.mark.parametrize("kind", ["mapped", "reversed"])
def test_lists_of_one_turn_with_as_many_entries_as_there_are_rows(kind: str):
    def inside(row):
        if kind == "mapped":
            return tf.map_fn(tf.sin, row)
        made = tf.TensorArray(tf.float64, 6)
        for i in range(6):
            made = made.write(5 - i, row[i])
        return made.stack()

    law(lambda x, w: tf.map_fn(inside, tf.tanh(x @ w)), (rows(6, 6),), devices=3, looped=False, at_home=None)


def test_the_gradient_of_a_loop_in_a_loop():
    """`tf.gradients` asks that the inner one be beside the outer one, which is on several devices."""

    def apply(x, w):
        y = tf.map_fn(lambda row: tf.map_fn(tf.sin, row), tf.tanh(x @ w))
        return y * tf.gradients(y, x)[0]

    law(apply, (rows(8, 6),), devices=3, learns=False)
