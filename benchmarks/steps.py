"""One workload's step, written for one device, and the parts that other contestants put together otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from benchmarks import networks
from benchmarks.workloads import OPTIMIZERS, Workload


@dataclass(frozen=True)
class Parts:
    """A model with the optimizer that trains it, both built."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    regression: bool

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Return the mean loss over the rows, in training mode."""
        predicted = self.model(x, training=True)
        if self.regression:
            return tf.reduce_mean(tf.square(predicted - y))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=predicted))

    def gradients(self, x: tf.Tensor, y: tf.Tensor, scale: float = 1.0) -> tuple[tf.Tensor, list[Any]]:
        """Return the loss times `scale`, and its gradients by the trainable variables."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y) * scale if scale != 1.0 else self.loss(x, y)
        return loss, tape.gradient(loss, self.model.trainable_variables)

    def apply(self, gradients: list[Any]) -> None:
        self.optimizer.apply(gradients, self.model.trainable_variables)


def make_parts(found: Workload) -> Parts:
    """Return the model and the optimizer, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    model = getattr(networks, found.network)(**found.options)
    name, options = OPTIMIZERS[found.optimizer]
    optimizer = getattr(keras.optimizers, name)(**options)
    optimizer.build(model.trainable_variables)
    return Parts(model, optimizer, found.inputs == "points")


def single_device_step(parts: Parts, mode: str) -> Callable[..., tf.Tensor]:
    """Return the step that everybody has to equal: `(x, y) -> loss`, or `x -> predictions`."""

    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss, gradients = parts.gradients(x, y)
        parts.apply(gradients)
        return loss

    def predict(x: tf.Tensor) -> tf.Tensor:
        return parts.model(x, training=False)

    return train if mode == "training" else predict
