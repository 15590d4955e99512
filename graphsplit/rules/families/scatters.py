"""Entries put into a tensor at places that are numbered along its first axes; counts of entries.

Places are numbers in the whole, so the axes that they number must be whole; the axes behind them are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Shard, is_whole
from graphsplit.core.sizes import are_same, is_at_least, is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import Dims, Factors
from graphsplit.rules.known import NotKnownError, known, ranked
from graphsplit.rules.registry import Answer, Sharded, register
from graphsplit.rules.rows import own_rows

_JOINED: dict[str, tuple[Layout, Layout]] = {  # how the tensor is read, and what joins the devices' parts
    "TensorScatterAdd": (PARTIAL_SUM, PARTIAL_SUM),
    "TensorScatterMax": (REPLICATE, Partial("max")),
    "TensorScatterMin": (REPLICATE, Partial("min")),
    "TensorScatterSub": (PARTIAL_SUM, PARTIAL_SUM),
}


_own_updates = own_rows("rnn", "r")


def scatter_own(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for updates of rows' own elements; and of a whole tensor, where that is no larger than the updates.

    Then every device puts its own updates into it, or into zeros, and what they have is joined.
    """
    answer = _own_updates(op, layouts)
    if answer is not None or op.type not in _JOINED or None in op.in_shapes:
        return answer
    tensor, indices, updates = [shape or () for shape in op.in_shapes]
    cut = layouts[2]
    if not is_whole(layouts[0]) or not isinstance(cut, Shard) or cut.axis >= len(indices) - 1:
        return None
    if None in (*tensor, *updates) or not is_at_least(math.prod(updates), math.prod(tensor)):
        return None
    tensor_layout, joined = _JOINED[op.type]
    return Sharded((tensor_layout, cut, cut), (joined,))


@register("TensorScatterUpdate", *_JOINED, layouts=scatter_own)
def tensor_scatter(op: Op) -> Factors:
    """`(tensor, indices, updates)`: the axes behind those that are indexed are the same in all."""
    tensor, indices, _ = ranked(*op.in_shapes)
    indexed = int(known(indices[-1], "the shape of its indices is"))
    behind = tuple(range(indexed, len(tensor)))
    dims = (*(None,) * indexed, *behind)
    return Factors((dims, None, (*(None,) * (len(indices) - 1), *behind)), (dims,))


@register("XlaDynamicUpdateSlice")
def dynamic_update_slice(op: Op) -> Factors:
    """`(tensor, update, start)`: axes that are updated as a whole are free, because a start is moved to fit."""
    tensor, update = ranked(*op.in_shapes[:2])
    pairs = zip(tensor, update, strict=True)
    dims: Dims = tuple([i if size is not None and is_same(size, new) else None for i, (size, new) in enumerate(pairs)])
    return Factors((dims, dims, None), (dims,))


@register("DynamicStitch", "ParallelDynamicStitch")
def dynamic_stitch(op: Op) -> Factors:
    """`(indices ..., data ...)`: the first axis of the result is numbered, those behind it are free."""
    *shapes, result = ranked(*op.in_shapes, op.out_shapes[0])
    count, behind = len(shapes) // 2, tuple(range(1, len(result)))
    data_dims = [(*(None,) * (len(shape) - len(behind)), *behind) for shape in shapes[count:]]
    return Factors(((None,) * count + tuple(data_dims)), ((None, *behind),))


@register("DenseBincount")
def dense_bincount(op: Op) -> Factors:
    """`(values, size, weights)`: rows are counted by themselves; of a vector every device counts its own entries."""
    values, weights = ranked(op.in_shapes[0], op.in_shapes[2])
    dims: Dims = (0, 1) if len(values) == 2 else (1,)
    weighted = are_same(weights, values)
    if not weighted and not any(is_same(size, 0) for size in weights):
        raise NotKnownError("the shape of its weights is not known when planning")
    counted = dims[:-1] if dims else ()
    return Factors(
        (dims, None, dims if weighted else None),
        ((*counted, None),),
        {1: "max" if op.attr("binary_output").b else "sum"},
    )


@register("HistogramFixedWidth")
def histogram(op: Op) -> Factors:
    """`(values, range, count)`: every device counts its own entries."""
    [values] = ranked(op.in_shapes[0])
    dims = tuple(range(len(values)))
    return Factors((dims, None, None), ((None,),), dict.fromkeys(dims, "sum"))
