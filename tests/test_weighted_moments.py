"""Weighted and masked moments, and moments over places that are cut: one exchange forward, one backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import MOMENTS, OWN_ROW
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.communication.transfers import Concatenation
from graphsplit.planning.costs.exchanges import EXCHANGE_BYTES
from tests.helpers.chains import chain_in_graph
from tests.helpers.float64 import float64
from tests.helpers.law import assert_close, assert_law
from tests.helpers.unknown_sizes import last_plan

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("float64")

AT_ONCE = {"exchange_bytes": EXCHANGE_BYTES}
PLACES, CHANNELS = 3, 4
Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def entries(count: int, mean: float = 0.0) -> tf.Tensor:
    return mean + tf.random.stateless_normal((count, PLACES, CHANNELS), [count, 3], dtype=tf.float64)


def mask(count: int) -> tf.Tensor:
    """Return which entries count: some, but for those of the first row, which may be a whole shard's."""
    chosen = (tf.random.stateless_uniform((count, PLACES), [count, 5]) < 0.6) | (tf.range(PLACES) > 1)
    return chosen & (tf.range(count) > 0)[:, None]


def weights(count: int, least: float = 0.0) -> tf.Tensor:
    return tf.random.stateless_uniform((count, PLACES, 1), [count, 9], least, 2.0, tf.float64)


Normalization = tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], Sequence[tf.Variable]]


def keras_masked() -> Normalization:
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((None, PLACES, CHANNELS))
    return lambda x, kept: layer(x, mask=kept, training=True), layer.variables


def tf_keras_masked() -> Normalization:
    tf_keras = pytest.importorskip("tf_keras")
    layer = tf_keras.layers.BatchNormalization(momentum=0.5, fused=False, dtype="float64")
    layer.build((None, PLACES, CHANNELS))
    return lambda x, kept: layer(x, mask=kept, training=True), layer.variables


def weighted(**options: Any) -> Normalization:
    def normalize(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        w = tf.cast(w, x.dtype)[..., None] if w.dtype == tf.bool else w
        mean, variance = tf.nn.weighted_moments(x, [0, 1], w, **options)
        return (x - mean) * tf.math.rsqrt(variance + 1e-3)

    return normalize, []


def trained(make: Callable[[], Normalization], count: int = 1) -> Made:
    """Products, each normalized, and a step for their weights; a gradient by the entries, too."""
    pairs = [make() for _ in range(count)]
    kernels = [tf.Variable(tf.constant(np.eye(CHANNELS) + 0.1 * k, tf.float64)) for k in range(1, count + 2)]

    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for kernel, (normalize, _) in zip(kernels, pairs, strict=False):
                y = normalize(tf.sin(y) @ kernel + y, w)
            loss = tf.reduce_sum(tf.sin(0.1 * y @ kernels[-1]))
        by_x, *by_kernels = tape.gradient(loss, [x, *kernels])
        for kernel, gradient in zip(kernels, by_kernels, strict=True):
            kernel.assign_sub(0.01 * gradient)
        return loss, y, by_x

    return step, [*kernels, *[variable for _, own in pairs for variable in own]]


def exchanged(plan: gs.inspect.Plan) -> int:
    """Return of how many weighted moments the shards send each other what they have, in one exchange."""
    return sum(move.source == OWN_ROW for move in plan.moves)


def assert_exchanged(
    make: Callable[[], Made], calls: Sequence[tuple[Any, ...]], count: int = 1, **options: Any
) -> None:
    plan = assert_law(make, calls, tuning=AT_ONCE, at_home=None, **options)
    assert exchanged(plan) == count, str(plan)


MADE = {
    "keras": (keras_masked, mask),
    "tf_keras": (tf_keras_masked, mask),
    "a mask as weights": (weighted, mask),
    "weights": (weighted, weights),
    "weights, axes kept": (lambda: weighted(keepdims=True), weights),
}


@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize(("make", "by"), MADE.values(), ids=MADE)
def test_uneven_rows_and_fewer_than_devices(
    make: Callable[[], Normalization], by: Callable[[int], tf.Tensor], devices: int
):
    assert_exchanged(lambda: trained(make, 2), [(entries(n), by(n)) for n in (2, 5, 7)], 2, devices=devices)


@pytest.mark.parametrize(("make", "by"), MADE.values(), ids=MADE)
def test_a_mean_of_a_thousand_deviations(make: Callable[[], Normalization], by: Callable[[int], tf.Tensor]):
    assert_exchanged(lambda: trained(make), [(entries(7, 1e3), by(7))], tolerance=1e-9)


LAID = {
    "micro-batches": {"micro_batches": 2},
    "replicated": {"variables": "replicated"},
    "sharded": {"variables": "sharded"},
    "compiled": {"jit_compile": True},
    "recomputed": {"recompute": 0.5},
    "mesh": {"mesh": {"batch": 2, "model": 2}, "devices": 4},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(own, marks=pytest.mark.long) if name == "compiled" else own for name, own in LAID.items()],
    ids=LAID,
)
@pytest.mark.parametrize(("make", "by"), [MADE["keras"], MADE["weights"]], ids=["keras", "weights"])
def test_every_layout(make: Callable[[], Normalization], by: Callable[[int], tf.Tensor], options: dict[str, Any]):
    assert_exchanged(lambda: trained(make), [(entries(n), by(n)) for n in (2, 7)], **options)


