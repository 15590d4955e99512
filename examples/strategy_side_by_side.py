"""One Keras classifier of handwritten digits, trained on one device, under MirroredStrategy and with graphsplit.

The model and the call of `fit` are the same in all three columns; the numbers are compared. The digits are the 1,797
real ones of scikit-learn (pip install scikit-learn).

python examples/strategy_side_by_side.py --samples 330 --batch 64 --epochs 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from machine import devices
from sklearn.datasets import load_digits

import graphsplit as gs

layers = keras.layers


def classifier() -> keras.Model:
    """Return the convolutional classifier."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def compiled(model: keras.Model) -> keras.Model:
    """Compile, as every script does."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def main() -> None:
    """Print the three learning curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    names = devices(options.devices)
    digits = load_digits()
    x = (digits.images[: options.samples, :, :, None] / 16).astype("float32")
    y = digits.target[: options.samples]

    def mirrored() -> keras.Model:
        with tf.distribute.MirroredStrategy(list(names)).scope():
            return compiled(classifier())

    ways: dict[str, Callable[[], keras.Model]] = {
        "one device": lambda: compiled(classifier()),
        "MirroredStrategy": mirrored,
        "graphsplit": lambda: compiled(gs.multi_gpu_model(classifier(), names)),
    }
    losses = {}
    for name, make in ways.items():
        history = make().fit(x, y, batch_size=options.batch, epochs=options.epochs, shuffle=False, verbose=0).history
        losses[name] = np.array(history["loss"])
    print(f"loss of each epoch, {options.samples} digits, batches of {options.batch}, {len(names)} devices")
    for name, values in losses.items():
        difference = np.abs(values - losses["one device"]).max()
        print(f"{name:>17}: {' '.join(f'{v:.5f}' for v in values)}   largest difference {difference:.1g}")


if __name__ == "__main__":
    main()
