"""Ops that move, repeat or make entries without computing on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphsplit.core.layouts import REPLICATE, Joined, Layout, Shard, joined
from graphsplit.core.sizes.polynomials import Polynomial
from graphsplit.core.sizes.symbolic_sizes import is_one, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.rules.blocks import blocks_beside, blocks_between, rows_of
from graphsplit.rules.factors import Declined, Dim, Dims, Factors, Part, Resize
from graphsplit.rules.families.contractions import shape_operand
from graphsplit.rules.families.elementwise import result_dims
from graphsplit.rules.registry import Answer, Sharded, register


@register("Transpose", "ConjugateTranspose", linear=(0,))
def transpose(op: Op) -> Factors | Declined:
    """`abc -> cab`, by the permutation."""
    permutation = op.constants.get(1)
    if permutation is None:
        return Declined("its permutation is not known when planning")
    rank = len(permutation)
    return Factors((tuple(range(rank)), None), (tuple([int(p) % rank for p in permutation]),))


@register("ExpandDims", linear=(0,))
def expand_dims(op: Op) -> Factors | Declined:
    """`ab -> a1b`."""
    shape, axis = op.in_shapes[0], op.constants.get(1)
    if shape is None or axis is None:
        return Declined("its axis is not known when planning")
    dims: list[Dim] = list(range(len(shape)))
    position = int(np.reshape(axis, -1)[0]) % (len(shape) + 1)
    return Factors((tuple(dims), None), ((*dims[:position], None, *dims[position:]),))


@register("Squeeze", linear=(0,))
def squeeze(op: Op) -> Factors | Declined:
    """`a1b -> ab`. Without axes it would squeeze the batch on a device that has one row."""
    shape = op.in_shapes[0]
    if shape is None:
        return Declined("the rank of its operand is not known")
    axes = {axis % len(shape) for axis in op.attr("squeeze_dims").list.i}
    if not axes:
        return Declined("it names no axis, and would squeeze the batch where a device has one row; give it an axis")
    dims: Dims = tuple([None if i in axes else i for i in range(len(shape))])
    return Factors((dims,), (tuple([i for i in range(len(shape)) if i not in axes]),))


@register("ReverseV2", linear=(0,))
def reverse(op: Op) -> Factors | Declined:
    """The reversed axes must be whole."""
    shape, axes = op.in_shapes[0], op.constants.get(1)
    if shape is None or axes is None:
        return Declined("its axes are not known when planning")
    reversed_axes = {int(a) % len(shape) for a in np.reshape(axes, -1)}
    dims: Dims = tuple([None if i in reversed_axes else i for i in range(len(shape))])
    return Factors((dims, None), (dims,))


@register("ReverseSequence", linear=(0,))
def reverse_sequence(op: Op) -> Factors | Declined:
    """`(ab, a) -> ab`: the first entries of every sequence are reversed, as many as the lengths say."""
    shape = op.in_shapes[0]
    if shape is None:
        return Declined("the rank of its operand is not known")
    dims: Dims = tuple([None if i == op.attr("seq_dim").i else i for i in range(len(shape))])
    return Factors((dims, (op.attr("batch_dim").i,)), (dims,))


@register("Cumsum", linear=(0,))
@register("Cumprod", "CumulativeLogsumexp")
def cumulate(op: Op) -> Factors | Declined:
    """The cumulated axis must be whole."""
    return reverse(op)


def pad_with_blocks(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Answer for padding along the sharded axis by as many rows as there are, or a multiple: a slice's gradient."""
    layout, shape, paddings = layouts[0], op.in_shapes[0], op.constants.get(1)
    if not isinstance(layout, Shard) or shape is None or paddings is None or not _pads(paddings[layout.axis]):
        return None
    axis, rows = layout.axis, rows_of(layout, shape[layout.axis])
    counts = [None if rows is None else quotient(count, rows) for count in paddings[axis]]
    if not all(isinstance(count, int) for count in counts) or isinstance(layout.partition, Joined):
        return None
    before, after = (replace(layout, blocks=blocks_beside(layout, count or 0)) for count in counts)
    resize = (Resize(1, (axis, 0), paddings, before), Resize(1, (axis, 1), paddings, after))
    return Sharded((layout, *(REPLICATE,) * (len(layouts) - 1)), (joined([before, layout, after]),), resize)


