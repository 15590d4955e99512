"""Ops on images and signals, sample by sample: pooling, resizing, batch normalisation in inference."""

from __future__ import annotations

from graphsplit.programs import Op
from graphsplit.rules.contractions import shape_operand
from graphsplit.rules.registry import Declined, Dims, Factors, Resize, register


def _samples(shape: tuple[int | None, ...] | None) -> Dims:
    return None if not shape else (0, *[None] * (len(shape) - 1))


@register("AvgPool", "AvgPool3D", linear=(0,))
@register("MaxPool", "MaxPool3D", "MaxPoolGrad", "MaxPoolGradGrad", "MaxPool3DGrad", "MaxPool3DGradGrad")
@register("MaxPoolWithArgmax", "LRN", "LRNGrad")
@register("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches", linear=(0,))
@register("AdjustContrastv2", "AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV")
def sample_by_sample(op: Op) -> Factors | Declined:
    """Every operand of rank 2 or more has the samples on its first axis; scalars and sizes are whole."""
    if op.attr("include_batch_in_index").b:
        return Declined("its indices count the whole batch")
    if any(shape is None for shape in (*op.in_shapes, *op.out_shapes)):
        return Declined("the rank of an operand is not known")
    inputs = tuple([_samples(shape) if shape and len(shape) > 1 else None for shape in op.in_shapes])
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

    The results after the first repeat the given statistics. They have no samples to cut, so the rule gives them none.
    """
    if op.attr("is_training").b:
        return Declined("it normalises with statistics of the whole batch in one fused kernel")
    return Factors((_samples(op.in_shapes[0]),) + (None,) * 4, (_samples(op.out_shapes[0]),))
