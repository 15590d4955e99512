"""What a variable is worth when it is made, known before any device has memory for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.keras_internals import new_variable_of
from graphsplit.core.variables.parted_variables import assign, parts_of_variable

_HOST = "CPU:0"


@dataclass(frozen=True)
class InitialValue:
    """The value of a variable that is made.

    Attributes:
      shape, dtype: of the variable.
      make: makes a value of a shape, on the device in whose scope it is called.
      is_uniform: whether all entries are the same, so that a part is made as the whole is. If not, `make` takes the
        variable's shape only.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    make: Callable[[Sequence[int]], tf.Tensor]
    is_uniform: bool

    def give(self, variable: tf.Variable) -> None:
        """Give a variable that has no value this one: to its parts, if it is they that are to have it."""
        parts = parts_of_variable(variable)
        if parts is not None and (parts.fill(self.make) if self.is_uniform else parts.take(self.make(self.shape))):
            return
        handle = variable.handle if parts is None else parts.raw_handle
        with tf.device(handle.device):
            assign(handle, self.make(self.shape))
        if parts is not None:
            parts.take_apart()


def initial_value(value: Any, dtype: Any, shape: Any) -> InitialValue | Callable[[], Any]:
    """Return the initial value of a variable, drawn in the host's memory unless all its entries are the same.

    Args:
      value, dtype, shape: as `tf.Variable` takes them.

    Returns:
      A function that returns the value, for those that only `tf.Variable` knows what to do with: of another shape than
      the variable, of strings, or read from a checkpoint whenever it is.
    """
    if (uniform := _uniform(value, dtype)) is not None:
        return uniform
    if callable(value):
        with tf.device(_HOST):
            value = value()
    known = [own for own in (shape, getattr(value, "shape", None)) if own is not None]
    if hasattr(value, "checkpoint_position") or not all(tf.TensorShape(own).is_fully_defined() for own in known):
        return lambda: value
    with tf.device(_HOST):
        whole = tf.convert_to_tensor(value, dtype)
    if (shape is not None and tf.TensorShape(shape) != whole.shape) or not whole.dtype.size:
        return lambda: whole
    return InitialValue(tuple(whole.shape), whole.dtype.base_dtype, lambda shape: whole, False)  # noqa: ARG005


def _uniform(make: Any, dtype: Any) -> InitialValue | None:
    """Return the value that a function makes by an initializer of Keras that gives all entries the same."""
    if (made := new_variable_of(make)) is not None:
        initializer, shape = made[0], made[1].shape
    elif isinstance(make, functools.partial) and len(make.args) == 1:  # tf_keras
        initializer, shape = make.func, make.args[0]
    else:
        return None
    if dtype is None or not _is_uniform(initializer):
        return None
    return InitialValue(tuple(shape), tf.as_dtype(dtype), functools.partial(initializer, dtype=dtype), True)


def _is_uniform(initializer: Any) -> bool:
    for library in filter(None, map(sys.modules.get, ("keras", "tf_keras"))):
        kinds = library.initializers
        if type(initializer) in (kinds.Zeros, kinds.Ones):
            return True
        if type(initializer) is kinds.Constant and np.ndim(initializer.value) == 0:
            return True
    return False
