"""A training step in named stages."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.helpers.law import rows


def network(stages: int, place: Any, widths: int = 6):
    """Return a function of so many stages of two layers, and its variables."""
    weights = [tf.Variable(rows(widths, widths) / 3) for _ in range(2 * stages)]

    def stage(number: int) -> Any:
        first, second = weights[2 * number : 2 * number + 2]
        return lambda h: tf.tanh(tf.tanh(h @ first) @ second)

    parts = [place(stage(number), number) for number in range(stages)]

    def forward(x):
        for part in parts:
            x = part(x)
        return x

    return forward, weights


def training(stages: int, place: Any):
    forward, weights = network(stages, place)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - y) ** 2)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    return step, weights


def named(function: Any, number: int) -> Any:
    function._fn.__name__ = f"part{number}"
    function.__name__ = f"part{number}"
    return function
