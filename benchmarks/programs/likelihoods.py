"""Programs that learn distributions: diffusion, flows, discrete codes, pixel by pixel."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.programs.building import (
    Training,
    draws,
    learner,
    numbers,
    perceptron,
    pictures,
    training,
    weights_of,
)


def _sinusoids(time: Any, width: int = 8) -> Any:
    frequencies = ops.exp(ops.linspace(0.0, math.log(100.0), width // 2))
    angles = 2.0 * math.pi * ops.cast(frequencies, time.dtype) * time
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


def _denoiser(size: int, channels: int) -> keras.Model:
    image, time = layers.Input((size, size, channels)), layers.Input((1, 1, 1))
    level = layers.UpSampling2D(size)(layers.Lambda(_sinusoids, (1, 1, 8))(time))
    x = layers.Concatenate()([layers.Conv2D(8, 1)(image), level])
    down = layers.Conv2D(16, 3, padding="same", activation="swish")(layers.BatchNormalization(center=False)(x))
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(layers.AveragePooling2D(2)(down))
    x = layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), down])
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    return keras.Model([image, time], layers.Conv2D(channels, 1)(x))


def ddim() -> Training:
    """A denoiser, its moving average, noise and diffusion times drawn for each image."""
    network, averaged = _denoiser(8, 3), _denoiser(8, 3)
    averaged.set_weights(network.get_weights())
    noise, optimizer = draws(7), keras.optimizers.AdamW(0.01, weight_decay=1e-4, epsilon=1e-3)
    learn = learner(network.trainable_variables, optimizer)
    scaling = layers.Normalization(mean=[0.5, 0.4, 0.6], variance=[0.1, 0.2, 0.1])
    scaling.build((None, 8, 8, 3))

    def step(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images = scaling(images)
        rows = tf.shape(images)[0]
        drawn = keras.random.normal(tf.shape(images), seed=noise)
        times = keras.random.uniform((rows, 1, 1, 1), seed=noise)
        angle = math.acos(0.95) + times * (math.acos(0.02) - math.acos(0.95))
        signal, rate = tf.cos(angle), tf.sin(angle)
        mixed = signal * images + rate * drawn
        with tf.GradientTape() as tape:
            predicted = network([mixed, rate**2], training=True)
            restored = (mixed - rate * predicted) / signal
            loss = tf.reduce_mean(keras.losses.mean_absolute_error(drawn, predicted))
        learn(tape, loss)
        for own, other in zip(averaged.weights, network.weights, strict=True):
            own.assign(0.99 * own + 0.01 * other)
        return loss, tf.reduce_mean(abs(restored - images))

    variables = [*network.variables, *averaged.variables, *optimizer.variables, noise.state]
    return Training(step, variables, lambda n: (pictures(n, 8),))


class MaskedConvolution(layers.Layer):
    """A convolution that sees only what is above and to the left."""

    def __init__(self, kind: str, filters: int, size: int):
        super().__init__()
        self.kind, self.size = kind, size
        self.convolution = layers.Conv2D(filters, size, padding="same")

    def build(self, shape: Any) -> None:
        self.convolution.build(shape)
        mask, middle = np.zeros(self.convolution.kernel.shape), self.size // 2
        mask[:middle], mask[middle, : middle + (self.kind == "B")] = 1.0, 1.0
        self.mask = mask

    def call(self, x: Any) -> Any:
        kernel = self.convolution.kernel
        seen = ops.conv(x, kernel * ops.cast(self.mask, kernel.dtype), padding="same")
        return seen + self.convolution.bias


def pixel_cnn() -> Training:
    """Masked convolutions and residual blocks; the likelihood of every pixel given those before it."""
    image = layers.Input((8, 8, 1))
    x = layers.ReLU()(MaskedConvolution("A", 16, 5)(image))
    for _ in range(2):
        y = layers.ReLU()(layers.Conv2D(8, 1)(x))
        y = layers.ReLU()(MaskedConvolution("B", 8, 3)(y))
        x = layers.Add()([x, layers.Conv2D(16, 1)(y)])
    model = keras.Model(image, layers.Conv2D(1, 1, activation="sigmoid")(x))

    def loss(images: tf.Tensor) -> tf.Tensor:
        pixels = tf.where(images < 0.33, tf.zeros_like(images), tf.ones_like(images))
        return tf.reduce_mean(keras.losses.binary_crossentropy(pixels, model(pixels, training=True)))

    return training(loss, model.trainable_variables, lambda n: (pictures(n, 8, 1),))


def real_nvp() -> Training:
    """Affine coupling layers with alternating masks, the exact likelihood under a normal distribution."""
    masks = [tf.constant([[0.0, 1.0]]), tf.constant([[1.0, 0.0]])] * 2
    scales = [keras.Sequential([perceptron(2, 32, 32, 2), layers.Activation("tanh")]) for _ in masks]
    shifts = [perceptron(2, 32, 32, 2) for _ in masks]
    weights = weights_of(*scales, *shifts)

    def loss(x: tf.Tensor) -> tf.Tensor:
        log_determinant = tf.zeros_like(x[:, 0])
        for mask, scale, shift in reversed(list(zip(masks, scales, shifts, strict=True))):
            kept = tf.cast(mask, x.dtype)
            s, t = (net(x * kept, training=True) * (1 - kept) for net in (scale, shift))
            x = (1 - kept) * (x * tf.exp(-s) - t * tf.exp(-s)) + x * kept
            log_determinant -= tf.reduce_sum(s, 1)
        density = -0.5 * tf.reduce_sum(x**2, 1) - math.log(2.0 * math.pi)
        return -tf.reduce_mean(density + log_determinant)

    return training(loss, weights, lambda n: (numbers(n, 2),))


def vq_vae() -> Training:
    """Vectors replaced by the nearest of a codebook, gradients passed straight through."""
    encoder = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(16, 3, 2, "same", activation="relu"), layers.Conv2D(4, 1)]
    )
    decoder = keras.Sequential(
        [
            layers.Input((4, 4, 4)),
            layers.Conv2DTranspose(16, 3, 2, "same", activation="relu"),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )
    codes = keras.Variable(keras.random.uniform((4, 12), -1.0, 1.0, seed=2), name="codes")

    def quantize(x: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(x, [-1, 4])
        table = tf.convert_to_tensor(codes)
        distances = tf.reduce_sum(flat**2, 1, keepdims=True) + tf.reduce_sum(table**2, 0) - 2 * flat @ table
        nearest = tf.one_hot(tf.argmin(distances, 1), 12, dtype=x.dtype)
        return tf.reshape(tf.matmul(nearest, table, transpose_b=True), tf.shape(x))

    def loss(images: tf.Tensor) -> tf.Tensor:
        encoded = encoder(images, training=True)
        quantized = quantize(encoded)
        commitment = 0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - encoded) ** 2)
        dictionary = tf.reduce_mean((quantized - tf.stop_gradient(encoded)) ** 2)
        rebuilt = decoder(encoded + tf.stop_gradient(quantized - encoded), training=True)
        return tf.reduce_mean((images - rebuilt) ** 2) / 0.1 + commitment + dictionary

    return training(loss, [*weights_of(encoder, decoder), codes], lambda n: (pictures(n, 8, 1),))
