"""Programs that look: radiance fields, windows of attention, boxes, lines of text."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.programs.building import (
    Training,
    classify,
    draws,
    integers,
    labels,
    learner,
    numbers,
    perceptron,
    pictures,
    training,
    weights_of,
)

SAMPLES = 8


def nerf() -> Training:
    """Points along rays, encoded by sines, to colours and densities, and these to pixels by volume rendering."""
    network = perceptron(3 + 3 * 2 * 4, 32, 32, 4)
    noise = draws(1)

    def encode(points: tf.Tensor) -> tf.Tensor:
        waves = [f(2.0**i * points) for i in range(4) for f in (tf.sin, tf.cos)]
        return tf.concat([points, *waves], -1)

    def render(origin: tf.Tensor, direction: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(origin)[0]
        depth = tf.cast(tf.linspace(2.0, 6.0, SAMPLES), origin.dtype)
        depth += keras.random.uniform((rows, SAMPLES), seed=noise) * 4.0 / SAMPLES
        points = origin[:, None] + direction[:, None] * depth[..., None]
        said = tf.reshape(network(tf.reshape(encode(points), [-1, 27]), training=True), [-1, SAMPLES, 4])
        colour, density = tf.sigmoid(said[..., :3]), tf.nn.relu(said[..., 3])
        last = tf.fill([rows, 1], tf.constant(1e10, depth.dtype))
        gaps = tf.concat([depth[:, 1:] - depth[:, :-1], last], 1)
        opacity = 1.0 - tf.exp(-density * gaps)
        light = tf.math.cumprod(1.0 - opacity + 1e-10, axis=1, exclusive=True)
        return tf.reduce_sum((opacity * light)[..., None] * colour, 1)

    def loss(origin: tf.Tensor, direction: tf.Tensor, pixel: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((render(origin, direction) - pixel) ** 2)

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return numbers(n, 3), numbers(n, 3, seed=1), tf.sigmoid(numbers(n, 3, seed=2))

    return training(loss, network.trainable_variables, inputs, state=[noise.state])


class Windows(layers.Layer):
    """Attention within windows of 4 x 4 patches, shifted or not, with a learnt bias for relative positions."""

    def __init__(self, width: int, heads: int, shift: int):
        super().__init__()
        self.width, self.heads, self.shift = width, heads, shift
        self.qkv, self.out = layers.Dense(3 * width), layers.Dense(width)

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(49, self.heads), name="bias")
        grid = np.stack(np.meshgrid(range(4), range(4), indexing="ij")).reshape(2, -1)
        offset = (grid[:, :, None] - grid[:, None]).transpose(1, 2, 0) + 3
        self.places = (offset[..., 0] * 7 + offset[..., 1]).reshape(-1)
        self.qkv.build(shape)
        self.out.build(shape)

    def call(self, x: Any) -> Any:
        size, depth = x.shape[1], self.width // self.heads
        x = ops.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = ops.reshape(x, (-1, size // 4, 4, size // 4, 4, self.width))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, 16, self.width))
        q, k, v = ops.unstack(ops.transpose(ops.reshape(self.qkv(x), (-1, 16, 3, self.heads, depth)), (2, 0, 3, 1, 4)))
        scores = ops.matmul(q / math.sqrt(depth), ops.transpose(k, (0, 1, 3, 2)))
        bias = ops.reshape(ops.take(self.bias, self.places, axis=0), (16, 16, self.heads))
        scores = ops.softmax(scores + ops.transpose(bias, (2, 0, 1))[None])
        x = ops.reshape(ops.transpose(ops.matmul(scores, v), (0, 2, 1, 3)), (-1, 16, self.width))
        x = ops.reshape(self.out(x), (-1, size // 4, size // 4, 4, 4, self.width))
        x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, size, size, self.width))
        return ops.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


def swin() -> Training:
    """Patches, two blocks of windowed attention, the second shifted; patches merged between them; stochastic depth."""
    image = layers.Input((16, 16, 3))
    x = layers.Conv2D(16, 2, 2)(image)
    for shift in (0, 2):
        drop = layers.Dropout(0.1, noise_shape=(None, 1, 1, 1), seed=4 + shift)
        x = x + drop(Windows(16, 2, shift)(layers.LayerNormalization()(x)))
        x = x + layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(x)))
    x = ops.concatenate([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1)
    x = layers.GlobalAveragePooling2D()(layers.Dense(24, use_bias=False)(x))
    network = keras.Model(image, layers.Dense(5)(x))
    return training(
        lambda x, y: classify(network(x, training=True), y),
        network.trainable_variables,
        lambda n: (pictures(n), labels(n)),
        state=network.non_trainable_variables,
    )


def _corners(boxes: Any) -> Any:
    return tf.concat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def _overlaps(one: Any, other: Any) -> Any:
    """Return the intersection over union of every box with every other."""
    a, b = _corners(one)[:, :, None], _corners(other)[:, None]
    sides = tf.maximum(tf.minimum(a[..., 2:], b[..., 2:]) - tf.maximum(a[..., :2], b[..., :2]), 0.0)
    shared = sides[..., 0] * sides[..., 1]
    areas = (one[..., 2] * one[..., 3])[:, :, None] + (other[..., 2] * other[..., 3])[:, None]
    return shared / tf.maximum(areas - shared, 1e-8)


def _anchors() -> np.ndarray:
    steps = (np.arange(4) + 0.5) / 4
    grid = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)
    return np.concatenate([grid, np.full_like(grid, 0.4)], 1)[None]


def _matched(anchors: Any, boxes: Any, classes: Any) -> tuple[Any, Any, Any]:
    """Return what each anchor should say: of its best box the offset and class (-1 if none), and whether it counts."""
    overlaps = _overlaps(anchors, boxes)
    best, quality = tf.argmax(overlaps, 2), tf.reduce_max(overlaps, 2)
    found = tf.gather(boxes, best, batch_dims=1)
    moved, scaled = (found[..., :2] - anchors[..., :2]) / anchors[..., 2:], found[..., 2:] / anchors[..., 2:]
    kinds = tf.where(quality > 0.3, tf.gather(classes, best, batch_dims=1), -1)
    return tf.concat([moved, tf.math.log(scaled)], -1), kinds, tf.cast((quality > 0.3) | (quality < 0.2), boxes.dtype)


def _detection_loss(said: Any, places: Any, targets: Any, kinds: Any, counted: Any) -> Any:
    """Return the focal loss of the classes and the smooth loss of the boxes, per matched anchor."""
    one_hot = tf.one_hot(kinds, 3, dtype=said.dtype)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(one_hot, said)
    share = tf.where(one_hot == 1.0, tf.sigmoid(said), 1 - tf.sigmoid(said))
    focal = tf.reduce_sum(tf.reduce_sum(0.25 * (1 - share) ** 2 * entropy, -1) * counted, 1)
    gap, positive = abs(targets - places), tf.cast(kinds >= 0, said.dtype)
    smooth = tf.reduce_sum(tf.where(gap < 1.0, 0.5 * gap**2, gap - 0.5), -1)
    number = tf.maximum(tf.reduce_sum(positive, 1), 1.0)
    return tf.reduce_mean((focal + tf.reduce_sum(smooth * positive, 1)) / number)


def _suppressed(anchors: Any, said: Any, places: Any) -> Any:
    """Return the boxes of each image that are left."""
    centres = places[..., :2] * anchors[..., 2:] + anchors[..., :2]
    decoded = _corners(tf.concat([centres, tf.exp(places[..., 2:]) * anchors[..., 2:]], -1))
    boxes, scores = (tf.cast(x, tf.float32) for x in (decoded[:, :, None], tf.sigmoid(said)))
    return tf.image.combined_non_max_suppression(boxes, scores, 4, 6, 0.5, 0.3)


def retina_net() -> Training:
    """Anchors matched to boxes, focal and smooth losses, and what is left of the predictions after suppression."""

    def convolutions(size: int, *each: dict[str, Any]) -> keras.Sequential:
        return keras.Sequential(
            [layers.Input((size, size, 3 if size == 16 else 16)), *[layers.Conv2D(**e) for e in each]]
        )

    hidden = {"filters": 16, "kernel_size": 3, "padding": "same", "activation": "relu"}
    backbone = convolutions(16, {**hidden, "strides": 2}, {**hidden, "strides": 2})
    heads = [convolutions(4, hidden, {"filters": k, "kernel_size": 3, "padding": "same"}) for k in (3, 4)]
    weights = weights_of(backbone, *heads)
    learn = learner(weights)

    def step(images: tf.Tensor, boxes: tf.Tensor, classes: tf.Tensor) -> tuple[tf.Tensor, Any]:
        anchors = tf.constant(_anchors(), boxes.dtype)
        matched = _matched(anchors, boxes, classes)
        with tf.GradientTape() as tape:
            features = backbone(images, training=True)
            said, places = (
                tf.reshape(head(features, training=True), [-1, 16, k]) for head, k in zip(heads, (3, 4), strict=True)
            )
            loss = _detection_loss(said, places, *matched)
        learn(tape, loss)
        return loss, _suppressed(anchors, said, places)

    def inputs(n: int) -> tuple[Any, ...]:
        boxes = 0.3 + 0.2 * tf.sigmoid(numbers(n, 3, 4))
        return pictures(n), boxes, integers(3, n, 3)

    return Training(step, weights, inputs)


def ocr() -> Training:
    """Convolutions, a bidirectional LSTM along the line, and the CTC loss of the characters."""
    image = layers.Input((16, 8, 1))
    x = layers.MaxPooling2D((1, 2))(layers.Conv2D(8, 3, padding="same", activation="relu")(image))
    x = layers.MaxPooling2D((1, 2))(layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(layers.Reshape((16, 16))(x))
    network = keras.Model(image, layers.Dense(9)(x))

    def loss(images: tf.Tensor, text: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(images)[0]
        lengths = tf.fill([rows], 16), tf.fill([rows], 4)
        return tf.reduce_mean(ops.ctc_loss(text, network(images, training=True), lengths[1], lengths[0]))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return tf.reshape(pictures(n, 16, 1)[:, :, :8], [n, 16, 8, 1]), integers(8, n, 4) + 1

    return training(loss, network.trainable_variables, inputs)
