"""What the programs are built from: a step made of a loss, small networks, rows of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.coverage_models import Training, integers, numbers


def adam(rate: float = 0.01) -> keras.optimizers.Optimizer:
    """Return Adam whose quotient is no more uncertain than the gradient is where that is nearly zero."""
    return keras.optimizers.Adam(rate, epsilon=1e-3)


def learner(weights: Sequence[Any], optimizer: keras.optimizers.Optimizer | None = None) -> Callable[..., None]:
    """Return what applies the gradients of a loss that a tape has seen."""
    optimizer = optimizer or adam()
    optimizer.build(weights)

    def learn(tape: tf.GradientTape, loss: tf.Tensor) -> None:
        optimizer.apply(tape.gradient(loss, weights), weights)

    learn.variables = optimizer.variables  # type: ignore[attr-defined]
    return learn


def training(
    loss: Callable[..., tf.Tensor],
    weights: Sequence[Any],
    inputs: Callable[[int], tuple[Any, ...]],
    optimizer: keras.optimizers.Optimizer | None = None,
    state: Sequence[Any] = (),
) -> Training:
    """Return the step that changes `weights` by the gradient of `loss(*arguments)`; `state` is what else changes."""
    learn = learner(weights, optimizer)

    def step(*arguments: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(*arguments)
        learn(tape, value)
        return value

    return Training(step, [*weights, *learn.variables, *state], inputs)  # type: ignore[attr-defined]


def weights_of(*models: keras.Model) -> list[Any]:
    """Return the trainable variables of several models, each once."""
    return list({id(w): w for model in models for w in model.trainable_variables}.values())


def perceptron(inputs: int, *widths: int, activation: str = "relu") -> keras.Sequential:
    """Return dense layers; the last is linear."""
    hidden = [layers.Dense(width, activation) for width in widths[:-1]]
    return keras.Sequential([layers.Input((inputs,)), *hidden, layers.Dense(widths[-1])])


def image_encoder(size: int, channels: int, width: int) -> keras.Sequential:
    """Return two strided convolutions with BatchNormalization and a projection."""
    parts: list[Any] = [layers.Input((size, size, channels))]
    for filters in (8, 16):
        parts += [layers.Conv2D(filters, 3, 2, "same"), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(width)])


def pictures(rows: int, size: int = 16, channels: int = 3, seed: int = 0) -> tf.Tensor:
    """Return images of numbers from 0 to 1."""
    rng = np.random.default_rng([rows, seed, 2])
    return tf.constant(rng.uniform(0, 1, (rows, size, size, channels)), keras.config.dtype_policy().compute_dtype)


def draws(seed: int) -> keras.random.SeedGenerator:
    """Return a source of random numbers whose state is a variable."""
    return keras.random.SeedGenerator(seed)


def labels(rows: int, classes: int = 5, seed: int = 0) -> tf.Tensor:
    """Return one class for each row."""
    return integers(classes, rows, seed=seed)


def classify(logits: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy."""
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(target, logits, from_logits=True))


__all__ = [
    "Training",
    "adam",
    "classify",
    "draws",
    "image_encoder",
    "integers",
    "labels",
    "learner",
    "numbers",
    "perceptron",
    "pictures",
    "training",
    "weights_of",
]
