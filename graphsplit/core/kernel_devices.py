"""Which kinds of device have a kernel for an operation as it is, with the types that it has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from graphsplit.core.tensorflow_internals import op_definition, registered_kernels

_DEFAULT = "DEFAULT"  # kernels for every kind of device that has none of its own: TensorFlow's `DEVICE_DEFAULT`
_KINDS = ("CPU", "GPU")


def kernel_devices(node: Any) -> frozenset[str]:
    """Return the kinds of device (`"CPU"`, `"GPU"`) that run a `NodeDef`, as TensorFlow's placer finds out.

    The kernels for GPUs are known wherever TensorFlow is built with CUDA, also where there is no GPU.

    >>> import tensorflow as tf
    >>> from graphsplit.core.graphdefs import make_node
    >>> sorted(kernel_devices(make_node("y", "StringUpper", ["x"])))
    ['CPU']
    """
    fitting = {k.kind for k in _kernels(node.op) if k.label == _label(node) and fits(node, k.constraints)}
    return frozenset(kind for kind in _KINDS if kind in fitting or _DEFAULT in fitting)


class Kernel(NamedTuple):
    """A registered kernel.

    Attributes:
      kind: of device.
      constraints: the types (their enums) that attributes may have.
      label: what the operation's `_kernel` must be.
    """

    kind: str
    constraints: tuple[tuple[str, frozenset[int]], ...]
    label: str


def kernel_of(definition: Any) -> Kernel:
    """Return what a `KernelDef` says."""
    constraints = tuple((c.name, frozenset(c.allowed_values.list.type)) for c in definition.constraint)
    return Kernel(definition.device_type, constraints, definition.label)


@functools.cache
def _kernels(op_type: str) -> tuple[Kernel, ...]:
    """Return the kernels of an op type for the kinds of device that a placer knows."""
    kinds = {*_KINDS, _DEFAULT}
    return tuple(kernel_of(kernel) for kernel in registered_kernels(op_type) if kernel.device_type in kinds)


def _label(node: Any) -> str:
    return node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""


def fits(node: Any, constraints: tuple[tuple[str, frozenset[int]], ...]) -> bool:
    """Return whether the types that an operation has are among those that a kernel takes."""
    for name, allowed in constraints:
        value = node.attr[name] if name in node.attr else _default(node.op, name)
        types = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
        if not types <= allowed:
            return False
    return True


@functools.cache
def _default(op_type: str, name: str) -> Any:
    return next(a.default_value for a in op_definition(op_type).attr if a.name == name)
