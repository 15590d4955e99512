"""Operands that number rows, or entries of rows, in the whole: of a part of the rows they are less what comes before.

`tf.gather(x, i, batch_dims=1)` has a gradient that adds up entries `row * n + i` of all rows, made flat. A shard that
has these rows has these entries, too, if `i` is less than `n` for certain: if something was gathered from `n` by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphsplit.core.polynomials import is_symbolic
from graphsplit.core.sizes import is_same

NUMBERED = {
    "CropAndResize": 2,
    "CropAndResizeGradBoxes": 3,
    "CropAndResizeGradImage": 2,
    "GatherNd": 1,
    "ScatterNd": 0,
    "TensorScatterAdd": 1,
    "TensorScatterMax": 1,
    "TensorScatterMin": 1,
    "TensorScatterSub": 1,
    "TensorScatterUpdate": 1,
    "UnsortedSegmentMax": 1,
    "UnsortedSegmentMin": 1,
    "UnsortedSegmentProd": 1,
    "UnsortedSegmentSum": 1,
}
"""The operand of an op type that may number rows. (Of vectors of indices, it is the first of each.)"""

_IN_ORDER = frozenset({"Cast", "ExpandDims", "Identity", "Reshape"})
_MOST_STEPS = 4


class Numbers(NamedTuple):
    """What is known of an operand: entry by entry, it is at least `least`, and less than `least + bound`."""

    least: np.ndarray
    bound: int

    def are_of(self, rows: Any, count: int) -> bool:
        """Return whether, cut into `rows` rows, each has the numbers of its own `count` entries only."""
        if type(rows) is not int or not rows or self.least.size % rows:
            return False
        least, first = self.least.reshape(rows, -1), np.arange(rows)[:, None] * count
        return bool(np.all(least >= first) and np.all(least + self.bound <= first + count))


class InOrder(NamedTuple):
    """What is known of an operand of unknown size: its entries are 0, 1, 2 and so on, as many as a polynomial says."""

    size: Any

    def are_of(self, rows: Any, count: int) -> bool:
        """Return whether, cut into `rows` rows, each has its own number only."""
        return count == 1 and is_same(self.size, rows)


class RowNumbers:
    """Finds them while a program is read, op by op."""

    def __init__(self, ops: Sequence[Any], known: Mapping[Any, np.ndarray]):
        self._ops = ops
        self._known = known
        self._gathered: dict[Any, int] = {}  # indices -> the length of what something was gathered from by them

    def note(self, op: Any) -> None:
        """Take notice of an op that is read."""
        axis, shape = op.constants.get(2), op.in_shapes[0] if op.in_shapes else None
        if op.type == "GatherV2" and axis is not None and shape and op.attr("batch_dims").i:
            length = shape[int(axis)]
            if type(length) is int:
                self._gathered[op.inputs[1]] = min(length, self._gathered.get(op.inputs[1], length))

    def find(self, op: Any) -> dict[int, Numbers | InOrder]:
        """Return what is known of the operand of an op that may number rows."""
        operand = NUMBERED.get(op.type)
        if operand is None:
            return {}
        found = self._first_column(op.inputs[operand]) if has_columns(op.type) else self._numbers(op.inputs[operand])
        return {} if found is None else {operand: found}

    def takes_all(self, op: Any) -> bool:
        """Return whether a gather takes all there is along the first axis, in order: `x[0]`, `x[1]` and so on."""
        shape, indices = op.in_shapes[:2]
        if not shape or indices is None or len(indices) != 1 or op.constants.get(2) != 0 or op.attr("batch_dims").i:
            return False
        found = self._numbers(op.inputs[1])
        return isinstance(found, InOrder) and found.are_of(shape[0], 1)

    def _numbers(self, tensor: Any) -> Numbers | InOrder | None:
        for _ in range(_MOST_STEPS):
            op = self._ops[tensor.op]
            if tensor in self._known or op.type not in _IN_ORDER:
                break
            tensor = op.inputs[0]
        op = self._ops[tensor.op]
        if op.type == "SelectV2":
            return self._or_first(op)
        if op.type == "Range" and 1 in op.symbols and (op.constants.get(0), op.constants.get(2)) == (0, 1):
            return InOrder(op.symbols[1].item())
        found, shape = self._sum(tensor), self._ops[tensor.op].out_shapes[tensor.index]
        if found is None or not found.least.size or shape is None or None in shape:
            return None
        numbered = found.least.ndim - sum(size == 1 for size in found.least.shape)
        is_of_first_axes = found.least.shape == (*shape[:numbered], *(1,) * (len(shape) - numbered))
        return found if is_of_first_axes else None

    def _or_first(self, op: Any) -> InOrder | None:
        """Return what is known of `n > 1 ? range(n) : 0`, as `tf.vectorized_map` numbers rows: the same without it."""
        asked, found = self._ops[op.inputs[0].op], self._numbers(op.inputs[1])
        asks = asked.type == "Greater" and asked.constants.get(1) == 1 and 0 in asked.symbols
        if not asks or op.constants.get(2) != 0 or not isinstance(found, InOrder):
            return None
        return found if found.are_of(asked.symbols[0].item(), 1) else None

    def _sum(self, tensor: Any, depth: int = 0) -> Numbers | None:
        """Return what is known of offsets plus indices within them: an array that is broadcast to the tensor."""
        op = self._ops[tensor.op]
        if tensor in self._known:
            return None if is_symbolic(self._known[tensor]) else Numbers(self._known[tensor], 1)
        if tensor in self._gathered:
            return Numbers(np.zeros((1,) * len(op.out_shapes[tensor.index] or ()), np.int64), self._gathered[tensor])
        if op.type != "AddV2" or depth > _MOST_STEPS:
            return None
        a, b = (self._sum(t, depth + 1) for t in op.inputs)
        if a is None or b is None or a.least.ndim != b.least.ndim:
            return None
        return Numbers(a.least + b.least, a.bound + b.bound - 1)

    def _first_column(self, tensor: Any) -> Numbers | InOrder | None:
        """Return what is known of the first index of each of some vectors."""
        if tensor in self._known:
            value = self._known[tensor]
            return None if is_symbolic(value) or not value.size else Numbers(value[..., 0], 1)
        op = self._ops[tensor.op]
        if op.type == "Pack" and op.attr("axis").i in (-1, len(op.out_shapes[0] or ()) - 1):
            return self._numbers(op.inputs[0])
        if op.type == "ConcatV2" and (op.in_shapes[0] or (0,))[-1] == 1:
            axis = op.constants.get(len(op.inputs) - 1)
            last = axis is not None and int(axis) in (-1, len(op.out_shapes[0] or ()) - 1)
            return self._numbers(op.inputs[0]) if last else None
        return None


def has_columns(op_type: str) -> bool:
    """Return whether an op type numbers rows by the first of several indices."""
    return op_type in ("GatherNd", "ScatterNd") or op_type.startswith("TensorScatter")
