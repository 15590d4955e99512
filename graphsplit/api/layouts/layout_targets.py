"""What users lay out: the variables of variables, modules, models and optimizers, and which slots belong to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core import keras_internals
from graphsplit.core.tensorflow_internals import has_handle
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.errors import ArgumentError, UnsupportedError


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
    """Yield the optimizers in a target: all that a model has, also in a list, which a step of its own applies."""
    if isinstance(target, (list, tuple, set, Mapping)):
        for value in _entries(target):
            yield from optimizers_of(value)
    elif hasattr(type(target), "apply_gradients"):
        yield target
    elif hasattr(target, "variables"):
        found = [own for value in getattr(target, "__dict__", {}).values() for own in _entries(value)]
        yield from [own for own in found if hasattr(type(own), "apply_gradients")]


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple, set)) else [value]


def plain_variable(variable: Any) -> Any:
    """Return TensorFlow's variable; Keras 3 wraps them."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def _all(target: Any) -> Iterable[Any]:
    if isinstance(target, tf.Variable):
        yield target
    elif isinstance(target, (list, tuple, set, Mapping)):
        for value in _entries(target):
            yield from _all(value)
    elif hasattr(target, "variables"):
        own = target.variables
        yield from own() if callable(own) else own  # a method in old tf_keras optimizers
        yield from _all([own for own in optimizers_of(target) if own is not target])
        yield from _all(getattr(target, "metrics", None) or ())
    elif hasattr(target, "assign_add"):  # a variable of Keras 3 (whose optimizers have such a method, too)
        yield target
    else:
        raise ArgumentError(f"Variable layouts are for variables, modules, models and optimizers, got {target!r}.")
