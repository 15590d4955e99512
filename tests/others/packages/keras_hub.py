"""KerasHub's backbones at the sizes of its own tests, in float64: a step that makes what they return small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from benchmarks.coverage_models import Training, integers, numbers
from tests.others.packages.keras_hub_sizes import COMPOSED, FLOAT32, LENGTH, OPEN, SIZES, WORDS

REQUIREMENTS = (
    "--no-deps keras-hub",
    "kagglehub",
    "regex",
    "tokenizers",
)  # (it asks for a tensorflow-text of its own TensorFlow)
PRECISION = "float64"
__all__ = ("FLOAT32", "PRECISION", "REQUIREMENTS", "models")


def models() -> dict[str, Callable[[], Training]]:
    """Return the steps of all backbones that are installed."""
    return {name: lambda name=name: small_outputs(backbone(name), OPEN.get(name, {})) for name in (*SIZES, *COMPOSED)}


def backbone(name: str) -> Any:
    """Return a backbone; "VideoPrismBackbone with texts" is one of the class that the first word names."""
    import keras_hub

    if name in COMPOSED:
        return COMPOSED[name](keras_hub.models)
    return getattr(keras_hub.models, name.split()[0].strip(","))(**SIZES[name])


def small_outputs(model: Any, sizes: Mapping[str, tuple[int, ...]]) -> Training:
    """Return the step of a functional model whose results are to be waves; `sizes` are those of inputs.

    A norm at the end gives results of one size, whatever is below it: waves ask for more than a size.
    """
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(inputs: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            parts = [*map(_distance, filter(_is_floating, outputs)), *model.losses]
            loss = tf.add_n([tf.cast(part, tf.float64) for part in parts])
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def inputs(rows: int) -> tuple[Any, ...]:
        return (keras.tree.map_structure(lambda like: _input(rows, like, sizes), model.input),)

    return Training(step, [*model.variables, *optimizer.variables], inputs)


def _is_floating(output: tf.Tensor) -> bool:
    return bool(output.dtype.is_floating)


def _distance(output: tf.Tensor) -> tf.Tensor:
    wave = tf.cos(tf.cast(tf.range(tf.shape(output)[-1] if len(output.shape) else 1), output.dtype))
    return tf.reduce_mean((output - wave) ** 2)


# Integers that are no words: from, and below.
_INTEGERS = {"labels": (0, 2), "segment": (0, 2), "position": (0, LENGTH), "indices": (0, LENGTH), "steps": (2, 9)}


def _input(rows: int, like: Any, sizes: Mapping[str, tuple[int, ...]]) -> tf.Tensor:
    name = like.name
    shape = sizes.get(name) or [LENGTH if size is None else size for size in like.shape[1:]]
    seed = sum(map(ord, name))
    if "mask" in name and len(shape) == 1:
        lengths = 1 + integers(shape[-1], rows)
        return tf.cast(tf.sequence_mask(lengths, shape[-1]), like.dtype)
    if tf.as_dtype(like.dtype).is_integer or name == "labels":
        least, below = next((found for kind, found in _INTEGERS.items() if kind in name), (0, WORDS))
        return tf.cast(least + integers(below - least, rows, *shape, seed=seed), like.dtype)
    return tf.cast(numbers(rows, *shape, seed=seed), like.dtype)
