"""Classes of variables that lie in parts, or have no value: those of TensorFlow, and each one's handle knows of it.

A variable that is laid out is given such a class (and its own one again): layers, optimizers and checkpoints hold the
object, and no public method is asked for whatever reads, restores or saves it. The classes override private methods,
each for the reason beside it, and call those of TensorFlow's own classes, which stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from graphsplit.core.variables.records import noted_of, record_of

_inside = threading.local()
_classes: dict[type, type] = {}
_waiting_classes: dict[type, type] = {}


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
    record_of(variable).parts = parts
    variable.__class__ = _parted_class(type(variable))


def take_parts(variable: Any) -> None:
    """Make a variable an ordinary one again."""
    variable.__class__ = type(variable).__mro__[1]
    record_of(variable).parts = None


def _parted_class(kind: type) -> type:
    """Return the class of variables of this class that lie in parts; itself, after a layout that was interrupted."""
    if kind in _classes.values():
        return kind
    if kind not in _classes:
        # TensorFlow's own `handle` is this attribute, which its eager runtime reads past all methods.
        def handle(variable: Any) -> tf.Tensor:
            parts: Any = variable._graphsplit_record.parts
            raw = tf.executing_eagerly() and are_raw()
            return parts.raw_handle if raw else parts.whole_handle(bool(getattr(_inside, "reads", 0)))

        # and all reads but those by that runtime go through this method
        def read(variable: Any, *args: Any, **options: Any) -> Any:
            if (True in args or options.get("no_copy")) and tf.executing_eagerly():  # for a checkpoint
                value = variable._graphsplit_record.parts.on_host()
                if value is not None:
                    return value
            depth = getattr(_inside, "reads", 0)
            _inside.reads = depth + 1
            try:
                return kind._read_variable_op(variable, *args, **options)  # type: ignore[attr-defined]
            finally:
                _inside.reads = depth

        def device(variable: Any) -> str:
            return str(variable._graphsplit_record.parts.raw_handle.device)  # (TensorFlow's own asks for the handle)

        # a function that is given the variable captures its handle first, and takes that for its argument
        def tracing_type(variable: Any, context: Any) -> Any:
            spec: Any = kind.__tf_tracing_type__(variable, context)  # type: ignore[attr-defined]
            spec_class: Any = type(spec)
            return _given_spec(spec_class)(spec.shape, spec.dtype, spec.trainable, spec.alias_id)

        members: dict[str, Any] = {"_handle": property(handle), "device": property(device)}

        def is_initialized(variable: Any, name: str | None = None) -> Any:  # (checkpoints ask)
            with raw_handles():
                return kind.is_initialized(variable, name)  # type: ignore[attr-defined]

        def numpy(variable: Any) -> Any:  # Keras' files and `get_weights`
            value = variable._graphsplit_record.parts.as_array()
            return kind.numpy(variable) if value is None else value  # type: ignore[attr-defined]

        # Keras' optimizers know a variable by its container, if it is in one; if not, they look for that at its handle
        members |= {"_distributed_container": _itself}
        members |= {
            "_read_variable_op": read,
            "is_initialized": is_initialized,
            "numpy": numpy,
            "__tf_tracing_type__": tracing_type,
        }
        _classes[kind] = type(kind.__name__, (kind,), {**members, **_writes(kind), "__module__": kind.__module__})
    return _classes[kind]


@functools.cache
def _given_spec(kind: type) -> type:
    """Return the spec of variables in parts that are given to a function, of TensorFlow's own one."""

    def placeholder(spec: Any, context: Any) -> Any:
        if not context.unnest_only and context.has_placeholder(spec.alias_id):
            record = record_of(context.get_placeholder(spec.alias_id))
            record.parts.become_argument(context.context_graph)
        return kind.placeholder_value(spec, context)  # type: ignore[attr-defined]

    members = {"placeholder_value": placeholder, "__slots__": (), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def let_wait(variable: Any, waiting: Any) -> None:
    """Let whoever reads a variable that has no value get an error that says so.

    Args:
      variable: it has none.
      waiting: what it waits for; its `handle_of(variable, own)` returns a handle for others, or raises the error, and
        its `saved(variable, spec)` what a checkpoint reads.
    """
    record_of(variable).waiting = waiting
    variable.__class__ = _waiting_class(type(variable))


def waiting_of(variable: Any) -> Any:
    """Return what a variable waits for; None if it does not, or is gone."""
    record = noted_of(variable)
    return None if record is None else record.waiting


def end_wait(variable: Any) -> None:
    """Make a variable that waited an ordinary one, or one in parts that never did."""
    record_of(variable).waiting = None
    kind, below = type(variable).__mro__[:2]
    if kind in _waiting_classes.values():
        variable.__class__ = below
    elif below in _waiting_classes.values():
        variable.__class__ = _parted_class(below.__mro__[1])


def _waiting_class(kind: type) -> type:
    if kind not in _waiting_classes:

        def handle(variable: Any) -> tf.Tensor:  # (which TensorFlow's eager runtime reads past all methods)
            waiting, own_handle = waiting_of(variable), vars(variable)["_handle"]
            is_asked = waiting is not None and not (tf.executing_eagerly() and are_raw())
            return waiting.handle_of(variable, own_handle) if is_asked else own_handle

        def device(variable: Any) -> str:
            return str(vars(variable)["_handle"].device)

        def save(variable: Any) -> Any:  # (TensorFlow leaves out of a checkpoint what has no value, and tells nobody)
            waiting, specs = waiting_of(variable), kind._serialize_to_tensors(variable)  # type: ignore[attr-defined]
            return specs if waiting is None else {key: waiting.saved(variable, spec) for key, spec in specs.items()}

        def raw(name: str) -> Any:
            def call(variable: Any, *args: Any, **options: Any) -> Any:
                with raw_handles():
                    return getattr(kind, name)(variable, *args, **options)

            return call

        raw_assign = raw("assign")

        def assign(variable: Any, value: Any, *args: Any, **options: Any) -> Any:
            value = tf.convert_to_tensor(value, variable.dtype)  # (it may be a variable in parts)
            return raw_assign(variable, value, *args, **options)

        members = {"assign": assign, **{name: raw(name) for name in ("is_initialized", "_restore_from_tensors")}}
        members |= {"_handle": property(handle), "device": property(device), "_serialize_to_tensors": save}
        members |= {"_distributed_container": _itself, "__module__": kind.__module__}  # (as above)
        _waiting_classes[kind] = type(kind.__name__, (kind,), members)
    return _waiting_classes[kind]


def _itself(variable: Any) -> Any:
    return variable


def _writes(kind: type) -> dict[str, Any]:
    """Return the methods of variables of this class that give them a value from outside: it may go to the parts.

    Checkpoints restore by a private one, past `assign`.
    """

    def write(variable: Any, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        if variable._graphsplit_record.parts.take(value):
            return variable if read_value else None
        return kind.assign(variable, value, use_locking, name, read_value)  # type: ignore[attr-defined]

    def restore(variable: Any, restored: Mapping[str, Any]) -> Any:
        if variable._graphsplit_record.parts.take(*restored.values()):
            return None
        return kind._restore_from_tensors(variable, restored)  # type: ignore[attr-defined]

    return {"assign": write, "_restore_from_tensors": restore}
