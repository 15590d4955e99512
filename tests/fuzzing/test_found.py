"""Every program that ever failed, small. The newest is at the end; a name says what was wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close

TOLERANCE = 1e-9
DOUBLE = tf.float64
NUMBER = tf.Variable(0.7, dtype=DOUBLE)


@dataclass(frozen=True)
class Found:
    """A function, the shapes of its arguments, call by call, and how it is run."""

    function: Callable[..., Any]
    calls: tuple[tuple[tuple[int, ...], ...], ...]
    inside: int = 0
    tapes: int = 0
    in_graph: bool = False
    dtype: tf.DType = DOUBLE
    seed: int = 0  # of the first argument's values
    signature: tuple[tuple[int | None, ...], ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


FOUND: dict[str, Found] = {}


def found(*shapes: tuple[int, ...], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the shapes of its arguments, what else `Found` has, and options of `parallelize`."""
    names = {entry.name for entry in dataclasses.fields(Found)}
    own = {name: options.pop(name) for name in names & set(options)}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FOUND[function.__name__] = Found(function, **{"calls": (shapes,), **own}, options=options)
        return function

    return register


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with the gradients of a sum over its floating-point outputs by its arguments."""

    @functools.wraps(f)
    def with_gradients(*arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            outputs = f(*arguments)
            floats = [v for v in tf.nest.flatten(outputs) if v is not None and v.dtype.is_floating]
            total = (
                tf.add_n([tf.reduce_sum(tf.sin(tf.cast(v, DOUBLE))) for v in floats])
                if floats
                else tf.constant(0.0, DOUBLE)
            )
        return outputs, tape.gradient(total, arguments)

    return with_gradients


@found((5, 3))
def gradient_through_an_axis_of_one(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.math.xlogy(x[:, :1], tf.fill([5, 1], tf.constant(2.0, DOUBLE))))
    return tf.reduce_sum(tape.gradient(y, x) * x)


@found((6,))
def gradient_of_what_is_broadcast_to_another_number_of_rows(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.math.xlogy(x, tf.fill([6, 1], tf.constant(2.0, DOUBLE))))
    return tf.reduce_sum(tape.gradient(y, x) * x)


@found((6, 4))
def gradient_through_an_axis_of_one_inside(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.math.xlogy(x, tf.fill([6, 1], tf.constant(2.0, DOUBLE))))
    return tf.reduce_sum(tape.gradient(y, x) * x)


@found((5, 3), tapes=1)
def output_that_cannot_be_differentiated(x):
    return tf.argmax(x, 1)


@found((5, 3), tapes=1)
def output_that_is_no_number(x):
    return tf.constant(3)


@found((4, 7, 3), dtype=tf.float32)
def ctc_loss_of_dense_labels(x):
    labels = tf.constant([[1, 2]] * 4)
    return tf.nn.ctc_loss(labels, x, [2] * 4, [7] * 4, logits_time_major=False)


@found(calls=(((5, 3),), ((2, 3),)), signature=((None, 3),), tapes=2)
def second_derivative_of_any_batch(x):
    return tf.tanh(x) * x


@found((5, 4), inside=1)
def gradient_of_a_split_with_an_empty_piece(x):
    return tf.split(x, [4, 0], 1)[0]


@found((5, 4), tapes=1)
def gradient_along_a_negative_axis(x):
    return tf.experimental.numpy.take_along_axis(x, tf.constant([[0, 1, 0, 2]]), -2)


@found((5, 4))
def tiled_not_once(x):
    return tf.tile(x, [0, 1])


@found((5, 4), tuning={"default_device": "CPU:2"})
def later_pieces_of_two_splits(x):
    a, b = tf.split(x, 2, 1)
    c, d = tf.split(tf.sin(x), 2, 1)
    return tf.cumsum(b), tf.cumsum(d), a, c


@found((5, 4))
def later_pieces_of_two_unstacks(x):
    return tf.cumsum(tf.unstack(x, axis=1)[1]) + tf.cumsum(tf.unstack(tf.sin(x), axis=1)[1])


@found((3, 0))
def gradient_of_no_numbers(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.identity(x)
    return tape.gradient(y, x) * x


@found((), tapes=1)
def output_of_a_variable_beside_one_that_is_no_number(x):
    return tf.shape(x), NUMBER


@found((1, 3), (3,), tapes=1)
def gradient_of_a_power_of_one_row(x, y):
    return tf.math.xlogy(tf.abs(x), tf.abs(x)) * y


@found((1,), tapes=1)
def gradient_of_one_row(x):
    return tf.math.xlogy(x, tf.abs(x))


@found((3, 4), (4,), tapes=2, devices=4, split={"x": 0, "y": None})
def second_derivative_of_a_sparse_division(x, y):
    quotient = tf.sparse.to_dense(tf.sparse.from_dense(x) / (tf.abs(y) + 0.5))
    return tf.foldr(lambda a, c: a * 0.5 + c, quotient)


@found((6, 6, 3), tapes=1, devices=1, dtype=tf.float32)
def gradient_with_many_squares(x):
    return tf.image.ssim(x, tf.sin(x), 1.0, filter_size=3)


@found((6, 6), inside=1, tapes=1, devices=4, in_graph=True)
def second_derivative_of_a_determinant(x):
    return tf.linalg.logdet(x)


@found((1, 5, 3, 3), signature=((1, None, 3, 3),), tapes=1, split={"x": 1}, devices=2)
def gradient_of_any_batch_behind_an_axis_of_one(x):
    return tf.matmul(x, x)


@found((4, 1), inside=1, tapes=1, split={"x": 1}, devices=5)
def second_derivative_of_one_row(x):
    return tf.raw_ops.Zeta(x=tf.abs(x), q=tf.abs(x) + 1.1)


@found(calls=(((2, 3, 2),), ((7, 3, 2),)), tuning={"reduce_retracing": True}, tapes=2)
def second_derivative_of_other_sizes(x):
    return tf.matmul(x, x, transpose_a=True)


@found((1, 3), inside=2, devices=4)
def gradient_of_the_first_none(x):
    return tf.abs(tf.math.top_k(x, 0)[0])


@found((2, 2), tapes=1, devices=1, in_graph=True)
def gradient_of_a_lookup_along_a_negative_axis(x):
    return tf.experimental.numpy.take_along_axis(x, tf.constant([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]]), -2)


@found((3, 2, 2, 3), (3,), (3,), signature=((3, 2, 2, 3), (3,), (3,)), tapes=1, dtype=tf.float32)
def no_gradient_of_a_moving_average(x, scale, mean):
    options = {"offset": scale, "mean": mean, "variance": tf.sigmoid(mean), "is_training": False}
    return tf.raw_ops.FusedBatchNormV2(x=x, scale=scale, **options)[:3]


@found((5, 1), tapes=1, devices=1)
def gradient_of_one_column(x):
    return tf.math.xlogy(tf.abs(x), tf.abs(x))


@found((5,), (0, 5, 2), (0, 5), inside=1)
def gather_from_no_rows(x, table, numbers):
    return tf.reduce_sum(x), tf.gather(table, tf.cast(numbers, tf.int64) % 2, axis=2, batch_dims=2)


@found((0, 3, 3, 0), (0,), tapes=1, dtype=tf.float32, devices=4)
def normalization_of_no_channels(x, scale):
    return tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=scale, mean=scale, variance=scale)[:3]


@found((1,), tapes=1, devices=4)
def gradient_of_the_next_number(x):
    return tf.raw_ops.NextAfter(x1=x, x2=x)


@found((5, 4, 4, 4, 2), tapes=2, dtype=tf.float32, seed=2)
def second_derivative_of_overlapping_windows(x):
    apart = 100.0 * x  # as test_incomparable.py says why
    return tf.raw_ops.MaxPool3D(input=apart, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, 1, 1], padding="SAME")


@found((1, 4), signature=((None, 4),))
def number_beside_a_device_without_rows(x):
    return x * NUMBER, tf.constant(3.0, DOUBLE)


@found((), signature=((),), tapes=1)
def gradient_of_a_branch_that_reads_a_variable(x):
    return x * tf.cond(x > 9.0, lambda: tf.sin(NUMBER), lambda: tf.identity(NUMBER))


@found(calls=(((5, 3),), ((1, 3),)), signature=((None, 3),), tapes=1)
def gradient_of_a_branch_that_pads(x):
    return tf.experimental.numpy.cross(x, tf.sin(x))


@found(calls=tuple(((rows,), (0,)) for rows in (8, 2, 4)), tuning={"reduce_retracing": True})
def random_numbers_beside_an_empty_argument(x, y):
    return tf.nn.dropout(x, 0.5), y


@found((4, 7, 3), signature=((4, 7, 3),), tapes=1, dtype=tf.float32)
def gradient_of_a_ctc_loss_beside_a_number(x):
    labels = tf.constant([[1, 2]] * 4)
    return tf.nn.ctc_loss(labels, x, [2] * 4, [7] * 4, logits_time_major=False), tf.constant(1.0)


@found((2,), (2, 7, 5), signature=((2,), (2, 7, 5)), tapes=1, dtype=tf.float32, devices=2)
def gradients_of_a_ctc_loss_and_of_something_else(y, x):
    labels = tf.constant([[1, 2]] * 2)
    return tf.math.ceil(y), tf.nn.ctc_loss(labels, x, [2] * 2, [7] * 2, logits_time_major=False)


@found((2, 1), (8, 3, 3), inside=2, devices=2)
def a_loop_has_whole_on_every_shard_what_is_read_in_rows(x, y):
    powers = tf.linalg.expm(y)
    return tf.nn.in_top_k(tf.zeros(2, tf.int32), tf.cast(x, tf.float32), 1), powers, tf.experimental.numpy.rot90(powers)


def list_of(*values: tf.Tensor) -> tf.TensorArray:
    array = tf.TensorArray(DOUBLE, len(values), infer_shape=False)
    for i, value in enumerate(values):
        array = array.write(i, value)
    return array


@found((6,), inside=1)
def a_list_of_a_vector_and_of_rows(x):
    return list_of(tf.fill((2,), NUMBER), tf.sigmoid(x)).read(0)


@found((3,), devices=2)
def a_list_of_a_number_and_of_rows(x):
    return list_of(tf.identity(NUMBER), x).read(0)


@found(calls=(((1,),), ((5,),)), signature=((None,),), inside=1)
def a_list_of_a_vector_and_of_rows_of_unknown_number(x):
    both = list_of(tf.fill((2,), NUMBER), x)
    return both.read(0), both.read(1)


@found((4, 3), inside=1)
def a_list_of_rows_and_of_shorter_rows(x):
    both = list_of(x, x[:, 0] * NUMBER)
    return both.read(0), both.read(1)


@found(calls=(((2, 2, 3),), ((2, 5, 3),)), signature=((2, None, 3),), inside=1)
def blocks_as_long_as_an_unknown_length(x):
    return tf.raw_ops.TopKV2(input=x, k=1).values


@found(
    calls=(((7, 1, 3, 3), (7, 1, 3, 4)), ((2, 1, 3, 3), (2, 1, 3, 4))),
    signature=((None, 1, None, 3), (None, 1, 3, 4)),
    tapes=1,
    devices=2,
    split={"x": 2, "y": None},
)
def gradient_of_what_needs_all_rows_beside_lengths(x, y):
    real = tf.raw_ops.IRFFT2D(input=tf.complex(x, x), fft_length=[3, 4], Treal=DOUBLE)
    return tf.raw_ops.TanhGrad(y=real, dy=y)


@found(
    calls=(((4, 4, 5, 4), (4, 8)), ((2, 4, 5, 2), (2, 8)), ((5, 4, 5, 2), (1, 8))),
    tuning={"reduce_retracing": True},
    split={"x": 0, "transforms": None},
)
def a_whole_argument_with_a_transform_for_each_image(x, transforms):
    transforms = tf.cast(transforms, tf.float32)
    options = {"output_shape": [3, 4], "fill_value": 0.5, "interpolation": "NEAREST"}
    return tf.raw_ops.ImageProjectiveTransformV3(images=x, transforms=transforms, **options)


@pytest.mark.filterwarnings("ignore:.* was planned for calls in which:graphsplit.errors.RetracingWarning")
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    case = FOUND[name]
    function = case.function
    for _ in range(case.inside):
        function = gradient(function)
    function = tf.autograph.experimental.do_not_convert(function)
    if case.signature is not None:
        specs = [tf.TensorSpec(shape, case.dtype) for shape in case.signature]
        function = tf.function(function, input_signature=specs, autograph=False)
    many = gs.parallelize(function, **{"devices": 3, **case.options})
    retracing = {name: value for name, value in case.options.get("tuning", {}).items() if name == "reduce_retracing"}
    single = function if case.signature is not None else tf.function(function, autograph=False, **retracing)
    for _ in range(case.tapes):
        many, single = gradient(many), gradient(single)
    if case.in_graph:
        many, single = tf.function(many, autograph=False), tf.function(single, autograph=False)
    for shapes in case.calls:
        NUMBER.assign(0.7)
        arguments = [
            tf.cast(np.random.default_rng(case.seed + i).standard_normal(s), case.dtype) for i, s in enumerate(shapes)
        ]
        tolerance = TOLERANCE if case.dtype == DOUBLE else 1e-5
        expected = single(*arguments)
        NUMBER.assign(0.7)
        assert_close(many(*arguments), expected, tolerance=tolerance)


def test_second_derivative_of_a_function_that_counts() -> None:
    """The gradient runs forward again, and would read a number that has changed since."""

    def counting(x: tf.Tensor) -> tf.Tensor:
        y = x * x * NUMBER
        NUMBER.assign_add(1.0)
        return y

    x = tf.ones([5, 3], DOUBLE)
    with pytest.raises(gs.errors.UnsupportedError) as error:
        gradient(gradient(gs.parallelize(counting, devices=3)))(x)
    assert str(error.value) == (
        "A second derivative of counting was asked for, but its value depends on variables that it changes while it "
        "runs. Parallelize the whole computation with both tapes inside, or make those changes outside of the function."
    )
    NUMBER.assign(0.7)
    inside = gs.parallelize(gradient(gradient(counting)), devices=3)(x)
    NUMBER.assign(0.7)
    assert_close(inside, tf.function(gradient(gradient(counting)))(x), tolerance=TOLERANCE)


def test_effects_of_a_called_function_happen_once_under_two_tapes() -> None:
    """What it returns waits for what it writes, and the second derivative runs what it returns again."""

    @tf.function(input_signature=[tf.TensorSpec((None,), DOUBLE)])
    def counting(x: tf.Tensor) -> tf.Tensor:
        NUMBER.assign_add(1.0)
        return x**3

    NUMBER.assign(0.7)
    x = tf.range(1.0, 6.0, dtype=DOUBLE)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = gs.parallelize(counting, devices=3)(x)
        slope = inner.gradient(y, x)
    assert_close(outer.gradient(slope, x), 6 * x, tolerance=TOLERANCE)
    assert float(NUMBER) == 1.7
    NUMBER.assign(0.7)


def test_a_loop_in_a_function_reads_a_variable_after_it_was_changed() -> None:
    """For second derivatives the loop is in a function, and only what else it is given waits for the change."""

    def function(x: tf.Tensor) -> tf.Tensor:
        NUMBER.assign_sub(0.1 * NUMBER)
        return tf.map_fn(lambda row: tf.reduce_sum(row * NUMBER), x)

    def results(make: Any) -> Any:
        NUMBER.assign(0.7)
        return make(gradient(gradient(function)))(tf.constant([[1.0, 2.0], [3.0, 5.0], [8.0, 13.0]], DOUBLE))

    expected = results(functools.partial(tf.function, autograph=False))
    assert_close(results(functools.partial(gs.parallelize, devices=2)), expected, tolerance=TOLERANCE)
    assert_close(
        results(functools.partial(gs.parallelize, devices=2, split={"x": None})), expected, tolerance=TOLERANCE
    )
    NUMBER.assign(0.7)


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_variable_that_is_broadcast_beside_others(layout: str) -> None:
    """What every copy makes of a value of one row is made of a copy of that."""
    shapes = (4, 3), (1, 5), (2, 2, 3, 1)
    variables = [tf.Variable(np.random.default_rng(i).standard_normal(shape)) for i, shape in enumerate(shapes)]

    def function(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            gradient_of_reciprocal = tf.raw_ops.ReciprocalGrad(y=x, dy=variables[2])
            numbers = [tf.reduce_sum(tf.sin(value)) for value in (*variables, gradient_of_reciprocal)]
        return tape.gradient(tf.add_n(numbers), [x, *variables]), gradient_of_reciprocal

    x = tf.constant(np.random.default_rng(9).standard_normal((2, 2, 3, 1)))
    expected = tf.function(function, autograph=False)(x)
    gs.set_variable_layout(variables, layout, devices=3)
    assert_close(gs.parallelize(function, devices=3)(x), expected, tolerance=TOLERANCE)


def test_a_copied_variable_without_entries() -> None:
    """What all copies need of a sum is added up in parts, of which there are none."""
    variable = tf.Variable(tf.zeros((0,), DOUBLE))
    gs.set_variable_layout(variable, "replicated", devices=2)

    @functools.partial(gs.parallelize, devices=2)
    def function(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.sin(variable))
        return tape.gradient(total, variable), tf.reduce_sum(x)

    x = tf.ones(3, DOUBLE)
    with tf.GradientTape() as tape:
        found, _ = function(x)
        total = tf.reduce_sum(found**2)
    assert tape.gradient(total, variable).shape == found.shape == (0,)
