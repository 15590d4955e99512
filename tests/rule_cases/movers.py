"""Cases of ops that reshape, join, cut and repeat."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import COMPLEX, add, call, case, ints

case("Transpose", "b34", [2, 0, 1])
case("Transpose", "3b4", [1, 0, 2])
if not tf.__version__.startswith("2.16."):  # whose kernel ends the process at axes that count from the end
    case("Transpose", "b34", [-1, 0, -2])
case("Transpose", "+34", [1, 0])
case("ConjugateTranspose", COMPLEX("b34"), [1, 2, 0])
case("ConjugateTranspose", COMPLEX("+34"), [1, 0])
case("ExpandDims", "b3", 1)
case("ExpandDims", "b3", 0)
case("ExpandDims", "3b", [-1])
case("ExpandDims", "+34", 0)
case("Squeeze", "b131", axis=[1, -1])
case("Squeeze", "1b31", axis=[0])
case("Squeeze", "+314", axis=[1])
# Without axes a device with one row would lose its batch axis too: reading the program names them.
add("Squeeze", lambda rows, x: call("AddV2", call("Squeeze", x, axis=[1]), call("Squeeze", x)), ["b13"])

for _axis in (0, 1, -1):
    case("Pack", ["b3", "b3"], axis=_axis)
case("Pack", ["b3", "B3"], axis=1)
case("Pack", ["3b", "3b", "3b"], axis=-2)
case("Pack", ["+34", "+34"], axis=1)
case("Unpack", "b23", num=2, axis=1)
case("Unpack", "3b2", num=3, axis=0)
case("Unpack", "3b2", num=2, axis=-1)
case("Unpack", "+234", num=2, axis=0)
case("ConcatV2", ["b2", "b3"], 1)
case("ConcatV2", ["2b", "3b"], 0)
case("ConcatV2", ["2b", "3B"], -2)
case("ConcatV2", ["b3", "b3"], 0)
case("ConcatV2", ["3b", "3b", "3b"], -1)
case("ConcatV2", ["+34", "+54"], 0)


def _twice(x, y, axis=0):
    return call("ConcatV2", [x, y], axis)


# Batches joined along the batch axis are blocks: each op meets them, and each undoes them.
add("ConcatV2", lambda rows, x, y: _twice(_twice(x, y), x), ["b3", "b3"])
add("Split", lambda rows, x, y: call("Split", 0, _twice(x, y), num_split=2), ["b3", "b3"], answered=False)
add(
    "Split",
    lambda rows, x, y: call("Split", -1, _twice(_twice(x, y, 1), x, 1), num_split=3),
    ["3b", "3b"],
    answered=False,
)
add("Slice", lambda rows, x, y: call("Slice", _twice(x, y), [rows, 1], [rows, 2]), ["b3", "b3"], answered=False)
add(
    "Slice",
    lambda rows, x: call("Slice", _twice(x, _twice(x, x, 1), 1), [0, 0], [-1, 2 * rows]),
    ["3b"],
    answered=False,
)
add(
    "Slice",
    lambda rows, x, y: call("AddV2", call("Slice", _twice(x, y), [1, 0], [rows, 3]), y),
    ["b3", "b3"],
    at_home=1,
    answered=False,
)
for _sizes in (lambda rows: [rows, 2 * rows], lambda rows: [-1, rows]):
    add(
        "SplitV",
        lambda rows, x, y, sizes=_sizes: call("SplitV", _twice(_twice(x, y), x), sizes(rows), 0, num_split=2),
        ["b3", "b3"],
        answered=False,
    )
case("ConcatV2", ["b3", "B3"], 0)
add("ConcatV2", lambda rows, x: call("ConcatV2", [x, np.ones((2 * rows, 3)), x], 0), ["b3"])
add("ConcatV2", lambda rows, x: call("ConcatV2", [x, np.ones((2 * rows + 1, 3))], 0), ["b3"], at_home=1, answered=False)
add("Reshape", lambda rows, x, y: call("Reshape", _twice(x, y), [2, rows, 3]), ["b3", "b3"], answered=False)
add("Reshape", lambda rows, x, y: call("Reshape", _twice(x, y), [-1, 1, 3]), ["b3", "b3"])
add("Transpose", lambda rows, x, y: call("Transpose", _twice(x, y), [1, 0]), ["b3", "b3"])
add("MatMul", lambda rows, x, y: call("MatMul", _twice(x, y), _twice(y, y), transpose_a=True), ["b3", "b3"])
add("Sum", lambda rows, x, y: call("Sum", _twice(x, y), [0]), ["b3", "b3"])
add("Mean", lambda rows, x, y: call("Mean", _twice(x, y), [0]), ["b3", "b3"])
add("Mul", lambda rows, x, y: call("Mul", _twice(x, y), call("Fill", [2 * rows, 1], np.float64(3))), ["b3", "b3"])
add("AddV2", lambda rows, x, y, z: call("AddV2", _twice(x, y), z), ["b3", "b3", "3"])
add("AddV2", lambda rows, x, y: call("AddV2", _twice(x, y), np.arange(6.0 * rows).reshape(-1, 3)), ["b3", "b3"])
# Blocks of a batch of three joined with themselves line up with rows that come six at a time only after a gather.
add("AddV2", lambda rows, x, y: call("AddV2", _twice(x, x), call("Reshape", y, [-1, 3])), ["b3", "b23"])

case("Split", 1, "b43", num_split=2)
case("Split", 0, "4b3", num_split=2)
case("Split", -1, "+34", num_split=2)
case("SplitV", "b53", [2, 3], 1, num_split=2)
case("SplitV", "5b", [2, -1], -2, num_split=2)
case("SplitV", "+35", [2, 3], 1, num_split=2)

case("Reshape", "b34", lambda rows: [rows, 12])
case("Reshape", "b34", [-1, 12])
case("Reshape", "b34", lambda rows: [rows, -1])
case("Reshape", "b34", lambda rows: [rows * 3, 4])
case("Reshape", "b34", lambda rows: [rows * 12])
case("Reshape", "b62", lambda rows: [rows * 2, 6])
case("Reshape", "b64", lambda rows: [rows * 4, 6])
case("Reshape", "3b4", lambda rows: [3 * rows, 4])
case("Reshape", "3b4", lambda rows: [3 * rows * 4])
case("Reshape", "34b", lambda rows: [12, rows])
case("Reshape", "34b", lambda rows: [12 * rows])
case("Reshape", "b3", lambda rows: [1, rows, 1, 3])
case("Reshape", "b1", [-1])
case("Reshape", "b", lambda rows: [rows, 1])
case("Reshape", "b12", np.array([-1, 2], np.int64))
case("Reshape", "+34", [2, 6])


def _and_back(*between):
    """Through a merged shape and back to three axes."""

    def function(rows, x):
        merged = call("Reshape", x, [rows if size == "b" else size for size in between] or [-1])
        return call("Reshape", call("Exp", merged), x.shape)

    return function


for _shape in ("b34", "3b4", "34b"):
    add("Reshape", _and_back(), [_shape])
add("Reshape", _and_back("b", 12), ["b34"])
add("Reshape", _and_back(12, "b"), ["34b"])
add("Reshape", lambda rows, x: call("Transpose", call("Reshape", x, [-1, 4]), [1, 0]), ["3b4"])
add("Reshape", lambda rows, x: call("MatMul", call("Reshape", x, [-1, 4]), np.ones((4, 2))), ["3b4"])

case("ReverseV2", "b34", [1])
case("ReverseV2", "3b4", [0, -1])
case("ReverseV2", "+34", [1])
case("ReverseSequence", "b43", ints(5)("b"), seq_dim=1)
case("ReverseSequence", "4b3", ints(5)("b"), seq_dim=0, batch_dim=1)
case("ReverseSequence", "34b", ints(5)("3"), seq_dim=1)
case("ReverseSequence", "+34", ints(5)("3"), seq_dim=1)
for _type in ["Cumsum", "Cumprod", "CumulativeLogsumexp"]:
    case(_type, "b3", 1)
    case(_type, "3b", -2, exclusive=True, reverse=True)
case("Cumsum", "+34", 1)
case("Roll", "b34", 1, 1)
case("Roll", "3b4", [1, -2], [0, 2])
case("Roll", "+34", [2], [0])

_PADDING = [[0, 0], [1, 2]]
case("Pad", "b3", _PADDING)
case("Pad", "3b", [[0, 1], [0, 0]])
case("Pad", "+34", [[0, 0], [0, 0]])
case("PadV2", "b3", _PADDING, 7.0)
case("Pad", "b3", lambda rows: [[rows, 0], [0, 1]])
case("PadV2", "3b", lambda rows: [[0, 0], [rows, 2 * rows]], 7.0)
case("Pad", "b3", lambda rows: [[rows + 1, 0], [0, 0]], expect={"at_home": 1})
case("MirrorPad", "b3", _PADDING, mode="REFLECT")
case("MirrorPad", "+34", [[0, 0], [0, 0]], mode="SYMMETRIC")
case("MirrorPadGrad", "b6", _PADDING, mode="REFLECT")
case("MirrorPadGrad", "+46", _PADDING, mode="SYMMETRIC")

case("Tile", "b3", [1, 2])
case("Tile", "b3", [2, 1])
case("Tile", "3b", [2, 3])
case("Tile", "b3", [0, 1], expect={"at_home": 1, "answered": False})
case("Tile", "b3", [1, 0], expect={"at_home": 1, "answered": False})
case("Tile", "+34", [1, 1])
add("Tile", lambda rows, x, y: call("AddV2", x, call("Tile", y, [rows, 1])), ["b3", "13"], demand=True)


def _tiled_to_blocks(rows, x):
    return call("AddV2", call("Reshape", x, [-1, 3]), call("Tile", np.ones((1, 3)), [2 * rows, 1]))


add("Tile", _tiled_to_blocks, ["b23"], demand=True)
case("BroadcastTo", "b1", lambda rows: [rows, 3])
case("BroadcastTo", "b1", lambda rows: [4, rows, 3])
case("BroadcastTo", "+34", [3, 4])
add("BroadcastTo", lambda rows, x, y: call("AddV2", x, call("BroadcastTo", y, [rows, 3])), ["b3", "3"], demand=True)
add("Fill", lambda rows, x: call("AddV2", x, call("Fill", [rows, 3], np.float64(2))), ["b3"], demand=True)
add("Fill", lambda rows, x: call("AddV2", x, call("Fill", [3, rows], np.float64(2))), ["3b"], demand=True)
