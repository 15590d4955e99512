"""The CTC loss, dense and sparse, and its decoders: loops whose functions are called by their names."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.coverage_models import integers, numbers
from tests.helpers.law import assert_law

FRAMES, WORDS, CLASSES = 6, 3, 5


def dense(logits: Any, words: Any, heard: Any, written: Any) -> Any:
    said = tf.transpose(logits, [1, 0, 2])
    return tf.nn.ctc_loss(words, said, written, heard, logits_time_major=True, blank_index=0)


def of_keras(logits: Any, words: Any, heard: Any, written: Any) -> Any:
    return keras.ops.ctc_loss(words, logits, written, heard)


def sparse(logits: Any, words: Any, heard: Any, written: Any) -> Any:
    labels = keras.ops.convert_to_tensor(words)
    return tf.nn.ctc_loss(
        tf.sparse.from_dense(labels), tf.transpose(logits, [1, 0, 2]), None, heard, blank_index=CLASSES - 1
    )


def loss_and_gradient(loss: Any, stretch: float = 1.0) -> Any:
    def function(logits: Any, words: Any, heard: Any, written: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            each = loss(tf.tanh(logits * stretch), words, heard, written)
            total = tf.reduce_mean(each)
        return each, tape.gradient(total, logits)

    return function


def arguments(rows: int) -> tuple[tf.Tensor, ...]:
    logits = tf.cast(numbers(rows, FRAMES, CLASSES), tf.float32)
    return logits, integers(CLASSES - 2, rows, WORDS) + 1, FRAMES - integers(2, rows), 1 + integers(WORDS, rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [dense, of_keras])
def test_dense_labels(loss: Any):
    assert_law(
        lambda: (loss_and_gradient(loss), []), [arguments(7)], sharded=["Tanh", "OneHot"], at_home=None, tolerance=3e-5
    )


def test_sparse_labels_are_one_list_of_all_rows():
    plan = gs.parallelize(loss_and_gradient(sparse), devices=3).plan(*arguments(7))
    assert {op.type for op, _ in plan.unsharded_ops} == {"CTCLoss", "GatherNd", "Where"}
    assert_law(lambda: (loss_and_gradient(sparse), []), [arguments(7)], sharded=["Tanh"], at_home=None, tolerance=3e-5)


@pytest.mark.parametrize("decoder", [tf.nn.ctc_greedy_decoder, tf.nn.ctc_beam_search_decoder])
def test_decoders(decoder: Any):
    def decode(logits: Any, heard: Any) -> Any:
        [words], chance = decoder(tf.transpose(tf.tanh(logits), [1, 0, 2]), heard)
        return tf.sparse.to_dense(words, default_value=-1), chance

    logits, _, heard, _ = arguments(7)
    assert_law(lambda: (decode, []), [(logits, heard)], sharded=["Tanh"], at_home=None)
