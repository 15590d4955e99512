"""Contractions: matrix products, einsum, convolutions and their gradients.

A contracted batch axis gives a partial sum: that is every weight gradient of a dense or convolutional layer.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphsplit.core.sizes import is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors, Resize
from graphsplit.rules.families.elementwise import broadcast_dims, result_dims
from graphsplit.rules.known import ranked, shape_if_known, shape_operand
from graphsplit.rules.registry import register

KnownSizes = Sequence[Any] | np.ndarray | None
"""What is known of a shape, which may be the value of an operand."""

_M, _N, _K = 0, 1, 2


@register("MatMul", linear=(0, 1))
def matmul(op: Op) -> Factors:
    """`mk, kn -> mn`, with either operand transposed."""
    left: Dims = (_K, _M) if op.attr("transpose_a").b else (_M, _K)
    right: Dims = (_N, _K) if op.attr("transpose_b").b else (_K, _N)
    return Factors((left, right), ((_M, _N),), {_K: "sum"})


@register("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", linear=(0, 1))
def batch_matmul(op: Op) -> Factors:
    """`...mk, ...kn -> ...mn`, leading axes broadcast; `adj_x` and `adj_y` transpose."""
    *operands, result = ranked(*op.in_shapes, op.out_shapes[0])
    leads, lead = [shape[:-2] for shape in operands], result[:-2]

    def dims(operand: int, last: tuple[int, int], transposed: bool) -> Dims:
        lead_dims = broadcast_dims(leads[operand], lead, first_axis=3) or ()
        return (*lead_dims, *(reversed(last) if transposed else last))

    inputs = (dims(0, (_M, _K), op.attr("adj_x").b), dims(1, (_K, _N), op.attr("adj_y").b))
    leading = [3 + i if isinstance(i, int) else None for i in result_dims(leads, lead)]
    return Factors(inputs, ((*leading, _M, _N),), {_K: "sum"})


@register("SparseTensorDenseMatMul", linear=(1, 3))
def sparse_matmul(op: Op) -> Factors:
    """`(indices, values, shape, kn) -> mn`: a sum over entries, each of which may be of any `m` and `k`."""
    right: Dims = (_N, None) if op.attr("adjoint_b").b else (None, _N)
    return Factors(((_K, None), (_K,), None, right), ((None, _N),), {_K: "sum"})


@register("Einsum", linear=(0, 1))
def einsum(op: Op) -> Factors | Declined:
    """The equation is the rule. An ellipsis stands for broadcast axes; a repeated letter (a diagonal) is declined."""
    *shapes, result_shape = ranked(*op.in_shapes, op.out_shapes[0])
    operands, _, result = op.attr("equation").s.decode().partition("->")
    terms = operands.split(",")
    if any(len(set(t.replace(".", ""))) != len(t.replace(".", "")) for t in [*terms, result]):
        return Declined("its equation takes a diagonal")
    letters = {letter: i for i, letter in enumerate(string.ascii_letters)}

    def broadcast_sizes(term: str, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        head, dots, tail = term.partition("...")
        return shape[len(head) : len(shape) - len(tail)] if dots else ()

    def dims(term: str, shape: tuple[int | None, ...], full: tuple[int | None, ...] | None) -> Dims:
        head, _, tail = term.partition("...")
        sizes = broadcast_sizes(term, shape)
        count, middle = len(sizes), []
        for i, size in enumerate(sizes):
            from_right = count - i  # ellipses align at their right end
            broadcast = full is not None and not is_same(size, full[len(full) - from_right])
            middle.append(None if broadcast or from_right in undecided else 100 + from_right)
        return (*[letters[c] for c in head], *middle, *[letters[c] for c in tail])

    shared = broadcast_sizes(result, result_shape) if "..." in result else None
    stands_for = [broadcast_sizes(term, shape) for term, shape in zip(terms, shapes, strict=True)]
    # (of a size that is only known when it runs, nobody knows whether it is broadcast)
    undecided = {len(sizes) - i for sizes in stands_for for i, size in enumerate(sizes) if size is None}
    inputs = tuple([dims(term, shape, shared) for term, shape in zip(terms, shapes, strict=True)])
    output = dims(result, result_shape, None)
    output_factors = set(output or ())
    contracted = {f: "sum" for d in inputs for f in d or () if isinstance(f, int) and f not in output_factors}
    return Factors(inputs, (output,), contracted)


def _rank(op: Op) -> int:
    return 5 if "3D" in op.type or "3d" in op.type else 4


def _images(op: Op, rank: int, channel: int | None) -> Dims:
    """Return the dims of images or signals that a convolution reads or makes: samples, and channels."""
    dims: list[int | None] = [0, *[None] * (rank - 1)]
    dims[_channel_axis(op, rank)] = channel
    return tuple(dims)


def _channels(op: Op, rank: int, images: KnownSizes, kernel: KnownSizes) -> tuple[int | None, int | None, Dims]:
    """Return the factors of the channels that a convolution reads and makes, and the dims of its filter.

    Those that it reads are summed for each that it makes. They have none, and must be whole, in groups, where a filter
    is for fewer than there are, and where the op has no channels that may be cut, or nobody knows how many there are.

    Args:
      op: the convolution, or a gradient of it.
      rank: of its images.
      images: the shape of those that the convolution reads, or None if it is not known.
      kernel: the shape of its filter, or None.
    """
    count = images[_channel_axis(op, rank)] if images is not None and _has_channels(op) else None
    is_cut = count is not None and kernel is not None and is_same(count, kernel[-2])
    in_channel, out_channel = (1, 2) if is_cut else (None, None)
    return in_channel, out_channel, (*[None] * (rank - 2), in_channel, out_channel)


@register("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv", linear=(0, 1))
def convolution(op: Op) -> Factors:
    """`n..i, ..io -> n..o`: samples are independent, and channels are summed, unless they are in groups.

    (In NCHW channels are the second axis. Where `_channels` has no factors of them, they are whole: `n.., .. -> n..`.)
    """
    rank = _rank(op) if op.type != "Conv" else len(op.out_shapes[0] or (0,) * 4)
    in_channel, out_channel, dims = _channels(op, rank, *op.in_shapes)
    sums = {} if in_channel is None else {in_channel: "sum"}
    return Factors((_images(op, rank, in_channel), dims), (_images(op, rank, out_channel),), sums)


@register("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput", linear=(1, 2))
def convolution_input_gradient(op: Op) -> Factors:
    """`(input_sizes, ..io, n..o) -> n..i`; `input_sizes` may begin with the number of samples, and has the channels."""
    rank, sizes = _rank(op), shape_operand(op, 0, "its input_sizes are")
    in_channel, out_channel, dims = _channels(op, rank, op.out_shapes[0], op.in_shapes[1])
    axis_of_factor = {0: 0} if in_channel is None else {0: 0, in_channel: _channel_axis(op, rank)}
    resize = {factor: (Resize(0, k, sizes),) if len(sizes) == rank else () for factor, k in axis_of_factor.items()}
    sums = {} if out_channel is None else {out_channel: "sum"}
    return Factors((None, dims, _images(op, rank, out_channel)), (_images(op, rank, in_channel),), sums, resize=resize)


@register("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter", linear=(0, 2))
def convolution_filter_gradient(op: Op) -> Factors:
    """`(n..i, filter_sizes, n..o) -> ..io`: a sum over the samples, so one addend per device."""
    rank, sizes = _rank(op), shape_if_known(op, 1)
    in_channel, out_channel, dims = _channels(op, rank, op.in_shapes[0], sizes)
    resize = {}
    if sizes is not None and in_channel is not None and out_channel is not None:
        resize = {in_channel: (Resize(1, rank - 2, sizes),), out_channel: (Resize(1, rank - 1, sizes),)}
    return Factors(
        (_images(op, rank, in_channel), None, _images(op, rank, out_channel)), (dims,), {0: "sum"}, resize=resize
    )


@register("BiasAdd", joint=True)
def bias_add(op: Op) -> Factors:
    """`a..c, c -> a..c`; in NCHW the channel is axis 1."""
    [shape] = ranked(op.out_shapes[0])
    dims = tuple(range(len(shape)))
    return Factors((dims, (_channel_axis(op, len(shape)),)), (dims,))


@register("BiasAddGrad", linear=(0,))
def bias_add_gradient(op: Op) -> Factors:
    """`a..c -> c`: the sum over everything but the channel."""
    [shape] = ranked(op.in_shapes[0])
    channel = _channel_axis(op, len(shape))
    sums = {i: "sum" for i in range(len(shape)) if i != channel}
    return Factors((tuple(range(len(shape))),), ((channel,),), sums)


def _has_channels(op: Op) -> bool:
    """Return whether the channels of a convolution may be cut: it is none of depth, and no `Conv`."""
    return op.type.startswith(("Conv2D", "Conv3D"))


def _channel_axis(op: Op, rank: int) -> int:
    return 1 if op.attr("data_format").s.startswith(b"NC") else rank - 1
