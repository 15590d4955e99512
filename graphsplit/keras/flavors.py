"""The two Kerases: Keras 3 (`keras`) and Keras 2 (`tf_keras`). A model of one can exist only once it is imported."""

from __future__ import annotations

import enum
import sys
from typing import Any


class Flavor(enum.Enum):
    """Which Keras a model belongs to; the value is the module's name."""

    KERAS_3 = "keras"
    KERAS_2 = "tf_keras"

    def module(self) -> Any:
        """Return the imported module, or None."""
        return sys.modules.get(self.value)


KERAS_3, KERAS_2 = Flavor.KERAS_3, Flavor.KERAS_2


def flavor_of(model: Any) -> Flavor | None:
    """Return the Keras that `model` is a model of, or None if it is no Keras model."""
    for flavor in Flavor:
        module = flavor.module()
        if module is not None and all(isinstance(model, base) for base in _bases(module)):
            return flavor
    return None


def defines(model: Any, method: str) -> bool:
    """Return whether a Keras model has its own method, not that of `keras.Model`. (A GAN may have no `call`.)"""
    flavor = flavor_of(model)
    return flavor is None or getattr(type(model), method) is not getattr(flavor.module().Model, method)


def _bases(module: Any) -> tuple[type, ...]:
    """Return the classes that make a model: the one that has `fit`, and a layer, for its variables.

    In Keras 3 they are two, and a class may have both without being a `Model`, as many of Keras' own tests do.
    """
    return next(base for base in module.Model.__mro__ if "fit" in vars(base)), module.layers.Layer
