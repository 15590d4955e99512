"""Training steps of the kinds of networks people train, small. `benchmarks.coverage` plans them, the tests run some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

CLASSES = 5
WORDS = 60


@dataclass(frozen=True)
class Training:
    """One model's training step.

    Attributes:
      step: the whole step on one device: forward, gradients, optimizer.
      variables: everything that it changes.
      inputs: from a number of rows to the arguments, the same for the same number.
    """

    step: Callable[..., Any]
    variables: Sequence[Any]
    inputs: Callable[[int], tuple[Any, ...]]


def supervised(
    model: keras.Model,
    inputs: Callable[[int], tuple[Any, ...]],
    loss: Any = None,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> Training:
    """Return the step `(x, y) -> loss` of a model; by default sparse categorical cross-entropy of logits, and SGD."""
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) + sum(model.losses)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return Training(step, [*model.variables, *optimizer.variables], inputs)


def numbers(rows: int, *shape: int, seed: int = 0) -> tf.Tensor:
    """Return rows of normal numbers in the precision that layers are made in."""
    rng = np.random.default_rng([rows, seed])
    return tf.constant(rng.standard_normal((rows, *shape)), keras.config.dtype_policy().compute_dtype)


def integers(below: int, rows: int, *shape: int, seed: int = 0) -> tf.Tensor:
    """Return rows of random integers."""
    return tf.constant(np.random.default_rng([rows, seed, 1]).integers(0, below, (rows, *shape)), tf.int32)


def _adam() -> keras.optimizers.Optimizer:
    # float64 where layers are: near a zero gradient Adam's quotient is as uncertain as the gradient is
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def lstm_text_classifier() -> Training:
    """Embedding, bidirectional LSTM over a masked sequence."""
    model = keras.Sequential(
        [
            layers.Input((7,), dtype="int32"),
            layers.Embedding(WORDS, 6, mask_zero=True),
            layers.Bidirectional(layers.LSTM(5)),
            layers.Dense(CLASSES),
        ]
    )
    return supervised(model, lambda rows: (integers(WORDS, rows, 7), integers(CLASSES, rows)), optimizer=_adam())


class Positions(layers.Layer):
    """Token embeddings plus learnt embeddings of their positions."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.tokens = layers.Embedding(WORDS, width)
        self.positions = layers.Embedding(length, width)
        self.length = length

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.positions(keras.ops.arange(self.length))


def _attend(x: Any, memory: Any, heads: int, causal: bool = False) -> Any:
    width = x.shape[-1]
    return x + layers.MultiHeadAttention(heads, width // heads)(
        layers.LayerNormalization()(x), memory, use_causal_mask=causal
    )


def _feed_forward(x: Any) -> Any:
    width = x.shape[-1]
    hidden = layers.Dense(2 * width, "gelu")(layers.LayerNormalization()(x))
    return x + layers.Dropout(0.1, seed=3)(layers.Dense(width)(hidden))


def transformer_encoder() -> Training:
    """Two encoder blocks and the mean over the positions."""
    tokens = layers.Input((8,), dtype="int32")
    x = Positions(8, 8)(tokens)
    for _ in range(2):
        x = _feed_forward(_attend(x, x, 2))
    model = keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    return supervised(model, lambda rows: (integers(WORDS, rows, 8), integers(CLASSES, rows)), optimizer=_adam())


def transformer_decoder() -> Training:
    """A decoder block with a causal mask and cross-attention to an encoded source; next-token loss."""
    source, target = layers.Input((6,), dtype="int32"), layers.Input((8,), dtype="int32")
    memory = _feed_forward(_attend(x := Positions(6, 8)(source), x, 2))
    x = _attend(y := Positions(8, 8)(target), y, 2, causal=True)
    x = _feed_forward(_attend(x, memory, 2))
    model = keras.Model([source, target], layers.Dense(WORDS)(layers.LayerNormalization()(x)))

    def inputs(rows: int) -> tuple[Any, ...]:
        return (integers(WORDS, rows, 6), integers(WORDS, rows, 8, seed=1)), integers(WORDS, rows, 8, seed=2)

    return supervised(model, inputs, optimizer=_adam())


