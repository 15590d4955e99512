"""Reductions over axes, segments and everything. Over the batch axis they give one part per device."""

from __future__ import annotations

import operator

import numpy as np
import tensorflow as tf

from graphsplit.program.program import Op
from graphsplit.rules.factors import DROPPED, Declined, Dims, Factors, Numbered, Resize
from graphsplit.rules.families.contractions import shape_operand
from graphsplit.rules.own_rows import own_scatter, own_segments
from graphsplit.rules.registry import register

_REDUCTION = {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


@register("Sum", "Mean", linear=(0,))
@register("Max", "Min", "Prod", "All", "Any")
def reduce(op: Op) -> Factors | Declined:
    """`ab -> b`: the factor of a reduced axis is contracted. What becomes of a mean, planning decides."""
    axes = reduced_axes(op)
    if axes is None:
        return Declined("its axes are not known when planning")
    if op.type == "Mean" and not op.out_dtypes[0].is_floating and not op.out_dtypes[0].is_complex:
        return Declined("a mean of integers rounds, and so does not follow from the means of the shards")
    rank = len(op.in_shapes[0] or ())
    keep = op.attr("keep_dims").b
    output: Dims = tuple([None if i in axes else i for i in range(rank) if keep or i not in axes])
    return Factors((tuple(range(rank)), None), (output,), dict.fromkeys(axes, _REDUCTION[op.type]))


def reduced_axes(op: Op, operand: int = 1) -> set[int] | None:
    """Return the axes that `op` reduces, counted from the front, or None if they are not known."""
    axes, shape = op.constants.get(operand), op.in_shapes[0]
    if axes is None or shape is None:
        return None
    return {int(axis) % len(shape) for axis in np.reshape(axes, -1)} if shape else set()


@register("EuclideanNorm")
def whole_axis_reduction(op: Op) -> Factors | Declined:
    """Reductions whose parts do not simply add: the reduced axes must be whole."""
    axes = reduced_axes(op)
    if axes is None:
        return Declined("its axes are not known when planning")
    rank = len(op.in_shapes[0] or ())
    keep = op.attr("keep_dims").b
    inputs: Dims = tuple([None if i in axes else i for i in range(rank)])
    output: Dims = tuple([None if i in axes else i for i in range(rank) if keep or i not in axes])
    return Factors((inputs, None), (output,))


@register("ArgMax", "ArgMin")
def arg_reduce(op: Op) -> Factors | Declined:
    """The position of the largest entry along one axis, which must be whole."""
    axes = reduced_axes(op)
    if axes is None:
        return Declined("its axis is not known when planning")
    rank = len(op.in_shapes[0] or ())
    inputs: Dims = tuple([None if i in axes else i for i in range(rank)])
    return Factors((inputs, None), (tuple([i for i in range(rank) if i not in axes]),))


@register("L2Loss")
def l2_loss(op: Op) -> Factors | Declined:
    """Half the sum of squares of everything."""
    rank = len(op.in_shapes[0] or ())
    return Factors((tuple(range(rank)),), ((),), dict.fromkeys(range(rank), "sum"))


_SEGMENT = 200  # the factor that segments are entries of: no axis has this number
_SEGMENTS = {
    "UnsortedSegmentSum": "sum",
    "UnsortedSegmentMax": "max",
    "UnsortedSegmentMin": "min",
    "UnsortedSegmentProd": "prod",
}


@register("UnsortedSegmentSum", linear=(0,), layouts=own_segments)
@register("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", layouts=own_segments)
def unsorted_segments(op: Op) -> Factors | Declined:
    """Rows reduced by their segment: every device reduces its own rows. This is an embedding's dense gradient.

    A segment without rows holds the identity of the reduction, on one device as in the whole.
    """
    data, ids = op.in_shapes[0], op.in_shapes[1]
    if data is None or ids is None:
        return Declined("the rank of an operand is not known")
    rows, rest = tuple(range(len(ids))), tuple(range(len(ids), len(data)))
    contracted, count = dict.fromkeys(rows, _SEGMENTS[op.type]), op.constants.get(2)
    if count is None or 2 in op.symbols or int(count) > tf.as_dtype(op.attr("Tindices").type).max:
        return Factors((rows + rest, rows, None), ((None, *rest),), contracted)
    resize = {_SEGMENT: (Resize(2, (), np.asarray(count)),)}
    numbered = {_SEGMENT: Numbered(1, DROPPED)}
    return Factors((rows + rest, rows, None), ((_SEGMENT, *rest),), contracted, resize, numbered=numbered)


@register("ScatterNd", linear=(1,), layouts=own_scatter)
def scatter_nd(op: Op) -> Factors | Declined:
    """`(indices, updates, shape)`: every device adds its own updates into zeros. The gradient of `GatherNd`."""
    indices, updates, shape = op.in_shapes[0], op.in_shapes[1], shape_operand(op, 2)
    if indices is None or updates is None or shape is None or indices[-1] is None:
        return Declined("its shape is not known when planning")
    rows, rest = tuple(range(len(indices) - 1)), tuple(range(len(indices) - 1, len(updates)))
    indexed = operator.index(indices[-1])
    resize = {factor: (Resize(2, indexed + i, shape),) for i, factor in enumerate(rest)}
    dims = ((*rows, None), rows + rest, None)
    return Factors(dims, ((*(None,) * indexed, *rest),), dict.fromkeys(rows, "sum"), resize)
