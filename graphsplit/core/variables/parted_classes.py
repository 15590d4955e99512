"""Classes of variables that lie in parts: those of TensorFlow, and each one's handle knows of the parts.

A variable that is laid out is given such a class (and its own one again): layers, optimizers and checkpoints hold the
object, and no public method is asked for whatever reads, restores or saves it. The classes override private methods,
each for the reason beside it, and call those of TensorFlow's own classes, which stay as they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_inside = threading.local()
_classes: dict[type, type] = {}


@contextlib.contextmanager
def raw_handles() -> Iterator[None]:
    """Give handles of variables as they are, as long as this lasts: they are looked at, and the parts stay."""
    depth = getattr(_inside, "depth", 0)
    _inside.depth = depth + 1
    try:
        yield
    finally:
        _inside.depth = depth


def are_raw() -> bool:
    """Return whether handles are given as they are."""
    return bool(getattr(_inside, "depth", 0))


def give_parts(variable: Any, parts: Any) -> None:
    """Let a variable's handle know of its parts, a `VariableParts`."""
    variable._graphsplit_parts = parts
    variable.__class__ = _parted_class(type(variable))


def take_parts(variable: Any) -> None:
    """Make a variable an ordinary one again."""
    variable.__class__ = type(variable).__mro__[1]
    del variable._graphsplit_parts


def _parted_class(kind: type) -> type:
    """Return the class of variables of this class that lie in parts; itself, after a layout that was interrupted."""
    if kind in _classes.values():
        return kind
    if kind not in _classes:
        # TensorFlow's own `handle` is this attribute, which its eager runtime reads past all methods.
        def handle(variable: Any) -> tf.Tensor:
            parts: Any = variable._graphsplit_parts
            raw = tf.executing_eagerly() and are_raw()
            return parts.raw_handle if raw else parts.whole_handle(bool(getattr(_inside, "reads", 0)))

        # and all reads but those by that runtime go through this method
        def read(variable: Any, *args: Any, **options: Any) -> Any:
            if (True in args or options.get("no_copy")) and tf.executing_eagerly():  # for a checkpoint
                value = variable._graphsplit_parts.on_host()
                if value is not None:
                    return value
            depth = getattr(_inside, "reads", 0)
            _inside.reads = depth + 1
            try:
                return kind._read_variable_op(variable, *args, **options)  # type: ignore[attr-defined]
            finally:
                _inside.reads = depth

        def device(variable: Any) -> str:
            return str(variable._graphsplit_parts.raw_handle.device)  # (TensorFlow's own asks for the handle)

        # a SavedModel copies each variable by this method, and no public one hears of it
        def export(variable: Any, *args: Any, **options: Any) -> Any:
            variable._graphsplit_parts.check_can_be_saved(variable.name)
            return kind._export_to_saved_model_graph(variable, *args, **options)  # type: ignore[attr-defined]

        own: dict[str, Any] = {"_handle": property(handle), "device": property(device)}

        def is_initialized(variable: Any, name: str | None = None) -> Any:  # (checkpoints ask)
            with raw_handles():
                return kind.is_initialized(variable, name)  # type: ignore[attr-defined]

        def numpy(variable: Any) -> Any:  # Keras' files and `get_weights`
            value = variable._graphsplit_parts.on_host() if tf.executing_eagerly() else None
            return kind.numpy(variable) if value is None else value.numpy()  # type: ignore[attr-defined]

        # Keras' optimizers know a variable by its container, if it is in one; if not, they look for that at its handle
        own |= {"_distributed_container": _itself}
        own |= {"_read_variable_op": read, "_export_to_saved_model_graph": export}
        own |= {"is_initialized": is_initialized, "numpy": numpy}
        _classes[kind] = type(kind.__name__, (kind,), {**own, **_writes(kind), "__module__": kind.__module__})
    return _classes[kind]


def _itself(variable: Any) -> Any:
    return variable


def _writes(kind: type) -> dict[str, Any]:
    """Return the methods of variables of this class that give them a value from outside: it may go to the parts.

    Checkpoints restore by a private one, past `assign`.
    """

    def write(variable: Any, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        if variable._graphsplit_parts.take(value):
            return variable if read_value else None
        return kind.assign(variable, value, use_locking, name, read_value)  # type: ignore[attr-defined]

    def restore(variable: Any, restored: Mapping[str, Any]) -> Any:
        if variable._graphsplit_parts.take(*restored.values()):
            return None
        return kind._restore_from_tensors(variable, restored)  # type: ignore[attr-defined]

    return {"assign": write, "_restore_from_tensors": restore}
