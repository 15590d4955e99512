"""Every way to say a slice of a variable, in parts and in copies, read and written, against one device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, rows

LAYOUTS = ["sharded", "replicated"]
SHAPES = [(16, 8), (7, 40), (3, 120), (1, 64)]


def some_slices(shape: tuple[int, ...], count: int, seed: int) -> list[tuple]:
    """Return slices: bounds within, at and past either end, strides of either sign, indices, ellipsis, new axes."""
    rng = random.Random(seed)

    def bound(size: int) -> int | None:
        return rng.choice([None, 0, 1, -1, size, -size, size - 1, -size + 1, size + 5, -size - 5, rng.randrange(size)])

    def entry(size: int):
        kind = rng.random()
        if kind < 0.15:
            return rng.randrange(-size, size)
        if kind < 0.75:
            return slice(bound(size), bound(size))
        return slice(bound(size), bound(size), rng.choice([-3, -2, -1, 1, 2, 3]))

    found: list[tuple] = [(slice(-shape[0], None),), (slice(-100, None), slice(2, None)), (slice(None, None, -1),)]
    while len(found) < count:
        chosen = [entry(size) for size in shape[: rng.choice([1, len(shape)])]]
        if rng.random() < 0.2:
            chosen.insert(rng.randrange(len(chosen) + 1), tf.newaxis)
        if rng.random() < 0.2 and len(chosen) < len(shape):
            chosen = [..., *chosen] if rng.random() < 0.5 else [*chosen, ...]
        found.append(tuple(chosen))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_are_read(shape: tuple[int, ...], layout: str):
    v = tf.Variable(rows(*shape))
    chosen = some_slices(shape, 30, seed=sum(shape))

    def f(x):
        return [v[entries] for entries in chosen], tf.reverse(v, [0]), x * 2.0

    expected = f(rows(5, 3))
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(f, devices=3)(rows(5, 3)), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_slices(shape: tuple[int, ...], layout: str):
    v = tf.Variable(rows(*shape))
    chosen = some_slices(shape, 12, seed=1 + sum(shape))

    def f(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x)) + sum(tf.reduce_sum(tf.sin(v[entries])) for entries in chosen)
        gradient = tf.convert_to_tensor(tape.gradient(loss, v))
        v.assign_sub(0.5 * gradient)
        return loss, gradient

    before = tf.identity(v)
    expected, after = f(rows(5, 3)), tf.identity(v)
    v.assign(before)
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(f, devices=3)(rows(5, 3)), expected)
    assert_close(tf.identity(v), after)


def sliced(v):
    begin = [size // 2 if k == 0 else 1 for k, size in enumerate(v.shape)]
    return [
        tf.slice(v, begin, [-1] * v.shape.rank),
        tf.slice(v, [0] * v.shape.rank, [v.shape[0], 2]),
        tf.gather(v, [0, v.shape[0] - 1, 0]),
        tf.gather(v, [3, 1], axis=1),
        tf.gather_nd(v, [[0, 1], [v.shape[0] - 1, 2]]),
        tf.boolean_mask(v, np.arange(v.shape[0]) % 2 == 0),
        tf.tensor_scatter_nd_update(v, [[v.shape[0] - 1]], tf.ones((1, v.shape[1]), v.dtype)),
        tf.tensor_scatter_nd_add(v, [[0, 1]], [5.0]),
        tf.split(v, [1, v.shape[1] - 1], axis=1)[1],
        tf.roll(v, 1, 0),
        tf.pad(v, [[1, 2], [0, 1]]),
        tf.tile(v, [2, 1]),
        tf.unstack(v)[-1],
        tf.concat([v, v[:1]], 0),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_ways_to_take_a_part(shape: tuple[int, ...], layout: str):
    v = tf.Variable(rows(*shape))

    def f(x):
        return sliced(v), x * 2.0

    expected = f(rows(5, 3))
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(f, devices=3)(rows(5, 3)), expected)


WRITES = {
    "a slice": lambda v, x: v[-2:, 1:3].assign(tf.zeros((min(2, v.shape[0]), 2), v.dtype)),
    "a row": lambda v, x: v[0].assign(tf.ones((v.shape[1],), v.dtype)),
    "rows by ids": lambda v, x: v.scatter_update(tf.IndexedSlices(tf.ones((1, v.shape[1]), v.dtype), [v.shape[0] - 1])),
    "added rows": lambda v, x: v.scatter_add(tf.IndexedSlices(tf.ones((2, v.shape[1]), v.dtype), [0, 0])),
    "entries": lambda v, x: v.scatter_nd_add([[0, 1]], [2.0]),
    "of itself": lambda v, x: v.assign(tf.concat([v[1:], v[:1]], 0)),
    "reversed": lambda v, x: v.assign(v[::-1]),
    "of the batch": lambda v, x: v[:1].assign(tf.reduce_sum(x) * tf.ones((1, v.shape[1]), v.dtype)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", WRITES)
def test_slices_are_written(how: str, shape: tuple[int, ...], layout: str):
    plain, v = (tf.Variable(rows(*shape)) for _ in range(2))
    write, x = WRITES[how], rows(5, 3)

    def step(v, x):
        write(v, x)
        return tf.reduce_sum(v[:, -1]) * x

    expected = step(plain, x)
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(lambda x: step(v, x), devices=3)(x), expected)
    assert_close(tf.identity(v), tf.identity(plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_go_into_lists(layout: str):
    v = tf.Variable(rows(64, 8))

    def f(x):
        held = tf.TensorArray(tf.float64, size=2, dynamic_size=True).write(0, v * 2.0).write(1, v + 1.0)
        return held.stack(), held.read(0) + v, x * 2.0

    expected = f(rows(6, 4))
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(f, devices=3)(rows(6, 4)), expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 64), (1, 64, 64), (1, 1, 300), (300, 1), (1, 1)])
def test_axes_of_length_one(shape: tuple[int, ...], layout: str):
    """The update does not depend on the batch, so each copy's part of it is made of one value."""
    plain, laid_out = ([tf.Variable(tf.ones(shape)), tf.Variable(tf.zeros(shape))] for _ in range(2))

    def step(w, m, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sin(tf.convert_to_tensor(w)))
        m.assign(0.9 * m + tape.gradient(loss, w))
        w.assign_sub(0.05 * m)
        return loss, x

    expected = step(*plain, rows(5, 3))
    gs.set_variable_layout(laid_out, layout, devices=3)
    assert_close(gs.parallelize(lambda x: step(*laid_out, x), devices=3)(rows(5, 3)), expected)
    assert_close([tf.identity(v) for v in laid_out], [tf.identity(v) for v in plain])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_what_is_combined_with_a_variable(layout: str):
    v = tf.Variable(rows(64, 8))

    def f(x, a):
        taken = tf.gather(a, 3), tf.gather(a, [1, 60])  # before the product that wants it in parts
        return a * v, taken, x

    a = rows(64, 8) + 1.0
    expected = f(rows(6, 3), a)
    gs.set_variable_layout([v], layout, devices=3)
    assert_close(gs.parallelize(f, devices=3)(rows(6, 3), a), expected)
