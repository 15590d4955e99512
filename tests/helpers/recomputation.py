"""A network with blocks, and its training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Step = Callable[..., tf.Tensor]


def block(x: Any, number: int, width: int) -> Any:
    named = lambda name: f"block_{number}_{name}"  # noqa: E731
    h = keras.layers.LayerNormalization(name=named("before"))(x)
    h = keras.layers.MultiHeadAttention(2, width // 2, name=named("attention"))(h, h)
    h = keras.layers.Dropout(0.2, seed=number, name=named("dropout"))(h)
    x = keras.layers.Add(name=named("sum"))([x, h])
    h = keras.layers.Dense(4 * width, "gelu", name=named("up"))(x)
    h = keras.layers.BatchNormalization(momentum=0.9, name=named("statistics"))(h)
    h = keras.layers.Dense(width, name=named("down"))(h)
    return keras.layers.Add(name=named("end"))([x, h])


def network(blocks: int = 3, tokens: int = 6, width: int = 8) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = given = keras.Input((tokens, width))
    for number in range(blocks):
        x = block(x, number, width)
    return keras.Model(given, keras.layers.Dense(3, name="head")(x))


def training(model: keras.Model, rate: float = 0.05) -> Step:
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    step.variables = [*model.variables, *optimizer.variables]  # type: ignore[attr-defined]
    return step
