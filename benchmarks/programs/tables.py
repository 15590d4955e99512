"""Programs on tables and graphs: recommenders, categories looked up, messages between nodes."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.programs.building import Training, classify, integers, labels, numbers, perceptron, training

WIDTH = 16


def two_towers() -> Training:
    """Users and items; in-batch softmax with the popularity of items taken off."""
    tables = [layers.Embedding(count, WIDTH) for count in (60, 40)]
    nets = [keras.Sequential([layers.Input((WIDTH,)), layers.Dense(32, "relu"), layers.Dense(8)]) for _ in "ui"]
    for table in tables:
        table.build()
    weights = [w for part in (*tables, *nets) for w in part.trainable_variables]

    def loss(user: tf.Tensor, item: tf.Tensor, chance: tf.Tensor) -> tf.Tensor:
        a, b = (net(table(x), training=True) for net, table, x in zip(nets, tables, (user, item), strict=True))
        scores = tf.matmul(a, b, transpose_b=True) - tf.math.log(chance)[None]
        same = tf.cast(item[:, None] == item[None], scores.dtype) - tf.eye(tf.shape(item)[0], dtype=scores.dtype)
        scores -= 1e3 * same  # the same item elsewhere in the batch is no mistake
        own = tf.range(tf.shape(item)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return integers(60, n), integers(40, n, seed=1), tf.sigmoid(numbers(n))

    return training(loss, weights, inputs, keras.optimizers.Adagrad(0.1))


def tab_transformer() -> Training:
    """Strings looked up in vocabularies inside the step, attention between columns, numbers beside them."""
    lookups = [layers.StringLookup(vocabulary=list("abcdefgh")[: 4 + i]) for i in range(3)]
    columns = [layers.Input((), dtype="int32") for _ in lookups]
    amounts = layers.Input((4,))
    embedded = [layers.Embedding(t.vocabulary_size(), WIDTH)(c) for t, c in zip(lookups, columns, strict=True)]
    x = ops.stack(embedded, 1)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1, seed=8)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(32, "gelu")(x)))
    x = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization()(amounts)])
    network = keras.Model(
        [*columns, amounts], layers.Dense(1)(layers.Dense(32, "selu")(layers.BatchNormalization()(x)))
    )
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def loss(words: tf.Tensor, amounts: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        looked_up = [lookup(words[:, i]) for i, lookup in enumerate(lookups)]
        return entropy(y, network([*looked_up, amounts], training=True))

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        words = np.random.default_rng(n).choice(list("abcdefghz"), (n, 3))
        return tf.constant(words), numbers(n, 4), tf.cast(integers(2, n, 1), amounts.dtype)

    return training(loss, network.trainable_variables, inputs, state=network.non_trainable_variables)


def message_passing() -> Training:
    """One graph for all molecules of the batch: ragged atoms and bonds merged, messages summed by segment."""
    encode, message = perceptron(4, WIDTH), layers.Dense(WIDTH * WIDTH)
    message.build((None, 3))
    update, readout = layers.GRUCell(WIDTH), perceptron(WIDTH, 32, 1)
    update.build((None, WIDTH))
    weights = [w for part in (encode, message, update, readout) for w in part.trainable_variables]

    def loss(atoms: tf.Tensor, bonds: tf.Tensor, pairs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        rows, nodes = tf.shape(atoms)[0], atoms.shape[1]
        edges = pairs.shape[1]
        first = tf.range(rows)[:, None, None] * nodes
        flat_pairs = tf.reshape(pairs + first, [-1, 2])
        state = encode(tf.reshape(atoms, [-1, 4]), training=True)
        for _ in range(2):
            kernels = tf.reshape(message(tf.reshape(bonds, [-1, 3])), [-1, WIDTH, WIDTH])
            neighbours = tf.gather(state, flat_pairs[:, 1])
            sent = tf.squeeze(tf.matmul(kernels, neighbours[..., None]), -1)
            summed = tf.math.unsorted_segment_sum(sent, flat_pairs[:, 0], rows * nodes)
            state, _ = update(summed, state)
        pooled = tf.reduce_mean(tf.reshape(state, [-1, nodes, WIDTH]), 1)
        return tf.reduce_mean((readout(pooled, training=True) - y) ** 2) + 0.0 * edges

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        return numbers(n, 5, 4), numbers(n, 7, 3, seed=1), integers(5, n, 7, 2), numbers(n, 1, seed=2)

    return training(loss, weights, inputs)


def citation_graph() -> Training:
    """One graph of papers for the whole run, a batch of papers from it: neighbours are gathered and averaged."""
    rng = np.random.default_rng(0)
    features = tf.constant(rng.standard_normal((30, 6)), keras.config.floatx())
    edges = tf.constant(rng.integers(0, 30, (2, 80)))
    prepare, combine, head = perceptron(6, WIDTH, WIDTH), perceptron(2 * WIDTH, WIDTH, WIDTH), layers.Dense(5)
    head.build((None, WIDTH))
    weights = [w for part in (prepare, combine, head) for w in part.trainable_variables]

    def loss(papers: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        x = prepare(features, training=True)
        sums = tf.math.unsorted_segment_mean(tf.gather(x, edges[1]), edges[0], 30)
        x = tf.math.l2_normalize(combine(tf.concat([x, sums], 1), training=True), 1)
        return classify(head(tf.gather(x, papers)), y)

    return training(loss, weights, lambda n: (integers(30, n), labels(n)))


def wide_lookup() -> Training:
    """Hashes and buckets inside the model; the product of their embeddings beside a deep network of them."""
    hashing, buckets = layers.Hashing(20), layers.Discretization([-1.0, 0.0, 1.0])
    tables = [layers.Embedding(count, 8) for count in (20, 4)]
    for table in tables:
        table.build()
    deep = perceptron(16, 64, 64, 1)
    weights = [w for part in (*tables, deep) for w in part.trainable_variables]

    def loss(number: tf.Tensor, amount: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        a, b = tables[0](hashing(number)), tables[1](buckets(amount))
        crossed = tf.reduce_sum(a * b, 1, keepdims=True)
        return tf.reduce_mean((deep(tf.concat([a, b], 1), training=True) + crossed - y) ** 2)

    return training(loss, weights, lambda n: (integers(99, n), numbers(n), numbers(n, 1, seed=1)))