def u_net() -> Training:
    """Two levels down and up again, skips joined along the channels, a label for every pixel."""

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", activation="relu")(x))
        return x

    image = layers.Input((16, 16, 2))
    one = block(image, 4)
    two = block(layers.MaxPooling2D()(one), 6)
    x = block(layers.MaxPooling2D()(two), 8)
    x = block(layers.Concatenate()([layers.Conv2DTranspose(6, 2, 2)(x), two]), 6)
    x = block(layers.Concatenate()([layers.UpSampling2D(interpolation="bilinear")(x), one]), 4)
    model = keras.Model(image, layers.Conv2D(CLASSES, 1)(x))
    return supervised(model, lambda rows: (numbers(rows, 16, 16, 2), integers(CLASSES, rows, 16, 16)))


def variational_autoencoder() -> Training:
    """Convolutional encoder to mean and log-variance, a sample drawn between, and the decoder's mirror image."""
    encoder = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, 2, "same", activation="relu"), layers.Flatten(), layers.Dense(6)]
    )
    decoder = keras.Sequential(
        [
            layers.Input((3,)),
            layers.Dense(4 * 4 * 2, "relu"),
            layers.Reshape((4, 4, 2)),
            layers.Conv2DTranspose(1, 3, 2, "same"),
        ]
    )
    noise, optimizer = keras.random.SeedGenerator(4), _adam()
    weights = [*encoder.trainable_variables, *decoder.trainable_variables]
    optimizer.build(weights)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(encoder(x, training=True), 2, axis=1)
            drawn = keras.random.normal(tf.shape(mean), dtype=mean.dtype, seed=noise)
            rebuilt = decoder(mean + tf.exp(0.5 * log_variance) * drawn, training=True)
            divergence = -0.5 * tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), 1)
            loss = tf.reduce_mean(tf.reduce_sum((rebuilt - x) ** 2, [1, 2, 3]) + divergence)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return Training(step, [*weights, *optimizer.variables, noise.state], lambda rows: (numbers(rows, 8, 8, 1),))


def gan() -> Training:
    """Two networks, two optimizers: the discriminator sees real and made rows joined into one batch."""
    generator = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(4 * 4 * 3),
            layers.Reshape((4, 4, 3)),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(1, 4, 2, "same"),
        ]
    )
    critic = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, 2, "same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    optimizers = _adam(), _adam()
    for optimizer, model in zip(optimizers, (generator, critic), strict=True):
        optimizer.build(model.trainable_variables)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(real: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            both = tf.concat([generator(noise, training=True), real], 0)
            labels = tf.concat([tf.zeros_like(noise[:, :1]), tf.ones_like(noise[:, :1])], 0)
            critic_loss = cross_entropy(labels, critic(both, training=True))
        gradients = tape.gradient(critic_loss, critic.trainable_variables)
        optimizers[1].apply(gradients, critic.trainable_variables)
        with tf.GradientTape() as tape:
            judged = critic(generator(noise, training=True), training=True)
            generator_loss = cross_entropy(tf.ones_like(judged), judged)
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        optimizers[0].apply(gradients, generator.trainable_variables)
        return critic_loss, generator_loss

    variables = [*generator.variables, *critic.variables, *optimizers[0].variables, *optimizers[1].variables]
    return Training(step, variables, lambda rows: (numbers(rows, 8, 8, 1), numbers(rows, 4, seed=1)))


def siamese() -> Training:
    """One encoder for both views of each row, joined into one batch; every row is contrasted with all others."""
    encoder = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(6)]
    )
    optimizer = _adam()
    optimizer.build(encoder.trainable_variables)

    def step(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            encoded = tf.math.l2_normalize(encoder(tf.concat([left, right], 0), training=True), axis=1)
            one, two = tf.split(encoded, 2)
            similarity = tf.matmul(one, two, transpose_b=True) / 0.1
            own = tf.range(tf.shape(similarity)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarity))
        optimizer.apply(tape.gradient(loss, encoder.trainable_variables), encoder.trainable_variables)
        return loss

    variables = [*encoder.variables, *optimizer.variables]
    return Training(step, variables, lambda rows: (numbers(rows, 8, 8, 1), numbers(rows, 8, 8, 1, seed=1)))


