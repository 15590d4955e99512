"""Programs on meshes that once raised, or were wrong: loops whose bodies need helpers, constants beside sums, marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs

MESH = {"batch": 2, "model": 2}
W = tf.Variable(np.random.default_rng(1).normal(size=(6, 6)), name="w")
B = tf.Variable(np.random.default_rng(2).normal(size=6), name="b")
ZERO = tf.constant(0.0, tf.float64)


def loop(start: Callable[[tf.Tensor], Any], body: Callable[[tf.Tensor, Any], Any]) -> Callable[[tf.Tensor], Any]:
    def run(x: tf.Tensor) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, body(x, a)), (0, start(x)))[1]

    return run


PROGRAMS: dict[str, Callable[[tf.Tensor], Any]] = {
    "a row at a time": lambda x: tf.map_fn(lambda row: tf.tensordot(row, W, 1) + B, x),
    "reshaped": loop(lambda x: x, lambda x, a: tf.reshape(tf.reshape(a @ W, [-1, 2, 3]), [-1, 6]) * 0.1 + x),
    "a mean": loop(lambda _: tf.zeros(6, tf.float64), lambda x, a: a + tf.reduce_mean(x @ W, 0) + B),
    "a sum from a constant": loop(lambda _: ZERO, lambda _, a: a + tf.reduce_sum(W)),
    "the largest of booleans": lambda x: tf.argmax(gs.with_layout(x @ W > 0, ("batch", "model")), 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [(None, "model"), ("model", None)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, layout: Any):
    x = tf.constant(np.random.default_rng(3).normal(size=(7, 6)))
    program = PROGRAMS[name]

    def with_gradient(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            found = program(x)
            loss = tf.reduce_sum(tf.cast(found, tf.float64) ** 2)
        gradients = tape.gradient(loss, [W, B], unconnected_gradients="zero")
        return [found, *map(tf.convert_to_tensor, gradients)]

    gs.set_variable_layout([W, B], "home")
    expected = tf.function(with_gradient)(x)
    gs.set_variable_layout(W, layout, mesh=MESH)
    parallel = gs.parallelize(with_gradient, mesh=MESH)
    for a, b in zip(expected, parallel(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    assert "along 'model'" in str(parallel.plan(x))


@pytest.mark.parametrize("name", ["with_layout_x", "with_layout_bbx", "graphsplit_with_layout_61_axes"])
def test_a_function_of_the_name_of_a_mark(name: str):
    """A name alone makes no function one that passes on what it is given."""

    def double(x: tf.Tensor) -> tf.Tensor:
        return 2.0 * x

    double.__name__ = name
    call = tf.function(double)
    x = tf.reshape(tf.range(14.0), [7, 2])
    np.testing.assert_array_equal(gs.parallelize(lambda x: call(x) + 1.0, devices=3)(x), 2.0 * x + 1.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["branches", "a loop", "a list"])
def test_what_has_another_shape_is_not_cut_alike(kind: str):
    order, weight = tf.constant([1, 0]), tf.Variable(np.random.default_rng(6).normal(size=(3, 2)))

    def f(x: tf.Tensor) -> tf.Tensor:
        if kind == "branches":
            return tf.cond(x[0] > 100, lambda: 2 * weight, lambda: tf.transpose(weight, order)) * 1.0
        if kind == "a loop":
            shapes = (tf.TensorShape(()), tf.TensorShape((None, None)))
            turn = lambda i, a: (i + 1, tf.transpose(a, order))  # noqa: E731
            return tf.while_loop(lambda i, _: i < 3, turn, (0, weight * 1.0), shape_invariants=shapes)[1]
        return tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, weight).write(1, B).read(0)

    x = tf.constant([1.0, 2.0, 3.0])
    gs.set_variable_layout([weight, B], "home")
    expected, mesh = tf.function(f)(x), {"batch": 2, "model": 1 if kind == "a list" else 2}
    gs.set_variable_layout(weight, (None, "model") if kind == "a list" else ("model", None), mesh=mesh)
    gs.set_variable_layout(B, ("model",), mesh=mesh)
    np.testing.assert_allclose(gs.parallelize(f, mesh=mesh)(x), expected, rtol=1e-9)


def test_another_answer_to_what_is_gathered_again():
    """Variables that are sharded already are told whether the whole is dropped after the forward pass."""
    weights = [tf.Variable(tf.ones((256, 256)), name=f"weight_{k}") for k in range(3)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    x, nodes = tf.ones((5, 256)), []
    for again in (True, False, True):
        gs.set_variable_layout(weights, "sharded", devices=3, reshard_after_forward=again)
        nodes.append(len(gs.parallelize(step, devices=3).graph_def(x).node))
    assert nodes[0] == nodes[2] > nodes[1]


def test_a_second_derivative_never_reads_parts_that_were_changed_since():
    """The function takes the variable whole, to change it, and its gradients take the parts."""
    cut = tf.Variable(np.random.default_rng(4).normal(size=4), name="cut")
    table = tf.Variable(np.random.default_rng(5).normal(size=(1, 40)), name="table")
    gs.set_variable_layout([cut, table], {"cut": ("model",), "table": "sharded"}, mesh={"batch": 1, "model": 2})

    def step(x: tf.Tensor) -> tf.Tensor:
        table.scatter_update(tf.IndexedSlices(x, [0]))
        return tf.reduce_sum(cut) * tf.reduce_sum(table * table)

    parallel, x = gs.parallelize(step, mesh={"batch": 1, "model": 2}), tf.ones((1, 40), tf.float64)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = parallel(x)
        with pytest.raises(
            gs.errors.UnsupportedError, match="its value depends on variables that it changes while it runs"
        ):
            inner.gradient(loss, [cut, table])
    del outer
