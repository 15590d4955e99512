"""Mixed precision: gradients that are not finite in one shard skip the step, as they do on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import graphsplit as gs
from tests.helpers.law import assert_law
from tests.helpers.policies import policy

__all__ = ["policy"]


def rows(count: int, bad: int | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count, 8, 8, 2)).astype(np.float32)
    if bad is not None:
        x[bad, 0, 0, 0] = np.inf
    return tf.constant(x), tf.constant(rng.integers(0, 4, count))


def make(optimizer: Any) -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu", bias_initializer="ones"),
            layers.LayerNormalization(beta_initializer="ones"),
            layers.Flatten(),
            layers.Dense(4, dtype="float32", bias_initializer="ones"),
        ]
    )
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss, tf.argmax(logits, 1)

    return step, model, optimizer


KINDS = {
    "sgd": lambda: optimizers.SGD(0.01),
    "clipped": lambda: optimizers.SGD(0.01, 0.9, global_clipnorm=0.1),
}


# Products of 16-bit numbers are rounded to 11 (bfloat16: 8) bits, and the weight gradient of each shard once more than
# on one device: 1e-3 (8e-3) of a gradient that is a hundredth of the weight.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 1e-3), ("mixed_bfloat16", 8e-3)], indirect=["policy"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision(policy: str, tolerance: float, kind: str):
    def made() -> tuple[Any, Any]:
        inner = KINDS[kind]()
        step, model, optimizer = make(
            optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=2)
            if policy == "mixed_float16"
            else inner
        )
        # (a moment is a gradient, as uncertain as its sixteen bits)
        return step, [*model.variables, *[v for v in optimizer.variables if "momentum" not in v.path]]

    kinds = ["Conv2D", "Conv2DBackpropFilter", "MatMul"]
    plan = assert_law(made, [rows(7), rows(7), rows(5)], sharded=kinds, tolerance=tolerance, strict=True)
    half = tf.float16 if policy == "mixed_float16" else tf.bfloat16
    assert {op.out_dtypes[0] for op in plan.sharded_ops if op.type == "Conv2D"} == {half}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.parametrize("bad", [0, 6])
def test_a_gradient_that_is_not_finite_in_one_shard_skips_the_step(policy: str, bad: int):
    seen = []
    for parallel in (False, True):
        inner = optimizers.SGD(0.01, 0.9)
        step, model, optimizer = make(optimizers.LossScaleOptimizer(inner, initial_scale=64.0))
        step = gs.parallelize(step, devices=3) if parallel else tf.function(step)
        step(*rows(7))
        before = [tf.identity(v) for v in model.variables]
        step(*rows(7, bad))
        after = [tf.identity(v) for v in model.variables]
        for b, a in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)  # skipped, to the bit
        step(*rows(7))
        assert any(np.any(a != v) for a, v in zip(after, model.variables, strict=True))  # and not the next one
        seen.append([float(optimizer.dynamic_scale.numpy()), int(optimizer.iterations), int(inner.iterations)])
    assert seen[0] == seen[1]
    assert seen[0][0] == 32.0


@pytest.mark.parametrize(
    ("reduce", "numbers"),
    [(tf.reduce_mean, [65504.0] * 7), (tf.reduce_sum, [2048.0, 1.0, 0.0, 2048.0, 1.0, 2048.0, 1.0])],
)
def test_a_sum_is_rounded_to_a_coarser_type_once_it_is_whole(reduce: Any, numbers: list[float]):
    """Rounded parts of a mean of the largest float16 add up to infinity."""

    def fn(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(reduce(tf.cast(x, tf.float32)), tf.float16)

    x = tf.constant(numbers, tf.float16)
    parallel = gs.parallelize(fn, devices=3)
    assert parallel(x).numpy() == fn(x).numpy() == np.float16(reduce(np.float32(numbers)))
    assert len(parallel.plan(x).sharded_ops) == 2  # the cast of rows, and their reduction
