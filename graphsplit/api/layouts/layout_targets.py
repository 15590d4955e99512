"""What users lay out: the variables of variables, modules, models and optimizers, and which slots belong to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core import keras_internals
from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.core.tensorflow_internals import has_handle
from graphsplit.core.variables.parted_classes import raw_handles


def variables_of(target: Any) -> list[tf.Variable]:
    """Return the TensorFlow variables of a target, each once, in its order.

    Raises:
      ArgumentError: for what has no variables.
      UnsupportedError: for a variable that is no `tf.Variable` of eager code.
    """
    return [value for value, _ in variables_with_owners(target)]


def variables_with_owners(target: Any) -> list[tuple[tf.Variable, Any]]:
    """Return `variables_of(target)`, each with the variable of Keras 3 that it is the value of, else itself."""
    found: dict[int, tuple[tf.Variable, Any]] = {}
    for variable in _all(target):
        value = plain_variable(variable)
        if value is not variable and isinstance(value, tf.Variable):
            value._graphsplit_path = variable.path
        with raw_handles():  # what lies in parts stays there
            is_plain = isinstance(value, tf.Variable) and has_handle(value)
        if not is_plain:
            raise UnsupportedError(f"{variable!r} is not a variable that can have a layout: it has no handle.")
        found.setdefault(id(value), (value, variable))
    return list(found.values())


def slots_of(target: Any, variables: Sequence[tf.Variable]) -> dict[int, tf.Variable]:
    """Return the variable that each slot belongs to, by the slot's id, as the optimizers of a target have it."""
    found = {}
    for optimizer in optimizers_of(target):
        for slot, variable in keras_internals.slots_of(optimizer, variables):
            found[id(plain_variable(slot))] = plain_variable(variable)
    return found


def optimizers_of(target: Any) -> Iterable[Any]:
    """Yield the optimizers of a target: those in it, and those of the models in it."""
    if isinstance(target, Mapping):
        target = list(target.values())
    if isinstance(target, (list, tuple, set)):
        for value in target:
            yield from optimizers_of(value)
    else:
        yield from [own for own in (target, getattr(target, "optimizer", None)) if hasattr(own, "apply_gradients")]


def plain_variable(variable: Any) -> Any:
    """Return TensorFlow's variable; Keras 3 wraps them."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def _all(target: Any) -> Iterable[Any]:
    if isinstance(target, tf.Variable):
        yield target
    elif isinstance(target, Mapping):
        for value in target.values():
            yield from _all(value)
    elif isinstance(target, (list, tuple, set)):
        for value in target:
            yield from _all(value)
    elif hasattr(target, "variables"):
        own = target.variables
        yield from own() if callable(own) else own  # a method in old tf_keras optimizers
        for part in ("optimizer", "metrics"):
            yield from _all(getattr(target, part, None) or ())
    elif hasattr(target, "assign_add"):  # a variable of Keras 3 (whose optimizers have such a method, too)
        yield target
    else:
        raise ArgumentError(f"Variable layouts are for variables, modules, models and optimizers, got {target!r}.")
