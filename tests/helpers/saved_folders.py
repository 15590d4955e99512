"""Small SavedModels, and what is in a folder."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def save(folder: Path, factor: float = 2.0) -> str:
    module = tf.Module()
    module.factor = tf.Variable(factor, name="factor")

    def scale(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": x * module.factor}

    def count(x: tf.Tensor) -> dict[str, tf.Tensor]:
        module.factor.assign_add(1.0)
        return {"y": x * module.factor}

    def unique(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"n": tf.size(tf.unique(x + 1.0)[0])}

    signatures = {
        "scale": tf.function(scale, input_signature=[tf.TensorSpec([5, 2], name="x")]),
        "count": tf.function(count, input_signature=[tf.TensorSpec([5, 2], name="x")]),
        "unique": tf.function(unique, input_signature=[tf.TensorSpec([5], name="x")]),
    }
    tf.saved_model.save(module, str(folder), signatures=signatures)
    return str(folder)
