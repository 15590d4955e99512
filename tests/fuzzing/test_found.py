"""Every program that ever failed, small. The newest is at the end; a name says what was wrong."""

from __future__ import annotations

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
NOT_MENDED: dict[str, str] = {}


@dataclass(frozen=True)
class Found:
    """A function, the shapes of its arguments, call by call, and how it is run."""

    function: Callable[..., Any]
    calls: tuple[tuple[tuple[int, ...], ...], ...]
    tapes: int = 0
    signature: tuple[tuple[int | None, ...], ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


FOUND: dict[str, Found] = {}


def found(*shapes: tuple[int, ...], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function: the shapes of its arguments, tapes around it, options of `parallelize`."""
    tapes, signature = options.pop("tapes", 0), options.pop("signature", None)
    calls = options.pop("calls", (shapes,))

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FOUND[function.__name__] = Found(function, tuple(calls), tapes, signature, options)
        return function

    return register


def gradient(f: Callable[..., Any], *, of: Callable[..., Any] = tf.reduce_sum) -> Callable[..., Any]:
    """Return `f` with the gradients of a sum over its floating-point outputs by its arguments."""

    def with_gradients(*arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            outputs = f(*arguments)
            floats = [v for v in tf.nest.flatten(outputs) if v is not None and v.dtype.is_floating]
            total = tf.add_n([of(tf.sin(v)) for v in floats]) if floats else tf.constant(0.0)
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


@found((4, 7, 3))
def ctc_loss_of_dense_labels(x):
    labels = tf.constant([[1, 2]] * 4)
    return tf.nn.ctc_loss(labels, tf.cast(x, tf.float32), [2] * 4, [7] * 4, logits_time_major=False)


@found(calls=(((5, 3),), ((2, 3),)), signature=((None, 3),), tapes=2)
def second_derivative_of_any_batch(x):
    return tf.tanh(x) * x


@found((5, 4), tapes=1)
def gradient_of_a_split_with_an_empty_piece(x):
    return tf.split(x, [4, 0], 1)[0]


@found((5, 4), tapes=1)
def gradient_along_a_negative_axis(x):
    return tf.experimental.numpy.take_along_axis(x, tf.constant([[0, 1, 0, 2]]), -2)


@found((5, 4))
def tiled_not_once(x):
    return tf.tile(x, [0, 1])


@found((5, 4), home="CPU:2")
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


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, request: pytest.FixtureRequest) -> None:
    if name in NOT_MENDED:
        request.applymarker(pytest.mark.xfail(strict=True, reason=NOT_MENDED[name]))
    case = FOUND[name]
    function = tf.autograph.experimental.do_not_convert(case.function)
    if case.signature is not None:
        specs = [tf.TensorSpec(shape, DOUBLE) for shape in case.signature]
        function = tf.function(function, input_signature=specs, autograph=False)
    many = gs.parallelize(function, **{"devices": 3, **case.options})
    single = function if case.signature is not None else tf.function(function, autograph=False)
    for _ in range(case.tapes):
        many, single = gradient(many), gradient(single)
    for shapes in case.calls:
        arguments = [tf.constant(np.random.default_rng(i).standard_normal(s)) for i, s in enumerate(shapes)]
        assert_close(many(*arguments), single(*arguments), tolerance=TOLERANCE)
