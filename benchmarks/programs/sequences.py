"""Programs on sequences: speech to text, mixtures of experts, language models."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks.programs.building import Training, classify, integers, labels, learner, numbers, training

WIDTH = 16


def _block(x: Any, causal: bool = False) -> Any:
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=causal))
    return layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(32, "relu")(x)))


def speech_transformer() -> Training:
    """Strided convolutions over frames, attention, and the CTC loss with sequences of different lengths."""
    frames = layers.Input((24, 6))
    x = layers.Conv1D(WIDTH, 5, 2, "same", activation="relu")(frames)
    x = _block(_block(x))
    network = keras.Model(frames, layers.Dense(10)(x))

    def loss(sound: tf.Tensor, text: tf.Tensor, heard: tf.Tensor, written: tf.Tensor) -> tf.Tensor:
        said = tf.transpose(network(sound, training=True), [1, 0, 2])
        return tf.reduce_mean(tf.nn.ctc_loss(text, said, written, heard, logits_time_major=True, blank_index=0))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return numbers(n, 24, 6), integers(9, n, 5) + 1, 12 - integers(2, n), 2 + integers(3, n)

    return training(loss, network.trainable_variables, inputs)


class _Routed(layers.Layer):
    """A layer of experts, each of which has room for so many of the tokens that a router sends to it."""

    def __init__(self, experts: int, room: int):
        super().__init__()
        self.experts, self.room = experts, room
        self.router = layers.Dense(experts)

    def build(self, shape: Any) -> None:
        self.router.build(shape)


class Experts(_Routed):
    """A router sends every token to the best expert, as far as that has room; others pass through zeros."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.up = self.add_weight(shape=(self.experts, shape[-1], 32), name="up")
        self.down = self.add_weight(shape=(self.experts, 32, shape[-1]), name="down")

    def call(self, x: Any) -> Any:
        chances = tf.nn.softmax(self.router(x))  # [rows, tokens, experts]
        gate, best = tf.math.top_k(chances, 1)
        mask = tf.one_hot(tf.squeeze(best, 2), self.experts, dtype=x.dtype)
        place = tf.cumsum(mask, 1) * mask  # of each token in its expert's queue, row by row
        mask *= tf.cast(place <= self.room, x.dtype)
        slot = tf.one_hot(tf.cast(tf.reduce_sum(place * mask, 2), tf.int32) - 1, self.room, dtype=x.dtype)
        dispatch = mask[..., None] * slot[..., None, :]  # [rows, tokens, experts, room]
        given = tf.einsum("btec,btd->becd", dispatch, x)
        hidden = tf.nn.relu(tf.einsum("becd,edf->becf", given, self.up))
        made = tf.einsum("becf,efd->becd", hidden, self.down)
        share, importance = tf.reduce_mean(mask, [0, 1]), tf.reduce_mean(chances, [0, 1])
        self.add_loss(0.01 * self.experts * tf.reduce_sum(share * importance))
        return tf.einsum("btec,becd->btd", dispatch * gate[..., None], made)


def switch_transformer() -> Training:
    """Attention and a layer of experts, with the loss that balances them over the whole batch."""
    tokens = layers.Input((8,), dtype="int32")
    x = layers.Embedding(50, WIDTH)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    experts = Experts(4, 3)
    x = layers.LayerNormalization()(x + experts(x))
    network = keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return classify(network(x, training=True), y) + sum(network.losses)

    return training(loss, network.trainable_variables, lambda n: (integers(50, n, 8), labels(n)))


class Dispatched(_Routed):
    """As a user might write it: tokens of the whole batch are gathered to each expert by indices, and put back."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.kernel = self.add_weight(shape=(self.experts, shape[-1], shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        chances = tf.nn.softmax(self.router(x))
        gates, places = tf.math.top_k(tf.transpose(chances, [0, 2, 1]), self.room)  # expert's choice, row by row
        chosen = tf.gather(x, places, batch_dims=1)  # [rows, experts, room, width]
        made = tf.einsum("becd,edf->becf", chosen, self.kernel) * gates[..., None]
        back = tf.one_hot(places, tf.shape(x)[1], dtype=x.dtype)
        return tf.einsum("bect,becf->btf", back, made)


def expert_choice() -> Training:
    """Experts choose their tokens; a causal language model's loss."""
    tokens = layers.Input((8,), dtype="int32")
    x = layers.Embedding(50, WIDTH)(tokens)
    x = _block(x, causal=True)
    x = layers.LayerNormalization()(x + Dispatched(4, 3)(x))
    network = keras.Model(tokens, layers.Dense(50)(x))
    learn = learner(network.trainable_variables)
    perplexity = keras.metrics.SparseCategoricalAccuracy()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            said = network(x, training=True)
            loss = classify(said, y)
        learn(tape, loss)
        perplexity.update_state(y, said)
        return loss

    return Training(step, network.variables, lambda n: (integers(50, n, 8), integers(50, n, 8, seed=1)))
