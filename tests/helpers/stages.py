"""A perceptron that is cut into stages."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.helpers.law import rows


def training(weights: list[Any], forward: Any):
    """Return a training step of a function of rows and variables with the shapes of `weights`, and the variables."""
    variables = [tf.Variable(w) for w in weights]

    def step(x, y):
        with tf.GradientTape() as tape:
            h = forward(x, variables)
            loss = tf.reduce_mean((h - y) ** 2)
        for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * gradient)
        return loss, h

    return step, variables


def perceptron(depth: int, width: int = 6):
    weights = [rows(width, width) / 3 for _ in range(depth)]

    def forward(h, variables):
        for w in variables:
            h = tf.tanh(h @ w)
        return h

    return lambda: training(weights, forward)
