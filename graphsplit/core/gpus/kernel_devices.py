"""Which kinds of device have a kernel for an operation as it is, with the types that it has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.protos.graphdefs import make_node
from graphsplit.core.tensorflow_internals import op_definition, registered_kernels

_DEFAULT = "DEFAULT"  # kernels for every kind of device that has none of its own: TensorFlow's `DEVICE_DEFAULT`
_KINDS = ("CPU", "GPU")
_INDICES = {"SplitV": {"Tlen": tf.int64}, "ConcatV2": {"Tidx": tf.int32}, "Slice": {"Index": tf.int32}}


def kernel_devices(node: Any) -> frozenset[str]:
    """Return the kinds of device (`"CPU"`, `"GPU"`) that run a `NodeDef`, as TensorFlow's placer finds out.

    The kernels for GPUs are known wherever TensorFlow is built with CUDA, also where there is no GPU.

    >>> import tensorflow as tf
    >>> from graphsplit.core.protos.graphdefs import make_node
    >>> sorted(kernel_devices(make_node("y", "StringUpper", ["x"])))
    ['CPU']
    """
    op_type = str(node.op)
    label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
    return _devices(op_type, label, tuple([_types(node, name) for name in _constrained(op_type)]))


@functools.cache
def can_be_cut(dtype: tf.DType, kind: str = "CPU") -> bool:
    """Return whether a kind of device has kernels that cut tensors of a type along an axis, and join them again.

    >>> can_be_cut(tf.float32), can_be_cut(tf.qint8)
    (True, False)
    """
    if dtype in (tf.resource, tf.variant):
        return True  # (handles and lists are never cut: each shard has its own)
    return all(has_moving_kernel(op_type, dtype, kind) for op_type in ("SplitV", "ConcatV2", "Slice"))


@functools.cache
def has_moving_kernel(op_type: str, dtype: tf.DType, kind: str) -> bool:
    """Return whether a kind of device has a kernel for an operation, in the form in which tensors are moved by it.

    >>> has_moving_kernel("SplitV", tf.float32, "CPU"), has_moving_kernel("SplitV", tf.qint8, "CPU")
    (True, False)
    """
    return kind in kernel_devices(make_node("moving", op_type, [], T=dtype, **_INDICES.get(op_type, {})))


class RegisteredKernel(NamedTuple):
    """A registered kernel.

    Attributes:
      kind: of device.
      constraints: the types (their enums) that attributes may have.
      label: what the operation's `_kernel` must be.
    """

    kind: str
    constraints: tuple[tuple[str, frozenset[int]], ...]
    label: str


def kernel_of(definition: Any) -> RegisteredKernel:
    """Return what a `KernelDef` says."""
    constraints = tuple((c.name, frozenset(c.allowed_values.list.type)) for c in definition.constraint)
    return RegisteredKernel(definition.device_type, constraints, definition.label)


@functools.cache
def _kernels(op_type: str) -> tuple[RegisteredKernel, ...]:
    """Return the kernels of an op type for the kinds of device that a placer knows."""
    kinds = {*_KINDS, _DEFAULT}
    return tuple(kernel_of(kernel) for kernel in registered_kernels(op_type) if kernel.device_type in kinds)


@functools.cache
def _constrained(op_type: str) -> tuple[str, ...]:
    """Return the attributes whose types kernels of an op type ask for."""
    return tuple(dict.fromkeys(name for kernel in _kernels(op_type) for name, _ in kernel.constraints))


@functools.cache
def _devices(op_type: str, label: str, types: tuple[tuple[int, ...], ...]) -> frozenset[str]:
    """Return the kinds of device with a kernel for these types of `_constrained`: a step has hundreds of each."""
    held = dict(zip(_constrained(op_type), types, strict=True))
    fitting = {
        kernel.kind
        for kernel in _kernels(op_type)
        if kernel.label == label and all(allowed.issuperset(held[name]) for name, allowed in kernel.constraints)
    }
    return frozenset(kind for kind in _KINDS if kind in fitting or _DEFAULT in fitting)


def fits(node: Any, constraints: tuple[tuple[str, frozenset[int]], ...]) -> bool:
    """Return whether the types that an operation has are among those that a kernel takes."""
    return all(allowed.issuperset(_types(node, name)) for name, allowed in constraints)


def _types(node: Any, name: str) -> tuple[int, ...]:
    value = node.attr[name] if name in node.attr else _default(str(node.op), name)
    return (value.type,) if value.WhichOneof("value") == "type" else tuple(value.list.type)


@functools.cache
def _default(op_type: str, name: str) -> Any:
    return next(a.default_value for a in op_definition(op_type).attr if a.name == name)
