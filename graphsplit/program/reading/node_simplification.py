"""Nodes that do the same and ask for less: no size of the whole, nothing that adds nothing, nothing tiled too early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import inputs_of, make_node
from graphsplit.core.sizes import Shape, are_same, has_sizes, is_one, is_same
from graphsplit.program.program import Op, Tensor

SIMPLIFIED = frozenset({"ConcatV2", "EnsureShape", "Squeeze"})
"""The types of nodes that may be simplified."""
_SCALES = frozenset({"Mul", "RealDiv"})


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


def is_known(inferred: Shape | None, ensured: Shape | None) -> bool:
    """Return whether a tensor is known to have a shape, every size of it."""
    return inferred is not None and None not in inferred and are_same(inferred, ensured)


def _without_empty_parts(node: Any, shapes: Sequence[Shape | None], axis: np.ndarray | None) -> Any:
    """Return a concatenation without what adds nothing to it, such as the gradient of an empty piece."""
    if axis is None:
        return node
    data, controls = inputs_of(node)
    pairs = zip(data[:-1], shapes, strict=False)
    parts = [part for part, shape in pairs if not shape or not is_same(shape[int(axis)], 0)]
    if not parts or len(parts) == len(data) - 1:
        return node
    dtype, index_dtype = (tf.as_dtype(node.attr[name].type) for name in ("T", "Tidx"))
    if len(parts) == 1:
        return make_node(node.name, "Identity", [*parts, *controls], T=dtype)
    return make_node(node.name, "ConcatV2", [*parts, data[-1], *controls], N=len(parts), T=dtype, Tidx=index_dtype)


def _with_squeezed_axes(node: Any, shape: Shape | None) -> Any:
    """Return a `Squeeze` that names its axes: on a device with one row, the batch is not among them."""
    if shape is None or None in shape or has_sizes(shape):
        return node
    copy = deepcopy(node)
    copy.attr["squeeze_dims"].list.i.extend(i for i, size in enumerate(shape) if is_one(size))
    return copy


def untile(op: Op, ops: Sequence[Op]) -> list[Op]:
    """Return the operations that `op` becomes, itself as a rule. The last one has its name and its result.

    Arithmetic on a tiled tensor is done before it is tiled, or instead. The gradient of a mean tiles what it is given
    to the size of what was averaged, and then divides by the count: for a BatchNormalization whole activations are
    written several times over to say one number for each channel. Scaling first gives the same bits; and a product that
    broadcasts needs no tiling. What is then small runs once.

    Args:
      op: an operation that follows `ops`.
      ops: the program up to there.
    """
    if op.type not in _SCALES or op.controls or not op.out_dtypes[0].is_floating:
        return [op]
    for k, tensor in enumerate(op.inputs):
        tile, other = ops[tensor.op], op.inputs[1 - k]
        if tile.type != "Tile":
            continue
        if op.in_shapes[1 - k] == () and ops[other.op].type == "Const":
            return _scaled_first(op, k, tile)
        if _broadcasts(tile.in_shapes[0], op.in_shapes[1 - k], op.out_shapes[0]):
            return [_reading(op, k, tile)]
    return [op]


def _reading(op: Op, k: int, tile: Op) -> Op:
    """Return `op` with what was tiled as its operand `k`."""
    inputs, shapes = list(op.inputs), list(op.in_shapes)
    inputs[k], shapes[k] = tile.inputs[0], tile.in_shapes[0]
    return replace(op, inputs=tuple(inputs), in_shapes=tuple(shapes))


def _scaled_first(op: Op, k: int, tile: Op) -> list[Op]:
    shape = tile.in_shapes[0]
    is_defined = shape is not None and None not in shape
    size = int(op.out_dtypes[0].size) * math.prod(int(size or 0) for size in shape or ()) if is_defined else 0
    small = replace(_reading(op, k, tile), name=f"{op.name}/untiled", out_shapes=(shape,), out_bytes=(size,))
    tiled = replace(
        tile,
        index=op.index + 1,
        name=op.name,
        inputs=(Tensor(op.index, 0), tile.inputs[1]),
        out_shapes=op.out_shapes,
        out_bytes=op.out_bytes,
    )
    return [small, tiled]


def _broadcasts(small: Shape | None, other: Shape | None, result: Shape | None) -> bool:
    """Return whether an operand of shape `small` gives the result that it gives tiled."""
    if small is None or result is None or None in small or None in result or not are_same(other, result):
        return False
    return len(small) == len(result) and all(is_one(a) or is_same(a, b) for a, b in zip(small, result, strict=True))