@pytest.mark.parametrize(("make", "by"), MADE.values(), ids=MADE)
def test_an_unknown_batch_and_shards_without_rows(make: Callable[[], Normalization], by: Callable[[int], tf.Tensor]):
    (single, single_variables), (many, many_variables) = trained(make), trained(make)
    signature = [tf.TensorSpec((None, *t.shape[1:]), t.dtype) for t in (entries(2), by(2))]
    parallel = gs.parallelize(tf.function(many, input_signature=signature), devices=3, tuning=AT_ONCE)
    for count in (7, 2, 1, 6):
        assert_close(parallel(entries(count), by(count)), single(entries(count), by(count)))
        assert_close([*map(tf.convert_to_tensor, many_variables)], [*map(tf.convert_to_tensor, single_variables)])
    plan = last_plan(parallel)
    assert not plan.rows
    assert exchanged(plan) == 1
    plan.check()
    check_emitted(plan, emit(plan))


@pytest.mark.parametrize("make", [keras_masked, tf_keras_masked, weighted], ids=["keras", "tf_keras", "weights"])
def test_a_shard_of_which_nothing_counts_and_all_of_them(make: Callable[[], Normalization]):
    """What does not count may be anything, if it is left out and not multiplied."""
    x, none = entries(6), tf.zeros((6, PLACES), tf.bool)
    kept = tf.repeat([False, False, True, True, True, False], PLACES)
    calls = [(x, tf.reshape(kept, (6, PLACES))), (x, none)]
    assert_exchanged(lambda: trained(make), calls)


def test_what_is_left_out_may_be_no_number():
    def make() -> Made:
        layer = keras.layers.BatchNormalization()
        layer.build((None, PLACES, CHANNELS))

        def step(x: tf.Tensor, kept: tf.Tensor) -> Any:
            y = layer(x, mask=kept, training=True)
            return tf.where(kept[..., None], y, 0)

        return step, layer.variables

    kept = mask(7)
    for wrong in (np.nan, np.inf, 1e200):
        x = tf.where(kept[..., None], entries(7), tf.constant(wrong, tf.float64))
        assert_exchanged(make, [(x, kept)])


def test_without_a_mean_there_is_none():
    """By no weight at all: a mean that is no number, and squares around it that are zero as nothing counts."""

    def step(x: tf.Tensor, kept: tf.Tensor) -> Any:
        kept = tf.broadcast_to(kept[..., None], tf.shape(x))
        total = tf.reduce_sum(tf.cast(kept, x.dtype), [0, 1])
        mean = tf.reduce_sum(tf.where(kept, x, 0), [0, 1]) / total
        squares = tf.reduce_sum(tf.square(tf.where(kept, x - mean, 0)), [0, 1])
        return mean, squares, squares / total, x + squares

    none = tf.zeros((6, PLACES), tf.bool)
    assert_exchanged(lambda: (step, []), [(entries(6), mask(6)), (entries(6), none)])


SIGNED = {
    "negative ones": lambda w: w - 1.0,
    "of no size": lambda w: 1e-300 * w,
    "large ones": lambda w: 1e8 * w,
    "that amount to nothing": lambda w: w - tf.reduce_mean(w),
    "that amount to nothing on a shard": lambda w: tf.constant([1, -1, 1, 1, 1, 1], w.dtype)[:, None, None] + 0 * w,
}


