"""Picking entries: slices with strides, gathers, one-hot, band parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from graphsplit.core.layouts import REPLICATE, Layout, Shard
from graphsplit.core.polynomials import Polynomial
from graphsplit.core.symbolic_sizes import Shape, Size
from graphsplit.program.program import Op
from graphsplit.rules.contractions import shape_operand
from graphsplit.rules.factors import Declined, Dim, Factors, Resize
from graphsplit.rules.registry import Answer, Sharded, register


class _Spec(NamedTuple):
    """One entry of a strided slice: `axis` of the operand, `result` axis (or None), and whether it takes all."""

    position: int
    axis: int | None
    result: int | None
    whole: bool


def _strided_specs(
    op: Op, shape: Shape, begin: np.ndarray | None, end: np.ndarray | None, strides: np.ndarray
) -> Iterator[_Spec]:
    """Yield what each entry of a `StridedSlice` does, ellipsis expanded (`begin` and `end` may be masked).

    Of bounds that are not known (the corner of a random crop), only those that are masked take an axis whole.
    """
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
            size = shape[axis]
            starts = bool(masks["begin"] >> i & 1) or (begin is not None and begin[i] == 0)
            clips = isinstance(size, Size) and not _grows(op, i)  # `x[:10]` takes all rows of some batches, not of all
            stops = bool(masks["end"] >> i & 1) or (
                size is not None and end is not None and end[i] >= size and not clips
            )
            yield _Spec(i, axis, result, bool(starts and stops and strides[i] == 1))
            axis, result = axis + 1, result + 1
    for _ in range(len(shape) - axis):
        yield _Spec(-1, axis, result, True)
        axis, result = axis + 1, result + 1


def _grows(op: Op, position: int) -> bool:
    """Return whether the end of a strided slice depends on unknown sizes."""
    return 2 in op.symbols and isinstance(op.symbols[2][position], Polynomial)


def _cut(op: Op, shape: Shape, axis: int, first_operand: int, of_result: bool = False) -> tuple[int, int, int] | None:
    """Return where on `axis` a strided slice begins and ends, and which entry of its bounds says so.

    (None unless it takes consecutive entries of this axis, and the axis remains.) With `of_result`, `axis` is counted
    in what is left after slicing.
    """
    begin, end, strides = [op.constants.get(first_operand + i) for i in range(3)]
    if begin is None or end is None or strides is None:
        return None
    for spec in _strided_specs(op, shape, begin, end, strides):
        if (spec.result if of_result else spec.axis) != axis or spec.axis is None or spec.result is None:
            continue
        size = shape[spec.axis]
        if spec.whole or size is None or spec.position < 0 or strides[spec.position] != 1:
            return None
        bit = 1 << spec.position
        if isinstance(size, Size) and not op.attr("end_mask").i & bit and not _grows(op, spec.position):
            return None
        bounds = slice(
            None if op.attr("begin_mask").i & bit else int(begin[spec.position]),
            None if op.attr("end_mask").i & bit else int(end[spec.position]),
        )
        start, stop, _ = bounds.indices(size)
        return start, stop, spec.position
    return None


def strided_slice_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a slice of whole blocks of the sharded axis: `both[:n]`, one of two batches that were joined."""
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    cut = _cut(op, shape, layout.axis, first_operand=1)
    found = layout.between(*cut[:2], shape[layout.axis] or 0) if cut else None
    factors = strided_slice(op)
    if cut is None or found is None or isinstance(factors, Declined):
        return None
    begin, end, strides = (op.constants[i] for i in (1, 2, 3))
    result = next(s.result for s in _strided_specs(op, shape, begin, end, strides) if s.axis == layout.axis)
    resize = tuple(Resize(1 + i, cut[2], (begin, end)[i], sum(layout.blocks[: found[i]])) for i in (0, 1))
    wants = (layout, REPLICATE, REPLICATE, REPLICATE)
    return Sharded(wants, (Shard(result or 0, layout.blocks[slice(*found)]),), resize)


