"""Sums that shards wait for go from each to each at once, and mean and variance together: as between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import MOMENTS, REPLICATE, Partial, SingleDevice
from graphsplit.emission import check_emitted, emit
from graphsplit.emission.clusters import compile_clusters
from graphsplit.planning.costs.exchanges import EXCHANGE_BYTES, exchange_bytes_between
from tests.helpers.float64 import float64
from tests.helpers.law import assert_close, assert_law, rows
from tests.helpers.unknown_sizes import last_plan

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("float64")

layers = keras.layers
AT_ONCE = {"exchange_bytes": EXCHANGE_BYTES}
SHAPE = (4, 3, 2)  # of an image


def images(count: int, mean: float = 0.0) -> tf.Tensor:
    return mean + tf.random.stateless_normal((count, *SHAPE), [count, 3], dtype=tf.float64)


def network(optimizer: str = "sgd") -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
    """Two BatchNormalizations, a squeeze-and-excite block, an optimizer."""
    keras.utils.set_random_seed(1)
    pixels = keras.Input(SHAPE)
    x = layers.Conv2D(3, 3, padding="same", use_bias=False)(pixels)
    x = layers.Activation("tanh")(layers.BatchNormalization()(x))
    x = layers.BatchNormalization()(layers.Conv2D(3, 3, padding="same", use_bias=False)(x))
    gate = layers.Dense(3, "sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    model = keras.Model(pixels, layers.Dense(2)(layers.Flatten()(x * gate)))
    rule = keras.optimizers.SGD(0.1, 0.9) if optimizer == "sgd" else keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    rule.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        rule.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    return step, [*model.variables, *rule.variables]


def by_hand() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
    """Moments over rows and places, with a gradient through both, and the statistics returned."""
    scale, offset, kept = (tf.Variable(tf.constant(v, tf.float64)) for v in ([1.0, -2.0], [0.5, 0.1], [0.0, 0.0]))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(x, [0, 1, 2])
            variance = tf.reduce_mean((x - mean) ** 2, [0, 1, 2])
            loss = tf.reduce_sum(tf.sin(3 * ((x - mean) * tf.math.rsqrt(variance + 1e-3) * scale + offset)))
        by_scale, by_offset = tape.gradient(loss, [scale, offset])
        scale.assign_sub(0.1 * by_scale)
        offset.assign_sub(0.1 * by_offset)
        kept.assign(0.9 * kept + 0.1 * mean)
        return loss, variance, mean

    return step, [scale, offset, kept]


def merged(plan: gs.inspect.Plan) -> int:
    """Return how many variances are merged from those of the shards' own rows, each sent with its mean."""
    together = [c for c in plan.collectives if c.moves[0].source in MOMENTS]
    assert all(len(c.moves) == 2 for c in together), str(plan)
    return len(together)


def assert_merged(
    make: Callable[[], Any], sizes: Sequence[int], count: int, mean: float = 0.0, **options: Any
) -> gs.inspect.Plan:
    plan = assert_law(make, [(images(n, mean),) for n in sizes], tuning=AT_ONCE, at_home=None, **options)
    assert merged(plan) == count
    return plan


@pytest.mark.parametrize("devices", [3, 4])
def test_uneven_rows_and_fewer_than_devices(devices: int):
    assert_merged(network, (2, 1, 7, 8), 2, devices=devices)


def test_clipping_by_the_global_norm():
    assert_merged(lambda: network("adam"), (7, 7), 2)


@pytest.mark.parametrize(("mean", "tolerance"), [(0.0, None), (1e3, 1e-9)])
def test_moments_by_hand_and_a_mean_of_a_thousand_deviations(mean: float, tolerance: float | None):
    assert_merged(by_hand, (2, 7), 1, mean, tolerance=tolerance)


