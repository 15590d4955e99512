"""Picking entries: slices with strides, gathers, one-hot, band parts."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, Layout, Shard, joined
from graphsplit.core.sizes import Shape, is_at_least, is_one, is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import SKIPPED, ZEROS, Dim, Factors, Numbered, Resize
from graphsplit.rules.known import axes_in, known, ranked, shape_if_known, shape_operand
from graphsplit.rules.registry import Answer, Sharded, register
from graphsplit.rules.rows import beside, blocks_between, own_rows

_PICKED = 200  # the factor whose entries are numbered: no axis has this number


class _Spec(NamedTuple):
    """One entry of a strided slice: `axis` of the operand, `result` axis (or None), and whether it takes all."""

    position: int
    axis: int | None
    result: int | None
    whole: bool


def _strided_specs(op: Op, shape: Shape) -> Iterator[_Spec]:
    """Yield what each entry of a `StridedSlice`, or of its gradient, does with what it slices, ellipsis expanded.

    Of bounds that are not known (the corner of a random crop), only those that are masked take an axis whole.
    """
    begin, end, strides = _bounds(op)
    strides = known(strides, "its bounds are")
    masks = {name: op.attr(f"{name}_mask").i for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count = len(strides)
    new_axes = sum(masks["new_axis"] >> i & 1 for i in range(count) if not masks["ellipsis"] >> i & 1)
    has_ellipsis = bool(masks["ellipsis"])
    spare = len(shape) - (count - new_axes - has_ellipsis)
    axis = result = 0
    for i in range(count):
        if masks["ellipsis"] >> i & 1:
            for _ in range(spare):
                yield _Spec(i, axis, result, True)
                axis, result = axis + 1, result + 1
        elif masks["new_axis"] >> i & 1:
            yield _Spec(i, None, result, False)
            result += 1
        elif masks["shrink_axis"] >> i & 1:
            yield _Spec(i, axis, None, False)
            axis += 1
        else:
            starts = bool(masks["begin"] >> i & 1) or (begin is not None and is_same(begin[i], 0))
            stops = bool(masks["end"] >> i & 1) or (end is not None and _reaches(end[i], shape[axis]))
            yield _Spec(i, axis, result, bool(starts and stops and is_one(strides[i])))
            axis, result = axis + 1, result + 1
    for _ in range(len(shape) - axis):
        yield _Spec(-1, axis, result, True)
        axis, result = axis + 1, result + 1


def _reaches(end: Any, size: Any) -> bool:
    """Return whether a slice up to `end` takes all that is there: `x[:10]` does of some batches, not of all."""
    return size is not None and is_at_least(end, size)


def _place(bound: Any, size: Any) -> Any:
    """Return where a slice begins or ends on an axis, as a number or polynomial, or None if that depends on sizes."""
    place = bound if is_at_least(bound, 0) else size + bound if is_at_least(-1, bound) else None
    if place is None or is_at_least(0, place):  # beyond its start
        return None if place is None else 0
    return place if is_at_least(size, place) else size if is_at_least(place, size) else None


def _cut(op: Op, shape: Shape, axis: int, of_result: bool = False) -> tuple[int, int, _Spec] | None:
    """Return where on `axis` a strided slice begins and ends, and what says so.

    (None unless it takes consecutive entries of this axis, and the axis remains.) With `of_result`, `axis` is counted
    in what is left after slicing.
    """
    begin, end, strides = _bounds(op)
    if begin is None or end is None or strides is None:
        return None
    for spec in _strided_specs(op, shape):
        if (spec.result if of_result else spec.axis) != axis or spec.axis is None or spec.result is None:
            continue
        size = shape[spec.axis]
        if spec.whole or size is None or spec.position < 0 or not is_one(strides[spec.position]):
            return None
        bit = 1 << spec.position
        start = 0 if op.attr("begin_mask").i & bit else _place(begin[spec.position], size)
        stop = size if op.attr("end_mask").i & bit else _place(end[spec.position], size)
        return None if start is None or stop is None else (start, stop, spec)
    return None


def _bounds(op: Op) -> tuple[np.ndarray | None, ...]:
    """Return the operands that say where a strided slice, or its gradient, begins and ends, and its strides."""
    return tuple([op.constants.get(i) for i in (1, 2, 3)])


def strided_slice_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a slice of whole blocks of the sharded axis: `both[:n]`, one of two batches that were joined."""
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    cut = _cut(op, shape, layout.axis)
    blocks = blocks_between(layout, *cut[:2], shape[layout.axis]) if cut else None
    if cut is None or blocks is None or op.out_shapes[0] is None:
        return None
    position, result = cut[2].position, cut[2].result
    resize = [Resize(1 + i, position, op.constants[1 + i], layout.between(0, blocks[i])) for i in (0, 1)]
    wants = (layout, REPLICATE, REPLICATE, REPLICATE)
    return Sharded(wants, (layout.between(*blocks).along(result or 0),), tuple(resize))


