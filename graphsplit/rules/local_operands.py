"""What each shard, or each part of a variable, makes for itself: operands that hold sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from graphsplit.core.layouts import Shard
from graphsplit.core.sizes.polynomials import Polynomial, as_entries
from graphsplit.core.sizes.symbolic_sizes import as_exact
from graphsplit.program.program import Op
from graphsplit.rules.factors import Place
from graphsplit.rules.registry import Sharded


def resized(op: Op, sharded: Sharded, own: Callable[[Shard | Place], Polynomial | int]) -> dict[int, np.ndarray]:
    """Return the operands that hold the size of a sharded axis, or a place on it, as polynomials of sizes.

    Args:
      own: returns how many entries the shard has of an axis that lies so, or where they are.
    """
    values: dict[int, np.ndarray] = {}
    for operand, position, value, extent in sharded.resize:
        made = values.setdefault(operand, _exact(op, operand, value))
        if position is not None:
            layout = sharded.gives[0] if extent is None else extent
            assert isinstance(layout, (Shard, Place))
            made[position] = own(layout)
    return values


def _exact(op: Op, operand: int, value: np.ndarray) -> np.ndarray:
    """Return a shape operand with what it has of unknown sizes."""
    if operand in op.symbols:
        return np.array(op.symbols[operand], object)
    sizes = op.out_shapes[0] or ()
    if operand in op.constants or value.shape != (len(sizes),):
        return value.astype(object)
    return as_entries([*map(as_exact, sizes)])  # from which its value was taken
