"""The seven steps of a hand-written multi-GPU training loop, as graphsplit makes it: one function.

By hand:                                              Here:
1. a model, a copy on every device                    1. a model
2. a loss, divided by the global batch size           2. a loss
3. an optimizer, its variables replicated               3. an optimizer
4. split the batch, run each device on its part       4-6. @gs.parallelize
5. compute gradients on each device
6. merge them, wait for all devices
7. update the variables of every copy                 7. optimizer.apply

python examples/training_loop.py --steps 100
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from machine import devices

import graphsplit as gs

layers = keras.layers


def main() -> None:
    """Train on one device and on several, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=61)
    options = parser.parse_args()
    names = devices(options.devices)

    def training() -> tuple[keras.Model, object]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Input((8,)), layers.Dense(32, "tanh"), layers.Dropout(0.1), layers.Dense(1)])
        loss_of = keras.losses.MeanSquaredError()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
        optimizer.build(model.trainable_variables)

        def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        return model, train_step

    (single_model, single_step), (model, train_step) = training(), training()
    single_step = tf.function(single_step)
    train_step = gs.parallelize(train_step, devices=names)

    generator = np.random.default_rng(0)
    for _ in range(options.steps):
        x = tf.constant(generator.normal(size=(options.batch, 8)), tf.float32)
        y = tf.reduce_sum(tf.sin(x), 1, keepdims=True)
        losses = float(single_step(x, y)), float(train_step(x, y))
    print(train_step.plan(x, y))
    print(f"loss of the last step: {losses[0]:.6f} on one device, {losses[1]:.6f} on {len(names)}")
    pairs = zip(single_model.get_weights(), model.get_weights(), strict=True)
    print(f"largest difference of a weight: {max(np.abs(a - b).max() for a, b in pairs):.1g}")


if __name__ == "__main__":
    main()
