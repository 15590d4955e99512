"""Ops that join operands to one, or cut one into several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphsplit.core.layouts import REPLICATE, Joined, Layout, Shard, joined
from graphsplit.core.sizes.symbolic_sizes import as_size, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.rules.blocks import blocks_between, rows_of
from graphsplit.rules.factors import Declined, Factors, Resize
from graphsplit.rules.known import axes_in, but, ranked
from graphsplit.rules.registry import Answer, Sharded, register


def join_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a concatenation along the sharded axis: the joined axis has the blocks of all operands.

    Whole operands (the gradient of rows that were compared with all others) are cut if they have as many rows, or a
    multiple of them.
    """
    known_axis, shape = op.constants.get(len(layouts) - 1), op.out_shapes[0]
    if known_axis is None or shape is None:
        return None
    axis = int(known_axis) % len(shape)
    data = layouts[:-1]
    if not any(isinstance(layout, Shard) and layout.axis == axis for layout in data):
        return None
    sizes = [None if s is None else s[axis] for s in op.in_shapes[: len(data)]]
    own = [layout if isinstance(layout, Shard) and layout.axis == axis else None for layout in data]
    cuts = [(layout, rows_of(layout, size)) for layout, size in zip(own, sizes, strict=True) if layout]
    known: list[Shard] = []
    for layout, size in zip(own, sizes, strict=True):
        found = layout or _cut_like(axis, size, cuts)
        if found is None:
            return Declined("it joins sharded rows with rows that every device has")
        known.append(found)
    return Sharded((*known, REPLICATE), (joined(known),))


def _cut_like(axis: int, size: Any, cuts: Sequence[tuple[Shard, Any]]) -> Shard | None:
    """Return how a whole operand is cut that is joined with others, each with how many rows it has."""
    for layout, rows in cuts:
        count = None if size is None or rows is None or isinstance(layout.partition, Joined) else quotient(size, rows)
        if count is not None and not is_same(count, 0):
            return Shard(axis, (as_size(count),), layout.partition)
    return None


@register("ConcatV2", joint=True, layouts=join_blocks)
def concat(op: Op) -> Factors:
    """`ab, ab -> ab`, the joined axis whole; joined along the sharded axis, see `join_blocks`."""
    [shape] = ranked(op.out_shapes[0])
    dims = but(axes_in(op, len(op.inputs) - 1, len(shape), "its axis is"), len(shape))
    return Factors((*[dims] * (len(op.inputs) - 1), None), (dims,))


@register("Pack", joint=True)
def pack(op: Op) -> Factors:
    """`ab, ab -> a2b`."""
    [shape] = ranked(op.in_shapes[0])
    dims = tuple(range(len(shape)))
    axis = op.attr("axis").i % (len(shape) + 1)
    return Factors((dims,) * len(op.inputs), ((*dims[:axis], None, *dims[axis:]),))


@register("Unpack", linear=(0,))
def unpack(op: Op) -> Factors:
    """`a2b -> ab, ab`; the unpacked axis must be whole."""
    [shape] = ranked(op.in_shapes[0])
    axis = op.attr("axis").i % len(shape)
    return Factors(
        (but([axis], len(shape)),), (tuple([i for i in range(len(shape)) if i != axis]),) * len(op.out_shapes)
    )


def split_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a split along the sharded axis into whole blocks: what a concatenation of batches joined."""
    layout, known_axis, shape = layouts[1], op.constants.get(0), op.in_shapes[1]
    if not isinstance(layout, Shard) or known_axis is None or shape is None:
        return None
    count = len(op.out_shapes)
    each, rest = divmod(len(layout.blocks), count)
    groups = [layout.between(i * each, (i + 1) * each) for i in range(count)]
    alike = len({(sum(group.blocks), group.partition) for group in groups}) == 1
    if layout.axis != int(known_axis) % len(shape) or rest or not alike or isinstance(groups[0].partition, Joined):
        return None
    return Sharded((REPLICATE, layout), tuple(groups))


def split_v_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a split along the sharded axis at the borders of blocks."""
    layout, known_axis, shape = layouts[0], op.constants.get(2), op.in_shapes[0]
    if not isinstance(layout, Shard) or known_axis is None or shape is None:
        return None
    if layout.axis != int(known_axis) % len(shape):
        return None
    begin: Any = 0
    pieces, resize = [], []
    for i, shapes in enumerate(op.out_shapes):
        size = None if shapes is None else shapes[layout.axis]
        found = None if size is None else blocks_between(layout, begin, begin + size, shape[layout.axis])
        if size is None or found is None:
            return None
        begin += size
        pieces.append(layout.between(*found))
        resize.append(Resize(1, i, op.constants.get(1, np.zeros(len(op.out_shapes), np.int32)), pieces[-1]))
    return Sharded((layout, REPLICATE, REPLICATE), tuple(pieces), tuple(resize))


@register("Split", linear=(1,), layouts=split_blocks)
@register("SplitV", linear=(0,), layouts=split_v_blocks)
def split(op: Op) -> Factors:
    """`(axis, ab) -> ab, ab`, or `(ab, sizes, axis)`; the split axis must be whole."""
    data, axis = (1, 0) if op.type == "Split" else (0, 2)
    [shape] = ranked(op.in_shapes[data])
    dims = but(axes_in(op, axis, len(shape), "its axis is"), len(shape))
    return Factors(tuple([dims if i == data else None for i in range(len(op.inputs))]), (dims,) * len(op.out_shapes))