LAID = {
    "micro-batches": {"micro_batches": 2},
    "replicated": {"variables": "replicated"},
    "sharded": {"variables": "sharded"},
    "sharded, micro-batches": {"variables": "sharded", "micro_batches": 2},
    "compiled": {"jit_compile": True},
    "recomputed": {"recompute": 0.5},
    "mesh": {"mesh": {"batch": 2, "model": 2}, "devices": 4},
    "mesh, sharded": {"mesh": {"batch": 2, "model": 2}, "devices": 4, "variables": "sharded"},
    "buckets": {"variables": "replicated", "devices": 5},
}


@pytest.mark.parametrize("options", LAID.values(), ids=LAID)
def test_every_layout(options: dict[str, Any]):
    assert_merged(network, (2, 7), 2, **options)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stages_keep_two_steps(micro_batches: int):
    """A stage may begin between mean and variance."""
    assert_merged(network, (9, 7), 0, stages=2, micro_batches=micro_batches, devices=4)


@pytest.mark.parametrize("options", [{}, {"variables": "sharded"}, {"micro_batches": 2}], ids=str)
def test_an_unknown_batch_and_shards_without_rows(options: dict[str, Any]):
    (single, single_variables), (many, many_variables) = network(), network()
    signature = [tf.TensorSpec((None, *SHAPE), tf.float64)]
    parallel = gs.parallelize(tf.function(many, input_signature=signature), devices=3, tuning=AT_ONCE, **options)
    for count in (7, 2, 1, 6):
        assert_close(parallel(images(count)), single(images(count)))
        assert_close([*map(tf.convert_to_tensor, many_variables)], [*map(tf.convert_to_tensor, single_variables)])
    plan = last_plan(parallel)
    assert not plan.rows
    assert merged(plan) == 2
    plan.check()
    check_emitted(plan, emit(plan))


def test_a_tape_outside():
    scale, x = tf.Variable(tf.constant([1.0, -2.0], tf.float64)), images(7)

    def normalized(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.sin((x - mean) * tf.math.rsqrt(variance + 1e-3) * scale)

    results = []
    for function in (gs.parallelize(normalized, devices=3, tuning=AT_ONCE), normalized):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 3)
        results.append((loss, tape.gradient(loss, [x, scale])))
    assert_close(*results)


def test_fused_batch_normalization():
    def make() -> Any:
        scale, offset = tf.Variable([1.0, -2.0]), tf.Variable([0.5, 0.1])
        means, variances = tf.Variable([0.1, 0.2]), tf.Variable([1.1, 1.2])

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                    tf.cast(x, tf.float32), scale, offset, means, variances, exponential_avg_factor=0.25
                )
                loss = tf.reduce_sum(tf.sin(3 * y))
            by_scale, by_offset = tape.gradient(loss, [scale, offset])
            scale.assign_sub(0.1 * by_scale)
            means.assign(mean)
            return y, mean, variance, by_offset

        return step, [scale, offset, means, variances]

    assert_merged(make, (1, 7), 1, tolerance=3e-5)


SPREADS = {
    "moments": lambda x: tf.nn.moments(x, [0, 1, 2]),
    "moments that keep axes": lambda x: tf.nn.moments(x, [0], keepdims=True),
    "variance": lambda x: tf.math.reduce_variance(x, [0, 1]),
    "standard deviation": lambda x: tf.math.reduce_std(x, 0),
    "keras": lambda x: keras.ops.moments(x, [0, 1, 2]),
    "in bfloat16": lambda x: tf.math.reduce_variance(tf.cast(x, tf.bfloat16), [0, 1, 2]),
}


