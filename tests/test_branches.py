"""Branches that draw or read inside: their effects happen once, the rest of them runs on the shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law, rows

DEVICES = [1, 2, 3, 5]


def check(branch, calls, devices, *more, **options):
    """Compare a network behind a branch, seeds set before each of both, and return the plan."""

    def make():
        tf.random.set_seed(4)
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 8)))
        return (lambda x: (tf.reduce_mean(tf.tanh(branch(x) @ w)), tf.reduce_sum(x, 1))), (w, *more)

    return assert_law(make, calls, devices=devices, **options)


@pytest.mark.parametrize("devices", DEVICES)
def test_a_draw_in_a_branch(devices: int):
    """The issue's own: noise for each row, drawn in one of two branches, which is chosen by a draw."""

    def branch(x):
        noise = lambda: x + tf.random.stateless_normal((13, 1), (1, 2), dtype=tf.float64)  # noqa: E731
        return tf.cond(tf.reduce_sum(x) > 0, noise, lambda: x)

    plan = check(branch, [(rows(13, 6),), (-rows(13, 6),)], devices)
    assert devices == 1 or "StatelessIf" in {op.type for op in plan.sharded_ops}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_stateful_draw_in_a_branch(devices: int, taken: bool):
    """It is drawn once if its branch is taken, and not drawn at all if not: what is drawn later is the same."""
    drawn = []
    x = rows(13, 6)
    import graphsplit as gs

    w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 8)))
    chosen = tf.Variable(taken)

    def f(x):
        more = lambda: x + tf.random.normal((13, 1), seed=2, dtype=tf.float64)  # noqa: E731
        y = tf.cond(chosen, more, lambda: x * tf.random.uniform((6,), seed=3, dtype=tf.float64))
        return tf.tanh(y @ w), tf.random.normal((2,), seed=7)

    for fn in (tf.function(f), parallel := gs.parallelize(f, devices=devices)):
        tf.random.set_seed(3)
        drawn.append([fn(x) for _ in range(3)])
    for (a, later), (b, same) in zip(*drawn, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(later, same)
    plan = parallel.plan(x)
    plan.check()
    if devices > 1:
        assert "StatelessIf" in {op.type for op in plan.sharded_ops}, str(plan)
        assert not plan.unsharded_ops
        assert "once for all shards" not in str(plan)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_seed_generator_in_a_branch(devices: int):
    """Keras counts its draws in a variable: it is counted once, in the branch that is taken."""

    def make():
        generator = keras.random.SeedGenerator(5)
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 8)))

        def step(x):
            noise = lambda: x + keras.random.normal((13, 6), seed=generator, dtype="float64")  # noqa: E731
            with tf.GradientTape() as tape:
                y = tf.cond(tf.reduce_sum(x) > 0, noise, lambda: 2.0 * x)
                loss = tf.reduce_mean(tf.tanh(y @ w) ** 2)
            w.assign_sub(tape.gradient(loss, w))
            return loss

        return step, (w, generator.state)

    plan = assert_law(make, [(rows(13, 6),), (-rows(13, 6),), (rows(13, 6),)], devices=devices)
    assert "StatelessIf" in {op.type for op in plan.sharded_ops}
    assert "MatMul" not in {op.type for op in plan.ops_once}


def test_effects_that_follow_from_rows_stay_with_them():
    """What is assigned is a sum over all rows: such a branch runs once."""

    def make():
        total = tf.Variable(0.0, dtype=tf.float64)

        def step(x):
            def add():
                total.assign_add(tf.reduce_sum(x))
                return x + total

            return tf.cond(tf.reduce_sum(x) > 0, add, lambda: x)

        return step, (total,)

    assert_law(make, [(rows(7, 3),), (-rows(7, 3),)], devices=3, at_home=None)


def test_a_branch_with_nothing_but_effects():
    def make():
        count = tf.Variable(0)

        def step(x):
            tf.cond(tf.reduce_sum(x) > 0, lambda: count.assign_add(1), lambda: count.assign(7))
            return tf.cond(count > 0, lambda: x * 2, lambda: x + tf.cast(count.assign_add(2), x.dtype))

        return step, (count,)

    assert_law(make, [(rows(7, 3),), (-rows(7, 3),)], devices=3, at_home=None)


# Branches that are not taken, and do not fit what they are given


def open_rows(function):
    return tf.function(function, input_signature=[tf.TensorSpec([None, 3], tf.float64)])


@open_rows
def only_of_four(x):
    return tf.cond(tf.shape(x)[0] == 4, lambda: tf.reduce_sum(tf.reshape(x, [2, 6]) * 2), lambda: tf.reduce_sum(x))


@open_rows
def of_some(x):
    return tf.case(
        [
            (tf.shape(x)[0] == 4, lambda: tf.reduce_sum(tf.reshape(x, [2, 6]))),
            (tf.shape(x)[0] == 6, lambda: tf.reduce_sum(tf.reshape(x, [9, 2]) * 2)),
        ],
        default=lambda: tf.reduce_sum(x),
    )


@open_rows
def one_in_another(x):
    def inner():
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(tf.reshape(x, [2, 6])), lambda: DOUBLE_ZERO)

    return tf.cond(tf.shape(x)[0] == 4, inner, lambda: tf.reduce_sum(tf.tanh(x)))


@open_rows
def never_turns(x):
    count = tf.shape(x)[0] - 6
    _, total = tf.while_loop(
        lambda i, a: i < count, lambda i, a: (i + 1, a + tf.reduce_sum(tf.reshape(x, [2, 6]))), (0, DOUBLE_ZERO)
    )
    return total + tf.reduce_sum(x)


DOUBLE_ZERO = tf.constant(0.0, tf.float64)


