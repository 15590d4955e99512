"""Ops that move, repeat or make entries without computing on them, join operands to one, or cut one into several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphsplit.core.layouts import REPLICATE, Joined, Layout, Shard, joined
from graphsplit.core.polynomials import Polynomial
from graphsplit.core.sizes import as_size, is_one, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dim, Dims, Factors, Part, Resize
from graphsplit.rules.families.elementwise import broadcast_dims, result_dims
from graphsplit.rules.known import axes_in, but, known, ranked, resized_axes, shape_operand
from graphsplit.rules.registry import Answer, Sharded, register
from graphsplit.rules.rows import beside, blocks_between, rows_of


@register("Transpose", "ConjugateTranspose", linear=(0,))
def transpose(op: Op) -> Factors:
    """`abc -> cab`, by the permutation."""
    permutation = known(op.constants.get(1), "its permutation is")
    rank = len(permutation)
    return Factors((tuple(range(rank)), None), (tuple([int(p) % rank for p in permutation]),))


@register("ExpandDims", linear=(0,))
def expand_dims(op: Op) -> Factors:
    """`ab -> a1b`."""
    [shape] = ranked(op.in_shapes[0])
    [position] = axes_in(op, 1, len(shape) + 1, "its axis is")
    dims = tuple(range(len(shape)))
    return Factors((dims, None), ((*dims[:position], None, *dims[position:]),))


@register("Squeeze", linear=(0,))
def squeeze(op: Op) -> Factors | Declined:
    """`a1b -> ab`. Without axes it would squeeze the batch on a device that has one row."""
    [shape] = ranked(op.in_shapes[0])
    axes = {axis % len(shape) for axis in op.attr("squeeze_dims").list.i}
    if not axes:
        return Declined("it names no axis, and would squeeze the batch where a device has one row; give it an axis")
    return Factors((but(axes, len(shape)),), (tuple([i for i in range(len(shape)) if i not in axes]),))


@register("ReverseV2", "Cumsum", linear=(0,))
@register("Cumprod", "CumulativeLogsumexp")
def along_whole_axes(op: Op) -> Factors:
    """The axes that are reversed, or along which it cumulates, must be whole."""
    [shape] = ranked(op.in_shapes[0])
    dims = but(axes_in(op, 1, len(shape)), len(shape))
    return Factors((dims, None), (dims,))


@register("ReverseSequence", linear=(0,))
def reverse_sequence(op: Op) -> Factors:
    """`(ab, a) -> ab`: the first entries of every sequence are reversed, as many as the lengths say."""
    [shape] = ranked(op.in_shapes[0])
    dims = but([op.attr("seq_dim").i], len(shape))
    return Factors((dims, (op.attr("batch_dim").i,)), (dims,))


def pad_with_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for padding along the sharded axis by as many rows as there are, or a multiple: a slice's gradient."""
    layout, shape, paddings = layouts[0], op.in_shapes[0], op.constants.get(1)
    if not isinstance(layout, Shard) or shape is None or paddings is None or not _pads(paddings[layout.axis]):
        return None
    axis, (ahead, behind) = layout.axis, paddings[layout.axis]
    zeros = beside(layout, ahead, behind, shape[axis])
    if zeros is None:
        return None
    zeros_before, zeros_after = zeros
    resize = (Resize(1, (axis, 0), paddings, zeros_before), Resize(1, (axis, 1), paddings, zeros_after))
    return Sharded((layout, *(REPLICATE,) * (len(layouts) - 1)), (joined([zeros_before, layout, zeros_after]),), resize)


@register("MirrorPad", "MirrorPadGrad", linear=(0,))
@register("Pad", linear=(0,), layouts=pad_with_blocks)
@register("PadV2", layouts=pad_with_blocks)
def pad(op: Op) -> Factors:
    """Axes that are padded, or were, must be whole."""
    paddings = known(op.constants.get(1), "its paddings are")
    dims = but([i for i, sizes in enumerate(paddings) if _pads(sizes)], len(paddings))
    return Factors((dims, None, None)[: len(op.inputs)], (dims,))


def _pads(sizes: np.ndarray) -> bool:
    """Return whether anything may be added before or after an axis."""
    return not all(is_same(size, 0) for size in sizes)


@register("Tile", linear=(0,))
def tile(op: Op) -> Factors | Declined:
    """A repeated axis is that many blocks of its factor; a repeated axis of size 1 is a new factor of the result."""
    [shape], multiples = ranked(op.in_shapes[0]), known(op.constants.get(1), "its multiples are")
    if any(is_same(m, 0) for m in multiples):
        return Declined("its result has no entries")
    output: list[Dim] = []
    resize: dict[int, tuple[Resize, ...]] = {}
    for i, m in enumerate(multiples):
        parts: tuple[Part, ...] = (Part(i, m if isinstance(m, Polynomial) else int(m), 1),)
        if is_one(shape[i]) and not is_one(m):
            parts = (Part(100 + i, 1, 1), *parts)
            resize[100 + i] = (Resize(1, i, multiples),)
        output.append(i if is_one(m) else parts)
    return Factors((tuple(range(len(shape))), None), (tuple(output),), resize=resize)