@pytest.mark.parametrize(
    ("spread", "tolerance"), [(spread, 2e-2 if "16" in name else None) for name, spread in SPREADS.items()], ids=SPREADS
)
def test_statistics_of_all_kinds(spread: Callable[[tf.Tensor], Any], tolerance: float | None):
    def make() -> Any:
        return (lambda x: (spread(x), x - tf.cast(tf.nest.flatten(spread(x))[-1], x.dtype))), []

    assert_merged(make, (2, 7), 1, tolerance=tolerance)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_mean_that_is_broadcast_along_another_axis(devices: int):
    """Rows as many as columns, each less the mean of another row: no square is around its own mean."""

    def step(x: tf.Tensor) -> Any:
        mean = tf.reduce_mean(x, 1)
        return tf.reduce_mean((x - mean) ** 2, 1), x * mean[:, None]

    calls = [(rows(4, 4),)]
    plan = assert_law(lambda: (step, []), calls, devices=devices, split={"x": 1}, tuning=AT_ONCE, at_home=None)
    assert merged(plan) == 0


def test_every_device_has_the_same_bits():
    """Each adds up in the same order."""
    x = tf.random.stateless_normal((7, 33), [1, 2])
    parallel = gs.parallelize(lambda x: x * tf.nn.moments(x, [0])[1], devices=5, tuning=AT_ONCE)
    factors = (parallel(x) / x).numpy()
    assert np.ptp(factors, axis=0).max() <= 3e-7 * factors.max()  # (of one multiplication and one division)
    plan = parallel.plan(x)
    [exchange] = [c for c in plan.collectives if c.moves[0].source in MOMENTS]
    orders = {value.of for value in exchange.values if type(value).__name__ == "Merged"}
    assert len(orders) == 1


def sums_at_once(plan: gs.inspect.Plan) -> list[list[str]]:
    """Return the sums that the shards send each other as one."""
    together = [b for b in plan.buckets if b.kind == "all-reduce" and b.moves[0].target == REPLICATE]
    return [[plan.program.ops[move.tensor.op].name for move in bucket.moves] for bucket in together]


def test_the_sums_of_a_backward_pass_are_one_message():
    plan = assert_merged(network, (7,), 2)
    assert [len(names) for names in sums_at_once(plan)] == [2, 2]


def test_what_waits_for_a_sum_is_not_joined_with_it():
    """A sum whose operation waits for what follows from another one, by a control edge only."""
    kept = tf.Variable(tf.zeros([2], tf.float64))

    def step(x: tf.Tensor) -> Any:
        first = tf.reduce_sum(x, [0, 1, 2])
        with tf.control_dependencies([kept.assign(tf.tanh(first))]):
            second = tf.reduce_sum(tf.square(x), [0, 1, 2])
        return x * tf.tanh(first) + tf.tanh(second)

    plan = assert_law(lambda: (step, []), [(images(7),)], tuning=AT_ONCE, at_home=None)
    assert all(len(names) < 2 for names in sums_at_once(plan))


def test_two_clusters_for_a_normalization():
    """What shards add up is compiled with what they compute from it."""
    step, _ = network()
    parallel = gs.parallelize(step, devices=3, tuning=AT_ONCE, jit_compile=True)
    graph = emit(parallel.plan(images(7)))
    nodes = compile_clusters(graph, graph.nodes, graph.outputs, graph.effects).nodes
    calls = [node for node in nodes if node.op == "PartitionedCall" and "CPU:1" in node.device]
    assert len(calls) == 5
    assert not [node.name for node in nodes if node.op in ("AddN", "Mean", "Sum") and "CPU:1" in node.device]


def test_between_which_devices():
    gpus = ["/device:GPU:0", "/device:GPU:1"]
    assert exchange_bytes_between(gpus, None) == EXCHANGE_BYTES
    assert exchange_bytes_between(gpus, 0) == 0
    assert exchange_bytes_between(["/device:CPU:0", "/device:CPU:1"], None) == 0
    hosts = [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(2)]
    assert exchange_bytes_between(hosts, None) == EXCHANGE_BYTES


def test_large_sums_go_through_one_device():
    x = tf.random.stateless_normal((6, 50), [1, 2])
    for most, is_small in ((2 * 200, True), (2 * 200 - 1, False)):
        plan = gs.parallelize(lambda x: x * tf.reduce_sum(x, 0), devices=3, tuning={"exchange_bytes": most}).plan(x)
        assert any(move.target == REPLICATE and move.kind == "all-reduce" for move in plan.moves) == is_small


