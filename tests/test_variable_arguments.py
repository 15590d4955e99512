"""Variables among the arguments: the function gets the variable itself, as that of a `tf.function` does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_close, rows

SHAPES = {
    "alone": (lambda v: v, lambda held: held),
    "in a mapping": (lambda v: {"v": v}, lambda held: held["v"]),
    "in a list": (lambda v: [3, v], lambda held: held[1]),
}
LAYOUTS = ["", "home", "replicated", "sharded"]


def both(layout: str = ""):
    """Return two variables of equal values, the second laid out."""
    variables = [tf.Variable(rows(3, 2)) for _ in range(2)]
    if layout:
        gs.set_variable_layout(variables[1], layout, devices=3)
    return variables


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_read_and_written(shape: str, layout: str):
    hold, take = SHAPES[shape]

    def step(x, held):
        v = take(held)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ v) ** 2)
        v.assign_sub(tape.gradient(loss, v))
        return loss

    (plain, laid_out), parallel = both(layout), gs.parallelize(step, devices=3)
    for _ in range(2):
        assert_close(parallel(rows(7, 3), hold(laid_out)), step(rows(7, 3), hold(plain)))
    assert_close(tf.convert_to_tensor(laid_out), tf.convert_to_tensor(plain))
    assert "MatMul" in {op.type for op in parallel.plan(rows(7, 3), hold(laid_out)).sharded_ops}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tape_outside_reaches_it(shape: str, layout: str):
    hold, take = SHAPES[shape]

    def loss_of(x, held):
        return tf.reduce_mean(tf.tanh(x @ take(held)) ** 2)

    found = []
    for fn, v in zip((loss_of, gs.parallelize(loss_of, devices=3)), both(layout), strict=True):
        with tf.GradientTape() as tape:
            loss = fn(rows(7, 3), hold(v))
        found.append(tape.gradient(loss, v))
    assert_close(found[1], found[0])


def test_each_variable_has_a_trace_of_its_own():
    traces = []

    def f(x, v):
        traces.append(v)
        return x * v

    parallel, x = gs.parallelize(f, devices=2), rows(5)
    for v in (one := tf.Variable(2.0, dtype=tf.float64), tf.Variable(3.0, dtype=tf.float64), one):
        assert_close(parallel(x, v), x * v)
    one.assign(7.0)
    assert_close(parallel(x, one), x * 7.0)
    assert len(traces) == 2


def test_keras_variables():
    v = keras.Variable(rows(3, 2), dtype="float64")
    parallel = gs.parallelize(lambda x, v: x @ v, devices=2)
    assert_close(parallel(rows(7, 3), v), rows(7, 3) @ v.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "replicated", ("model",)])
def test_functions_inside_are_given_variables_that_are_laid_out(layout):
    """The function changes it by each of its names, and calls another one with it."""
    w = tf.Variable(tf.zeros((70_000,)), name="w")

    @tf.function
    def innermost(v, by):
        v.assign_add(by * tf.ones_like(v))
        return v[0]

    @tf.function
    def inner(x, v, same):
        v.assign(v * 2.0 + 1.0)  # what is read of the same variable by another name comes before and after
        middle = w[1] + same[2]
        return x * innermost(v, middle) + w[3]

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(inner(x, w, w))
        return y, tape.gradient(y, w)[:2]

    x, mesh = tf.range(5.0), {"mesh": {"batch": 1, "model": 2}} if isinstance(layout, tuple) else {"devices": 2}
    expected = [tf.function(step)(x) for _ in range(3)]
    value = w.numpy()
    w.assign(tf.zeros_like(w))
    found = [gs.parallelize(step, devices=2)(x)]  # traced before it is laid out, and after
    gs.set_variable_layout(w, layout, **mesh)
    found.append(gs.parallelize(step, **mesh)(x))
    assert parts_of_variable(w).in_parts
    found.append(tf.function(step)(x))  # and outside
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(w, value, rtol=1e-6)
