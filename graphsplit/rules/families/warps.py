"""Images seen through other coordinates, image by image: warps, crops of boxes, boxes drawn and suppressed."""

from __future__ import annotations

from graphsplit.core.sizes.symbolic_sizes import Shape, is_one, is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors, Resize
from graphsplit.rules.own_rows import own_images
from graphsplit.rules.registry import register

_CHANNEL = 3


def _rows(shape: Shape | None) -> Dims:
    return None if not shape else (0, *[None] * (len(shape) - 1))


def _by_rows(op: Op, operands: int) -> Factors | Declined:
    """Return the factors of an op whose first operands and all results have the images on their first axis."""
    shapes = (*op.in_shapes[:operands], *op.out_shapes)
    if any(not shape for shape in shapes):
        return Declined("the rank of an operand is not known")
    inputs = [_rows(shape) if i < operands else None for i, shape in enumerate(op.in_shapes)]
    return Factors(tuple(inputs), tuple([_rows(shape) for shape in op.out_shapes]))


@register("ImageProjectiveTransformV2", linear=(0,))
@register("ImageProjectiveTransformV3")
def projective_transform(op: Op) -> Factors | Declined:
    """`(images, transforms, output size, ...)`: a transform for each image, or one for all.

    (The third version is not linear in the images: it fills what comes from outside of them with a given value.)
    """
    images, transforms = op.in_shapes[:2]
    if not images or not transforms or transforms[0] is None:
        return Declined("it is not known whether each image has a transform of its own")
    if is_same(transforms[0], images[0]):
        return _by_rows(op, operands=2)
    return (
        _by_rows(op, operands=1)
        if is_one(transforms[0])
        else Declined("it is not known whether each image has a transform of its own")
    )


@register("ScaleAndTranslate", linear=(0,))
@register("DrawBoundingBoxes")
def images_alone(op: Op) -> Factors | Declined:
    """`(images, ...)`: size, scale and translation are those of all images; so are colours. Boxes have rows too."""
    return _by_rows(op, operands=2 if op.type == "DrawBoundingBoxes" else 1)


@register("ScaleAndTranslateGrad", linear=(0,))
@register("DrawBoundingBoxesV2")
def images_in_pairs(op: Op) -> Factors | Declined:
    """`(dy, images, scale, translation)`, `(images, boxes, colours)`: the first two have the same rows."""
    return _by_rows(op, operands=2)


@register("CombinedNonMaxSuppression")
def combined_suppression(op: Op) -> Factors | Declined:
    """`(boxes, scores, limits ...)`: the boxes of each image are chosen by themselves, as many as the limits say."""
    return _by_rows(op, operands=2)


@register("CropAndResize", layouts=own_images("ren-", "e"))
def crop_and_resize(op: Op) -> Factors | Declined:
    """`(images, boxes, image of each box, size)`: a row for each box; any box may be of any image."""
    if not op.out_shapes[0]:
        return Declined("the rank of an operand is not known")
    pixels = (None, None, None, _CHANNEL)
    return Factors((pixels, (0, None), (0,), None), ((0, None, None, _CHANNEL),))


@register("CropAndResizeGradImage", linear=(0,), layouts=own_images("een-", "r", size=3))
def crop_and_resize_image_gradient(op: Op) -> Factors | Declined:
    """`(dy, boxes, image of each box, image size) -> dx`: every box adds to its image."""
    size = op.constants.get(3)
    channel = _CHANNEL if size is not None else None
    resize = {} if size is None else {_CHANNEL: (Resize(3, 3, size),)}
    inputs: tuple[Dims, ...] = ((0, None, None, channel), (0, None), (0,), None)
    return Factors(inputs, ((None, None, None, channel),), {0: "sum"}, resize)


@register("CropAndResizeGradBoxes", linear=(0, 1), layouts=own_images("eren", "e"))
def crop_and_resize_boxes_gradient(op: Op) -> Factors | Declined:
    """`(dy, images, boxes, image of each box) -> dboxes`: a row for each box, a sum over the channels."""
    pixels = (None, None, None, _CHANNEL)
    return Factors(((0, None, None, _CHANNEL), pixels, (0, None), (0,)), ((0, None),), {_CHANNEL: "sum"})