@pytest.mark.parametrize("signed", SIGNED.values(), ids=SIGNED)
@pytest.mark.parametrize("around", [0.0, 1e3])
def test_weights_of_any_sign(signed: Callable[[tf.Tensor], tf.Tensor], around: float):
    """Squares around the mean, and around another place."""

    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        total = tf.reduce_sum(w + tf.zeros_like(x), [0, 1])
        mean = tf.reduce_sum(w * x, [0, 1]) / (tf.abs(total) + 1.0)
        squares = tf.reduce_sum(w * (x - mean) ** 2, [0, 1])
        return squares, x + squares, total, mean

    w = signed(weights(6))
    assert_exchanged(lambda: (step, []), [(entries(6, around), w)], tolerance=1e-9 if around else None)


@pytest.mark.parametrize(("make", "by"), MADE.values(), ids=MADE)
def test_each_layer_waits_once_forward_and_once_backward(
    make: Callable[[], Normalization], by: Callable[[int], tf.Tensor]
):
    chains = [longest_chain(trained(make, count)[0], entries(16), by(16)) for count in (0, 1, 3)]
    assert chains == [chains[0], chains[0] + 2, chains[0] + 6]


def longest_chain(step: Callable[..., Any], *arguments: tf.Tensor, **options: Any) -> int:
    """Return how many exchanges follow each other on eight GPUs, by the plan and by what is emitted."""
    plan = gs.parallelize(step, devices=[f"GPU:{k}" for k in range(8)], **options).plan(*arguments)
    assert len(plan.longest_chain) == chain_in_graph(emit(plan))
    return len(plan.longest_chain)


# Statistics of an example over places that are cut


def groups(x: tf.Tensor) -> tf.Tensor:
    """Normalize groups of channels, by hand."""
    together = tf.reshape(x, [-1, 8, 6, 2, 2])
    mean, variance = tf.nn.moments(together, [1, 2, 4], keepdims=True)
    return tf.reshape((together - mean) * tf.math.rsqrt(variance + 1e-3), [-1, 8, 6, 4])


