"""Ops on images and signals, sample by sample: pooling, resizing, warps, crops, boxes, normalisation in inference."""

from __future__ import annotations

import operator
from dataclasses import replace

from graphsplit.core.sizes import quotient
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors, Part, Resize
from graphsplit.rules.families.rowwise import by_core_ranks
from graphsplit.rules.known import known, ranked, shape_operand
from graphsplit.rules.registry import register
from graphsplit.rules.rows import own_rows

_CHANNEL = 3
_PIXELS: Dims = (None, None, None, _CHANNEL)
_ALONE = by_core_ranks((-1, None, None, None), (-1,))  # images, and what is the same for all: sizes, scales, colours
_IN_PAIRS = by_core_ranks((-1, -1, None, None), (-1,))
_IN_THREES = by_core_ranks((-1, -1, -1), (-1,))

register("AvgPool", "AvgPool3D", linear=(0,))(_ALONE)
register("MaxPool", "MaxPool3D", "LRN")(_ALONE)
register("MaxPoolGrad", "MaxPoolGradGrad", "MaxPool3DGrad", "MaxPool3DGradGrad", "LRNGrad")(_IN_THREES)
register("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches", linear=(0,))(_ALONE)
register("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor", linear=(0,))(_ALONE)
register("ResizeNearestNeighborGrad", "ScaleAndTranslate", linear=(0,))(_ALONE)
register("ResizeBicubicGrad", "ResizeBilinearGrad", "ScaleAndTranslateGrad", linear=(0,))(_IN_PAIRS)
register("Dilation2D")(_ALONE)
register("Dilation2DBackpropInput", linear=(2,))(by_core_ranks((-1, None, -1), (-1,)))
register("DrawBoundingBoxes", "DrawBoundingBoxesV2")(_IN_PAIRS)
register("CombinedNonMaxSuppression")(by_core_ranks((-1, -1, *(None,) * 4), (-1,) * 4))  # boxes, scores and limits
# A transform for each image, or one for all. The third version fills what comes from outside of images, so not linear.
register("ImageProjectiveTransformV2", linear=(0,))(_IN_PAIRS)
register("ImageProjectiveTransformV3")(_IN_PAIRS)


@register("Dilation2DBackpropFilter", linear=(2,))
def dilation_filter_gradient(op: Op) -> Factors:
    """`(x, filter, dy) -> dw`: a sum over the samples."""
    samples = (0, None, None, None)
    return Factors((samples, None, samples), ((None,) * 3,), {0: "sum"})


@register("MaxPoolWithArgmax", "MaxPoolGradWithArgmax")
def pool_with_places(op: Op) -> Factors | Declined:
    """Places count from the beginning of a sample, or of the batch."""
    if op.attr("include_batch_in_index").b:
        return Declined("its indices count the whole batch")
    return by_core_ranks((-1, -1, -1), (-1, -1))(op)


@register("AvgPoolGrad", "AvgPool3DGrad", linear=(1,))
def average_pool_gradient(op: Op) -> Factors:
    """`(original_shape, dy) -> dx`: the first element of the shape is the number of samples."""
    shape = shape_operand(op, 0, "its original shape is")
    return replace(by_core_ranks((None, -1), (-1,))(op), resize={0: (Resize(0, 0, shape),)})


@register("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_norm(op: Op) -> Factors | Declined:
    """In inference the statistics are given and samples are independent; in training they are the whole batch's.

    The results after the first repeat the given statistics: every device has them whole.
    """
    if op.attr("is_training").b:
        return Declined("it normalises with statistics of the whole batch in one fused kernel")
    return by_core_ranks((-1, *(None,) * 4), (-1, *(None,) * 5))(op)


@register("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_batch_norm_gradient(op: Op) -> Factors | Declined:
    """`(dy, x, scale, mean, variance) -> dx, dscale, doffset` with given statistics; sums over the samples."""
    if op.attr("is_training").b:
        return Declined("it differentiates through statistics of the whole batch in one fused kernel")
    factors = by_core_ranks((-1, -1, *(None,) * 4), (-1, *(None,) * 4))(op)
    [images, *_] = factors.outputs
    return replace(factors, outputs=(images, (None,), (None,), None, None), contracted={0: "sum"})


@register("SpaceToBatchND", "BatchToSpaceND", linear=(0,))
def space_to_batch(op: Op) -> Factors:
    """Images are cut into interleaved ones, or joined: an axis has one batch for each position in the block."""
    read_shape, made_shape = ranked(op.in_shapes[0], op.out_shapes[0])
    few, many = (read_shape, made_shape) if op.type == "SpaceToBatchND" else (made_shape, read_shape)
    counts = [known(shape[0], "its shape is") for shape in (many, few)]
    count = operator.index(known(quotient(*counts), "its shape is"))
    images: Dims = (0, *(None,) * (len(few) - 1))
    blocks: Dims = ((Part(0, count, 1),), *(None,) * (len(many) - 1))
    read_dims, made_dims = (images, blocks) if few is read_shape else (blocks, images)
    return Factors((read_dims, None, None), (made_dims,))


@register("CropAndResize", layouts=own_rows("ren-", "e"))
def crop_and_resize(op: Op) -> Factors:
    """`(images, boxes, image of each box, size)`: a row for each box; any box may be of any image."""
    ranked(op.out_shapes[0])
    return Factors((_PIXELS, (0, None), (0,), None), ((0, None, None, _CHANNEL),))


@register("CropAndResizeGradImage", linear=(0,), layouts=own_rows("een-", "r", shape=3))
def crop_and_resize_image_gradient(op: Op) -> Factors:
    """`(dy, boxes, image of each box, image size) -> dx`: every box adds to its image."""
    size = op.constants.get(3)
    channel = _CHANNEL if size is not None else None
    resize = {} if size is None else {_CHANNEL: (Resize(3, 3, size),)}
    inputs: tuple[Dims, ...] = ((0, None, None, channel), (0, None), (0,), None)
    return Factors(inputs, ((None, None, None, channel),), {0: "sum"}, resize)


@register("CropAndResizeGradBoxes", linear=(0, 1), layouts=own_rows("eren", "e"))
def crop_and_resize_boxes_gradient(op: Op) -> Factors:
    """`(dy, images, boxes, image of each box) -> dboxes`: a row for each box, a sum over the channels."""
    return Factors(((0, None, None, _CHANNEL), _PIXELS, (0, None), (0,)), ((0, None),), {_CHANNEL: "sum"})
