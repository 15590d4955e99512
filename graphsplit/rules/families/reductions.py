"""Reductions over axes, segments and everything. Over the batch axis they give one part per device."""

from __future__ import annotations

import operator

import numpy as np
import tensorflow as tf

from graphsplit.program.program import Op
from graphsplit.rules.factors import DROPPED, Declined, Dims, Factors, Numbered, Resize
from graphsplit.rules.known import axes_in, but, known, ranked, shape_operand
from graphsplit.rules.registry import register
from graphsplit.rules.rows import own_segments

_REDUCTION = {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


@register("Sum", "Mean", linear=(0,))
@register("Max", "Min", "Prod", "All", "Any")
def reduce(op: Op) -> Factors | Declined:
    """`ab -> b`: the factor of a reduced axis is contracted. What becomes of a mean, planning decides."""
    axes, rank, output = _reduced(op)
    if op.type == "Mean" and not op.out_dtypes[0].is_floating and not op.out_dtypes[0].is_complex:
        return Declined("a mean of integers rounds, and so does not follow from the means of the shards")
    reduction = f"own {op.merged}" if op.merged else _REDUCTION[op.type]
    return Factors((tuple(range(rank)), None), (output,), dict.fromkeys(axes, reduction))


@register("ArgMax", "ArgMin", "EuclideanNorm")
def whole_axis_reduction(op: Op) -> Factors:
    """Reductions whose parts do not simply add: the reduced axes must be whole."""
    axes, rank, output = _reduced(op)
    return Factors((but(axes, rank), None), (output,))


def _reduced(op: Op) -> tuple[set[int], int, Dims]:
    """Return the axes that an op reduces, of how many, and the dims of its result."""
    [shape] = ranked(op.in_shapes[0])
    axes, keep = axes_in(op, 1, len(shape)), op.attr("keep_dims").b
    dims = [None if i in axes else i for i in range(len(shape)) if keep or i not in axes]
    return axes, len(shape), tuple(dims)


@register("L2Loss")
def l2_loss(op: Op) -> Factors:
    """Half the sum of squares of everything."""
    rank = len(op.in_shapes[0] or ())
    return Factors((tuple(range(rank)),), ((),), dict.fromkeys(range(rank), "sum"))


_SEGMENT = 200  # the factor that segments are entries of: no axis has this number


@register("UnsortedSegmentSum", linear=(0,), layouts=own_segments(1))
@register("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd", layouts=own_segments(1))
def unsorted_segments(op: Op) -> Factors:
    """Rows reduced by their segment: every device reduces its own rows. This is an embedding's dense gradient.

    A segment without rows holds the identity of the reduction, on one device as in the whole.
    """
    data, ids = ranked(*op.in_shapes[:2])
    rows, inner_axes = tuple(range(len(ids))), tuple(range(len(ids), len(data)))
    contracted, count = dict.fromkeys(rows, _REDUCTION[op.type.removeprefix("UnsortedSegment")]), op.constants.get(2)
    if count is None or 2 in op.symbols or int(count) > tf.as_dtype(op.attr("Tindices").type).max:
        return Factors((rows + inner_axes, rows, None), ((None, *inner_axes),), contracted)
    resize = {_SEGMENT: (Resize(2, (), np.asarray(count)),)}
    numbered = {_SEGMENT: Numbered(1, DROPPED)}
    return Factors((rows + inner_axes, rows, None), ((_SEGMENT, *inner_axes),), contracted, resize, numbered=numbered)


@register("ScatterNd", linear=(1,), layouts=own_segments(0))
def scatter_nd(op: Op) -> Factors:
    """`(indices, updates, shape)`: every device adds its own updates into zeros. The gradient of `GatherNd`."""
    shape, (indices, updates) = shape_operand(op, 2), ranked(*op.in_shapes[:2])
    rows, inner_axes = tuple(range(len(indices) - 1)), tuple(range(len(indices) - 1, len(updates)))
    indexed = operator.index(known(indices[-1], "its shape is"))
    resize = {factor: (Resize(2, indexed + i, shape),) for i, factor in enumerate(inner_axes)}
    dims = ((*rows, None), rows + inner_axes, None)
    adds = "any" if op.out_dtypes[0].is_bool else "sum"
    return Factors(dims, ((*(None,) * indexed, *inner_axes),), dict.fromkeys(rows, adds), resize)
