"""Loops over rows: `tf.map_fn`, and TensorArrays that are read and written row by row."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law, rows

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
        assert "StatelessWhile" not in {op.type for op in plan.ops_once}, str(plan)
    return plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_map(devices: int):
    law(
        lambda x, w: tf.map_fn(lambda row: tf.tanh(row[None] @ w)[0], x), (rows(13, 6),), (rows(7, 6),), devices=devices
    )


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_by_rows_that_are_mapped(devices: int):
    """Each turn adds a list with the gradient of its row; of what a loop picks from each row, too."""
    picked = tf.constant(np.random.default_rng(2).integers(0, 6, (13, 3)))

    def apply(x, w, i):
        hidden = tf.tanh(x @ w)
        return tf.map_fn(lambda pair: tf.gather(tf.sin(pair[0]), pair[1]), (hidden, i), fn_output_signature=tf.float64)

    plan = law(apply, (rows(13, 6), picked), (rows(7, 6), picked[:7]), devices=devices)
    assert devices == 1 or [op.type for op in plan.sharded_ops].count("StatelessWhile") == 2


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_the_gradient_of_a_loop_in_a_loop():
    """`tf.gradients` asks that the inner one be beside the outer one, which is on several devices."""

    @tf.function  # (in eager code there is no `tf.gradients`)
    def apply(x, w):
        y = tf.map_fn(lambda row: tf.map_fn(tf.sin, row), tf.tanh(x @ w))
        return y * tf.gradients(y, x)[0]

    law(apply, (rows(8, 6),), devices=3, learns=False)


def _mapped(x, w):
    return tf.map_fn(lambda row: tf.tanh(row[None] @ w)[0], x)


def _several(x, w):
    """Rows of several types, among them strings, to results of several types."""

    def one(own):
        row, text, number = own
        return row @ w * tf.cast(tf.strings.length(text), tf.float64), tf.strings.join([text, "!"]), number + 1

    number = tf.cast(10.0 * x[:, 0], tf.int32)
    like = (tf.float64, tf.string, tf.int32)
    y, texts, more = tf.map_fn(one, (x[:, None], tf.strings.as_string(number), number), fn_output_signature=like)
    return tf.tanh(y[:, 0]) * tf.cast(tf.strings.length(texts) + more, tf.float64)[:, None]


def _array(x, w):
    count = tf.shape(x)[0]
    read, made = tf.TensorArray(tf.float64, count).unstack(x), tf.TensorArray(tf.float64, count)
    for i in tf.range(count):
        made = made.write(i, tf.linalg.matvec(w, read.read(i)) * tf.cast(i, tf.float64))
    return made.stack()


def _total(x, w):
    read, total = tf.TensorArray(tf.float64, tf.shape(x)[0]).unstack(x), tf.ones((6,), tf.float64)
    for i in tf.range(tf.shape(x)[0]):
        total += tf.tanh(tf.linalg.matvec(w, read.read(i)))
    return total


def _nested(x, w):
    return tf.map_fn(lambda row: tf.map_fn(tf.sin, row), tf.tanh(x @ w))


def _flat(x, w):
    """Three turns for each row."""
    return tf.reshape(tf.map_fn(tf.sin, tf.reshape(x @ w, [-1, 2])), [-1, 6])


def _layers(x, w):
    """As in a Keras model: between layers, over what others have computed."""
    return tf.nn.softmax(tf.map_fn(tf.tanh, tf.nn.relu(x @ w)) @ w)


OPEN = {f.__name__[1:]: f for f in (_mapped, _several, _array, _total, _nested, _flat, _layers)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", OPEN)
def test_turns_of_an_unknown_number_of_rows(name: str, devices: int):
    """As many as each shard has rows: perhaps none."""
    apply = OPEN[name]

    def make():
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 6)))

        @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float64)])
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = apply(x, w)
                loss = tf.reduce_sum(tf.sin(y))
            by_x, by_w = tape.gradient(loss, [x, w])
            w.assign_sub(0.01 * (0.0 if by_w is None else by_w))
            return y, by_x

        return step, (w,)

    plan = assert_law(make, [(rows(n, 6),) for n in (7, 1, 0, 2, 9, 4)], devices=devices)
    _assert_all_loops_are_split(plan)
    assert plan.program.batch_is_unknown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
def test_gradients_of_mapped_rows_from_outside(name: str, known: bool):
    w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 6)))
    signature = [tf.TensorSpec((9 if known else None, 6), tf.float64)]
    plain = tf.function(lambda x: OPEN[name](x, w), input_signature=signature)
    parallel = gs.parallelize(plain, devices=3)

    def gradients(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, [x, w], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    for n in (9,) if known else (9, 2, 0, 1, 4):
        x = rows(n, 6)
        assert_close(gradients(parallel, x), gradients(plain, x), f"{n} rows")
    _assert_all_loops_are_split(parallel.gradient_plan(*signature))


def _assert_all_loops_are_split(plan: gs.inspect.Plan) -> None:
    assert "StatelessWhile" in {op.type for op in plan.sharded_ops}, str(plan)
    assert "StatelessWhile" not in {op.type for op in plan.ops_once}, str(plan)
    assert not plan.unsharded_ops, str(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows_known", [False, True])
def test_a_loop_that_does_not_turn_once_for_each_row_says_so(rows_known: bool):
    @tf.function(input_signature=[tf.TensorSpec((8 if rows_known else None, 6))])
    def some(x):
        read, total = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x), tf.zeros((6,))
        for i in tf.range(tf.shape(x)[0] // 2):
            total += read.read(i)
        return total

    @tf.function(input_signature=some.input_signature)
    def twice(x):
        return tf.map_fn(tf.sin, tf.concat([x, x], 0))

    for f, why in (
        (some, "it is not known to iterate once for each entry of a list of rows"),
        (twice, "its lists do not hold the rows of one batch, in order"),
    ):
        parallel = gs.parallelize(f, devices=3)
        plan = parallel.plan(*f.input_signature)
        [(_, reason)] = plan.unsharded_ops
        assert reason.endswith(why)
        assert "loop over all rows of one batch, as tf.map_fn does" in str(plan)
        assert_close(parallel(tf.ones((8, 6))), f(tf.ones((8, 6))))
    assert "nothing gathered; its list" in str(gs.parallelize(some, devices=3).plan(*some.input_signature))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signature", [None, [tf.TensorSpec((None, 6), tf.float64)]], ids=["known", "unknown"])
def test_an_array_that_grows_with_each_turn(signature: list[tf.TensorSpec] | None):
    def f(x):
        made = tf.TensorArray(tf.float64, 0, dynamic_size=True, element_shape=(6,))
        for i in tf.range(tf.shape(x)[0]):
            made = made.write(i, tf.sin(x[i]))
        return made.size(), made.stack(), tf.shape(made.stack())

    assert_law(lambda: (tf.function(f, signature), ()), [(rows(7, 6),)], at_home=None)


VECTORIZED = {
    "product": lambda row, w: tf.tanh(row[None] @ w)[0],
    "inverse": lambda row, w: tf.linalg.inv(w + 3.0 * tf.linalg.diag(1.0 + row**2)),
    "picked": lambda row, w: tf.gather(tf.sort(row), [1, 4]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", VECTORIZED)
def test_vectorized_maps_of_an_unknown_number_of_rows(name: str):
    """Rows are gathered by their numbers: all of them, in order."""

    def make():
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(6, 6)))

        @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float64)])
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.vectorized_map(lambda row: VECTORIZED[name](row, w), x)
                loss = tf.reduce_sum(tf.sin(y))
            return y, tf.convert_to_tensor(tape.gradient(loss, x))

        return step, (w,)

    plan = assert_law(make, [(rows(n, 6),) for n in (7, 1, 0, 2, 9)], sharded=["Identity"])
    assert "GatherV2" not in {op.type for op in plan.ops_once}, str(plan)


@pytest.mark.parametrize("first", [0, 1])
def test_gathers_that_do_not_take_every_row_in_order(first: int):
    @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float64)])
    def f(x):
        numbers = tf.range(first, tf.shape(x)[0])
        return tf.gather(x, numbers[::-1]), tf.gather(x, numbers * 1), tf.gather(x, numbers)

    assert_law(lambda: (f, ()), [(rows(n, 6),) for n in (7, 1, 2)], at_home=None)