@register("BroadcastTo", linear=(0,))
def broadcast_to(op: Op) -> Factors:
    """Axes that are broadcast are new factors of the result."""
    shape, result = ranked(op.in_shapes[0], op.out_shapes[0])
    resize = resized_axes(1, shape_operand(op, 1, "its target shape is"), range(len(result)))
    return Factors((broadcast_dims(shape, result), None), (result_dims([shape], result),), resize=resize)


@register("Fill")
def fill(op: Op) -> Factors:
    """`(sizes, value)`: every axis is a factor, made at the size each device needs."""
    sizes, [result] = shape_operand(op, 0), ranked(op.out_shapes[0])
    dims = tuple(range(len(result)))
    return Factors((None, None), (dims,), resize=resized_axes(0, sizes, dims))


def slice_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a slice of whole blocks of the sharded axis: the gradient of a concatenation of batches.

    Every device takes its own rows of these blocks, so it begins where its rows of the blocks before them end.
    """
    layout, shape, begin, sizes = layouts[0], op.in_shapes[0], op.constants.get(1), op.constants.get(2)
    if not isinstance(layout, Shard) or shape is None or begin is None or sizes is None:
        return None
    axis, length = layout.axis, shape[layout.axis]
    first, size = begin[axis], sizes[axis]
    if length is None or is_same(size, -1) or is_same(size, length):
        return None
    blocks = blocks_between(layout, first, first + size, length)
    if blocks is None:
        return None
    resize = (Resize(1, axis, begin, layout.between(0, blocks[0])), Resize(2, axis, sizes))
    return Sharded((layout, REPLICATE, REPLICATE), (layout.between(*blocks),), resize)


@register("Slice", linear=(0,), layouts=slice_blocks)
def slice_(op: Op) -> Factors:
    """Axes that are taken whole keep their factor."""
    sizes, (shape, result) = shape_operand(op, 2, "its sizes are"), ranked(op.in_shapes[0], op.out_shapes[0])
    dims: Dims = tuple([i if size is not None and is_same(size, result[i]) else None for i, size in enumerate(shape)])
    axes = [i for i in range(len(shape)) if not is_same(sizes[i], -1)]
    return Factors((dims, None, None), (dims,), resize=resized_axes(2, sizes, axes))


@register("Roll", linear=(0,))
def roll(op: Op) -> Factors:
    """The rolled axes must be whole."""
    [shape] = ranked(op.in_shapes[0])
    dims = but(axes_in(op, 2, len(shape)), len(shape))
    return Factors((dims, None, None), (dims,))


def join_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for a concatenation along the sharded axis: the joined axis has the blocks of all operands.

    Whole operands (the gradient of rows that were compared with all others) are cut if they have as many rows, or a
    multiple of them.
    """
    known_axis, shape = op.constants.get(len(layouts) - 1), op.out_shapes[0]
    if known_axis is None or shape is None:
        return None
    axis = int(known_axis) % len(shape)
    operands = layouts[:-1]
    if not any(isinstance(layout, Shard) and layout.axis == axis for layout in operands):
        return None
    sizes = [None if s is None else s[axis] for s in op.in_shapes[: len(operands)]]
    cut_along_axis = [layout if isinstance(layout, Shard) and layout.axis == axis else None for layout in operands]
    cuts = [(layout, rows_of(layout, size)) for layout, size in zip(cut_along_axis, sizes, strict=True) if layout]
    wants: list[Shard] = []
    for layout, size in zip(cut_along_axis, sizes, strict=True):
        cut = layout or _cut_like(axis, size, cuts)
        if cut is None:
            return Declined("it joins sharded rows with rows that every device has")
        wants.append(cut)
    return Sharded((*wants, REPLICATE), (joined(wants),))


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
    per_piece, remainder = divmod(len(layout.blocks), count)
    groups = [layout.between(i * per_piece, (i + 1) * per_piece) for i in range(count)]
    alike = len({(sum(group.blocks), group.partition) for group in groups}) == 1
    if layout.axis != int(known_axis) % len(shape) or remainder or not alike or isinstance(groups[0].partition, Joined):
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
        blocks = None if size is None else blocks_between(layout, begin, begin + size, shape[layout.axis])
        if size is None or blocks is None:
            return None
        begin += size
        pieces.append(layout.between(*blocks))
        resize.append(Resize(1, i, op.constants.get(1, np.zeros(len(op.out_shapes), np.int32)), pieces[-1]))
    return Sharded((layout, REPLICATE, REPLICATE), tuple(pieces), tuple(resize))


@register("Split", linear=(1,), layouts=split_blocks)
@register("SplitV", linear=(0,), layouts=split_v_blocks)
def split(op: Op) -> Factors:
    """`(axis, ab) -> ab, ab`, or `(ab, sizes, axis)`; the split axis must be whole."""
    operand, axis = (1, 0) if op.type == "Split" else (0, 2)
    [shape] = ranked(op.in_shapes[operand])
    dims = but(axes_in(op, axis, len(shape), "its axis is"), len(shape))
    return Factors(tuple([dims if i == operand else None for i in range(len(op.inputs))]), (dims,) * len(op.out_shapes))
