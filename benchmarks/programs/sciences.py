"""Programs from signals, physics, geometry and few examples; gradients of gradients, loops over rows."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks.programs.building import (
    Training,
    classify,
    image_encoder,
    integers,
    labels,
    learner,
    numbers,
    perceptron,
    pictures,
    training,
    weights_of,
)

WIDTH = 16


def heat_equation() -> Training:
    """A network whose derivatives by its inputs obey an equation: gradients of gradients of gradients."""
    network = perceptron(2, 32, 32, 1, activation="tanh")

    def loss(points: tf.Tensor, edge: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
        x, t = points[:, :1], points[:, 1:]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch([x, t])
                u = network(tf.concat([x, t], 1), training=True)
            by_x, by_t = inner.gradient(u, x), inner.gradient(u, t)
        residual = by_t - 0.1 * outer.gradient(by_x, x)
        return tf.reduce_mean(residual**2) + tf.reduce_mean((network(edge, training=True) - known) ** 2)

    return training(
        loss, network.trainable_variables, lambda n: (numbers(n, 2), numbers(n, 2, seed=1), numbers(n, 1, seed=2))
    )


def point_net() -> Training:
    """A learnt rotation of each cloud of points, with the penalty that keeps it one; the largest of all features."""
    turn, features, head = perceptron(3, 16, 16), perceptron(3, 32, WIDTH), perceptron(WIDTH, 16, 5)
    spread = layers.Dense(9)
    spread.build((None, 16))
    weights = [*weights_of(turn, features, head), *spread.trainable_variables]

    def loss(cloud: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        by_point = tf.reshape(turn(tf.reshape(cloud, [-1, 3]), training=True), [-1, 12, 16])
        rotation = tf.reshape(spread(tf.reduce_max(by_point, 1)), [-1, 3, 3]) + tf.eye(3, dtype=cloud.dtype)
        gap = tf.eye(3, dtype=cloud.dtype) - tf.matmul(rotation, rotation, transpose_b=True)
        turned = tf.reshape(tf.matmul(cloud, rotation), [-1, 3])
        pooled = tf.reduce_max(tf.reshape(features(turned, training=True), [-1, 12, WIDTH]), 1)
        return classify(head(pooled, training=True), y) + 1e-3 * tf.nn.l2_loss(gap)

    return training(loss, weights, lambda n: (numbers(n, 12, 3), labels(n)))


def sound_classifier() -> Training:
    """Short-time Fourier transforms, mel bands, logarithms, and a convolutional network on them."""
    network = keras.Sequential(
        [layers.Input((15, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten(), layers.Dense(5)]
    )
    mel = tf.signal.linear_to_mel_weight_matrix(8, 17, 8000, 80.0, 3600.0, dtype=tf.as_dtype(keras.config.floatx()))

    def loss(wave: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        spectrum = abs(tf.signal.stft(wave, frame_length=32, frame_step=16))
        bands = tf.math.log(tf.tensordot(spectrum, mel, 1) + 1e-6)
        return classify(network(bands[..., None], training=True), y)

    return training(loss, network.trainable_variables, lambda n: (numbers(n, 256), labels(n)))


def style_transfer() -> Training:
    """Gram matrices of features; the images themselves are learnt towards them by a small network."""
    judge = keras.Sequential([layers.Input((16, 16, 3)), layers.Conv2D(8, 3, activation="relu"), layers.Conv2D(8, 3)])
    painter = keras.Sequential([layers.Input((16, 16, 3)), layers.Conv2D(8, 3, padding="same", activation="relu")])
    painter.add(layers.Conv2D(3, 3, padding="same", activation="sigmoid"))

    def gram(x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.einsum("bijc,bijd->bcd", x, x) / (12.0 * 12.0)

    def loss(images: tf.Tensor, style: tf.Tensor) -> tf.Tensor:
        made = painter(images, training=True)
        seen, wanted = judge(made), judge(images)
        variation = tf.reduce_mean(tf.image.total_variation(made))
        return (
            tf.reduce_mean((gram(seen) - gram(judge(style))) ** 2)
            + tf.reduce_mean((seen - wanted) ** 2)
            + 1e-4 * variation
        )

    return training(loss, painter.trainable_variables, lambda n: (pictures(n), pictures(n, seed=1)))


def meta_learning() -> Training:
    """Each row is a task: a step on its support, the loss on its query, row by row with `tf.map_fn`."""
    first = keras.Variable(keras.random.normal((1, 16), seed=1), dtype=keras.config.floatx(), name="first")
    second = keras.Variable(keras.random.normal((16, 1), seed=2), dtype=keras.config.floatx(), name="second")

    def predict(weights: list[Any], x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ weights[0]) @ weights[1]

    def task(given: tuple[tf.Tensor, ...]) -> tf.Tensor:
        x, y, query, wanted = given
        weights = [tf.convert_to_tensor(first), tf.convert_to_tensor(second)]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            inner = tf.reduce_mean((predict(weights, x) - y) ** 2)
        moved = [w - 0.05 * g for w, g in zip(weights, tape.gradient(inner, weights), strict=True)]
        return tf.reduce_mean((predict(moved, query) - wanted) ** 2)

    def loss(*given: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.map_fn(task, given, fn_output_signature=given[0].dtype))

    return training(loss, [first, second], lambda n: tuple(numbers(n, 8, 1, seed=i) for i in range(4)))


def gaussian_features() -> Training:
    """For each row a small Gaussian process on its points: kernels, Cholesky factors, marginal likelihoods."""
    network, noise = perceptron(3, 16, 4), keras.Variable(0.5, dtype=keras.config.floatx(), name="noise")

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        z = tf.reshape(network(tf.reshape(x, [-1, 3]), training=True), [-1, 6, 4])
        distance = tf.reduce_sum((z[:, :, None] - z[:, None]) ** 2, -1)
        kernel = tf.exp(-0.5 * distance) + (0.1 + tf.convert_to_tensor(noise) ** 2) * tf.eye(6, dtype=x.dtype)
        factor = tf.linalg.cholesky(kernel)
        solved = tf.linalg.cholesky_solve(factor, y[..., None])[..., 0]
        log_determinant = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)), 1)
        return tf.reduce_mean(0.5 * tf.reduce_sum(y * solved, 1) + 0.5 * log_determinant + 3.0 * math.log(2 * math.pi))

    return training(loss, [*network.trainable_variables, noise], lambda n: (numbers(n, 6, 3), numbers(n, 6, seed=1)))


def masked_autoencoder() -> Training:
    """Three quarters of the patches hidden, other ones for each image; the decoder restores them."""
    embed, restore = layers.Dense(WIDTH), layers.Dense(4 * 4 * 3)
    attention, norm = layers.MultiHeadAttention(2, 8), layers.LayerNormalization()
    for layer, shape in ((embed, (None, 16, 48)), (restore, (None, 16, WIDTH)), (norm, (None, 16, WIDTH))):
        layer.build(shape)
    attention.build((None, 4, WIDTH), (None, 4, WIDTH))
    token = keras.Variable(keras.random.normal((1, WIDTH), seed=3), dtype=keras.config.floatx(), name="token")
    parts = (embed, restore, attention, norm)

    def loss(images: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
        size = [1, 4, 4, 1]
        patches = tf.reshape(tf.image.extract_patches(images, size, size, [1, 1, 1, 1], "VALID"), [-1, 16, 48])
        shuffled = tf.argsort(order, 1)
        seen, hidden = shuffled[:, :4], shuffled[:, 4:]
        x = tf.gather(embed(patches), seen, batch_dims=1)
        x = norm(x + attention(x, x))
        blanks = tf.repeat(tf.repeat(tf.convert_to_tensor(token)[None], 12, 1), tf.shape(images)[0], 0)
        x = tf.gather(tf.concat([x, blanks], 1), tf.argsort(shuffled, 1), batch_dims=1)
        said = tf.gather(restore(x), hidden, batch_dims=1)
        return tf.reduce_mean((said - tf.gather(patches, hidden, batch_dims=1)) ** 2)

    weights = [w for part in parts for w in part.trainable_variables]
    return training(loss, [*weights, token], lambda n: (pictures(n), numbers(n, 16)))


def region_head() -> Training:
    """Two boxes of each image cut out of its features and classified, as detectors' second stages do."""
    backbone = keras.Sequential([layers.Input((16, 16, 3)), layers.Conv2D(8, 3, 2, "same", activation="relu")])
    head = keras.Sequential([layers.Input((4, 4, 8)), layers.Conv2D(16, 3, activation="relu"), layers.Flatten()])
    head.add(layers.Dense(5))

    def loss(images: tf.Tensor, boxes: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        features = backbone(images, training=True)
        own = tf.repeat(tf.range(tf.shape(images)[0]), 2)
        regions = tf.image.crop_and_resize(features, tf.reshape(boxes, [-1, 4]), own, [4, 4])
        return classify(head(tf.cast(regions, features.dtype), training=True), tf.reshape(y, [-1]))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        boxes = tf.sigmoid(numbers(n, 2, 4)) / 2 + tf.constant([0.0, 0.0, 0.4, 0.4])
        return pictures(n), boxes, integers(5, n, 2)

    return training(loss, weights_of(backbone, head), inputs)


def quantized() -> Training:
    """Weights and activations rounded to eight bits in the forward pass, ranges that follow the activations."""
    first, second = perceptron(20, 64), perceptron(64, 5)
    top = keras.Variable(4.0, dtype="float32", trainable=False, name="top")
    weights = weights_of(first, second)
    learn = learner(weights)
    rounded = tf.quantization.fake_quant_with_min_max_vars

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            kernel, bias = first.trainable_variables
            hidden = tf.nn.relu(tf.matmul(x, rounded(kernel, -1.0, 1.0)) + bias)
            loss = classify(second(rounded(hidden, 0.0, tf.convert_to_tensor(top)), training=True), y)
        learn(tape, loss)
        top.assign(0.9 * top + 0.1 * tf.reduce_max(hidden))
        return loss

    return Training(step, [*weights, top], lambda n: (numbers(n, 20), labels(n)))


def measured() -> Training:
    """Metrics kept beside the training: curves, rankings, overlaps, confusion."""
    network = image_encoder(16, 3, 3)
    learn = learner(network.trainable_variables)
    metrics = [
        keras.metrics.AUC(num_thresholds=20, multi_label=True, num_labels=3),
        keras.metrics.F1Score(average="macro"),
        keras.metrics.TopKCategoricalAccuracy(2),
        keras.metrics.OneHotMeanIoU(3),
        keras.metrics.PrecisionAtRecall(0.5, num_thresholds=20),
    ]

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            said = network(x, training=True)
            loss = classify(said, y)
        learn(tape, loss)
        truth, chance = tf.one_hot(y, 3, dtype=said.dtype), tf.nn.softmax(said)
        for metric in metrics:
            metric.update_state(truth, chance)
        return (loss, *[metric.result() for metric in metrics])

    return Training(step, network.variables, lambda n: (pictures(n), labels(n, 3)))


def translator() -> Training:
    """Recurrent encoder and decoder with attention between them; gates that are normalized; a masked loss."""
    source, target = layers.Input((7,), dtype="int32"), layers.Input((6,), dtype="int32")
    states, last = layers.GRU(WIDTH, return_sequences=True, return_state=True)(
        layers.Embedding(30, WIDTH, mask_zero=True)(source)
    )
    x = layers.LSTM(WIDTH, return_sequences=True)(layers.Embedding(30, WIDTH)(target), initial_state=[last, last])
    x = layers.Concatenate()([x, layers.AdditiveAttention()([x, states])])
    network = keras.Model([source, target], layers.Dense(30)(x))

    def loss(words: tf.Tensor, before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        said = network([words, before], training=True)
        mask = tf.cast(after != 0, said.dtype)
        each = keras.losses.sparse_categorical_crossentropy(after, said, from_logits=True)
        return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return integers(30, n, 7), integers(30, n, 6, seed=1), integers(30, n, 6, seed=2)

    return training(loss, network.trainable_variables, inputs)


def next_frame() -> Training:
    """Convolutional LSTM over frames, a 3-D convolution behind."""
    frames = layers.Input((4, 8, 8, 1))
    x = layers.ConvLSTM2D(6, 3, padding="same", return_sequences=True)(frames)
    x = layers.BatchNormalization()(x)
    network = keras.Model(frames, layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x))

    def loss(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(keras.losses.binary_crossentropy(after, network(before, training=True)))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return tuple(tf.reshape(pictures(4 * n, 8, 1, seed=i), [n, 4, 8, 8, 1]) for i in (0, 1))

    return training(loss, network.trainable_variables, inputs, state=network.non_trainable_variables)
