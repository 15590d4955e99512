"""A training step of a regression."""

from __future__ import annotations

import keras
import tensorflow as tf


def regression_step(model: keras.Model):
    """Return a training step of a model, by the squared error, and its variables."""
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    return step, [*model.variables, *optimizer.variables]
