"""A small convolutional network with BatchNormalization on the 1,797 handwritten digits of scikit-learn.

Computed in float64: in float32 the order of a sum over the batch, which differs by device, is amplified from step to
step, as any other rounding is, and would blur the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from graphsplit.api.decorators import parallelize
from graphsplit.core.errors import UnsupportedError
from graphsplit.core.requirements import how_to_install
from graphsplit.demos.display import console, demo_devices, progress, table

TEST_IMAGES = 297


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, float64 [1797, 8, 8, 1] from 0 to 1, and their digits, int64 [1797], shuffled."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UnsupportedError(
            "graphsplit demo digits needs scikit-learn, which carries the images: "
            f"{how_to_install('scikit-learn', 'digits')}."
        ) from error
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    return data.images[order, :, :, None].astype(np.float64) / 16, data.target[order].astype(np.int64)


def network() -> keras.Model:
    """Return the network, with the same initial weights every time."""
    keras.utils.set_random_seed(0)
    layers, double = keras.layers, {"dtype": "float64"}
    return keras.Sequential(
        [
            layers.Input((8, 8, 1), dtype="float64"),
            layers.Conv2D(16, 3, padding="same", use_bias=False, **double),
            layers.BatchNormalization(momentum=0.9, **double),
            layers.Activation("relu", **double),
            layers.MaxPooling2D(**double),
            layers.Conv2D(32, 3, padding="same", use_bias=False, **double),
            layers.BatchNormalization(momentum=0.9, **double),
            layers.Activation("relu", **double),
            layers.GlobalAveragePooling2D(**double),
            layers.Dense(10, **double),
        ]
    )


def training(model: keras.Model) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a training step (gives the loss) and a test step (gives the number of right answers)."""
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        answers = tf.argmax(model(images, training=False), axis=1)
        return tf.reduce_sum(tf.cast(answers == labels, tf.int32))

    return train_step, test_step


def run(devices: int, batch: int, epochs: int) -> float:
    """Train on one device and on several, print both learning curves, return their largest difference."""
    images, labels = load()
    names = demo_devices(devices)
    one = [tf.function(step) for step in training(network())]
    many = [parallelize(step, devices=names) for step in training(network())]
    rows, difference = [], 0.0
    starts = range(0, len(images) - TEST_IMAGES, batch)
    for epoch in range(epochs):
        losses: list[tuple[float, float]] = []
        for start in progress(starts, f"epoch {epoch + 1}"):
            chosen = slice(start, min(start + batch, len(images) - TEST_IMAGES))
            data = tf.constant(images[chosen]), tf.constant(labels[chosen])
            losses.append((float(one[0](*data)), float(many[0](*data))))
        test = tf.constant(images[-TEST_IMAGES:]), tf.constant(labels[-TEST_IMAGES:])
        right = int(one[1](*test)), int(many[1](*test))
        means = np.mean(losses, axis=0)
        difference = max(difference, float(np.max(np.abs(np.subtract(*zip(*losses, strict=True))))))
        accuracies = [f"{n / TEST_IMAGES:.1%}" for n in right]
        rows.append([epoch + 1, f"{means[0]:.5f}", f"{means[1]:.5f}", *accuracies])
    columns = [
        "epoch",
        "loss, 1 device",
        f"loss, {len(names)} devices",
        "test, 1 device",
        f"test, {len(names)} devices",
    ]
    table("Handwritten digits", columns, rows)
    console.print(str(many[0].plan(*data)), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Largest difference of the loss at any step: {difference:.2g}", highlight=False)
    return difference
