"""A training step for micro-batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.helpers.law import rows
from tests.helpers.regression import regression_step


def singles(*arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return tuple(tf.cast(a, tf.float32) for a in arguments)


GIVEN = singles(rows(11, 6), rows(11, 3))


def training(*hidden: Any):
    """Return a training step of a network with hidden layers between two dense ones, and its variables."""
    keras.utils.set_random_seed(3)
    made = [layer() for layer in hidden]
    return regression_step(keras.Sequential([layers.Input((6,)), layers.Dense(5, "tanh"), *made, layers.Dense(3)]))
