"""Operands that number rows, or entries of rows, in the whole: of a part of the rows they are less what comes before.

`tf.gather(x, i, batch_dims=1)` has a gradient that adds up entries `row * n + i` of all rows, made flat. A shard that
has these rows has these entries, too, if `i` is less than `n` for certain: if something was gathered from `n` by it, or
if it says which of `n` are the largest, as `tf.math.top_k` does, whose gradient is made flat likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphsplit.core.polynomials import is_symbolic
from graphsplit.core.sizes import is_at_least, is_same, quotient

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
    """What is known of an operand of any size: entry `k` of its first axis is at least `k * step`.

    Attributes:
      size: how many entries there are.
      step: from the least of one entry to that of the next.
      bound: each is less than its least and this; of 1, it is `k * step` itself.
    """

    size: Any
    step: Any = 1
    bound: Any = 1

    def are_of(self, rows: Any, count: Any) -> bool:
        """Return whether, cut into `rows` rows, each has the numbers of its own `count` entries only."""
        per_row = quotient(self.size, rows)
        return type(per_row) is int and is_same(self.step * per_row, count) and is_at_least(self.step, self.bound)


class RowNumbers:
    """Finds them while a program is read, op by op."""

    def __init__(self, ops: Sequence[Any], integers: Mapping[Any, np.ndarray]):
        self._ops = ops
        self._integers = integers
        self._below: dict[Any, Any] = {}  # indices -> the length of the axis on which there is something at them

    def note(self, op: Any) -> None:
        """Take notice of an op that is read."""
        axis, shape = op.constants.get(2), op.in_shapes[0] if op.in_shapes else None
        if op.type == "GatherV2" and axis is not None and shape and op.attr("batch_dims").i:
            self._note_below(op.inputs[1], shape[int(axis)])
        elif op.type == "TopKV2" and shape:
            self._note_below(type(op.inputs[0])(op.index, 1), shape[-1])

    def _note_below(self, indices: Any, length: Any) -> None:
        noted_length = self._below.get(indices)
        if length is not None and (noted_length is None or is_at_least(noted_length, length)):
            self._below[indices] = length

    def find(self, op: Any) -> dict[int, Numbers | InOrder]:
        """Return what is known of the operand of an op that may number rows."""
        operand = NUMBERED.get(op.type)
        if operand is None:
            return {}
        numbers = self._first_column(op.inputs[operand]) if has_columns(op.type) else self._numbers(op.inputs[operand])
        return {} if numbers is None else {operand: numbers}

    def takes_all(self, op: Any) -> bool:
        """Return whether a gather takes all there is along the first axis, in order: `x[0]`, `x[1]` and so on."""
        shape, indices = op.in_shapes[:2]
        if not shape or indices is None or len(indices) != 1 or op.constants.get(2) != 0 or op.attr("batch_dims").i:
            return False
        numbers = self._numbers(op.inputs[1])
        return isinstance(numbers, InOrder) and numbers.are_of(shape[0], 1)

    def _numbers(self, tensor: Any) -> Numbers | InOrder | None:
        tensor = self._in_order(tensor)
        op = self._ops[tensor.op]
        if op.type == "SelectV2":
            return self._or_first(op)
        numbers, shape = self._sum(tensor), op.out_shapes[tensor.index]
        if numbers is None or not numbers.least.size or shape is None or None in shape:
            return self._steps(tensor)
        numbered = numbers.least.ndim - sum(size == 1 for size in numbers.least.shape)
        is_of_first_axes = numbers.least.shape == (*shape[:numbered], *(1,) * (len(shape) - numbered))
        return numbers if is_of_first_axes else None

    def _in_order(self, tensor: Any) -> Any:
        """Return a tensor that has the same numbers in the same order, before they got another shape or dtype."""
        for _ in range(_MOST_STEPS):
            op = self._ops[tensor.op]
            if tensor in self._integers or not self._keeps_numbers(op):
                break
            tensor = op.inputs[0]
        return tensor

    def _keeps_numbers(self, op: Any) -> bool:
        """Return whether an operation has the numbers that it reads: no small integers wrap, no floats are rounded."""
        if op.type != "Cast":
            return op.type in _IN_ORDER
        [source] = op.inputs
        types = (self._ops[source.op].out_dtypes[source.index], op.out_dtypes[0])
        return all(dtype.is_integer and dtype.size >= 4 for dtype in types)

    def _steps(self, tensor: Any) -> InOrder | None:
        """Return what is known of numbers in equal steps, and of their sum with indices within a step."""
        op = self._ops[tensor.op]
        if op.type != "AddV2":
            return self._exact_steps(tensor)
        for indices, numbers in (op.inputs, op.inputs[::-1]):
            shape, length = op.out_shapes[0], self._length_below(indices)
            is_spread = shape and self._is_of_first_axis(numbers, shape)
            steps = self._exact_steps(self._in_order(numbers)) if length is not None and is_spread else None
            if steps is not None:
                return steps._replace(bound=length)
        return None

    def _is_of_first_axis(self, tensor: Any, shape: Any) -> bool:
        """Return whether a tensor has a number for each entry of the first axis of what it is broadcast to."""
        number_shape = self._ops[tensor.op].out_shapes[tensor.index]
        if number_shape is None or len(number_shape) != len(shape):
            return False
        return is_same(number_shape[0], shape[0]) and all(is_same(size, 1) for size in number_shape[1:])

    def _exact_steps(self, tensor: Any) -> InOrder | None:
        """Return what is known of a range from 0, and of its multiples."""
        op = self._ops[tensor.op]
        if op.type == "Range":
            end, step = (op.symbols.get(k, op.constants.get(k)) for k in (1, 2))
            if op.constants.get(0) != 0 or end is None or step is None or not is_at_least(step.item(), 1):
                return None
            size = quotient(end.item(), step.item())
            return None if size is None else InOrder(size, step.item())
        if op.type == "Mul":
            for k in (0, 1):
                times = op.symbols.get(k, op.constants.get(k))
                steps = self._exact_steps(op.inputs[1 - k]) if times is not None and times.ndim == 0 else None
                if steps is not None and times is not None and is_at_least(times.item(), 1):
                    return steps._replace(step=steps.step * times.item())
        return None

    def _length_below(self, tensor: Any) -> Any:
        """Return a length that is more than each of some indices, none of which is negative, or None."""
        for _ in range(_MOST_STEPS):
            if tensor in self._below or not self._keeps_numbers(self._ops[tensor.op]):
                break
            tensor = self._ops[tensor.op].inputs[0]
        return self._below.get(tensor)

    def _or_first(self, op: Any) -> InOrder | None:
        """Return what is known of `n > 1 ? range(n) : 0`, as `tf.vectorized_map` numbers rows: the same without it."""
        condition, numbers = self._ops[op.inputs[0].op], self._numbers(op.inputs[1])
        asks = condition.type == "Greater" and condition.constants.get(1) == 1 and 0 in condition.symbols
        if not asks or op.constants.get(2) != 0 or not isinstance(numbers, InOrder):
            return None
        return numbers if numbers.are_of(condition.symbols[0].item(), 1) else None

    def _sum(self, tensor: Any, depth: int = 0) -> Numbers | None:
        """Return what is known of offsets plus indices within them: an array that is broadcast to the tensor."""
        op = self._ops[tensor.op]
        if tensor in self._integers:
            return None if is_symbolic(self._integers[tensor]) else Numbers(self._integers[tensor], 1)
        length = self._length_below(tensor)
        if type(length) is int:
            return Numbers(np.zeros((1,) * len(op.out_shapes[tensor.index] or ()), np.int64), length)
        if op.type != "AddV2" or depth > _MOST_STEPS:
            return None
        a, b = (self._sum(t, depth + 1) for t in op.inputs)
        if a is None or b is None or a.least.ndim != b.least.ndim:
            return None
        return Numbers(a.least + b.least, a.bound + b.bound - 1)

    def _first_column(self, tensor: Any) -> Numbers | InOrder | None:
        """Return what is known of the first index of each of some vectors."""
        if tensor in self._integers:
            value = self._integers[tensor]
            return None if is_symbolic(value) or not value.size else Numbers(value[..., 0], 1)
        op = self._ops[tensor.op]
        if op.out_shapes[tensor.index] and is_same(op.out_shapes[tensor.index][-1], 1):
            return self._numbers(tensor)
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
