"""What is not compared, because TensorFlow itself has two answers: the proof of each, and how programs avoid it.

A test that fails has good news: TensorFlow has one answer now, and programs need not avoid it any longer.
"""

from __future__ import annotations

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

    oneDNN's gives it to one; TensorFlow takes that where forward and backward are in one graph. So the gradient depends
    on how graphs are cut. Values a hundred times as large are hardly ever so close.
    """
    x = tf.constant(np.reshape([1.0, 1.0 + 6e-6, 0.0], [1, 3, 1, 1, 1]), tf.float32)
    assert gradient(x).numpy().ravel().tolist() == [1.0, 2.0, 0.0]  # three gradients of two windows
    assert tf.function(gradient, autograph=False)(x).numpy().ravel().tolist() == [0.0, 2.0, 0.0]
    assert gradient(100.0 * x).numpy().ravel().tolist() == [0.0, 2.0, 0.0]


def test_programs_keep_entries_of_windows_apart() -> None:
    templates = [t for family in CATALOG.values() for t in family if "tf.raw_ops.MaxPool3D(" in t]
    assert templates
    assert all("* 100.0" in template for template in templates)