def left_out(x: tf.Tensor) -> tf.Tensor:
    """Normalize each channel by the entries of some places."""
    mean, variance = tf.nn.weighted_moments(x, [1, 2], tf.cast(x[..., :1] > 0, x.dtype), keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def of_layer(kind: str, **options: Any) -> Callable[[], Callable[[tf.Tensor], tf.Tensor]]:
    def make() -> Callable[[tf.Tensor], tf.Tensor]:
        layer = getattr(keras.layers, kind)(**options)
        layer.build((None, 8, 6, 4))
        return layer

    return make


CUT = {
    "groups by hand": lambda: groups,
    "places left out": lambda: left_out,
    "groups": of_layer("GroupNormalization", groups=2),
    "layer": of_layer("LayerNormalization", axis=[1, 2, 3], center=False, scale=False),
}


@pytest.mark.parametrize("make", CUT.values(), ids=CUT)
@pytest.mark.parametrize("axis", [1, 2])
def test_statistics_over_places_that_are_cut(make: Callable[[], Callable[[tf.Tensor], tf.Tensor]], axis: int):
    def made(normalization: Callable[[tf.Tensor], tf.Tensor] | None = None) -> Made:
        normalize, kernel = normalization or make(), tf.Variable(tf.constant(np.eye(4) + 0.3, tf.float64))

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                y = normalize(tf.sin(x @ kernel))
                loss = tf.reduce_sum(tf.sin(y))
            kernel.assign_sub(0.01 * tape.gradient(loss, kernel))
            return loss, y

        return step, [kernel]

    x = tf.random.stateless_normal((2, 8, 6, 4), [1, 2], dtype=tf.float64)
    plan = assert_law(made, [(x,)], devices=4, split={"x": axis}, tuning=AT_ONCE, at_home=None)
    assert len([c for c in plan.collectives if c.moves[0].source in (OWN_ROW, *MOMENTS)]) == 1, str(plan)
    chains = [longest_chain(own[0], x, split={"x": axis}) for own in (made(tf.identity), made())]
    assert chains[1] == chains[0] + 2


def test_weights_that_are_cut_along_another_axis():
    """Of as many rows as columns, which lie so: sums of other entries than theirs."""

    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        total = tf.reduce_sum(tf.broadcast_to(w, tf.shape(x)), [0, 1])
        mean = tf.reduce_sum(w * x, [0, 1]) / total
        squares = tf.reduce_sum(w * tf.square(x - mean), [0, 1])
        return squares, x + squares

    x = tf.random.stateless_normal((8, 8), [1, 2], dtype=tf.float64)
    w = tf.random.stateless_uniform((8, 1), [1, 3], dtype=tf.float64)
    for split, count in (({"x": 1, "w": None}, 0), ({"x": 0, "w": 0}, 1)):
        assert_exchanged(lambda: (step, []), [(x, w)], count, split=split)


def test_weights_that_are_the_same_on_all_devices():
    """They are cut only once it is known that their sum is wanted of what is cut."""

    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        mean, variance = tf.nn.weighted_moments(tf.sin(x), [0, 1], w, keepdims=True)
        return x - mean + variance, mean

    x, w = tf.random.stateless_normal((8, 4), [1, 2], dtype=tf.float64), weights(8)[:, 0]
    assert_exchanged(lambda: (step, []), [(x, w)], 0, split={"x": 1, "w": None})


@pytest.mark.parametrize("how", ["with a sign", "of the difference only", "of nothing"])
def test_masks_that_do_not_keep_the_whole_product(how: str):
    """Weights below zero behind a mask; and where a mask keeps nothing, 0 times a difference from no number is none."""

    def step(x: tf.Tensor, w: tf.Tensor, kept: tf.Tensor) -> Any:
        numbers = tf.cast(kept, x.dtype)
        if how == "with a sign":
            masked = tf.where(kept, w, tf.zeros_like(w))
            mean = tf.reduce_sum(masked * x, 0) / tf.reduce_sum(w * numbers, 0)
            squares = tf.reduce_sum(masked * tf.square(x - mean), 0)
        else:
            mean = tf.reduce_sum(tf.where(kept, x, tf.zeros_like(x)), 0) / tf.reduce_sum(numbers, 0)
            squares = tf.reduce_sum(tf.where(kept, x - mean, tf.zeros_like(x)) * (x - mean), 0)
        return squares, mean, x * squares

    x = tf.random.stateless_normal((7, CHANNELS), [1, 2], dtype=tf.float64)
    w = tf.random.stateless_normal((7, CHANNELS), [1, 3], dtype=tf.float64) + 0.3
    kept = tf.random.stateless_uniform((7, CHANNELS), [1, 4]) < 0.6
    kept &= (tf.range(CHANNELS) > 0) | (how != "of nothing")
    assert_exchanged(lambda: (step, []), [(x, w, kept)], int(how == "with a sign"))


def test_sums_that_are_not_broadcast_to_what_they_add_up():
    """Along an axis in the middle, which they do not have: such a sum is beside other entries than its own."""

    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        sums, totals = tf.reduce_sum(w * x, 2), tf.reduce_sum(w, 2)
        around = tf.reduce_mean(sums / totals, 0)[:, None]
        squares = tf.reduce_sum(w * tf.square(x - around), 2)
        return squares, x * squares[:, :, None]

    x = tf.random.stateless_normal((3, 3, 8, 3), [1, 2], dtype=tf.float64)
    w = tf.random.stateless_uniform((3, 3, 8, 3), [1, 3], dtype=tf.float64)
    assert_exchanged(lambda: (step, []), [(x, w)], 0, split={"x": 2, "w": 2})


# What is checked


def with_rows(plan: gs.inspect.Plan, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> gs.inspect.Plan:
    """Return a plan in which other rows are joined, on all devices."""
    [exchange] = [c for c in plan.collectives if c.moves[0].source == OWN_ROW]
    values = [
        dataclasses.replace(value, of=change(value.of)) if isinstance(value, Concatenation) else value
        for value in exchange.values
    ]
    changed = dataclasses.replace(exchange, values=tuple(values))
    return dataclasses.replace(plan, collectives=tuple([changed if c is exchange else c for c in plan.collectives]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[::-1], "in another order"),
        (lambda rows: rows[:2], "bytes"),
        (lambda rows: rows[:1] * 3, "order"),
    ],
    ids=["another order", "one is left out", "one is joined twice"],
)
def test_rows_that_are_joined_wrongly(change: Callable[[tuple[int, ...]], tuple[int, ...]], message: str):
    parallel = gs.parallelize(trained(keras_masked)[0], devices=3, tuning=AT_ONCE)
    plan = parallel.plan(entries(6), mask(6))
    with_rows(plan, lambda rows: rows).check()
    with pytest.raises(gs.errors.CheckError, match=message):
        with_rows(plan, change).check()
