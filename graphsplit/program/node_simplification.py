"""Nodes that do the same and ask for less: no size of the whole where none is needed, nothing that adds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.graphdefs import inputs_of, make_node
from graphsplit.core.symbolic_sizes import Shape, are_same, has_sizes, is_one, is_same

SIMPLIFIED = frozenset({"ConcatV2", "EnsureShape", "Squeeze"})
"""The types of nodes that may be simplified."""


def simplified(
    node: Any,
    in_shapes: Sequence[Shape | None],
    constants: Sequence[np.ndarray | None],
    out_shapes: Sequence[Shape | None],
    out_dtypes: Sequence[tf.DType],
) -> Any:
    """Return a node that may stand for `node`, with the same name and results; it may read fewer tensors.

    Args:
      node: a `NodeDef`. It is left as it is.
      in_shapes, constants: of its operands; None where nothing is known.
      out_shapes, out_dtypes: of its results.
    """
    if node.op == "ConcatV2":
        return _without_empty_parts(node, in_shapes, constants[-1])
    if node.op == "Squeeze" and not node.attr["squeeze_dims"].list.i:
        return _with_squeezed_axes(node, in_shapes[0])
    if node.op == "EnsureShape" and is_known(in_shapes[0], out_shapes[0]):
        return make_node(node.name, "Identity", node.input, T=out_dtypes[0])
    return node


def is_known(before: Shape | None, ensured: Shape | None) -> bool:
    """Return whether a tensor is known to have a shape, every size of it."""
    return before is not None and None not in before and are_same(before, ensured)


def _without_empty_parts(node: Any, shapes: Sequence[Shape | None], axis: np.ndarray | None) -> Any:
    """Return a concatenation without what adds nothing to it, such as the gradient of an empty piece."""
    if axis is None:
        return node
    data, controls = inputs_of(node)
    parts = zip(data[:-1], shapes, strict=False)
    kept = [part for part, shape in parts if not shape or not is_same(shape[int(axis)], 0)]
    if not kept or len(kept) == len(data) - 1:
        return node
    dtype, index_dtype = (tf.as_dtype(node.attr[name].type) for name in ("T", "Tidx"))
    if len(kept) == 1:
        return make_node(node.name, "Identity", [*kept, *controls], T=dtype)
    return make_node(node.name, "ConcatV2", [*kept, data[-1], *controls], N=len(kept), T=dtype, Tidx=index_dtype)


def _with_squeezed_axes(node: Any, shape: Shape | None) -> Any:
    """Return a `Squeeze` that names its axes: on a device with one row, the batch is not among them."""
    if shape is None or None in shape or has_sizes(shape):
        return node
    copy = deepcopy(node)
    copy.attr["squeeze_dims"].list.i.extend(i for i, size in enumerate(shape) if is_one(size))
    return copy
