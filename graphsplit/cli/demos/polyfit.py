"""The first try: fit y = 5x^2 + 0x + 3 by gradient descent, as the make_parallel article does."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from graphsplit.api.decorators import parallelize
from graphsplit.cli.demos.display import console, demo_devices, progress, table
from graphsplit.core.devices import short_name

TRUE_COEFFICIENTS = (5.0, 0.0, 3.0)
LEARNING_RATE = 0.1


def training_step() -> tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], tf.Variable]:
    """Return a new training step, written for one device, and the coefficients that it fits, shape [3, 1]."""
    w = tf.Variable(tf.zeros([3, 1]), name="w")
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build([w])

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = tf.stack([tf.square(x), x, tf.ones_like(x)], 1)
            prediction = tf.squeeze(tf.matmul(features, w), 1)
            loss = tf.reduce_mean(tf.square(prediction - y))
        optimizer.apply([tape.gradient(loss, w)], [w])
        return loss

    return step, w


def batches(steps: int, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `steps` batches of points (x, y), x uniform in [-10, 10], always the same ones."""
    generator = np.random.default_rng(0)
    xs = generator.uniform(-10, 10, (steps, batch)).astype(np.float32)
    return [(x, (5 * x**2 + 3).astype(np.float32)) for x in xs]


def run(devices: int, batch: int, steps: int) -> float:
    """Fit on one device and on several with the same data, print both, return the largest difference."""
    names = demo_devices(devices)
    data = batches(steps, batch)
    single_step, single_w = training_step()
    parallel_step, parallel_w = training_step()
    single = tf.function(single_step)
    parallel = parallelize(parallel_step, devices=names)
    difference = 0.0
    for x, y in progress(data, f"fitting on 1 and on {len(names)} devices"):
        points = tf.constant(x), tf.constant(y)
        single(*points)
        parallel(*points)
        difference = max(difference, float(tf.reduce_max(tf.abs(single_w - parallel_w))))
    rows = [
        [power, true, f"{float(one):.4f}", f"{float(many):.4f}"]
        for power, true, one, many in zip(
            ("x^2", "x", "1"), TRUE_COEFFICIENTS, single_w[:, 0], parallel_w[:, 0], strict=True
        )
    ]
    label = f"{len(names)} devices ({', '.join(short_name(n) for n in names)})"
    table(f"Coefficients after {steps} steps", ["term", "true", "1 device", label], rows)
    console.print(str(parallel.plan(*points)), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Largest difference of a coefficient at any step: {difference:.2g}", highlight=False)
    return difference
