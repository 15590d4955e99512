"""Programs that are read from graphs which TensorFlow has rewritten: by differentiation, and by tracing calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close


def normal(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)


def gradient(f: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(f(x) ** 2)
    return tape.gradient(loss, x)


def assert_second_derivatives(
    f: Callable[[tf.Tensor], tf.Tensor], *sizes: int, split: Callable[..., tf.Tensor]
) -> None:
    """Compare second derivatives, both tapes outside, for batches of rows of three numbers."""
    for size in sizes:
        x = normal(size, 3)
        found = [gradient(lambda x, g=g: gradient(g, x), x) for g in (split, tf.function(f))]
        assert_close(found[0], found[1], f"{size} rows")


def test_a_function_called_by_its_name_inside_of_a_loop() -> None:
    labels = tf.constant([[1, 2], [2, 1], [1, 1], [2, 2]])

    def loss(logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            each = tf.nn.ctc_loss(labels, logits, tf.fill([4], 2), tf.fill([4], 5), logits_time_major=False)
        return each, tape.gradient(each, logits)

    logits = tf.random.stateless_normal((4, 5, 4), [1, 2])
    for devices in (1, 2):
        assert_close(gs.parallelize(loss, devices=devices)(logits), tf.function(loss)(logits))


def squared(x: tf.Tensor) -> tf.Tensor:
    for _ in tf.range(3):
        x = tf.sin(x) * x
    return x


def scanned(x: tf.Tensor) -> tf.Tensor:
    return tf.scan(lambda a, e: a * e + tf.sin(a), tf.transpose(x), initializer=tf.ones_like(x[:, 0]))


def ragged(x: tf.Tensor) -> tf.Tensor:
    return tf.RaggedTensor.from_row_splits(tf.reshape(x, [-1]), [0, 2, 4, 9, 15]).to_tensor() ** 2


def guarded(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(99.0, x.dtype))]):
        return tf.identity(x) ** 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("f", [squared, scanned, guarded, lambda x: tf.tanh(x * x)])
def test_second_derivatives_of_any_number_of_rows(f: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Integers that follow from the number of rows change nothing; what a list's elements are may be known late."""
    known = tf.function(f, input_signature=[tf.TensorSpec((None, 3), tf.float64)])
    assert_second_derivatives(f, 5, 2, split=gs.parallelize(known, devices=2))


def test_gradients_of_a_scan_of_another_number_of_rows() -> None:
    f = lambda x: gradient(scanned, x)  # noqa: E731
    parallel = gs.parallelize(f, devices=2, tuning={"reduce_retracing": True})
    for size in (4, 5):
        x = normal(size, 3)
        assert_close(gradient(parallel, x), gradient(f, x), f"{size} rows")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("f", [ragged, guarded])
def test_assertions_change_nothing(f: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """A guarded assertion is a branch with an effect, but none on variables."""
    assert_second_derivatives(f, 5, split=gs.parallelize(f, devices=2))


def test_a_loop_that_changes_a_variable_changes_something() -> None:
    v = tf.Variable(1.0)

    def f(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            v.assign_add(1.0)
        tf.debugging.assert_positive(tf.reduce_max(x))
        return x * v

    program = gs.parallelize(f, devices=2).plan(tf.ones(4)).program
    assert [program.ops[i].type for i in program.writes] == ["While"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", [-2, 0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_results_of_differentiated_branches(axis: int, nested: bool) -> None:
    """TensorFlow says that they have the shapes of the first branch's; here the other one transposes."""
    indices = tf.random.stateless_uniform((6, 4), [1, 2], maxval=4, dtype=tf.int32)

    def f(x: tf.Tensor) -> tf.Tensor:
        return gradient(lambda x: tf.experimental.numpy.take_along_axis(x, indices, axis), x)

    x = normal(6, 4)
    for devices in (1, 2):
        parallel = gs.parallelize(tf.function(f) if nested else f, devices=devices)
        assert_close(parallel(x), f(x))


def test_results_of_differentiated_branches_of_which_one_is_not_known() -> None:
    def f(x: tf.Tensor) -> tf.Tensor:
        def chosen(x: tf.Tensor) -> tf.Tensor:
            y = tf.cond(x[0, 0] > 0, lambda: x, lambda: tf.boolean_mask(x, x[:, 1] > 0))
            return y * tf.cast(tf.shape(y)[0], x.dtype)

        return gradient(chosen, x)

    x = normal(6, 4)
    for sign in (1, -1):
        for devices in (1, 2):
            assert_close(gs.parallelize(tf.function(f), devices=devices)(sign * x), f(sign * x))


def test_tiles_without_entries() -> None:
    x = normal(6, 4)
    for multiples in ([0, 1], [1, 0]):
        f = lambda x, multiples=multiples: (tf.tile(x, multiples), gradient(lambda x: tf.tile(x, multiples), x))  # noqa: E731
        assert_close(gs.parallelize(f, devices=2)(x), f(x))


def test_pieces_without_entries() -> None:
    """Their gradients are empty, and add nothing to what they are joined with."""
    cuts = [lambda x, s=s: tf.split(x, s, 1)[0] for s in ([4, 0], [4, -1])]
    joins = [lambda x: tf.concat([x, x[:, :0], x], -1), lambda x: tf.concat([x[:0], x, tf.zeros([0, 4], x.dtype)], 0)]
    for f in (*cuts, *joins):
        both = lambda x, f=f: (f(x), gradient(f, x))  # noqa: E731
        for devices in (1, 3):
            parallel = gs.parallelize(both, devices=devices)
            assert_close(parallel(normal(6, 4)), both(normal(6, 4)))
            assert f not in cuts or not parallel.plan(normal(6, 4)).unsharded_ops