def strided_slice_gradient_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for the inverse: what comes before and after on the axis is so many batches of zeros."""
    layout, shape, gradient = layouts[4], shape_operand(op, 0), op.in_shapes[4]
    if not isinstance(layout, Shard) or shape is None or gradient is None:
        return None
    static = op.out_shapes[0] or tuple(int(size) for size in shape)
    cut = _cut(op, static, layout.axis, first_operand=1, of_result=True)
    rows = (gradient[layout.axis] or 0) // sum(layout.blocks)
    if cut is None or not rows:
        return None
    begin, end, strides = (op.constants[i] for i in (1, 2, 3))
    axis = next(s.axis for s in _strided_specs(op, static, begin, end, strides) if s.result == layout.axis)
    start, stop, position = cut
    rest = (static[axis] or 0) - stop if axis is not None else 0
    if axis is None or start % rows or rest % rows:
        return None
    blocks = ((1,) * (start // rows), layout.blocks, (1,) * (rest // rows))
    before = sum(blocks[0])
    resize = (
        Resize(0, axis, shape),
        Resize(1, position, begin, before),
        Resize(2, position, end, before + sum(layout.blocks)),
    )
    return Sharded((REPLICATE,) * 4 + (layout,), (Shard(axis, sum(blocks, ())),), resize)


@register("StridedSlice", linear=(0,), layouts=strided_slice_blocks)
def strided_slice(op: Op) -> Factors | Declined:
    """Axes taken whole keep their factor. (An end beyond the local size is harmless: slices are clipped.)"""
    shape, result = op.in_shapes[0], op.out_shapes[0]
    begin, end, strides = (op.constants.get(i) for i in (1, 2, 3))
    if shape is None or result is None or strides is None:
        return Declined("its bounds are not known when planning")
    inputs: list[Dim] = [None] * len(shape)
    output: list[Dim] = [None] * len(result)
    for spec in _strided_specs(op, shape, begin, end, strides):
        if spec.whole and spec.axis is not None and spec.result is not None:
            inputs[spec.axis] = output[spec.result] = spec.axis
    return Factors((tuple(inputs), None, None, None), (tuple(output),))


@register("StridedSliceGrad", linear=(4,), layouts=strided_slice_gradient_blocks)
def strided_slice_gradient(op: Op) -> Factors | Declined:
    """`(shape, begin, end, strides, dy) -> dx`: the inverse; `shape` holds the batch size."""
    gradient, shape = op.in_shapes[4], shape_operand(op, 0)
    begin, end, strides = (op.constants.get(i) for i in (1, 2, 3))
    if gradient is None or shape is None or strides is None:
        return Declined("its bounds are not known when planning")
    inputs: list[Dim] = [None] * len(gradient)
    output: list[Dim] = [None] * len(shape)
    resize: dict[int, tuple[Resize, ...]] = {}
    static = op.out_shapes[0] or tuple(int(size) for size in shape)
    for spec in _strided_specs(op, static, begin, end, strides):
        if spec.whole and spec.axis is not None and spec.result is not None:
            inputs[spec.result] = output[spec.axis] = spec.axis
            resize[spec.axis] = (Resize(0, spec.axis, shape),)
            if spec.position >= 0 and end is not None and not op.attr("ellipsis_mask").i >> spec.position & 1:
                resize[spec.axis] += (Resize(2, spec.position, end),)
    return Factors((None, None, None, None, tuple(inputs)), (tuple(output),), resize=resize)


@register("GatherV2", linear=(0,))
def gather(op: Op) -> Factors | Declined:
    """Sharded indices into a table that every device reads, or rows taken from each sample (`batch_dims`)."""
    params, indices, axis = op.in_shapes[0], op.in_shapes[1], op.constants.get(2)
    if params is None or indices is None or axis is None:
        return Declined("its axis is not known when planning")
    batch = op.attr("batch_dims").i
    batch += len(indices) if batch < 0 else 0
    at = int(axis) % len(params)
    params_dims: list[Dim] = [None if i == at else i for i in range(len(params))]
    index_dims: list[Dim] = [i if i < batch else 100 + i for i in range(len(indices))]
    output = (*params_dims[:at], *index_dims[batch:], *params_dims[at + 1 :])
    return Factors((tuple(params_dims), tuple(index_dims), None), (output,))


@register("GatherNd", linear=(0,))
def gather_nd(op: Op) -> Factors | Declined:
    """Sharded indices into a value that every device reads."""
    params, indices = op.in_shapes
    if params is None or indices is None or indices[-1] is None:
        return Declined("the shape of its indices is not known when planning")
    rows: tuple[Dim, ...] = tuple(range(len(indices) - 1))
    rest: tuple[Dim, ...] = tuple(100 + i for i in range(indices[-1], len(params)))
    return Factors((((None,) * indices[-1] + rest), (*rows, None)), ((*rows, *rest),))


@register("OneHot")
def one_hot(op: Op) -> Factors | Declined:
    """`ab -> abn`; the new axis (the last, or `axis`) is whole."""
    shape = op.in_shapes[0]
    if shape is None:
        return Declined("the rank of its indices is not known")
    dims: list[Dim] = list(range(len(shape)))
    axis = op.attr("axis").i
    axis = len(shape) if axis == -1 else axis
    return Factors((tuple(dims), None, None, None), ((*dims[:axis], None, *dims[axis:]),))
