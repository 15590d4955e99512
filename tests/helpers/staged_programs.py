"""Programs that are cut into stages: an MLP, and what trains any, with slots and one norm of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

HIDDEN = 12

Made = tuple[list[tf.Variable], Callable[..., Any]]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape) / 2


def trained(variables: Mapping[str, np.ndarray], loss_of: Callable[..., tf.Tensor]) -> Made:
    """Return variables with their slots, and a step of Adam that clips by the norm of all gradients."""
    own = {name: tf.Variable(value, name=name) for name, value in variables.items()}
    slots = {name: [tf.Variable(value * 0, name=f"{name}/slot_{k}") for k in "12"] for name, value in variables.items()}

    def step(*batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(own, *batch)
        found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, list(own.values()))]
        gradients, norm = tf.clip_by_global_norm(found, 0.5)
        for (name, weight), gradient in zip(own.items(), gradients, strict=True):
            first, second = slots[name]
            first.assign(0.9 * first + 0.1 * gradient)
            second.assign(0.99 * second + 0.01 * gradient**2)
            weight.assign_sub(0.1 * first / (tf.sqrt(second) + 1e-2))
        return loss, norm

    return [*own.values(), *[slot for pair in slots.values() for slot in pair]], step


def perceptron() -> Made:
    sizes = {"0/up": (7, HIDDEN), "0/down": (HIDDEN, 6), "1/up": (6, HIDDEN), "1/down": (HIDDEN, 5)}
    biases = {"0/bias": (6,), "1/bias": (5,)}

    def loss(own: Mapping[str, tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        for k in "01":
            x = tf.tanh(tf.nn.relu(x @ own[f"{k}/up"]) @ own[f"{k}/down"] + own[f"{k}/bias"])
        return tf.reduce_mean((x - y) ** 2)

    return trained({name: numbers(*size) for name, size in {**sizes, **biases}.items()}, loss)


def rows(count: int) -> list[tf.Tensor]:
    return [tf.constant(numbers(count, 7, seed=1)), tf.constant(numbers(count, 5, seed=2))]
