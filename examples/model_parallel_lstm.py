"""Model parallelism: one shared LSTM encodes two sequences, each on its own device, concatenated on the CPU.

Keras 3 ignores `tf.device` around layers, and a plain tape puts backward on the first device whatever forward did. What
`on_device` gives a device stays there, forward and backward. With `--shards 2`, each of the two encoders has two
devices of its own, and every batch is split as well.

python examples/model_parallel_lstm.py --samples 64 --steps 20
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
    """Learn whether two sequences were made by the same rule, as the example of the Keras documentation does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--timesteps", type=int, default=140)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    names = devices(2 * options.shards)
    first, second = names[: options.shards], names[options.shards :]
    keras.utils.set_random_seed(0)

    shared_lstm, head = layers.LSTM(options.units), layers.Dense(1, activation="sigmoid")
    shared_lstm.build((None, options.timesteps, options.features))
    head.build((None, 2 * options.units))
    variables = [*shared_lstm.trainable_variables, *head.trainable_variables]
    loss_of, optimizer = keras.losses.BinaryCrossentropy(), keras.optimizers.RMSprop(0.001)
    optimizer.build(variables)

    encode_a, encode_b = gs.on_device(shared_lstm, first), gs.on_device(shared_lstm, second)
    merge = gs.on_device(layers.Concatenate(name="merge"), "CPU:0")

    @gs.parallelize(devices=first)
    def train_step(a: tf.Tensor, b: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            merged = merge([encode_a(a), encode_b(b)])
            loss = loss_of(same, head(merged))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    generator = np.random.default_rng(0)
    shape = (options.samples, options.timesteps, options.features)
    a, b = (tf.constant(generator.normal(size=shape), tf.float32) for _ in range(2))
    same = tf.constant(generator.integers(0, 2, (options.samples, 1)), tf.float32)
    losses = [float(train_step(a, b, same)) for _ in range(options.steps)]
    print(train_step.plan(a, b, same))
    products = train_step.placement(a, b, same, actual=True).select("MatMul")
    for device in names:
        backward = [op.backward for op in products if op.device == device]
        print(f"{device}: {backward.count(False)} matrix products forward, {backward.count(True)} backward")
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {options.steps} steps")


if __name__ == "__main__":
    main()
