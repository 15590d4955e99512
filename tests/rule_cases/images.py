"""Cases of ops on images and signals."""

import tensorflow as tf

from tests.rule_cases.table import F32, UNIT, UNIT32, add, call, case

_POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
_POOL3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
case("AvgPool", "b563", **_POOL)
case("AvgPool", "+1443", **_POOL)
case("AvgPool3D", F32("b4443"), **_POOL3)
case("AvgPool3D", F32("+14443"), **_POOL3)
case("MaxPool", "b563", **_POOL)
case("MaxPool3D", F32("b4443"), **_POOL3)
case("AvgPoolGrad", lambda rows: [rows, 5, 6, 3], "b333", **_POOL)
case("AvgPoolGrad", [1, 1, 1, 3], "+1113", **_POOL)
case("AvgPool3DGrad", lambda rows: [rows, 4, 4, 4, 3], F32("b2223"), **_POOL3)
_ONE3 = {"ksize": [1, 1, 1, 1, 1], "strides": [1, 1, 1, 1, 1], "padding": "VALID"}
case("AvgPool3DGrad", [1, 2, 2, 2, 3], F32("+12223"), **_ONE3)


def _pooled(pool, options):
    """A pooling op's gradient needs the pooled image as well."""
    return lambda rows, x, *rest: (x, call(pool, x, **options), *rest)


def _after_pool(op_type, pool, options, *shapes):
    prepare = _pooled(pool, options)
    add(op_type, lambda rows, *tensors: call(op_type, *prepare(rows, *tensors), **options), shapes)


_after_pool("MaxPoolGrad", "MaxPool", _POOL, "b563", "b333")
_after_pool("MaxPoolGrad", "MaxPool", _POOL, "b563", "B333")
_after_pool("MaxPoolGradGrad", "MaxPool", _POOL, "b563", "b563")
_after_pool("MaxPool3DGrad", "MaxPool3D", _POOL3, F32("b4443"), F32("b2223"))
_after_pool("MaxPool3DGradGrad", "MaxPool3D", _POOL3, F32("b4443"), F32("b4443"))
case("MaxPoolWithArgmax", "b443", Targmax=tf.int64, **_POOL)
case("MaxPoolWithArgmax", "b443", Targmax=tf.int64, include_batch_in_index=True, **_POOL, expect={"at_home": 1})


def _argmax_gradient(rows, x, dy):
    argmax = call("MaxPoolWithArgmax", x, Targmax=tf.int64, **_POOL)[1]
    return call("MaxPoolGradWithArgmax", x, dy, argmax, **_POOL)


add("MaxPoolGradWithArgmax", _argmax_gradient, [F32("b443"), F32("b223")])
case("LRN", F32("b344"), depth_radius=1)
case("LRNGrad", F32("b344"), F32("b344"), F32("b344"), depth_radius=1)

case("DepthToSpace", "b238", block_size=2)
case("DepthToSpace", "+1218", block_size=2)
case("SpaceToDepth", "b462", block_size=2)
case("SpaceToDepth", "+1422", block_size=2)
_PATCHES = {"ksizes": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
case("ExtractImagePatches", "b452", rates=[1, 1, 1, 1], **_PATCHES)
case("ExtractImagePatches", "+1442", rates=[1, 1, 1, 1], **_PATCHES)
case("ExtractVolumePatches", "b4452", ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
case("ExtractVolumePatches", "+14442", ksizes=[1, 2, 2, 2, 1], strides=[1, 2, 2, 2, 1], padding="VALID")
case("SpaceToBatchND", "b452", [2, 2], [[0, 0], [1, 0]])
case("SpaceToBatchND", "+1442", [2, 2], [[0, 0], [0, 0]])
_TO_BATCH = ([2, 3], [[0, 0], [1, 1]])
add(
    "BatchToSpaceND",
    lambda rows, x: call("BatchToSpaceND", call("SpaceToBatchND", x, *_TO_BATCH), *_TO_BATCH),
    ["b442"],
)
case("BatchToSpaceND", "+4222", [2, 2], [[0, 1], [0, 0]])

for _type in ["AdjustHue", "AdjustSaturation", "AdjustContrastv2"]:
    case(_type, UNIT32("b443"), 0.3)
    case(_type, UNIT32("4b443"), 0.3)
for _type in ["AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV"]:
    case(_type, UNIT32("4b3"), *([0.3] if _type.startswith("Adjust") else []))
case("HSVToRGB", UNIT("b3"))
case("RGBToHSV", UNIT("b443"))

case("ResizeArea", "b452", [3, 7], expect={"answered": False})
case("ResizeArea", "+1452", [3, 4])
for _type in ["ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"]:
    case(_type, F32("b452"), [3, 7])
    case(_type, F32("b452"), [8, 8], half_pixel_centers=True)
    case(_type, F32("+1452"), [3, 4])
for _type in ["ResizeBicubicGrad", "ResizeBilinearGrad"]:
    case(_type, F32("b372"), F32("b452"))
    case(_type, F32("+1672"), F32("1452"))
case("ResizeNearestNeighborGrad", F32("b372"), [4, 5])
case("ResizeNearestNeighborGrad", F32("+1672"), [4, 5])

for _type in ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"]:
    case(_type, F32("b453"), F32("3"), F32("3"), F32("3"), UNIT32("3"), is_training=False)
_STATISTICS = [F32("3"), F32("3"), F32("3"), UNIT32("3")]
case("FusedBatchNormV3", F32("b2453"), *_STATISTICS, is_training=False, data_format="NDHWC")
for _type in ["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"]:
    _more = (F32("3"),) if _type.endswith("V3") else ()
    case(_type, F32("b453"), F32("b453"), F32("3"), F32("3"), UNIT32("3"), *_more, is_training=False)
