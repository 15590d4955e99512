"""Model parallelism: one shared LSTM encodes two sequences, each on its own device, concatenated on the CPU.

Keras 3 ignores `tf.device` around layers, and a plain tape puts backward on the first device whatever forward did. A
layer that is parallelized over one device stays there, forward and backward. With a list of devices each, the stages of
a model share a batch as well.

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
    options = parser.parse_args()
    first, second = devices(2)
    keras.utils.set_random_seed(0)

    shared_lstm, head = layers.LSTM(options.units), layers.Dense(1, activation="sigmoid")
    shared_lstm.build((None, options.timesteps, options.features))
    head.build((None, 2 * options.units))
    variables = [*shared_lstm.trainable_variables, *head.trainable_variables]
    loss_of, optimizer = keras.losses.BinaryCrossentropy(), keras.optimizers.RMSprop(0.001)
    optimizer.build(variables)

    encode_a = gs.parallelize(shared_lstm, devices=[first])
    encode_b = gs.parallelize(shared_lstm, devices=[second])

    @tf.function
    def train_step(a: tf.Tensor, b: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            encoded_a, encoded_b = encode_a(a), encode_b(b)
            with tf.device("CPU:0"):
                merged = tf.concat([encoded_a, encoded_b], axis=-1)
            loss = loss_of(same, head(merged))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    generator = np.random.default_rng(0)
    shape = (options.samples, options.timesteps, options.features)
    a, b = (tf.constant(generator.normal(size=shape), tf.float32) for _ in range(2))
    same = tf.constant(generator.integers(0, 2, (options.samples, 1)), tf.float32)
    losses = [float(train_step(a, b, same)) for _ in range(options.steps)]
    for name, encode, sequence in (("a", encode_a, a), ("b", encode_b, b)):
        print(f"sequence {name}: {', '.join(encode.plan(sequence).devices)}")
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {options.steps} steps")


if __name__ == "__main__":
    main()
