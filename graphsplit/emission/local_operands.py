"""What each shard makes for itself: operands that hold sizes, and its pieces of constants."""

from __future__ import annotations

import numpy as np

from graphsplit.core.layouts import Shard
from graphsplit.core.polynomials import Polynomial
from graphsplit.core.symbolic_sizes import OWN, as_exact
from graphsplit.program.program import Op
from graphsplit.rules import Sharded


def resized(op: Op, sharded: Sharded) -> dict[int, np.ndarray]:
    """Return the operands that hold the size of a sharded axis, or a place on it, as polynomials of sizes."""
    values: dict[int, np.ndarray] = {}
    for operand, position, value, each in sharded.resize:
        own = values.setdefault(operand, _exact(op, operand, value))
        if position is not None:
            layout = sharded.gives[0]
            assert isinstance(layout, Shard)
            count = sum(layout.blocks) if each is None else each
            own[position] = Polynomial.of(OWN) * Polynomial.of(count)
    return values


def _exact(op: Op, operand: int, value: np.ndarray) -> np.ndarray:
    """Return a shape operand with what it has of unknown sizes."""
    if operand in op.symbols:
        return np.array(op.symbols[operand], object)
    sizes = op.out_shapes[0] or ()
    if operand in op.constants or value.shape != (len(sizes),):
        return value.astype(object)
    return np.array([*map(as_exact, sizes), None], object)[:-1]  # from which its value was taken


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
