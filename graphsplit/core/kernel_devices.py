"""Which kinds of device have a kernel for an operation as it is, with the types that it has."""

from __future__ import annotations

import functools
from typing import Any

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
    found = _kernels(node.op)
    fitting = {kind for kind, constraints, label in found if label == _label(node) and _fits(node, constraints)}
    return frozenset(kind for kind in _KINDS if kind in fitting or _DEFAULT in fitting)


@functools.cache
def _kernels(op_type: str) -> tuple[tuple[str, tuple[tuple[str, frozenset[int]], ...], str], ...]:
    """Return kind, allowed types by attribute, and label of each kernel of an op type."""
    kinds = {*_KINDS, _DEFAULT}
    return tuple(
        (
            kernel.device_type,
            tuple((c.name, frozenset(c.allowed_values.list.type)) for c in kernel.constraint),
            kernel.label,
        )
        for kernel in registered_kernels(op_type)
        if kernel.device_type in kinds
    )


def _label(node: Any) -> str:
    return node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""


def _fits(node: Any, constraints: tuple[tuple[str, frozenset[int]], ...]) -> bool:
    for name, allowed in constraints:
        value = node.attr[name] if name in node.attr else _default(node.op, name)
        types = {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)
        if not types <= allowed:
            return False
    return True


@functools.cache
def _default(op_type: str, name: str) -> Any:
    return next(a.default_value for a in op_definition(op_type).attr if a.name == name)
