"""Augmentation inside of the function: warps, crops at random places, boxes; for batches of one size and of any."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from benchmarks.coverage_models import numbers
from tests.helpers.law import assert_law


def turned(images: Any, angle: Any) -> Any:
    """Each image turned by its own angle, and moved by one shift that all share."""
    cosine, sine, zero = tf.cos(angle), tf.sin(angle), tf.zeros_like(angle)
    each = tf.stack([cosine, -sine, zero, sine, cosine, zero, zero, zero], 1)
    shift = tf.constant([[1.0, 0, 1, 0, 1, -1, 0, 0]])
    for transforms in (each, shift):
        images = tf.raw_ops.ImageProjectiveTransformV3(
            images=images, transforms=transforms, output_shape=[6, 6], fill_value=0.5, interpolation="BILINEAR"
        )
    return images


def cropped(images: Any, angle: Any) -> Any:
    """The same window of all images, at a place that depends on the data."""
    place = tf.cast(tf.reduce_max(tf.abs(angle)), tf.int32) % 3
    window = tf.ensure_shape(images[:, place : place + 4], [None, 4, 6, 2])
    return tf.reduce_mean(window, [1, 2]) + images[:, place, 0]


def scaled(images: Any, angle: Any) -> Any:
    return tf.raw_ops.ScaleAndTranslate(
        images=images * angle[:, None, None, None], size=[9, 5], scale=[1.5, 0.8], translation=[0.0, 0.3]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduce_retracing", [False, True])
@pytest.mark.parametrize(
    ("function", "op_type"),
    [(turned, "ImageProjectiveTransformV3"), (cropped, "StridedSlice"), (scaled, "ScaleAndTranslate")],
)
def test_augmentation(function: Any, op_type: str, reduce_retracing: bool):
    def step(images: Any, angle: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            made = function(tf.tanh(images), angle)
            loss = tf.reduce_sum(made**2)
        return made, tape.gradient(loss, images)

    calls = [(tf.cast(numbers(n, 6, 6, 2), tf.float32), tf.cast(numbers(n), tf.float32)) for n in (7, 7, 2)]
    assert_law(lambda: (step, []), calls, sharded=[op_type], tuning={"reduce_retracing": reduce_retracing})
