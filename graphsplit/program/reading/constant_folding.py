"""Constant folding of integer arithmetic on static shapes, in numpy.

Gradients of broadcasting ops, `Mean` and the like compute on shapes. Rules need the values (a permutation, a target
shape), and what is known when planning need not run on every device. Floating-point constants are left to TensorFlow.

Where sizes are unknown, the same table works on arrays of dtype object, whose entries are polynomials; what cannot be
decided for all sizes is not folded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphsplit.core.polynomials import Polynomial, UndecidedError, is_symbolic
from graphsplit.core.sizes import as_exact, has_sizes

MOST_ELEMENTS = 1024
OperandValues = Sequence[np.ndarray]


def _broadcast_gradient_axes(op: Any, shapes: OperandValues) -> list[np.ndarray] | None:
    """Return the axes over which the gradients of both operands of a broadcasting op are summed.

    As TensorFlow has it (`tensorflow/core/util/bcast.h`): none for equal shapes, of which nothing is broadcast; else
    every axis of size 1, those that both operands have too. Shapes that do not fit are left for it to refuse.
    """
    rank = max(map(len, shapes))
    left, right = ([1] * (rank - len(shape)) + list(shape) for shape in shapes)
    pairs = list(zip(left, right, strict=True))
    if any(not _is_one(x) and not _is_one(y) and x != y for x, y in pairs):
        return None  # (an UndecidedError asks whether it is one row, which is broadcast)
    if len(shapes[0]) == len(shapes[1]) and not any(_is_one(x) != _is_one(y) for x, y in pairs):
        return [np.zeros(0, np.int64)] * 2
    return [np.array([i for i, x in enumerate(sizes) if _is_one(x)], np.int64) for sizes in (left, right)]


def _is_one(size: Any) -> bool:
    """Return whether an axis is broadcast. A batch of one row need not count: the sum over one row is that row."""
    return not isinstance(size, Polynomial) and bool(size == 1)


def _cast(op: Any, values: OperandValues) -> list[np.ndarray]:
    if not is_symbolic(values[0]):
        return [values[0].astype(op.out_dtypes[0].as_numpy_dtype)]
    if op.out_dtypes[0].is_bool:
        raise UndecidedError  # is it zero?
    return [values[0]]


def _concat_offsets(op: Any, values: OperandValues) -> list[np.ndarray] | None:
    axis, shapes = int(values[0]), values[1:]
    if any(np.any(np.delete(shape != shapes[0], axis)) for shape in shapes[1:]):
        return None  # which TensorFlow refuses
    offsets, position = [], 0
    for shape in shapes:
        offset = np.zeros(shape.shape, object)
        offset[axis] = position
        offsets.append(offset)
        position = position + shape[axis]
    return offsets


def _cumulate(op: Any, values: OperandValues) -> list[np.ndarray]:
    x, axis = values[0], int(values[1])
    x = np.flip(x, axis) if op.attr("reverse").b else x
    sums = np.cumsum(x, axis) - (x if op.attr("exclusive").b else 0)
    return [np.flip(sums, axis) if op.attr("reverse").b else sums]


def _split(value: np.ndarray, sizes: np.ndarray, axis: int) -> list[np.ndarray]:
    """Return a value in pieces; one of them may have what the others leave, a size of -1."""
    remainder = value.shape[axis] - sum(int(size) for size in sizes if size >= 0)
    ends = np.cumsum([remainder if size < 0 else int(size) for size in sizes])
    return np.split(value, ends[:-1], axis)


def _stitch(op: Any, values: OperandValues) -> list[np.ndarray] | None:
    count = len(values) // 2
    size = max((int(np.max(indices)) + 1 for indices in values[:count] if indices.size), default=0)
    if len({int(index) for indices in values[:count] for index in indices.flat}) < size:
        return None  # what stands between them is not said anywhere
    result = np.zeros((size, *values[count].shape[values[0].ndim :]), object)
    for indices, data in zip(values[:count], values[count:], strict=True):
        result[indices] = data
    return [result]


def _reduce(function: Callable[..., Any]) -> Callable[[Any, OperandValues], list[np.ndarray] | None]:
    def apply(op: Any, values: OperandValues) -> list[np.ndarray] | None:
        if not values[0].size and function in (np.max, np.min):
            return None  # the largest of nothing is the smallest number there is; nobody needs to know
        axes = tuple(int(a) for a in np.reshape(values[1], -1))
        dtype = {"dtype": values[0].dtype} if function in (np.sum, np.prod) else {}
        return [np.asarray(function(values[0], axis=axes, keepdims=op.attr("keep_dims").b, **dtype))]

    return apply


def _strided_slice(op: Any, values: OperandValues) -> list[np.ndarray] | None:
    if op.attr("ellipsis_mask").i or values[0].ndim != 1 or len(values[1]) != 1 or op.attr("new_axis_mask").i:
        return None
    begin, end, stride = (int(v[0]) for v in values[1:])
    if op.attr("shrink_axis_mask").i:
        return [np.asarray(values[0][begin])]
    first = None if op.attr("begin_mask").i else begin
    last = None if op.attr("end_mask").i else end
    return [values[0][first:last:stride]]


def _elementwise(function: Callable[..., Any]) -> Callable[[Any, OperandValues], list[np.ndarray]]:
    return lambda op, values: [np.asarray(function(*values))]


def _equal(op: Any, values: OperandValues) -> list[np.ndarray] | None:
    """Compare what can be broadcast; otherwise, TensorFlow may be asked to call it different as a whole."""
    return None if op.out_shapes[0] is None or not _broadcasts(values) else [np.asarray(np.equal(*values))]


def _broadcasts(values: OperandValues) -> bool:
    sizes = itertools.zip_longest(*[reversed(value.shape) for value in values], fillvalue=1)
    return all(len({*column} - {1}) < 2 for column in sizes)


def _select(op: Any, values: OperandValues) -> list[np.ndarray]:
    """Choose entries, or rows: unlike elsewhere, a vector of conditions is for the first axis."""
    condition, chosen, other = values
    rows = (*condition.shape, *(1,) * (chosen.ndim - 1)) if condition.ndim == 1 else condition.shape
    return [np.asarray(np.where(np.reshape(condition, rows), chosen, other))]


def _divide(function: Callable[..., Any]) -> Callable[[Any, OperandValues], list[np.ndarray] | None]:
    return lambda op, values: None if not np.all(values[1]) else [np.asarray(function(*values))]


_FOLD: dict[str, Callable[[Any, OperandValues], list[np.ndarray] | None]] = {
    "Add": _elementwise(np.add),
    "AddV2": _elementwise(np.add),
    "BroadcastGradientArgs": _broadcast_gradient_axes,
    "Cast": _cast,
    "ConcatOffset": _concat_offsets,
    "ConcatV2": lambda op, v: [np.concatenate(v[:-1], int(v[-1]))],
    "Cumsum": _cumulate,
    "DynamicStitch": _stitch,
    "Equal": _equal,
    "ExpandDims": lambda op, v: [np.expand_dims(v[0], int(v[1]))],
    "FloorDiv": _divide(np.floor_divide),
    "FloorMod": _divide(np.mod),
    "Fill": lambda op, v: [np.full(v[0], v[1])],
    "GatherV2": lambda op, v: None if op.attr("batch_dims").i else [np.take(v[0], v[1], axis=int(v[2]))],
    "Greater": _elementwise(np.greater),
    "GreaterEqual": _elementwise(np.greater_equal),
    "Identity": lambda op, v: [v[0]],
    "InvertPermutation": lambda op, v: [np.argsort(v[0]).astype(v[0].dtype)],
    "Less": _elementwise(np.less),
    "LessEqual": _elementwise(np.less_equal),
    "LogicalAnd": _elementwise(np.logical_and),
    "LogicalNot": _elementwise(np.logical_not),
    "LogicalOr": _elementwise(np.logical_or),
    "Max": _reduce(np.max),
    "Maximum": _elementwise(np.maximum),
    "Min": _reduce(np.min),
    "Minimum": _elementwise(np.minimum),
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Pack": lambda op, v: [np.stack(v, op.attr("axis").i)],
    "Prod": _reduce(np.prod),
    "Range": lambda op, v: [np.arange(int(v[0]), int(v[1]), int(v[2]))],
    "Reshape": lambda op, v: [np.reshape(v[0], v[1])],
    "Select": _select,
    "SelectV2": _elementwise(np.where),
    "Slice": lambda op, v: [v[0][tuple(slice(b, None if s < 0 else b + s) for b, s in zip(v[1], v[2], strict=True))]],
    "Split": lambda op, v: np.split(v[1], op.attr("num_split").i, int(v[0])),
    "SplitV": lambda op, v: _split(v[0], v[1], int(v[2])),
    "Squeeze": lambda op, v: [np.reshape(v[0], op.out_shapes[0])],
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(np.subtract),
    "Sum": _reduce(np.sum),
    "Tile": lambda op, v: [np.tile(v[0], v[1])],
    "Unpack": lambda op, v: [*np.moveaxis(v[0], op.attr("axis").i, 0)],
}
_FROM_SHAPE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "Rank": len,
    "Shape": list,
    "ShapeN": list,
    "Size": math.prod,
}
_AS_LARGE_AS_ASKED = frozenset({"Fill", "Range", "Tile"})
FOLDABLE = frozenset({*_FOLD, *_FROM_SHAPE})


def fold(op: Any, symbols: Mapping[int, np.ndarray]) -> list[np.ndarray] | None:
    """Return the values of `op`'s outputs if they are small integers that follow from shapes, else None.

    Args:
      op: the operation.
      symbols: the operands that depend on unknown sizes, as arrays of dtype object. Results that depend on them are
        such arrays too.
    """
    if not all(dtype.is_integer or dtype.is_bool for dtype in op.out_dtypes):
        return None
    if not all(_may_be_small(op.type, shape) for shape in op.out_shapes):
        return None
    try:
        values = _values(op, symbols)
    except UndecidedError:
        return None
    if not values or any(np.size(value) > MOST_ELEMENTS for value in values):
        return None
    if any(entry is None for value in values for entry in np.ravel(np.asarray(value, object))):
        return None
    return [_typed(v, d.as_numpy_dtype) for v, d in zip(values, op.out_dtypes, strict=True)]


def _may_be_small(op_type: str, shape: Any) -> bool:
    """Return whether an output may be computed to see how large it is.

    TensorFlow does not infer how many axes `BroadcastGradientArgs` returns, nor the shapes of what is computed of them.
    """
    if shape is None or None in shape:
        return op_type not in _AS_LARGE_AS_ASKED
    return not has_sizes(shape) and math.prod(shape) <= MOST_ELEMENTS


def _values(op: Any, symbols: Mapping[int, np.ndarray]) -> list[Any] | None:
    if op.type in _FROM_SHAPE:
        if any(shape is None or None in shape for shape in op.in_shapes):
            return None
        return [_FROM_SHAPE[op.type]([as_exact(size) for size in s]) for s in op.in_shapes]
    if len(op.constants) != len(op.inputs) or not op.inputs:
        return None
    return _FOLD[op.type](op, [symbols.get(i, op.constants[i]) for i in range(len(op.inputs))])


def _typed(value: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(value, object) if isinstance(value, (list, Polynomial)) else np.asarray(value)
    return array if is_symbolic(array) else array.astype(dtype)