@register("MirrorPad", linear=(0,))
@register("Pad", linear=(0,), layouts=pad_with_blocks)
@register("PadV2", layouts=pad_with_blocks)
def pad(op: Op) -> Factors | Declined:
    """Axes that are padded must be whole."""
    paddings = op.constants.get(1)
    if paddings is None:
        return Declined("its paddings are not known when planning")
    dims: Dims = tuple([None if _pads(sizes) else i for i, sizes in enumerate(paddings)])
    return Factors((dims, None, None)[: len(op.inputs)], (dims,))


def _pads(sizes: np.ndarray) -> bool:
    """Return whether anything may be added before or after an axis."""
    return not all(is_same(size, 0) for size in sizes)


@register("MirrorPadGrad", linear=(0,))
def mirror_pad_gradient(op: Op) -> Factors | Declined:
    """The inverse of `MirrorPad`: padded axes must be whole."""
    return pad(op)


@register("Tile", linear=(0,))
def tile(op: Op) -> Factors | Declined:
    """A repeated axis is that many blocks of its factor; a repeated axis of size 1 is a new factor of the result."""
    shape, multiples = op.in_shapes[0], op.constants.get(1)
    if shape is None or multiples is None:
        return Declined("its multiples are not known when planning")
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
def broadcast_to(op: Op) -> Factors | Declined:
    """Axes that are broadcast are new factors of the result."""
    shape, result, target = op.in_shapes[0], op.out_shapes[0], shape_operand(op, 1)
    if shape is None or result is None or target is None:
        return Declined("its target shape is not known when planning")
    skip = len(result) - len(shape)
    dims: Dims = tuple([skip + i if is_same(size, result[skip + i]) else None for i, size in enumerate(shape)])
    resize = {i: (Resize(1, i, target),) for i in range(len(result))}
    return Factors((dims, None), (result_dims([shape], result),), resize=resize)


@register("Fill")
def fill(op: Op) -> Factors | Declined:
    """`(sizes, value)`: every axis is a factor, made at the size each device needs."""
    sizes, result = shape_operand(op, 0), op.out_shapes[0]
    if sizes is None or result is None:
        return Declined("its shape is not known when planning")
    resize = {i: (Resize(0, i, sizes),) for i in range(len(result))}
    return Factors((None, None), (tuple(range(len(result))),), resize=resize)


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
    found = blocks_between(layout, first, first + size, length)
    if found is None:
        return None
    resize = (Resize(1, axis, begin, layout.between(0, found[0])), Resize(2, axis, sizes))
    return Sharded((layout, REPLICATE, REPLICATE), (layout.between(*found),), resize)


@register("Slice", linear=(0,), layouts=slice_blocks)
def slice_(op: Op) -> Factors | Declined:
    """Axes that are taken whole keep their factor."""
    shape, result, sizes = op.in_shapes[0], op.out_shapes[0], shape_operand(op, 2)
    if shape is None or result is None or sizes is None:
        return Declined("its sizes are not known when planning")
    dims: Dims = tuple([i if size is not None and is_same(size, result[i]) else None for i, size in enumerate(shape)])
    resize = {i: (Resize(2, i, sizes),) for i in range(len(shape)) if not is_same(sizes[i], -1)}
    return Factors((dims, None, None), (dims,), resize=resize)


@register("Roll", linear=(0,))
def roll(op: Op) -> Factors | Declined:
    """The rolled axes must be whole."""
    shape, axes = op.in_shapes[0], op.constants.get(2)
    if shape is None or axes is None:
        return Declined("its axes are not known when planning")
    rolled = {int(a) % len(shape) for a in np.reshape(axes, -1)}
    dims: Dims = tuple([None if i in rolled else i for i in range(len(shape))])
    return Factors((dims, None, None), (dims,))
