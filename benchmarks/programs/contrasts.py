"""Programs that compare views and rows: self-supervision, images with words."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from benchmarks.programs.building import (
    Training,
    image_encoder,
    integers,
    labels,
    learner,
    perceptron,
    pictures,
    training,
    weights_of,
)

WIDTH = 16


def _views(n: int) -> tuple[tf.Tensor, tf.Tensor]:
    return pictures(n), pictures(n, seed=1)


def barlow_twins() -> Training:
    """The correlation of two views over the batch should be the identity."""
    encoder = image_encoder(16, 3, WIDTH)

    def normalised(z: tf.Tensor) -> tf.Tensor:
        return (z - tf.reduce_mean(z, 0)) / (tf.math.reduce_std(z, 0) + 1e-3)

    def loss(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
        a, b = normalised(encoder(one, training=True)), normalised(encoder(two, training=True))
        correlation = tf.matmul(a, b, transpose_a=True) / tf.cast(tf.shape(a)[0], a.dtype)
        off = correlation - tf.linalg.diag(tf.linalg.diag_part(correlation))
        return tf.reduce_sum((1.0 - tf.linalg.diag_part(correlation)) ** 2) + 5e-3 * tf.reduce_sum(off**2)

    return training(loss, encoder.trainable_variables, _views, state=encoder.non_trainable_variables)


def sim_siam() -> Training:
    """A predictor on one side, no gradient on the other; cosine decay of the learning rate."""
    encoder, predictor = image_encoder(16, 3, WIDTH), perceptron(WIDTH, 8, WIDTH)

    def similarity(p: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        p, z = tf.math.l2_normalize(p, 1), tf.math.l2_normalize(tf.stop_gradient(z), 1)
        return -tf.reduce_mean(tf.reduce_sum(p * z, 1))

    def loss(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
        z = encoder(one, training=True), encoder(two, training=True)
        p = predictor(z[0], training=True), predictor(z[1], training=True)
        return similarity(p[0], z[1]) / 2 + similarity(p[1], z[0]) / 2

    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.03, 100), momentum=0.6)
    return training(loss, weights_of(encoder, predictor), _views, optimizer, state=encoder.non_trainable_variables)


def nnclr() -> Training:
    """Positives are nearest neighbours from a queue of earlier embeddings, which the batch then enters."""
    encoder, projection = image_encoder(16, 3, WIDTH), perceptron(WIDTH, WIDTH, WIDTH)
    queue = tf.Variable(tf.math.l2_normalize(pictures(1, 16, 3)[0, :, :, 0], 1), trainable=False, name="queue")
    weights = weights_of(encoder, projection)
    learn = learner(weights)

    def nearest(z: tf.Tensor) -> tf.Tensor:
        similarity = tf.matmul(z, queue, transpose_b=True)
        return z + tf.stop_gradient(tf.gather(queue, tf.argmax(similarity, 1)) - z)

    def step(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = [tf.math.l2_normalize(projection(encoder(x, training=True), training=True), 1) for x in (one, two)]
            own = tf.range(tf.shape(z[0])[0])
            losses = []
            for a, b in ((0, 1), (1, 0)):
                scores = tf.matmul(nearest(z[a]), z[b], transpose_b=True) / 0.1
                losses.append(keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True))
            loss = tf.reduce_mean(tf.concat(losses, 0))
        learn(tape, loss)
        queue.assign(tf.concat([z[0], queue], 0)[:16])
        return loss

    variables = [*encoder.variables, *projection.variables, *learn.variables, queue]  # type: ignore[attr-defined]
    return Training(step, variables, _views)


def clip() -> Training:
    """Images and texts, each to find its partner among all of the batch, both ways; a learnt temperature."""
    vision = image_encoder(16, 3, WIDTH)
    tokens = layers.Input((6,), dtype="int32")
    x = layers.Embedding(40, WIDTH)(tokens)
    x = x + layers.MultiHeadAttention(2, 8)(layers.LayerNormalization()(x), x)
    text = keras.Model(tokens, layers.Dense(WIDTH)(layers.GlobalAveragePooling1D()(x)))
    temperature = keras.Variable(1.0, dtype=keras.config.floatx(), name="temperature")

    def loss(images: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        a = tf.math.l2_normalize(vision(images, training=True), 1)
        b = tf.math.l2_normalize(text(words, training=True), 1)
        scores = tf.matmul(a, b, transpose_b=True) * tf.exp(temperature.value)
        own = tf.range(tf.shape(a)[0])
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        return tf.reduce_mean(entropy(own, scores) + entropy(own, tf.transpose(scores))) / 2

    weights = [*weights_of(vision, text), temperature]
    return training(loss, weights, lambda n: (pictures(n), integers(40, n, 6)), state=vision.non_trainable_variables)


def supervised_contrastive() -> Training:
    """All rows of the same class attract each other."""
    encoder = image_encoder(16, 3, WIDTH)

    def loss(images: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        z = tf.math.l2_normalize(encoder(images, training=True), 1)
        scores = tf.matmul(z, z, transpose_b=True) / 0.2
        others = 1.0 - tf.eye(tf.shape(z)[0], dtype=z.dtype)
        scores -= tf.stop_gradient(tf.reduce_max(scores, 1, keepdims=True))
        log_share = scores - tf.math.log(tf.reduce_sum(tf.exp(scores) * others, 1, keepdims=True))
        same = tf.cast(target[:, None] == target[None], z.dtype) * others
        return -tf.reduce_mean(tf.reduce_sum(same * log_share, 1) / tf.maximum(tf.reduce_sum(same, 1), 1.0))

    return training(
        loss, encoder.trainable_variables, lambda n: (pictures(n), labels(n, 3)), state=encoder.non_trainable_variables
    )
