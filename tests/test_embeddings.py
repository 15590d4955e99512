"""Embeddings with sparse gradients, sparse and ragged arguments, strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from benchmarks.coverage_models import Training, integers, numbers, supervised
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_law
from tests.helpers.trainings import assert_training

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("float64")

WORDS = 20


def embedded(optimizer: Callable[[], Any], **options: Any) -> Callable[[], Training]:
    def made() -> Training:
        model = keras.Sequential(
            [
                layers.Input((4,), dtype="int32"),
                layers.Embedding(WORDS, 3, **options),
                layers.GlobalAveragePooling1D(),
                layers.Dense(5),
            ]
        )
        return supervised(model, lambda n: (integers(WORDS, n, 4), integers(5, n)), optimizer=optimizer())

    return made


# Optimizers with moments turn a sparse gradient into a dense one themselves, on one device too.
SPARSE: dict[str, tuple[Callable[[], Any], dict[str, Any], bool]] = {
    "sgd": (lambda: optimizers.SGD(0.1), {}, True),
    "momentum": (lambda: optimizers.SGD(0.1, 0.9), {}, False),
    "adam": (lambda: optimizers.Adam(0.01, epsilon=1e-3), {}, False),
    "adagrad": (lambda: optimizers.Adagrad(0.1), {}, True),
    "rmsprop": (lambda: optimizers.RMSprop(0.01, epsilon=1e-3), {}, False),
    "clipped": (lambda: optimizers.SGD(0.1, clipnorm=0.01), {}, True),
    "masked": (lambda: optimizers.SGD(0.1), {"mask_zero": True}, True),
    "regularised": (lambda: optimizers.SGD(0.1), {"embeddings_regularizer": "l2"}, False),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str):
    optimizer, options, sparse = SPARSE[name]
    made = embedded(optimizer, **options)

    def make() -> tuple[Any, Any]:
        keras.utils.set_random_seed(1)
        training = made()
        return training.step, training.variables

    calls = [made().inputs(rows) for rows in (7, 7, 2)]
    plan = assert_law(make, calls, sharded=["GatherV2", "MatMul"], at_home=None, tolerance=EXACT)
    kinds = {op.type for op, _ in plan.unsharded_ops if op in plan.program.ops}
    assert all("Scatter" in kind for kind in kinds), str(plan)
    inside = {op.type for op, _ in plan.unsharded_ops if op not in plan.program.ops}  # of the optimizer's branches
    assert inside <= {"ScatterNd", "ConcatV2"}, str(plan)
    assert bool(kinds) == sparse
    reduced = [r for r in plan.moves if r.kind == "reduce" and plan.program.shape(r.tensor) == (WORDS, 3)]
    assert bool(reduced) != sparse  # sparse: the rows and their numbers are gathered, the table's size is never sent


def test_shared_table_and_gathers_from_variables():
    """One table read twice, one of them as TensorFlow 1 does, with a sparse update by hand."""

    def make() -> tuple[Any, Any]:
        table = tf.Variable(tf.reshape(tf.range(60.0, dtype=tf.float64), [WORDS, 3]) / 60)

        def step(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                one, two = tf.nn.embedding_lookup(table, left), tf.gather(table, right)
                loss = tf.reduce_mean(tf.reduce_sum(tf.sin(one * two), 1))
            gradient = tape.gradient(loss, table)
            assert isinstance(gradient, tf.IndexedSlices)
            table.scatter_sub(gradient)
            return loss

        return step, [table]

    calls = [(integers(WORDS, rows), integers(WORDS, rows, seed=3)) for rows in (7, 7, 5)]
    plan = assert_law(make, calls, sharded=["GatherV2", "Sin", "Cos"], at_home=1, tolerance=EXACT)
    assert [op.type for op in plan.rows_kept] == ["ResourceScatterSub"]


def test_gather_and_scatter_row_by_row():
    def make() -> tuple[Any, Any]:
        w = tf.Variable(numbers(4, 6))

        def step(x: tf.Tensor, places: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ w)
                picked = tf.gather(hidden, places, batch_dims=1)
                best, at = tf.math.top_k(picked, 2)
                spread = tf.reduce_sum(tf.one_hot(places, 6, dtype=x.dtype) * picked[..., None], 1)
                counted = tf.math.unsorted_segment_sum(picked, places, 6)  # over all rows
                loss = tf.reduce_mean(best) + tf.reduce_mean(spread**2) + tf.reduce_mean(counted**2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss, at, tf.argsort(picked)[:, :2], tf.searchsorted(tf.sort(picked), best)

        return step, [w]

    calls = [(numbers(rows, 4), integers(6, rows, 3)) for rows in (7, 7, 2)]
    kinds = ["GatherV2", "TopKV2", "OneHot", "LowerBound", "MatMul"]
    assert_law(make, calls, sharded=kinds, tolerance=EXACT, strict=True)


def sparse_rows(rows: int) -> tf.SparseTensor:
    dense = np.random.default_rng(rows).integers(0, 3, (rows, 6)).astype(float)
    return tf.sparse.from_dense(tf.constant(np.where(dense > 1, dense, 0.0)))


def test_sparse_argument_beside_a_dense_one():
    def make() -> tuple[Any, Any]:
        w = tf.Variable(tf.reshape(tf.range(18.0, dtype=tf.float64), [6, 3]) / 18)

        def step(x: tf.SparseTensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                predicted = tf.sparse.sparse_dense_matmul(x, w)
                loss = tf.reduce_mean(tf.square(tf.tanh(predicted) - y))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    assert_law(make, [(sparse_rows(n), numbers(n, 3)) for n in (7, 5)], at_home=None, tolerance=EXACT)


def test_ragged_argument_beside_a_dense_one():
    def make() -> tuple[Any, Any]:
        table = tf.Variable(tf.reshape(tf.range(60.0, dtype=tf.float64), [WORDS, 3]) / 60)

        def step(words: tf.RaggedTensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                mean = tf.reduce_mean(tf.ragged.map_flat_values(lambda i: tf.gather(table, i), words), 1)
                loss = tf.reduce_mean(tf.square(tf.tanh(mean) - y))
            table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
            return loss, words.row_lengths()

        return step, [table]

    words = [tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7], [2, 2], [19, 0, 1, 3], [8]][:n]) for n in (7, 5)]
    calls = [(w, numbers(int(w.nrows()), 3)) for w in words]
    assert_law(make, calls, at_home=None, tolerance=EXACT)


@pytest.mark.parametrize("beside", [True, False], ids=["beside labels", "alone"])
def test_ragged_rows_are_split_once_they_are_dense(beside: bool):
    def make() -> tuple[Any, Any]:
        table = tf.Variable(tf.reshape(tf.range(60.0, dtype=tf.float64), [WORDS, 3]) / 60)

        def step(words: tf.RaggedTensor, y: Any = 0.5) -> Any:
            with tf.GradientTape() as tape:
                padded = words.to_tensor(default_value=0)
                vectors = tf.tanh(tf.gather(tf.convert_to_tensor(table), padded))
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(vectors, 1) - y))
            table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
            return loss

        return step, [table]

    words = [tf.ragged.constant([[1, 2], [3], [4, 5, 6], [], [2, 2], [19, 0, 1, 3], [8]][:n]) for n in (7, 5, 2)]
    calls = [(w, numbers(int(w.nrows()), 3)) if beside else (w,) for w in words]
    plan = assert_law(make, calls, sharded=["GatherV2", "Tanh"], at_home=None, tolerance=EXACT)
    reasons = {op.type: reason for op, reason in plan.unsharded_ops}  # some gradients reshape by the unknown length
    assert reasons["RaggedTensorToTensor"] == "its rows are only equal once they are dense"
    assert "words is a RaggedTensor: it is kept whole, and split where it becomes dense" in plan.notes


@pytest.mark.parametrize(
    "dense", [tf.sparse.to_dense, lambda s: tf.sparse.sparse_dense_matmul(s, tf.eye(4, dtype=s.dtype))]
)
def test_sparse_rows_are_split_once_they_are_dense(dense: Any):
    def make() -> tuple[Any, Any]:
        w = tf.Variable(tf.reshape(tf.range(12.0, dtype=tf.float64), [4, 3]) / 12)

        def step(s: tf.SparseTensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(dense(s) @ w))
            w.assign_sub(tape.gradient(loss, w))
            return loss

        return step, [w]

    calls = [(tf.sparse.from_dense(numbers(n, 4) * tf.cast(numbers(n, 4) > 0, tf.float64)),) for n in (7, 5, 2)]
    assert_law(make, calls, sharded=["MatMul", "Tanh"], at_home=1, tolerance=EXACT)


def test_words_to_categories():
    """Hashed and looked up words: cleaned and embedded on the shards, looked up where the table is."""
    known = ["an apple", "a day", "keeps"]
    given = tf.constant([" An apple", "a day", "KEEPS", "away", "the ", "a day", "doctor"])

    def made() -> Training:
        lookup = layers.StringLookup(vocabulary=known)
        hashing = layers.Hashing(8)
        tables = [layers.Embedding(n, 3) for n in (4, 8)]
        head = layers.Dense(5)
        for table in tables:
            table.build((None,))
        head.build((None, 3))
        weights = [w for layer in (*tables, head) for w in layer.trainable_variables]
        optimizer = optimizers.SGD(0.1)
        optimizer.build(weights)

        def step(words: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            clean = tf.strings.lower(tf.strings.strip(words))
            with tf.GradientTape() as tape:
                hidden = tables[0](lookup(clean)) + tables[1](hashing(clean))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, head(tf.tanh(hidden))))
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        return Training(step, [*weights, *optimizer.variables], lambda n: (given[:n], integers(5, n)))

    at_home = ("LookupTableFindV2", "ResourceScatterSub", "ResourceScatterSub")
    kinds = ["StringLower", "StringToHashBucketFast", "GatherV2", "Tanh", "MatMul"]
    assert_training(made, (7, 7, 5), at_home=at_home, sharded=kinds)


@pytest.mark.long
def test_text_vectorization():
    """Texts are split into words at home, all at once; the words' numbers are rows again."""
    texts = tf.constant(["a b", "the cat sat on", "e d c b a", "a", "b", "c", "the the"])

    def made() -> Training:
        vectorize = layers.TextVectorization(max_tokens=WORDS, output_sequence_length=4)
        vectorize.adapt(["a b c d e", "the cat sat"])
        training = embedded(lambda: optimizers.SGD(0.1))()

        def step(text: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return training.step(vectorize(text), y)

        return Training(step, training.variables, lambda n: (texts[:n], integers(5, n)))

    kinds = ["StringLower", "StaticRegexReplace", "GatherV2", "MatMul"]
    assert_training(made, (7, 7, 2), at_home=("StringSplitV2", "ResourceScatterSub"), sharded=kinds)
