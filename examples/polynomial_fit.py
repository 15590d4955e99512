"""The polynomial fit of the make_parallel article, in TensorFlow 2: fit w in y = w0 x^2 + w1 x + w2.

python examples/polynomial_fit.py --steps 2000
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from machine import devices

import graphsplit as gs


def main() -> None:
    """Fit with a step that runs on all devices, forward, backward and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()

    names = devices(options.devices)
    w = tf.Variable(tf.zeros([3, 1]))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([w])

    @gs.parallelize(devices=names)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            f = tf.stack([tf.square(x), x, tf.ones_like(x)], 1)
            loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(f, w), 1) - y))
        optimizer.apply([tape.gradient(loss, w)], [w])
        return loss

    generator = np.random.default_rng(0)
    for _ in range(options.steps):
        x = tf.constant(generator.uniform(-10.0, 10.0, size=100), tf.float32)
        train_step(x, 5 * tf.square(x) + 3)
    print(train_step.plan(x, x))
    print("w =", [f"{value:.2f}" for value in w.numpy()[:, 0]])


if __name__ == "__main__":
    main()
