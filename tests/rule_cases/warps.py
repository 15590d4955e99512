"""Cases of images seen through other coordinates, and of boxes."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import F32, UNIT32, Arg, add, call, case, ints

_TURN = np.array([[0.9, -0.2, 0.5, 0.2, 0.9, -0.3, 0.01, 0.0]], np.float32)
_TURNS = lambda shape: Arg(shape, lambda rng, sizes: (_TURN + 0.05 * rng.standard_normal(sizes)).astype(np.float32))  # noqa: E731
_SIZE, _WAY = [4, 6], {"interpolation": "BILINEAR"}
case("ImageProjectiveTransformV2", F32("b452"), _TURNS("b8"), _SIZE, **_WAY)
case("ImageProjectiveTransformV2", F32("b452"), _TURN, _SIZE, interpolation="NEAREST", fill_mode="REFLECT")
case("ImageProjectiveTransformV2", F32("+1452"), _TURN, _SIZE, **_WAY)
case("ImageProjectiveTransformV3", F32("b452"), _TURNS("b8"), _SIZE, np.float32(0.5), **_WAY)
case("ImageProjectiveTransformV3", F32("b452"), _TURNS("18"), _SIZE, np.float32(0), fill_mode="WRAP", **_WAY)

_AFFINE = (np.array([1.3, 0.8], np.float32), np.array([0.2, -0.4], np.float32))
case("ScaleAndTranslate", F32("b452"), [5, 7], *_AFFINE)
case("ScaleAndTranslate", F32("+1452"), [5, 7], *_AFFINE, kernel_type="triangle", antialias=False)
case("ScaleAndTranslateGrad", F32("b572"), F32("b452"), *_AFFINE)
case("ScaleAndTranslateGrad", F32("+1572"), F32("1452"), *_AFFINE)

_BOXES = lambda shape: Arg(shape, lambda rng, sizes: np.sort(rng.uniform(0, 1, sizes), -1).astype(np.float32))  # noqa: E731
_COLOURS = np.array([[1, 0, 0], [0, 1, 0]], np.float32)
case("DrawBoundingBoxes", UNIT32("b553"), _BOXES("b24"))
case("DrawBoundingBoxesV2", UNIT32("b553"), _BOXES("b24"), _COLOURS)
case("CombinedNonMaxSuppression", _BOXES("b614"), UNIT32("b63"), 2, 4, 0.4, 0.2)
case("CombinedNonMaxSuppression", _BOXES("b634"), UNIT32("b63"), 3, 5, 0.5, 0.1, pad_per_class=True)

_OWN = lambda shape: ints(2)(shape)  # noqa: E731
case("CropAndResize", UNIT32("2553"), _BOXES("b4"), _OWN("b"), [3, 3])
case("CropAndResize", UNIT32("2553"), _BOXES("b4"), _OWN("b"), [3, 2], method="nearest", extrapolation_value=1.0)
case("CropAndResize", UNIT32("255b"), _BOXES("44"), _OWN("4"), [3, 3])
# Boxes of the batch's own images: these are gathered, the cutting is not.
add(
    "CropAndResize",
    lambda rows, images, boxes, own: call("CropAndResize", images, boxes, own % rows, [3, 3]),
    [UNIT32("b553"), _BOXES("b4"), ints(99)("b")],
)
case("CropAndResizeGradImage", F32("b333"), _BOXES("b4"), _OWN("b"), [2, 5, 5, 3], T=tf.float32)
case("CropAndResizeGradImage", F32("433b"), _BOXES("44"), _OWN("4"), lambda rows: [2, 5, 5, rows], T=tf.float32)
case("CropAndResizeGradImage", F32("+4333"), _BOXES("44"), _OWN("4"), [2, 5, 5, 3], T=tf.float32)
case("CropAndResizeGradBoxes", F32("b333"), UNIT32("2553"), _BOXES("b4"), _OWN("b"))
case("CropAndResizeGradBoxes", F32("433b"), F32("255b"), _BOXES("44"), _OWN("4"))
case("CropAndResizeGradBoxes", F32("+4333"), F32("2553"), _BOXES("44"), _OWN("4"))
case("CropAndResizeGradBoxes", F32("4333"), F32("+2553"), _BOXES("44"), _OWN("4"))