def strided_slice_gradient_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for the inverse: what comes before and after on the axis is so many batches of zeros."""
    layout, shape, gradient = layouts[4], shape_if_known(op, 0), op.in_shapes[4]
    if not isinstance(layout, Shard) or shape is None or gradient is None:
        return None
    static = op.out_shapes[0] or tuple(shape)
    cut = _cut(op, static, layout.axis, of_result=True)
    if cut is None:
        return None
    start, stop, (position, axis, *_) = cut
    assert axis is not None
    size: Any = static[axis]
    gradient_layout = layout.along(axis)
    zeros = beside(gradient_layout, start, size - stop, gradient[layout.axis])
    if zeros is None:
        return None
    zeros_before, zeros_after = zeros
    whole = joined([zeros_before, gradient_layout, zeros_after])
    resize = (
        Resize(0, axis, shape),
        Resize(1, position, op.constants[1], zeros_before),
        Resize(2, position, op.constants[2], whole.between(0, len(zeros_before.blocks) + len(layout.blocks))),
    )
    return Sharded((REPLICATE,) * 4 + (layout,), (whole,), resize)


@register("StridedSlice", linear=(0,), layouts=strided_slice_blocks)
def strided_slice(op: Op) -> Factors:
    """Axes taken whole keep their factor. (An end beyond the local size is harmless: slices are clipped.)"""
    shape, result = ranked(op.in_shapes[0], op.out_shapes[0])
    inputs: list[Dim] = [None] * len(shape)
    output: list[Dim] = [None] * len(result)
    for spec in _strided_specs(op, shape):
        if spec.whole and spec.axis is not None and spec.result is not None:
            inputs[spec.axis] = output[spec.result] = spec.axis
    return Factors((tuple(inputs), None, None, None), (tuple(output),))


@register("StridedSliceGrad", linear=(4,), layouts=strided_slice_gradient_blocks)
def strided_slice_gradient(op: Op) -> Factors:
    """`(shape, begin, end, strides, dy) -> dx`: the inverse; `shape` holds the batch size."""
    [gradient], shape = ranked(op.in_shapes[4]), shape_operand(op, 0, "its bounds are")
    end = op.constants.get(2)
    inputs: list[Dim] = [None] * len(gradient)
    output: list[Dim] = [None] * len(shape)
    resize: dict[int, tuple[Resize, ...]] = {}
    static = op.out_shapes[0] or tuple(shape)
    for spec in _strided_specs(op, static):
        if spec.whole and spec.axis is not None and spec.result is not None:
            inputs[spec.result] = output[spec.axis] = spec.axis
            resize[spec.axis] = (Resize(0, spec.axis, shape),)
            if spec.position >= 0 and end is not None and not op.attr("ellipsis_mask").i >> spec.position & 1:
                resize[spec.axis] += (Resize(2, spec.position, end),)
    return Factors((None, None, None, None, tuple(inputs)), (tuple(output),), resize=resize)


_PICKS = "it picks rows by numbers, which may be those of any"


@register("GatherV2", linear=(0,), why_whole=_PICKS)
def gather(op: Op) -> Factors:
    """Sharded indices into a table that every device reads, or rows taken from each sample (`batch_dims`)."""
    params, indices = ranked(*op.in_shapes[:2])
    [at] = axes_in(op, 2, len(params), "its axis is")
    batch = op.attr("batch_dims").i
    batch += len(indices) if batch < 0 else 0
    # (zeros for entries of others fit to the result where nothing stands between its axes)
    in_parts = _may_be_numbered(op, 1, params[at]) and is_number(op.out_dtypes[0]) and batch in (0, at)
    params_dims: list[Dim] = [(_PICKED if in_parts else None) if i == at else i for i in range(len(params))]
    index_dims: list[Dim] = [i if i < batch else 100 + i for i in range(len(indices))]
    output = (*params_dims[:at], *index_dims[batch:], *params_dims[at + 1 :])
    dims = (tuple(params_dims), tuple(index_dims), None)
    if not in_parts:
        return Factors(dims, (output,))
    return Factors(dims, (output,), {_PICKED: "sum"}, numbered={_PICKED: Numbered(1, ZEROS)})


def _may_be_numbered(op: Op, operand: int, size: Any) -> bool:
    """Return whether the integers of an operand may be moved by any number of entries of an axis."""
    [name] = [name for name in ("Tindices", "TI") if name in op.node.attr]
    return type(size) is int and size <= tf.as_dtype(op.attr(name).type).max


def is_number(dtype: tf.DType) -> bool:
    """Return whether there are zeros of a type, which can be added up."""
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_complex)


@register("GatherNd", linear=(0,), layouts=own_rows("rn", "n"), why_whole=_PICKS)
def gather_nd(op: Op) -> Factors:
    """Sharded indices into a value that every device reads."""
    params, indices = ranked(*op.in_shapes)
    rows: tuple[Dim, ...] = tuple(range(len(indices) - 1))
    depth = operator.index(known(indices[-1], "the shape of its indices is"))
    inner_axes: tuple[Dim, ...] = tuple(100 + i for i in range(depth, len(params)))
    return Factors((((None,) * depth + inner_axes), (*rows, None)), ((*rows, *inner_axes),))


@register("OneHot")
def one_hot(op: Op) -> Factors:
    """`ab -> abn`, the new axis (the last, or `axis`) as long as a device needs it."""
    [shape], depth = ranked(op.in_shapes[0]), op.constants.get(1)
    dims: list[Dim] = list(range(len(shape)))
    axis = op.attr("axis").i
    axis = len(shape) if axis == -1 else axis
    if depth is None or 1 in op.symbols or not _may_be_numbered(op, 0, int(depth)):
        return Factors((tuple(dims), None, None, None), ((*dims[:axis], None, *dims[axis:]),))
    output = (*dims[:axis], _PICKED, *dims[axis:])
    resize = {_PICKED: (Resize(1, (), np.asarray(depth)),)}
    return Factors((tuple(dims), None, None, None), (output,), resize=resize, numbered={_PICKED: Numbered(0, SKIPPED)})
