"""What a variable is worth when it is made, known before any device has memory for it."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.keras_internals import new_variable_of
from graphsplit.core.tensorflow_internals import function_graph, in_save_context, value_at_call
from graphsplit.core.variables.parted_classes import are_raw, end_wait, let_wait, raw_handles, waiting_of
from graphsplit.core.variables.parted_variables import (
    assign,
    check_have_values,
    handle_at_call,
    is_initialized,
    name_of,
    parts_of_variable,
)
from graphsplit.errors import ArgumentError

_HOST = "CPU:0"

_without: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()  # by their own handles
_positions = itertools.count()


@dataclass(frozen=True)
class InitialValue:
    """The value of a variable that is made.

    Attributes:
      shape, dtype: of the variable.
      make: makes a value of a shape, on the device in whose scope it is called.
      is_uniform: whether all entries are the same, so that a part is made as the whole is. If not, `make` takes the
        variable's shape only, and returns what is in the host's memory.
      is_made: whether the value is there already, and `make` only returns it.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    make: Callable[[Sequence[int]], tf.Tensor]
    is_uniform: bool = False
    is_made: bool = False

    def give(self, variable: tf.Variable) -> None:
        """Give a variable that has no value this one: to its parts, if it is they that are to have it."""
        parts = parts_of_variable(variable)
        if self.is_uniform and parts is not None and parts.fill(self.make):
            return
        with raw_handles():
            handle = variable.handle
        with tf.device(handle.device):
            value = self.make(self.shape)
        if parts is not None and parts.take(value):
            return
        with tf.device(handle.device):
            assign(handle, value)
        if parts is not None:
            parts.take_apart()

    def wait(self, variable: tf.Variable) -> None:
        """Leave a variable without a value, which `give_values` gives it."""
        with raw_handles():
            _without[id(variable.handle)] = variable
        let_wait(variable, _Waiting(self, next(_positions)))


@dataclass(frozen=True)
class _Waiting:
    """What a variable without a value waits for, and how many began to wait before: in this order values are drawn."""

    value: InitialValue
    position: int

    def handle_of(self, variable: tf.Variable, own_handle: tf.Tensor) -> tf.Tensor:
        """Return a variable's handle for others: in a function that is traced, one that is checked at each call.

        Raises:
          ArgumentError: outside of functions, if it still waits.
        """
        graph = None if tf.executing_eagerly() or in_save_context() else function_graph()
        if graph is not None:
            return value_at_call(graph, functools.partial(_checked, own_handle), own_handle, (id(own_handle), None))
        if tf.executing_eagerly():
            self._check(variable)
        return own_handle

    def saved(self, variable: tf.Variable, spec: Any) -> Any:
        """Return what a checkpoint reads of a variable, `spec` if it has a value by then; an error if not."""

        def read() -> tf.Tensor:
            self._check(variable)
            return spec.tensor

        return type(spec)(read, spec.dtype, spec.device)

    def _check(self, variable: tf.Variable) -> None:
        check_have_values([name_of(variable)] if _waits(variable) else [])


def _checked(handle: tf.Tensor) -> tf.Tensor:
    check_values([] if are_raw() else [handle])
    return handle_at_call(handle, lambda: False)


def give_values(variables: Iterable[tf.Variable]) -> None:
    """Give variables that wait for their values these, in the order in which they were made."""
    waiting = [(variable, waiting_of(variable)) for variable in variables if _waits(variable)]
    for variable, pending in sorted(waiting, key=lambda pair: pair[1].position):
        pending.value.give(variable)
        end_wait(variable)


def check_values(handles: Iterable[tf.Tensor]) -> None:
    """Raise `ArgumentError` if variables behind some of these handles, which are their own ones, have no values."""
    if not _without:
        return
    variable_by_handle = {
        id(handle): variable for handle in handles if (variable := _without.get(id(handle))) is not None
    }
    check_have_values([name_of(variable) for variable in variable_by_handle.values() if _waits(variable)])
    for key in variable_by_handle:
        _without.pop(key, None)


def _waits(variable: tf.Variable) -> bool:
    """Return whether a variable waits; one that has its value by now is an ordinary one from now on."""
    if waiting_of(variable) is None:
        return False
    with tf.init_scope(), raw_handles():
        has_value = is_initialized(variable.handle)
    if has_value:
        end_wait(variable)
    return not has_value


def initial_value(value: Any, dtype: Any, shape: Any) -> InitialValue | Callable[[], Any]:
    """Return the initial value of a variable, drawn in the host's memory, as soon as it is asked for if that is known.

    Returns:
      A function that returns the value, for those that only `tf.Variable` knows what to do with: of another shape than
      the variable, of strings, or read from a checkpoint whenever it is.
    """
    if (by_initializer := _by_initializer(value, dtype)) is not None:
        return by_initializer
    if callable(value):
        with tf.device(_HOST):
            value = value()
    shapes = [known_shape for known_shape in (shape, getattr(value, "shape", None)) if known_shape is not None]
    if hasattr(value, "checkpoint_position") or not all(
        tf.TensorShape(known_shape).is_fully_defined() for known_shape in shapes
    ):
        return lambda: value
    with tf.device(_HOST):
        whole = tf.convert_to_tensor(value, dtype)
    if (shape is not None and tf.TensorShape(shape) != whole.shape) or not whole.dtype.size:
        return lambda: whole
    return InitialValue(tuple(whole.shape), whole.dtype.base_dtype, lambda shape: whole, is_made=True)  # noqa: ARG005


def _by_initializer(make: Any, dtype: Any) -> InitialValue | None:
    """Return the value that a function makes by an initializer of Keras, of which shape and dtype are known before."""
    if (new_variable := new_variable_of(make)) is not None:
        initializer, shape = new_variable[0], new_variable[1].shape
    elif _is_of_tf_keras(make):
        initializer, shape = make.func, make.args[0]
    else:
        return None
    if dtype is None:
        return None
    sizes = tuple(tf.TensorShape(shape).as_list())
    if _is_uniform(initializer):
        return InitialValue(sizes, tf.as_dtype(dtype), functools.partial(initializer, dtype=dtype), is_uniform=True)
    return InitialValue(sizes, tf.as_dtype(dtype), functools.partial(_drawn, make, dtype))


def _is_of_tf_keras(make: Any) -> bool:
    library = sys.modules.get("tf_keras")
    if library is None or not isinstance(make, functools.partial):
        return False
    return isinstance(make.func, library.initializers.Initializer) and len(make.args) == 1 and "dtype" in make.keywords


def _drawn(make: Callable[[], Any], dtype: Any, shape: Sequence[int]) -> tf.Tensor:
    with tf.device(_HOST):
        value = tf.convert_to_tensor(make(), dtype)
    if tuple(value.shape) != tuple(shape):
        raise ArgumentError(
            f"An initializer returned a value of shape {tuple(value.shape)} for a variable of {tuple(shape)}."
        )
    return value


def _is_uniform(initializer: Any) -> bool:
    for library in filter(None, map(sys.modules.get, ("keras", "tf_keras"))):
        kinds = library.initializers
        if type(initializer) in (kinds.Zeros, kinds.Ones):
            return True
        if type(initializer) is kinds.Constant and np.ndim(initializer.value) == 0:
            return True
    return False