def test_a_wrong_number_of_bytes():
    with pytest.raises(gs.errors.ArgumentError, match="exchange_bytes must be a number of bytes, at least 0, got -1"):
        gs.parallelize(lambda x: x, devices=2, tuning={"exchange_bytes": -1})


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"recompute": "blocks"}, {"recompute": 0.5}], ids=str)
def test_sums_that_run_later_are_not_joined(options: dict[str, Any]) -> None:
    """One that waits, in a later turn or to save memory, may follow from another one that is ready as early."""

    def make() -> Any:
        weights = [up, down, scale, bias] = [tf.Variable(0.5 * rows(*shape)) for shape in ((5, 8), (8, 4), (8,), (8,))]

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                h = x @ up
                _, variance = tf.nn.moments(h, [0])
                y = (h - tf.reduce_mean(h, 0)) / tf.sqrt(variance + 0.1) * scale + bias
                cubes, numbers, squares = tf.reduce_sum(y * y * y, 0), tf.reduce_sum(y), tf.reduce_sum(h * h, 0)
                result = tf.tanh((y * cubes * 0.01 + squares * 0.01 + numbers) @ down)
                loss = tf.reduce_mean(result * result)
            for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                variable.assign_sub(0.05 * gradient)
            return loss, result

        return step, weights

    calls = [(rows(count, 5),) for count in (7, 4)]
    assert_law(make, calls, sharded=["MatMul"], tuning=AT_ONCE, tolerance=1e-10, **options)


def test_parts_of_a_sum_that_is_not_small_are_added_up_where_they_lie():
    """Each part is small, but all of them together are not: no device gets what all have of all parts."""

    def make(layout: str) -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        weight = tf.Variable(tf.reshape(tf.range(60 * 90, dtype=tf.float64), (60, 90)) / 1e4)
        if layout != "home":
            gs.set_variable_layout([weight], layout, 3)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
            gradient = tape.gradient(loss, weight)
            is_finite = tf.cast(tf.reduce_all(tf.math.is_finite(gradient)), tf.float64)
            weight.assign_sub(0.1 * gradient * is_finite)
            return x * is_finite

        return step, [weight]

    ways = iter(["home", "sharded"])
    most = 2 * 20_000  # (a part of the weight has 14,400 bytes)
    plan = assert_law(lambda: make(next(ways)), [(rows(7, 60),)], tuning={"exchange_bytes": most})
    ops = plan.program.ops
    parts = [move for move in plan.moves if ops[move.tensor.op].divides and isinstance(move.source, Partial)]
    assert parts
    assert all(isinstance(move.target, SingleDevice) for move in parts), [str(move) for move in parts]


def test_moments_of_gradients_that_are_whole_are_taken_whole():
    """A normalized update: its squares are whole, and read in columns; their mean is of the one whole mean."""

    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        weights = [tf.Variable(0.3 * numbers) for numbers in (rows(7, 5), rows(7, 6)[:, :5])]

        def step(*inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                losses = [tf.reduce_mean(tf.tanh(x @ weight) ** 2) for x, weight in zip(inputs, weights, strict=True)]
                loss = tf.add_n(losses)
            total = tf.zeros((), tf.float64)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                mean, variance = tf.nn.moments(gradient, [1], keepdims=True)
                update = (gradient - mean) * tf.math.rsqrt(variance + 1e-3)
                update = tf.transpose(tf.transpose(update / tf.norm(update)))
                weight.assign_sub(0.05 * update)
                total += tf.reduce_mean(update)
            return loss, 1.0 + total  # (which is 0, but for rounding)

        return step, weights

    plan = assert_law(make, [(rows(2, 7), rows(2, 7) * 0.5)], tuning=AT_ONCE, tolerance=1e-10)
    assert not any(move.source in MOMENTS for move in plan.moves)
