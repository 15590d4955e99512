"""What of Keras is true only inside of a scope: whether it trains, the dtype and the values of variables.

What is traced there must not serve elsewhere. No public name of Keras says which scope is open, so this file, and no
other, looks into its private modules: those that are imported; a Keras that is not has no scope open.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core import structures


def open_scopes() -> Hashable:
    """Return what the scopes that are open now say; () outside of all.

    Keras 3: the context of the layer that is being called, above all `training`, and the dtype to which variables are
    cast. tf_keras: the same, and the learning phase.
    """
    return tuple(_of_keras_3()) + tuple(_of_keras_2())


def _of_keras_3() -> Iterator[Hashable]:
    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is not None:
        cast, call = (state.get_global_attribute(name) for name in ("autocast_scope", "current_call_ctx"))
        if cast is not None:
            yield "cast to", cast.dtype
        for name, value in sorted(vars(call).items()) if call is not None else ():
            if name != "entry_layer" and value is not None:
                yield name, _hashable(value)


def _of_keras_2() -> Iterator[Hashable]:
    layers = sys.modules.get("tf_keras.src.engine.base_layer_utils")
    if layers is not None:
        context, backend = layers.call_context(), sys.modules["tf_keras.src.backend"]
        handed_on = {"training": context._state.get("training"), **context._state.get("call_context_args", {})}
        for name, value in sorted(handed_on.items()):  # (up to tf_keras 2.16, training alone)
            if value is not None:
                yield name, _hashable(value)
        if backend.global_learning_phase_is_set():
            yield "learning phase", _hashable(backend._GRAPH_LEARNING_PHASES.get(backend._DUMMY_EAGER_GRAPH.key))
        cast = sys.modules["tf_keras.src.mixed_precision.autocast_variable"]._autocast_dtype
        if getattr(cast, "dtype", None) is not None:
            yield "cast to", cast.dtype


def _hashable(value: Any) -> Hashable:
    tensors, tree = structures.flatten(value)
    return tree, tuple(map(_tensor_key, tensors))


def _tensor_key(tensor: tf.Tensor) -> Hashable:
    """Return what tells a tensor from others of its type: of an eager number its value, else which tensor it is."""
    is_number = hasattr(tensor, "numpy") and tensor.shape.rank == 0
    return structures.StaticLeaf(np.asarray(tensor).item()) if is_number else tensor.ref()


def variables_have_other_values() -> bool:
    """Return whether Keras' variables are worth something else than they hold: in `stateless_call`, while it builds."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    return state is not None and state.get_global_attribute("stateless_scope") is not None


def only_shapes_count() -> bool:
    """Return whether Keras 3 wants to know shapes only: while it builds layers and functional models."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    return state is not None and state.get_global_attribute("symbolic_scope") is not None
