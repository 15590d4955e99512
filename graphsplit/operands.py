"""What each shard makes for itself: operands that hold sizes, and constants."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from graphsplit.batch_sizes import STAND_IN, Rows
from graphsplit.graphdefs import constant_value
from graphsplit.layouts import Shard
from graphsplit.programs import Op
from graphsplit.rules import Sharded

Operand = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Integers `rest + own * (rows of a shard) + whole * (rows of the batch)`."""


def resized(op: Op, sharded: Sharded) -> dict[int, Operand]:
    """Return the operands that hold the size of a sharded axis, or a place on it."""
    values: dict[int, Operand] = {}
    for operand, position, value, per_row in sharded.resize:
        if operand not in values:
            whole = _growth(op, operand, value)
            values[operand] = value - whole * STAND_IN, np.zeros(value.shape, np.int64), whole
        if position is not None:
            rest, own, whole = values[operand]
            layout = sharded.gives[0]
            assert isinstance(layout, Shard)
            rest[position] = whole[position] = 0
            own[position] = sum(layout.blocks) if per_row is None else per_row
    return values


def _growth(op: Op, operand: int, value: np.ndarray) -> np.ndarray:
    """Return by how much a shape operand grows with each row of a batch of unknown size."""
    if operand in op.constants:
        return np.array(op.per_row.get(operand, np.zeros(value.shape, np.int64)))
    sizes = op.out_shapes[0] or ()  # from which its value was taken
    growth = [size.per_row if isinstance(size, Rows) else 0 for size in sizes]
    return np.array(growth if value.shape == (len(growth),) else np.zeros(value.shape), np.int64)


def rows_constant(op: Op) -> tuple[np.ndarray, np.ndarray]:
    """Return what a constant that depends on the number of rows is for none, and by how much it grows with each."""
    return constant_value(op.node), tf.make_ndarray(op.node.attr["per_row"].tensor)


def own_rows(value: np.ndarray, layout: Shard, rows: tuple[int, ...], d: int) -> np.ndarray:
    """Return device `d`'s piece of every block of `value`."""
    if not any(value.strides):  # one number repeated: nothing to pick, and it stays one number
        shape = list(value.shape)
        shape[layout.axis] = layout.size(rows[d])
        return np.broadcast_to(value.reshape(-1)[0], shape)
    chosen, start = [], 0
    for block in layout.pieces(rows):
        first = start + sum(block[:d])
        chosen.append(np.arange(first, first + block[d]))
        start += sum(block)
    return np.take(value, np.concatenate(chosen), layout.axis)
