"""Means of rows and columns of a variable in parts (Adafactor): of each part where it is, and weighted by its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_law, rows

ROWS, COLUMNS = 203, 90  # (no number of devices below divides the rows)
Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def factored(weight: tf.Variable, slots: Sequence[tf.Variable], gradient: tf.Tensor) -> None:
    """Update a weight by Adafactor's rule: squares of gradients are remembered as means of rows and of columns."""
    row, column, second = slots
    squares = gradient**2 + 1e-9
    row.assign(0.7 * row + 0.3 * tf.reduce_mean(squares, -1))
    column.assign(0.7 * column + 0.3 * tf.reduce_mean(squares, -2))
    second.assign((row / tf.reduce_mean(row, -1, keepdims=True))[:, None] * column[None])
    update = gradient / tf.sqrt(second)
    update /= tf.maximum(tf.constant(1.0, weight.dtype), tf.sqrt(tf.reduce_mean(update**2)))
    weight.assign_sub(0.1 * tf.sqrt(tf.reduce_mean(weight**2)) * update)


def training(devices: int, dtype: tf.DType = tf.float64, layout: str = "sharded", branch: bool = False) -> Made:
    numbers = np.random.default_rng(1).standard_normal((ROWS, COLUMNS))
    weight = tf.Variable(tf.cast(numbers, dtype), name="weight")
    slots = [tf.Variable(tf.zeros(shape, dtype)) for shape in ((ROWS,), (COLUMNS,), (ROWS, COLUMNS))]
    if devices > 1:
        gs.set_variable_layout([weight, *slots], layout, devices)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.cast(x, dtype) @ weight) ** 2)
        gradient = tape.gradient(loss, weight)
        if branch:
            tf.cond(loss > 0.1, lambda: factored(weight, slots, gradient), lambda: None)
        else:
            factored(weight, slots, gradient)
        return loss

    return step, [weight, *slots]


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("devices", [3, 4])
def test_statistics_stay_in_parts(devices: int, branch: bool):
    ways = iter([training(count, branch=branch) for count in (1, devices)])
    plan = assert_law(lambda: next(ways), [(rows(11, ROWS),), (rows(5, ROWS),)], devices=devices, sharded=["MatMul"])
    size = ROWS * COLUMNS * 8
    reduced = [op for op in plan.program.ops if op.type == "Mean" and plan.program.bytes(op.inputs[0]) > 5000]
    assert len(reduced) == 4 * devices
    assert max([plan.program.bytes(op.inputs[0]) for op in reduced]) <= size / devices + 8 * COLUMNS
    # the weight is put together, its gradient added up in parts, and some columns are sent
    assert max(traffic(plan).busiest[1:]) <= 2.1 * size


def test_means_of_half_precision_do_not_overflow():
    plan = _half()
    assert len([op for op in plan.program.ops if op.type == "Mean" and op.devices]) == 3


def _half() -> gs.inspect.Plan:
    def make(devices: int) -> Made:
        weight = tf.Variable(tf.fill((ROWS, COLUMNS), tf.constant(60000.0, tf.float16)))
        if devices > 1:
            gs.set_variable_layout([weight], "sharded", devices)

        def step(x: tf.Tensor) -> tf.Tensor:
            means = tf.reduce_mean(tf.math.abs(weight), 0)
            weight.assign(weight * tf.constant(0.5, tf.float16))
            return tf.reduce_sum(x, 1, keepdims=True) * tf.cast(means, tf.float64)

        return step, [weight]

    ways = iter([make(1), make(3)])
    return assert_law(lambda: next(ways), [(rows(7, 2),)])


def test_fewer_rows_than_devices():
    def make(devices: int) -> Made:
        weight = tf.Variable(tf.reshape(tf.range(2 * 900, dtype=tf.float64), (2, 900)))
        if devices > 1:
            gs.set_variable_layout([weight], "sharded", devices)

        def step(x: tf.Tensor) -> tf.Tensor:
            means = tf.reduce_mean(weight, 0)
            weight.assign_sub(0.1 * tf.tanh(weight) + means)
            return tf.reduce_sum(x, 1, keepdims=True) * means

        return step, [weight]

    ways = iter([make(1), make(3)])
    assert_law(lambda: next(ways), [(rows(7, 2),), (rows(1, 2),)])
