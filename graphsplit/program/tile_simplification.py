"""Arithmetic on a tiled tensor is done before it is tiled, or instead.

The gradient of a mean tiles what it is given to the size of what was averaged, and then divides by the count: for a
BatchNormalization whole activations are written several times over to say one number for each channel. Scaling first
gives the same bits; and a product that broadcasts needs no tiling. What is then small runs once, at home.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from graphsplit.core.symbolic_sizes import Shape, are_same, is_one, is_same
from graphsplit.program.program import Op, Tensor

_SCALES = frozenset({"Mul", "RealDiv"})


def untile(op: Op, ops: Sequence[Op]) -> list[Op]:
    """Return the operations that `op` becomes, itself as a rule. The last one has its name and its result.

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
    known = shape is not None and None not in shape
    size = int(op.out_dtypes[0].size) * math.prod(int(size or 0) for size in shape or ()) if known else 0
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
