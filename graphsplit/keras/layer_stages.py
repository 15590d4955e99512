"""Stages of a Keras model by the names of its layers.

What a layer computes is named by its name: Keras calls it in a name scope.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.keras.flavors import KERAS_3, Flavor
from graphsplit.planning.schedule.automatic_stages import Beginnings

_MOST_NAMES = 12


def stages_of_model(model: Any, stages: object, flavor: Flavor) -> int | Beginnings | None:
    """Return what stages a user asked for, checked against the layers of the model.

    Args:
      model: a built model.
      stages: how many, which the options check, or patterns of names of layers at which stages begin.
      flavor: the Keras of the model. Keras 3 enters each layer's scope twice, to build and to call it, so that
        TensorFlow gives the second one a number; Keras 2 enters it once.

    Raises:
      ArgumentError: for neither of these, or a pattern that no layer's name fits.
    """
    if stages is None or (isinstance(stages, int) and not isinstance(stages, bool)):
        return stages
    if not isinstance(stages, (list, tuple)) or not stages or not all(isinstance(name, str) for name in stages):
        raise ArgumentError(
            f"stages={stages!r}: stages of a model are a number, at least 1, or patterns of names of the layers at "
            "which new stages begin, ['block4_*', 'block9_*']."
        )
    if not hasattr(model, "layers"):
        raise ArgumentError(
            f"stages={stages!r}: {model.name!r} is a layer with fit, no keras.Model, and does not say which layers it "
            "has. Give a number of stages, or make it a keras.Model."
        )
    names = list(dict.fromkeys(_layer_names(model)))
    fitting = {pattern: fnmatch.filter(names, pattern) for pattern in stages}
    idle = [pattern for pattern, found in fitting.items() if not found]
    if idle:
        raise ArgumentError(
            f"stages={stages!r}: no layer of {model.name!r} has a name that fits {', '.join(map(repr, idle))}. Its "
            f"layers are:\n{bullet_list(names, _MOST_NAMES)}"
        )
    suffix = r"_\d+" if flavor is KERAS_3 else ""
    return Beginnings.at(fitting, names, f"(^|/)({{}}){suffix}/")


def _layer_names(model: Any) -> Iterator[str]:
    """Return the names of the layers of a model, and of models in it, in order."""
    for layer in model.layers:
        yield layer.name
        if hasattr(layer, "layers"):
            yield from _layer_names(layer)
