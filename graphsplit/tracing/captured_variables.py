"""The variables that a traced function captured: those of which TensorFlow knows, and those behind handles alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.tensorflow_internals import resource_value, variable_behind
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import parts_of

_objects: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()  # by the ids of their handles


def variables_of(
    graph: tf.Graph, placeholders: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]
) -> tuple[tf.Variable, ...]:
    """Return the variables that a function captured, each once, in the order in which it did.

    A graph keeps a set of variables whose objects were used while it was built. Of others it has the handle (an old
    optimizer hands those of its slots to its kernels): for such there is a new object, for the same variable.

    Args:
      graph: of the function.
      placeholders: of what it captured.
      captured: what these stand for.
    """
    variables, places = list(graph.variables), {id(handle): k for k, handle in enumerate(captured)}
    with tf.init_scope(), raw_handles():
        known = {id(variable.handle) for variable in variables}
        for placeholder, handle in zip(placeholders, captured, strict=True):
            held = resource_value(placeholder) if handle.dtype == tf.resource and hasattr(handle, "numpy") else None
            if held is None or id(handle) in known:
                continue
            known.add(id(handle))
            parts = parts_of(handle)
            own = parts.variable if parts is not None else None
            variables.append(_behind(handle, *held, placeholder.op.name) if own is None else own)
        # (what is laid out lies by this order: not by that of a set, which is another one in every process)
        return tuple(
            sorted(variables, key=lambda variable: (places.get(id(variable.handle), len(places)), variable.name))
        )


def _behind(handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape, name: str) -> tf.Variable:
    """Return the object for the variable behind a handle, the same as long as somebody has it (and so the handle)."""
    found = _objects.get(id(handle))
    if found is None:
        found = _objects[id(handle)] = variable_behind(handle, dtype, shape, name)
    return found
