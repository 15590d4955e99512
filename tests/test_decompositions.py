"""Fused and reading ops, taken apart while a program is read."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close

pytestmark = pytest.mark.sampled(quick=5)


def normal(*shape: int, seed: int = 0, dtype: tf.DType = tf.float32) -> tf.Tensor:
    return tf.cast(tf.random.stateless_normal(shape, [shape[0], seed]), dtype)


def normalise(x: tf.Tensor, scale: Any, offset: Any, layout: str = "NHWC", factor: float = 1.0) -> list[tf.Tensor]:
    statistics = tf.constant([0.1, 0.2, 0.3]), tf.constant([1.1, 1.2, 1.3])
    results = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=statistics[0], variance=statistics[1], epsilon=1e-3,
        exponential_avg_factor=factor, data_format=layout,
    )  # fmt: skip
    return list(results[:3])  # the rest is the kernel's own business


def with_gradients(layout: str = "NHWC", factor: float = 1.0) -> Any:
    scale, offset = tf.Variable([1.0, -2.0, 0.5]), tf.Variable([0.5, 0.1, -1.0])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, mean, variance = normalise(x, scale, offset, layout, factor)
            loss = tf.reduce_sum(tf.sin(3 * tf.cast(y, tf.float32)))
        return y, mean, variance, tape.gradient(loss, [x, scale, offset])

    return step


# float32: two sums of rounding errors, squared and divided; float16: rounded once more or once less than in the kernel
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shape", "layout", "factor", "dtype", "tolerance"),
    [
        ((4, 5, 3), "NHWC", 1.0, tf.float32, 2e-5),
        ((4, 5, 3), "NHWC", 0.25, tf.float32, 2e-5),
        ((2, 3, 4, 3), "NDHWC", 1.0, tf.float32, 2e-5),
        ((4, 5, 3), "NHWC", 1.0, tf.float16, 5e-3),
    ],
)
@pytest.mark.parametrize("count", [1, 7])
def test_fused_batch_normalisation_in_training(shape, layout, factor, dtype, tolerance, count: int):
    x, step = normal(count, *shape, dtype=dtype), with_gradients(layout, factor)
    parallel = gs.parallelize(step, devices=3, strict=True)
    assert_close(parallel(x), tf.function(step)(x), tolerance=tolerance)
    kinds = {op.type for op in parallel.plan(x).program.ops}
    assert not any(kind.startswith("FusedBatchNorm") for kind in kinds)


def test_channels_first():
    """No CPU kernel takes this layout, so what is compared with is the other one."""
    x = normal(7, 4, 5, 3)
    y, mean, variance, (dx, *rest) = gs.parallelize(with_gradients("NCHW"), devices=3)(tf.transpose(x, [0, 3, 1, 2]))
    back = [0, 2, 3, 1]
    actual = tf.transpose(y, back), mean, variance, [tf.transpose(dx, back), *rest]
    assert_close(actual, tf.function(with_gradients())(x), tolerance=2e-5)


def test_stays_fused_where_a_branch_differentiates_it():
    scale, offset = tf.Variable([1.0, -2.0, 0.5]), tf.Variable([0.5, 0.1, -1.0])

    def step(x, flag):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(normalise(x, scale, offset)[0] ** 3)
        return tf.cond(flag, lambda: tape.gradient(loss, x), lambda: x)

    parallel, x = gs.parallelize(step, devices=3), normal(7, 4, 5, 3)
    assert_close(parallel(x, tf.constant(True)), tf.function(step)(x, tf.constant(True)), tolerance=2e-5)
    reasons = [
        reason for op, reason in parallel.plan(x, tf.constant(True)).unsharded_ops if op.type == "FusedBatchNormV3"
    ]
    assert reasons == ["it normalises with statistics of the whole batch in one fused kernel"]


@pytest.mark.parametrize("nested", [False, True])
def test_gathers_from_variables_are_sharded_and_keep_their_order(nested: bool):
    def make():
        table = tf.Variable(tf.reshape(tf.range(60.0, dtype=tf.float64), [5, 4, 3]))

        def step(ids):
            before = tf.gather_nd(table, ids[:, None]) if nested else tf.nn.embedding_lookup(table, ids)
            table.scatter_sub(tf.IndexedSlices(before, ids))
            return before, tf.nn.embedding_lookup(table, ids), table.read_value()

        return table, step

    ids = tf.constant([0, 3, 4, 1, 3, 2, 0])
    (table, step), (other, again) = make(), make()
    parallel = gs.parallelize(again, devices=3)
    assert_close(parallel(ids), tf.function(step)(ids))
    assert_close(other.read_value(), table.read_value())
    plan = parallel.plan(ids)
    assert [op.type for op in plan.rows_kept] == ["ResourceScatterSub"]
    assert ("GatherNd" if nested else "GatherV2") in {op.type for op in plan.sharded_ops}


def test_a_shape_that_is_known_is_not_ensured_again():
    x = normal(7, 4)
    parallel = gs.parallelize(lambda x: tf.tanh(tf.ensure_shape(tf.exp(x), [7, 4])), devices=3, strict=True)
    assert_close(parallel(x), tf.tanh(tf.exp(x)))
    assert "Tanh" in {op.type for op in parallel.plan(x).sharded_ops}


def test_numbers_are_checked_on_the_shards():
    parallel = gs.parallelize(lambda x: tf.debugging.check_numerics(tf.math.log(x), "odd") * 2, devices=3, strict=True)
    x = tf.range(1.0, 8.0)
    assert_close(parallel(x), tf.math.log(x) * 2)
    assert "CheckNumerics" in {op.type for op in parallel.plan(x).sharded_ops}
    with pytest.raises(tf.errors.InvalidArgumentError, match="odd : Tensor had Inf"):
        parallel(tf.concat([x[:6], [0.0]], 0))