def graph_convolution() -> Training:
    """A batch of small graphs: normalised adjacency matrices times node features, twice; the mean over the nodes."""
    nodes, adjacency = layers.Input((6, 4)), layers.Input((6, 6))
    degree = keras.ops.sqrt(keras.ops.sum(adjacency, -1, keepdims=True))
    spread = adjacency / degree / keras.ops.swapaxes(degree, 1, 2)
    x = nodes
    for _ in range(2):
        x = keras.ops.relu(layers.Dense(8)(keras.ops.matmul(spread, x)))
    model = keras.Model([nodes, adjacency], layers.Dense(CLASSES)(keras.ops.mean(x, 1)))

    def inputs(rows: int) -> tuple[Any, ...]:
        edges = tf.cast(integers(2, rows, 6, 6), keras.config.dtype_policy().compute_dtype)
        symmetric = tf.maximum(tf.maximum(edges, tf.transpose(edges, [0, 2, 1])), tf.eye(6, dtype=edges.dtype))
        return (numbers(rows, 6, 4), symmetric), integers(CLASSES, rows)

    return supervised(model, inputs)


def wide_and_deep() -> Training:
    """A linear model of crossed categories beside a deep one of their embeddings; sparse gradients."""
    categories, features = layers.Input((3,), dtype="int32"), layers.Input((4,))
    crossed = (categories[:, 0] * 7 + categories[:, 1]) % 50
    wide = layers.Embedding(50, 1)(crossed)
    deep = layers.Concatenate()([layers.Flatten()(layers.Embedding(WORDS, 5)(categories)), features])
    deep = layers.Dense(1)(layers.Dense(8, "relu")(deep))
    model = keras.Model([categories, features], layers.Add()([wide, deep]))

    def inputs(rows: int) -> tuple[Any, ...]:
        labels = tf.cast(integers(2, rows, 1), keras.config.dtype_policy().compute_dtype)
        return (integers(WORDS, rows, 3), numbers(rows, 4)), labels

    return supervised(model, inputs, keras.losses.BinaryCrossentropy(from_logits=True), keras.optimizers.Adagrad(0.1))


def wavenet() -> Training:
    """Dilated causal convolutions with gates, residuals and skips; the next sample of every sample."""
    signal = layers.Input((32, 1))
    x, skips = layers.Conv1D(6, 2, padding="causal")(signal), []
    for dilation in (1, 2, 4, 8):
        filtered = layers.Conv1D(6, 2, padding="causal", dilation_rate=dilation, activation="tanh")(x)
        gate = layers.Conv1D(6, 2, padding="causal", dilation_rate=dilation, activation="sigmoid")(x)
        joined = filtered * gate
        skips.append(layers.Conv1D(6, 1)(joined))
        x = x + layers.Conv1D(6, 1)(joined)
    model = keras.Model(signal, layers.Conv1D(CLASSES, 1)(keras.ops.relu(layers.Add()(skips))))
    return supervised(model, lambda rows: (numbers(rows, 32, 1), integers(CLASSES, rows, 32)))


MODELS: dict[str, Callable[[], Training]] = {
    "LSTM text classifier": lstm_text_classifier,
    "Transformer encoder": transformer_encoder,
    "Transformer decoder": transformer_decoder,
    "U-Net": u_net,
    "Variational autoencoder": variational_autoencoder,
    "GAN": gan,
    "Siamese": siamese,
    "Graph convolution": graph_convolution,
    "Wide & deep": wide_and_deep,
    "WaveNet": wavenet,
}
