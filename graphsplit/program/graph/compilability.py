"""What XLA can compile as part of a cluster, asked of TensorFlow's own registry of kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from graphsplit.core.gpus import RegisteredKernel, fits, kernel_of
from graphsplit.core.tensorflow_internals import op_definition, registered_xla_kernels
from graphsplit.program.graph.function_calls import CONTROL_FLOW, functions_called

# XLA pads what they return to the most that there may be; how much of it there is follows from the data.
_SIZES_FROM_DATA = frozenset({"Where", "Unique", "UniqueV2", "DynamicPartition", "ListDiff", "SetDiff1D"})
# Effects on variables are what XLA keeps in order; all others happen between clusters.
_ON_VARIABLES = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})


def why_not_compiled(node: Any, functions: Mapping[str, Any], kind: str) -> str:
    """Return why an operation is left out of clusters; "" if XLA compiles it.

    Args:
      node: its `NodeDef`.
      functions: the functions that it may call, by name.
      kind: of its device, `"CPU"` or `"GPU"`.
    """
    if node.op in _SIZES_FROM_DATA:
        return "the size of what it returns follows from the data"
    if _draws(node.op):
        return "XLA draws other random numbers"
    if node.op in CONTROL_FLOW:
        return _why_not_its_functions(node, functions, kind)
    if op_definition(node.op).is_stateful and not is_of_variables(node.op):
        return "it has effects"
    if not any(fits(node, kernel.constraints) for kernel in _xla_kernels(node.op, kind)):
        return "XLA has no kernel for it"
    return ""


def _why_not_its_functions(node: Any, functions: Mapping[str, Any], kind: str) -> str:
    for function in functions_called([node], functions):
        for inner in function.node_def:
            if inner.op in CONTROL_FLOW or inner.op in functions:
                continue
            if why := why_not_compiled(inner, functions, kind):
                return f"{inner.op} in it: {why}"
    return ""


def is_of_variables(op_type: str) -> bool:
    """Return whether ops of a type have no effects but those on variables."""
    return (
        op_type in _ON_VARIABLES
        or op_type.startswith(("ResourceApply", "ResourceSparseApply", "ResourceScatter", "ResourceStridedSliceAssign"))
        or (op_type.startswith("Assign") and op_type.endswith("VariableOp"))
    )


def _draws(op_type: str) -> bool:
    is_stateless_draw = op_type.startswith("Stateless") and op_type not in CONTROL_FLOW
    return is_stateless_draw or "Rng" in op_type


@functools.cache
def _xla_kernels(op_type: str, kind: str) -> tuple[RegisteredKernel, ...]:
    return tuple(kernel_of(k) for k in registered_xla_kernels(op_type) if k.device_type == f"XLA_{kind}_JIT")


def holds_variants(node: Any) -> bool:
    """Return whether an operation reads or makes lists of tensors, which XLA keeps in a form of its own.

    >>> from graphsplit.core.protos import make_node
    >>> holds_variants(make_node("l", "TensorListReserve", ["shape", "count"], element_dtype=tf.float32))
    True
    """
    always, types, lists = _where_variants(node.op)
    variant = tf.variant.as_datatype_enum
    return (
        always
        or any(node.attr[name].type == variant for name in types)
        or any(variant in node.attr[name].list.type for name in lists)
    )


@functools.cache
def _where_variants(op_type: str) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Return whether an op type always reads or makes variants, and by which attributes it says that it does."""
    definition = op_definition(op_type)
    arguments = [*definition.input_arg, *definition.output_arg]
    types = tuple(dict.fromkeys(a.type_attr for a in arguments if a.type_attr))
    lists = tuple(dict.fromkeys(a.type_list_attr for a in arguments if a.type_list_attr))
    return any(a.type == tf.variant.as_datatype_enum for a in arguments), types, lists
