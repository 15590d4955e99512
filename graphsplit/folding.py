"""Constant folding of integer arithmetic on static shapes, in numpy.

Gradients of broadcasting ops, `Mean` and the like compute on shapes. Rules need the values (a permutation, a target
shape), and what is known when planning need not run on every device. Floating-point constants are left to TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MOST_ELEMENTS = 1024
Values = Sequence[np.ndarray]


def _broadcast_gradient_axes(left: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    """Return the axes over which the gradients of both operands of a broadcasting op are summed."""
    rank = max(len(left), len(right))
    a = [1] * (rank - len(left)) + list(left)
    b = [1] * (rank - len(right)) + list(right)
    axes_a = [i for i in range(rank) if i < rank - len(left) or (a[i] == 1 and b[i] != 1)]
    axes_b = [i for i in range(rank) if i < rank - len(right) or (b[i] == 1 and a[i] != 1)]
    both = [i for i in range(rank) if a[i] == 1 and b[i] == 1]
    return [
        np.array(sorted({*axes_a, *both}), left.dtype),
        np.array(sorted({*axes_b, *both}), left.dtype),
    ]


def _concat_offsets(op: Any, values: Values) -> list[np.ndarray]:
    axis, shapes = int(values[0]), values[1:]
    offsets, position = [], 0
    for shape in shapes:
        offset = np.zeros_like(shape)
        offset[axis] = position
        offsets.append(offset)
        position += int(shape[axis])
    return offsets


def _stitch(op: Any, values: Values) -> list[np.ndarray]:
    count = len(values) // 2
    size = max((int(np.max(indices)) + 1 for indices in values[:count] if indices.size), default=0)
    result = np.zeros((size, *values[count].shape[values[0].ndim :]), values[count].dtype)
    for indices, data in zip(values[:count], values[count:], strict=True):
        result[indices] = data
    return [result]


def _reduce(function: Callable[..., Any]) -> Callable[[Any, Values], list[np.ndarray]]:
    def apply(op: Any, values: Values) -> list[np.ndarray]:
        axes = tuple(int(a) for a in np.reshape(values[1], -1))
        dtype = {"dtype": values[0].dtype} if function in (np.sum, np.prod) else {}
        return [np.asarray(function(values[0], axis=axes, keepdims=op.attr("keep_dims").b, **dtype))]

    return apply


def _strided_slice(op: Any, values: Values) -> list[np.ndarray] | None:
    if op.attr("ellipsis_mask").i or values[0].ndim != 1 or len(values[1]) != 1 or op.attr("new_axis_mask").i:
        return None
    begin, end, stride = (int(v[0]) for v in values[1:])
    if op.attr("shrink_axis_mask").i:
        return [np.asarray(values[0][begin])]
    first = None if op.attr("begin_mask").i else begin
    last = None if op.attr("end_mask").i else end
    return [values[0][first:last:stride]]


def _elementwise(function: Callable[..., Any]) -> Callable[[Any, Values], list[np.ndarray]]:
    return lambda op, values: [np.asarray(function(*values))]


def _divide(function: Callable[..., Any]) -> Callable[[Any, Values], list[np.ndarray] | None]:
    return lambda op, values: None if not np.all(values[1]) else [np.asarray(function(*values))]


_FOLD: dict[str, Callable[[Any, Values], list[np.ndarray] | None]] = {
    "Add": _elementwise(np.add),
    "AddV2": _elementwise(np.add),
    "BroadcastGradientArgs": lambda op, v: _broadcast_gradient_axes(*v),
    "Cast": lambda op, v: [v[0].astype(op.out_dtypes[0].as_numpy_dtype)],
    "ConcatOffset": _concat_offsets,
    "ConcatV2": lambda op, v: [np.concatenate(v[:-1], int(v[-1]))],
    "DynamicStitch": _stitch,
    "Equal": _elementwise(np.equal),
    "ExpandDims": lambda op, v: [np.expand_dims(v[0], int(v[1]))],
    "FloorDiv": _divide(np.floor_divide),
    "FloorMod": _divide(np.mod),
    "Fill": lambda op, v: [np.full(v[0], v[1])],
    "GatherV2": lambda op, v: None if op.attr("batch_dims").i else [np.take(v[0], v[1], axis=int(v[2]))],
    "Identity": lambda op, v: [v[0]],
    "InvertPermutation": lambda op, v: [np.argsort(v[0]).astype(v[0].dtype)],
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
    "Select": _elementwise(np.where),
    "SelectV2": _elementwise(np.where),
    "Slice": lambda op, v: [v[0][tuple(slice(b, None if s < 0 else b + s) for b, s in zip(v[1], v[2], strict=True))]],
    "Squeeze": lambda op, v: [np.reshape(v[0], op.out_shapes[0])],
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(np.subtract),
    "Sum": _reduce(np.sum),
    "Tile": lambda op, v: [np.tile(v[0], v[1])],
}
_FROM_SHAPE: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "Rank": len,
    "Shape": list,
    "ShapeN": list,
    "Size": lambda shape: int(np.prod(shape)),
}
FOLDABLE = frozenset({*_FOLD, *_FROM_SHAPE})


def fold(op: Any) -> list[np.ndarray] | None:
    """Return the values of `op`'s outputs if they are small integers that follow from static shapes, else None."""
    if not all(dtype.is_integer or dtype.is_bool for dtype in op.out_dtypes):
        return None
    if op.type != "BroadcastGradientArgs" and any(
        s is None or None in s or np.prod(s) > MOST_ELEMENTS for s in op.out_shapes
    ):
        return None  # (TensorFlow does not infer how many axes BroadcastGradientArgs returns; there are few)
    dtypes = [dtype.as_numpy_dtype for dtype in op.out_dtypes]
    if op.type in _FROM_SHAPE:
        if any(shape is None or None in shape for shape in op.in_shapes):
            return None
        return [np.array(_FROM_SHAPE[op.type](s), d) for s, d in zip(op.in_shapes, dtypes, strict=True)]
    if len(op.constants) != len(op.inputs) or not op.inputs:
        return None
    values = _FOLD[op.type](op, [op.constants[i] for i in range(len(op.inputs))])
    return None if values is None else [np.asarray(v, d) for v, d in zip(values, dtypes, strict=True)]
