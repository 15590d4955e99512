"""MiniGoogLeNet on data of CIFAR-10's shape: time of an epoch on one device and on several, same numbers.

The images are made up (each class a pattern under noise), so that nothing has to be downloaded. For an honest ratio on
logical CPU devices give every device one thread: --threads-per-device 1.

python examples/minigooglenet.py --samples 256 --batch 64 --epochs 2
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import graphsplit as gs

layers = keras.layers


def convolution(x: keras.KerasTensor, filters: int, size: int, stride: int = 1, padding: str = "same"):
    """Convolution, batch normalisation, ReLU."""
    x = layers.Conv2D(filters, size, strides=stride, padding=padding, use_bias=False)(x)
    return layers.Activation("relu")(layers.BatchNormalization()(x))


def inception(x: keras.KerasTensor, ones: int, threes: int):
    """Two convolutions side by side."""
    return layers.Concatenate()([convolution(x, ones, 1), convolution(x, threes, 3)])


def downsample(x: keras.KerasTensor, filters: int):
    """A strided convolution beside a pooling."""
    pooled = layers.MaxPooling2D(3, strides=2)(x)
    return layers.Concatenate()([convolution(x, filters, 3, 2, "valid"), pooled])


def minigooglenet(classes: int = 10) -> keras.Model:
    """Return the network, with the same weights every time."""
    keras.utils.set_random_seed(0)
    image = keras.Input((32, 32, 3))
    x = convolution(image, 96, 3)
    x = downsample(inception(inception(x, 32, 32), 32, 48), 80)
    for ones, threes in ((112, 48), (96, 64), (80, 80), (48, 96)):
        x = inception(x, ones, threes)
    x = inception(inception(downsample(x, 96), 176, 160), 176, 160)
    x = layers.Dropout(0.5)(layers.AveragePooling2D(7)(x))
    return keras.Model(image, layers.Dense(classes)(layers.Flatten()(x)))


def main() -> None:
    """Train twice and print losses and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads-per-device", type=int, default=None)
    options = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        gs.use_logical_devices(options.devices, threads_per_device=options.threads_per_device)
    generator = np.random.default_rng(0)
    y = generator.integers(0, 10, options.samples)
    patterns = generator.normal(size=(10, 32, 32, 3))
    x = (patterns[y] + generator.normal(size=(options.samples, 32, 32, 3))).astype("float32")

    best = {}
    for gpus in (1, options.devices):
        model = gs.multi_gpu_model(minigooglenet(), gpus)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
        seconds, losses = [], []
        for epoch in range(options.epochs):
            start = time.perf_counter()
            fit = {"batch_size": options.batch, "initial_epoch": epoch, "epochs": epoch + 1, "verbose": 0}
            losses += model.fit(x, y, **fit).history["loss"]
            seconds.append(time.perf_counter() - start)
        best[gpus] = min(seconds[1:] or seconds)  # the first epoch traces
        curve = " ".join(f"{value:.5f}" for value in losses)
        print(f"{gpus} device(s): {best[gpus]:.2f} s an epoch, the first {seconds[0]:.2f} s; losses {curve}")
    print(f"{best[1] / best[options.devices]:.2f} times as fast on {options.devices} devices")


if __name__ == "__main__":
    main()
