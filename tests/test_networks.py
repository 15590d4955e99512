"""Whole training steps of the kinds of networks people train: equal to one device, and sharded throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from benchmarks.coverage import application
from benchmarks.coverage_models import MODELS, Training, integers, numbers, supervised
from tests.helpers.float64 import float64
from tests.helpers.trainings import Made, assert_training

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("float64")


HEAVY = {
    "LSTM text classifier": ["MatMul", "GatherV2", "StatelessWhile"],
    "Transformer encoder": ["MatMul", "Softmax", "Rsqrt"],
    "Transformer decoder": ["MatMul", "Softmax", "Rsqrt"],
    "U-Net": ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPoolGrad", "ResizeBilinearGrad"],
    "Variational autoencoder": ["Conv2D", "MatMul", "Conv2DBackpropFilter"],
    "GAN": ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MatMul"],
    "Siamese": ["Conv2D", "Conv2DBackpropFilter", "MatMul"],
    "Graph convolution": ["BatchMatMulV2", "MatMul", "Relu"],
    "Wide & deep": ["GatherV2", "MatMul"],
    "WaveNet": ["Conv2D", "Conv2DBackpropFilter", "SpaceToBatchND"],
}
# Sparse gradients stay sparse: their rows are gathered for the one update of the table.
SPARSE_UPDATES = {"Wide & deep": (*["ResourceScatterAdd"] * 2, *["ScatterNd"] * 4, *["ConcatV2"] * 2)}


# With the long tests, here; `test_unknown_batch` trains some of them with batches of several sizes.
OTHERS = {"GAN", "Graph convolution", "LSTM text classifier", "Siamese", "Transformer decoder", "WaveNet"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in OTHERS else n for n in MODELS])
def test_architecture(name: str):
    rows = (7, 7) if name != "Siamese" else (7, 7, 5)  # another batch is another trace: see `test_unknown_batch`
    at_home = SPARSE_UPDATES.get(name, ())
    assert_training(MODELS[name], rows, sharded=HEAVY[name], at_home=at_home, strict=not at_home)


def test_every_architecture_is_run():
    assert set(HEAVY) == set(MODELS)


@pytest.mark.long
def test_application():
    plan = assert_training(lambda: application("MobileNetV2", 32), (5,), strict=True, devices=2)
    assert sum(op.type == "Conv2DBackpropFilter" for op in plan.sharded_ops) > 30


# Attention


def attention(make: Callable[[Any], Any], *more: tuple[int, ...]) -> Made:
    """Return the training of a layer on sequences of width 8, and how its parts are named."""

    def made() -> Training:
        x = layers.Input((6, 8))
        model = keras.Model(x, layers.Dense(5)(layers.GlobalAveragePooling1D()(make(x))))
        return supervised(
            model, lambda rows: (numbers(rows, 6, 8), integers(5, rows)), optimizer=keras.optimizers.SGD(0.1, 0.9)
        )

    return made


def masked(x: Any) -> Any:
    mask = keras.ops.abs(x[:, :, 0]) < 1.0
    return layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask[:, None, :], use_causal_mask=True)


class Hand(layers.Layer):
    """Attention as papers write it, with einsum, relative positions and a mask."""

    def build(self, _: Any) -> None:
        self.kernels = [self.add_weight(shape=(8, 2, 4), name=name) for name in "qkv"]
        self.distances = self.add_weight(shape=(11, 2), name="distances")

    def call(self, x: Any) -> Any:
        q, k, v = (tf.einsum("btc,chd->bthd", x, kernel) for kernel in self.kernels)
        scores = tf.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
        offsets = tf.range(6)[:, None] - tf.range(6)[None] + 5
        scores += tf.transpose(tf.gather(self.distances, offsets), [2, 0, 1])
        scores = tf.where(tf.linalg.band_part(tf.ones((6, 6), tf.bool), -1, 0), scores, -1e9)
        return tf.reshape(tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), v), [-1, 6, 8])


ATTENTION = {
    "masked and causal": masked,
    "by hand": lambda x: Hand()(x),
    "grouped queries": lambda x: layers.GroupQueryAttention(4, 4, 2)(x, x),
    "additive": lambda x: layers.AdditiveAttention()([x, x[:, :3]]),
    "normalised": lambda x: layers.RMSNormalization()(layers.UnitNormalization()(layers.GroupNormalization(4)(x))),
    "separable": lambda x: layers.SeparableConv1D(8, 3, padding="same")(layers.LayerNormalization(axis=[1, 2])(x)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str):
    assert_training(attention(ATTENTION[name]), (7, 7), strict=True)


# Rows against rows, picking and putting


def towers(loss: Callable[[Any, Any], tf.Tensor]) -> Made:
    def made() -> Training:
        encoders = [keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(4)]) for _ in "ab"]
        weights = [w for encoder in encoders for w in encoder.trainable_variables]
        optimizer = keras.optimizers.SGD(0.1, 0.9)
        optimizer.build(weights)

        def step(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = loss(encoders[0](a), encoders[1](b))
            optimizer.apply(tape.gradient(value, weights), weights)
            return value

        return Training(step, [*weights, *optimizer.variables], lambda n: (numbers(n, 6), numbers(n, 6, seed=1)))

    return made


def in_batch_softmax(a: Any, b: Any) -> tf.Tensor:
    scores = tf.matmul(a, b, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores))


def both_ways(a: Any, b: Any) -> tf.Tensor:
    a, b = tf.math.l2_normalize(a, 1), tf.math.l2_normalize(b, 1)
    scores = a @ tf.transpose(b) * 5.0
    own = tf.range(tf.shape(a)[0])
    losses = [tf.nn.sparse_softmax_cross_entropy_with_logits(own, s) for s in (scores, tf.transpose(scores))]
    return tf.reduce_mean(losses[0] + losses[1]) / 2


def normalised_temperature(a: Any, b: Any) -> tf.Tensor:
    """SimCLR: 2n rows against each other, never against themselves (https://arxiv.org/abs/2002.05709)."""
    z = tf.math.l2_normalize(tf.concat([a, b], 0), 1)
    count = tf.shape(a)[0]
    scores = z @ tf.transpose(z) * 2.0 - 1e9 * tf.eye(2 * count, dtype=z.dtype)
    partner = tf.concat([tf.range(count) + count, tf.range(count)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(partner, scores))


def triplet(a: Any, b: Any) -> tf.Tensor:
    distances = tf.reduce_sum((a[:, None] - b[None]) ** 2, -1)
    own = tf.linalg.diag_part(distances)
    hardest = tf.reduce_min(distances + 1e9 * tf.eye(tf.shape(a)[0], dtype=a.dtype), 1)
    return tf.reduce_mean(tf.nn.relu(1.0 + own - hardest))


def barlow(a: Any, b: Any) -> tf.Tensor:
    a, b = (x - tf.reduce_mean(x, 0) for x in (a, b))
    correlation = tf.matmul(a, b, transpose_a=True) / tf.cast(tf.shape(a)[0], a.dtype)
    return tf.reduce_sum((correlation - tf.eye(4, dtype=a.dtype)) ** 2)


def top_few(a: Any, b: Any) -> tf.Tensor:
    values, places = tf.math.top_k(a * b, 2)
    chosen = tf.gather(b, places, batch_dims=1) * values
    spread = tf.tensor_scatter_nd_update(a, tf.where(tf.ones_like(a[:, 0]) > 0)[:2], tf.zeros_like(a[:2]))
    return (
        tf.reduce_mean(chosen)
        + tf.reduce_sum(tf.one_hot(places, 4, dtype=a.dtype) * a[:, None])
        + tf.reduce_sum(spread)
    )


def joined(a: Any, b: Any) -> tf.Tensor:
    """Two batches in one, cut again in each of the ways there are."""
    both = tf.tanh(tf.concat([a, b, a * b], 0))
    count = tf.shape(a)[0]
    one, two, three = tf.split(both, 3)
    total = tf.reduce_sum(one * two[:, :1]) + tf.reduce_sum(both[:count] * both[count : 2 * count])
    pieces = tf.split(both, [a.shape[0], 2 * a.shape[0]])
    return (
        total + tf.reduce_sum(tf.slice(both, [count, 1], [count, 2]) ** 3) + tf.reduce_sum(pieces[1] ** 2)
    ) / 9.0 + tf.reduce_mean(three)


LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "in-batch softmax": (in_batch_softmax, ()),
    "both ways": (both_ways, ("SparseSoftmaxCrossEntropyWithLogits",)),  # of the columns: each needs all rows
    "normalised temperature": (normalised_temperature, ()),
    "triplet": (triplet, ("MatrixDiagPartV3", "MatrixDiagV3")),  # a diagonal from row to row
    "barlow": (barlow, ()),
    "top-k": (top_few, ("TensorScatterUpdate",)),  # into rows that are counted in the whole batch
    "joined": (joined, ()),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOSSES)
def test_rows_against_rows(name: str):
    loss, at_home = LOSSES[name]
    assert_training(towers(loss), (7, 5), at_home=at_home, sharded=["MatMul", "Tanh"])