@pytest.mark.parametrize("function", [only_of_four, of_some, one_in_another, never_turns])
def test_a_branch_that_does_not_fit(function):
    def f(x):
        return function(x), tf.tanh(x)

    x = rows(6, 3)
    parallel = gs.parallelize(f, devices=3)
    assert_close(parallel(x), tf.function(f)(x))
    assert "Tanh" in {op.type for op in parallel.plan(x).sharded_ops}

    def twice(x):
        return function(x) + function(x[:4])

    assert_close(gs.parallelize(twice, devices=3)(x), tf.function(twice)(x))


@pytest.mark.parametrize("rows_are_known", [True, False])
def test_known_integers_that_a_branch_is_given_are_known_inside(rows_are_known: bool):
    """Axes, shapes and divisors from outside of a branch are constants in it: rules see what it does on shards."""
    axis, shape, half = tf.constant([1]), tf.constant([-1, 3, 2]), tf.constant(2)

    def f(x):
        def summed():
            return tf.reduce_sum(tf.reshape(x, shape), axis) + tf.cast(tf.shape(x)[1] // half, tf.float64)

        return tf.cond(tf.reduce_sum(x) > 0, summed, lambda: x[:, :2])

    calls = [(rows(count, 6),) for count in ((5,) if rows_are_known else (5, 1, 8))]
    calls += [(-call[0],) for call in calls]
    plan = assert_law(lambda: (f, ()), calls, devices=2, tuning={"reduce_retracing": not rows_are_known})
    [branch] = [op for op in plan.program.ops if op.type in ("If", "StatelessIf")]
    inside = [op for body in branch.bodies.values() for op in body.ops if op.type == "Sum"]
    assert [op.constants[1].tolist() for op in inside] == [[1]]
    assert branch in plan.sharded_ops


@pytest.mark.parametrize("devices", [2, 3])
def test_results_whose_sizes_are_known_inside_only(devices: int):
    """The rows are counted outside of a branch, which TensorFlow gives a result of any number of rows."""

    def make():
        weight = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 8)))

        def step(x):
            count = tf.shape(x)[0]

            def no_rows():
                return tf.zeros([count, 8], tf.float64) + tf.cast(count, tf.float64)

            y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ weight), no_rows)
            return tf.reduce_sum(y, 0), y

        return step, (weight,)

    plan = assert_law(make, [(rows(7, 6),), (-rows(7, 6),), (rows(2, 6),)], devices=devices)
    assert {op.type for op in plan.sharded_ops} & {"If", "StatelessIf"}


INNER = [((3,), (3,)), ((4, 3), (3,)), ((3,), (4, 3)), ((1,), (1,)), ((1, 1), (1, 1)), ((7, 1), (1,))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("left", "right"), INNER)
def test_a_branch_that_the_shapes_rule_out(left: tuple[int, ...], right: tuple[int, ...]):
    """`keras.ops.inner` branches on the rank, and the branch of numbers does not fit vectors; nor does its gradient."""

    def f(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            found = keras.ops.inner(x, y)
            total = tf.reduce_sum(
                tf.sin(found) * tf.cast(tf.reshape(tf.range(tf.size(found)), tf.shape(found)), x.dtype)
            )
        return found, tape.gradient(total, [x, y])

    x, y = tf.reshape(rows(*left, 1), left), tf.reshape(rows(*right, 1), right)
    assert_close(gs.parallelize(f, devices=3)(x, y), tf.function(f)(x, y))


@tf.function(input_signature=[tf.TensorSpec([None, 3])])
def summed_in_a_loop_for_three_rows(x):
    turns = tf.where(tf.shape(x)[0] == 3, 1, 0)
    body = lambda i, total: (i + 1, total + tf.reduce_sum(tf.reshape(x, [3, 3]) ** 2))  # noqa: E731
    _, total = tf.while_loop(lambda i, _: i < turns, body, (0, 0.0))
    return total + tf.reduce_sum(x**2)


@pytest.mark.parametrize("retracing", [False, True], ids=["known rows", "any rows"])
def test_gradient_of_a_loop_that_never_turns_and_whose_body_does_not_fit(retracing: bool):
    def f(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = summed_in_a_loop_for_three_rows(x)
        return total, tape.gradient(total, x)

    parallel = gs.parallelize(f, devices=3, tuning={"reduce_retracing": retracing})
    for count in (6, 3, 1):
        x = tf.random.stateless_normal((count, 3), [1, count])
        assert_close(parallel(x), tf.function(f)(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows_are_known", [True, False])
@pytest.mark.parametrize("kind", ["a constant", "an argument", "turned", "a loop that doubles", "a loop with another"])
def test_branches_and_turns_of_other_shapes(kind: str, rows_are_known: bool):
    """What one branch makes of the rows has not the shape of what another makes, which is not cut like it."""

    def f(x, other, order):
        first, double = x[0, 0], lambda: 2 * x
        shapes = (tf.TensorShape(()), tf.TensorShape((None, 2)))
        if kind == "a constant":
            return tf.cond(first > 100, double, lambda: tf.ones((3, 2), tf.float64))
        if kind == "an argument":
            return tf.cond(first > 100, double, lambda: other)
        if kind == "turned":
            return tf.cond(first > 100, double, lambda: tf.transpose(x, order))
        turn = lambda _, a: tf.concat([a, a], 0) if kind == "a loop that doubles" else other  # noqa: E731
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, turn(i, a)), (0, x), shape_invariants=shapes)[1]

    calls = [(rows(count, 2), rows(3, 2), tf.constant([1, 0])) for count in ((5,) if rows_are_known else (5, 1, 8))]
    assert_law(lambda: (f, ()), calls, devices=2, at_home=None, tuning={"reduce_retracing": not rows_are_known})
