"""What is not compared, because TensorFlow itself has two answers: the proof of each, and how programs avoid it.

A test that fails has good news: TensorFlow has one answer now, and programs need not avoid it any longer.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.fuzzing.catalog import CATALOG


def pool(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.MaxPool3D(input=x, ksize=[1, 2, 1, 1, 1], strides=[1] * 5, padding="VALID")


def gradient(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = pool(x)
    return tape.gradient(y, x)


@pytest.mark.usefixtures("plain_oracle")
def test_windows_with_two_largest_entries() -> None:
    """TensorFlow's own kernel of MaxPool3DGrad gives a gradient to all entries within 1e-5 of a window's largest.

    oneDNN's gives it to one; TensorFlow takes that where forward and backward are in one graph, on processors for which
    it uses oneDNN (by default not on those without AVX-512). So the gradient depends on how graphs are cut. Values a
    hundred times as large are hardly ever so close.
    """
    x = tf.constant(np.reshape([1.0, 1.0 + 6e-6, 0.0], [1, 3, 1, 1, 1]), tf.float32)
    assert gradient(x).numpy().ravel().tolist() == [1.0, 2.0, 0.0]  # three gradients of two windows
    in_one_graph = tf.function(gradient, autograph=False)(x).numpy().ravel().tolist()
    assert in_one_graph in ([0.0, 2.0, 0.0], [1.0, 2.0, 0.0])
    assert gradient(100.0 * x).numpy().ravel().tolist() == [0.0, 2.0, 0.0]


def test_programs_keep_entries_of_windows_apart() -> None:
    templates = [t for family in CATALOG.values() for t in family if "tf.raw_ops.MaxPool3D(" in t]
    assert templates
    assert all("* 100.0" in template for template in templates)


def pooled_gradient(x: tf.Tensor, g: tf.Tensor, stride: int = 1) -> tf.Tensor:
    """Return what the second derivative of a max pooling reads of `2 * g`: at each window's largest entry."""
    window = {"ksize": [1, 2, 2, 1], "strides": [1, stride, stride, 1], "padding": "SAME"}
    y = tf.raw_ops.MaxPool(input=x, **window)
    return tf.raw_ops.MaxPoolGradGrad(orig_input=x, orig_output=y, grad=2.0 * g, **window)


@pytest.mark.parametrize("stride", [1, 2])
def test_second_derivatives_of_pooling_write_over_what_they_read(stride: int) -> None:
    """TensorFlow's kernel of MaxPoolGradGrad takes the memory of its operand for a result of the same shape.

    It does so where nobody else reads that, which a graph decides and not the program, and goes on reading what it has
    written over. A result of another shape has memory of its own.
    """
    x, g = (tf.constant(np.random.default_rng(seed).standard_normal([3, 4, 5, 2])) for seed in range(2))
    largest = tf.nn.max_pool_with_argmax(x, 2, stride, "SAME", include_batch_in_index=True).argmax
    right = tf.gather(tf.reshape(2.0 * g, [-1]), largest).numpy()
    found = tf.function(pooled_gradient, autograph=False)(x, g, stride).numpy()
    assert np.array_equal(found, right) == (stride != 1)


def test_programs_pool_into_other_shapes() -> None:
    templates = [
        t for family in CATALOG.values() for t in family if re.search(r"MaxPool(Grad|V2|\()|max_pool|nn\.pool", t)
    ]
    assert len(templates) >= 8
    same = [t for t in templates if "'SAME'" in t and re.search(r"(1, 'SAME'|\[1, ?1, ?1, ?1\]|nn\.pool)", t)]
    assert not same


def test_gradients_of_depthwise_convolutions_without_filters_are_not_written() -> None:
    """TensorFlow's kernel returns early where a filter has no entries, with a result that it has only allocated."""

    def gradient(multiplier: int) -> np.ndarray:
        junk = [tf.fill([4, 4, 5, 3], tf.constant(7.0, tf.float64)) for _ in range(3)]
        del junk  # its memory is handed out again
        filters, above = tf.zeros([2, 2, 3, multiplier], tf.float64), tf.zeros([4, 4, 5, 3 * multiplier], tf.float64)
        return tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
            input_sizes=[4, 4, 5, 3], filter=filters, out_backprop=above, strides=[1] * 4, padding="SAME"
        ).numpy()

    assert any(gradient(0).any() for _ in range(50))
    assert not gradient(1).any()


def test_programs_have_filters_of_depthwise_convolutions() -> None:
    templates = [t for family in CATALOG.values() for t in family if "epthwise" in t]
    assert len(templates) >= 4
    assert not [template for template in templates if "d}" in template]  # a number that is drawn, and may be the rows'


def test_gradients_of_sparse_segments_without_entries_are_not_written() -> None:
    """As above: with no indices, the result is memory that TensorFlow has only allocated."""

    def gradient(indices: int) -> np.ndarray:
        junk = [tf.fill([4, 3], tf.constant(7.0, tf.float64)) for _ in range(3)]
        del junk
        none = tf.zeros([indices], tf.int32)
        above = tf.zeros([3, 3], tf.float64)
        return tf.raw_ops.SparseSegmentSumGrad(grad=above, indices=none, segment_ids=none, output_dim0=4).numpy()

    assert any(gradient(0).any() for _ in range(50))
    assert not gradient(1).any()


def test_programs_have_entries_of_sparse_segments_that_are_differentiated() -> None:
    templates = [t for family in CATALOG.values() for t in family if "SparseSegmentSumGrad(" in t]
    assert templates
    assert all(template.count("tf.pad(") == 2 for template in templates)


def test_diagonals_of_unknown_length_have_a_wrong_static_shape() -> None:
    """TensorFlow counts with -1 for the length: a gradient inside raises, and `tf.size` is 0 in TensorFlow, too."""
    found = []

    def off_diagonal(x: tf.Tensor) -> tf.Tensor:
        y = tf.linalg.diag(x, k=1)
        found.append(y.shape.as_list())
        return y

    x = tf.ones([3])
    assert tf.function(off_diagonal, input_signature=[tf.TensorSpec([None])])(x).shape == (4, 4)
    assert found == [[0, 0]]


def test_programs_have_diagonals_of_known_length() -> None:
    templates = [t for family in CATALOG.values() for t in family if "linalg.diag(" in t and "k=" in t]
    assert templates
    assert all("{f:*3}" in template for template in templates)
