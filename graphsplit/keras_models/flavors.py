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
        if module is not None and isinstance(model, module.Model):
            return flavor
    return None
