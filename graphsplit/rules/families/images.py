"""Ops on images and signals, sample by sample: pooling, resizing, batch normalisation in inference."""

from __future__ import annotations

import operator

from graphsplit.core.sizes.symbolic_sizes import Shape, quotient
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors, Part, Resize
from graphsplit.rules.families.contractions import shape_operand
from graphsplit.rules.registry import register


def _samples(shape: tuple[int | None, ...] | None) -> Dims:
    return None if not shape else (0, *[None] * (len(shape) - 1))


@register("AvgPool", "AvgPool3D", linear=(0,))
@register("MaxPool", "MaxPool3D", "MaxPoolGrad", "MaxPoolGradGrad", "MaxPool3DGrad", "MaxPool3DGradGrad")
@register("MaxPoolWithArgmax", "MaxPoolGradWithArgmax", "LRN", "LRNGrad")
@register("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches", linear=(0,))
def sample_by_sample(op: Op) -> Factors | Declined:
    """Operands of rank 4 and 5 have the samples on their first axis; scalars and sizes are whole."""
    if op.attr("include_batch_in_index").b:
        return Declined("its indices count the whole batch")
    if any(shape is None for shape in (*op.in_shapes, *op.out_shapes)):
        return Declined("the rank of an operand is not known")
    inputs = tuple([_samples(shape) if shape and len(shape) > 3 else None for shape in op.in_shapes])
    return Factors(inputs, tuple([_samples(shape) for shape in op.out_shapes]))


@register("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor", linear=(0,))
@register("ResizeBicubicGrad", "ResizeBilinearGrad", "ResizeNearestNeighborGrad", linear=(0,))
def resize(op: Op) -> Factors | Declined:
    """Images and (for gradients) originals by sample; a target height and width is whole."""
    return sample_by_sample(op)


@register("AvgPoolGrad", "AvgPool3DGrad", linear=(1,))
def average_pool_gradient(op: Op) -> Factors | Declined:
    """`(original_shape, dy) -> dx`: the first element of the shape is the number of samples."""
    shape = shape_operand(op, 0)
    if shape is None:
        return Declined("its original shape is not known when planning")
    resize = {0: (Resize(0, 0, shape),)}
    return Factors((None, _samples(op.in_shapes[1])), (_samples(op.out_shapes[0]),), resize=resize)


@register("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(op: Op) -> Factors | Declined:
    """In inference the statistics are given and samples are independent; in training they are the whole batch's.

    The results after the first repeat the given statistics: every device has them whole.
    """
    if op.attr("is_training").b:
        return Declined("it normalises with statistics of the whole batch in one fused kernel")
    whole = (None,) * (len(op.out_shapes) - 1)
    return Factors((_samples(op.in_shapes[0]), *(None,) * 4), (_samples(op.out_shapes[0]), *whole))


@register("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_batch_norm_gradient(op: Op) -> Factors | Declined:
    """`(dy, x, scale, mean, variance) -> dx, dscale, doffset` with given statistics; sums over the samples."""
    if op.attr("is_training").b:
        return Declined("it differentiates through statistics of the whole batch in one fused kernel")
    images = _samples(op.in_shapes[0])
    inputs = (images, images, *(None,) * (len(op.inputs) - 2))
    return Factors(inputs, (images, (None,), (None,), None, None), {0: "sum"})


@register("SpaceToBatchND", linear=(0,))
def space_to_batch(op: Op) -> Factors | Declined:
    """Cut images into interleaved ones: the new first axis is one batch for each position in the block."""
    shape, result = op.in_shapes[0], op.out_shapes[0]
    count = _times(result, shape)
    if not shape or not result or not count:
        return Declined("its shape is not known when planning")
    blocks: Dims = ((Part(0, count, 1),), *(None,) * (len(result) - 1))
    return Factors((_samples(shape), None, None), (blocks,))


@register("BatchToSpaceND", linear=(0,))
def batch_to_space(op: Op) -> Factors | Declined:
    """The inverse of `SpaceToBatchND`."""
    shape, result = op.in_shapes[0], op.out_shapes[0]
    count = _times(shape, result)
    if not shape or not result or not count:
        return Declined("its shape is not known when planning")
    blocks: Dims = ((Part(0, count, 1),), *(None,) * (len(shape) - 1))
    return Factors((blocks, None, None), (_samples(result),))


def _times(many: Shape | None, few: Shape | None) -> int:
    """Return how many times as many samples one shape has as another, 0 if that is not known."""
    known = many and few and many[0] is not None and few[0] is not None
    return operator.index(quotient(many[0], few[0]) or 0) if known and many and few else 0
