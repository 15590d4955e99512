"""Cases of reductions over axes and segments."""

import tensorflow as tf

from tests.rule_cases.table import BOOL, F32, POSITIVE, Arg, add, call, case, distinct, ints

_DOMAINS = {"All": BOOL, "Any": BOOL, "Prod": POSITIVE}
for _type in ["Sum", "Mean", "Max", "Min", "Prod", "All", "Any"]:
    _of = _DOMAINS.get(_type, Arg)
    case(_type, _of("b34"), [1])
    case(_type, _of("b34"), [0])
    case(_type, _of("b34"), [0, 2], keep_dims=True)
    case(_type, _of("3b4"), [-2])
    case(_type, _of("b34"), [0, 1, 2])
    case(_type, _of("b3"), -1)
    if _type in ("All", "Any"):
        case(_type, _of("b3"), [])
    else:  # a reduction over no axes is its operand
        add("Square", lambda rows, x, kind=_type: call("Square", call(kind, x, [])), [_of("b3")])
case("Sum", ints(99)("b3"), [0])
case("Sum", ints(99, 0, "uint8")("b3"), [0])
case("Mean", F32("b3"), [0])
case("Mean", ints(99)("b3"), [1], expect={"at_home": 1, "answered": False})
case("Sum", "+34", [1])
case("Mean", "+34", [0], keep_dims=True)

case("EuclideanNorm", "b34", [1])
case("EuclideanNorm", "b34", [2], keep_dims=True)
for _type in ["ArgMax", "ArgMin"]:
    case(_type, distinct("b3"), 1)
    case(_type, distinct("3b4"), -1)
    case(_type, distinct("3b4"), 0, output_type=tf.int32)
case("L2Loss", "b34")

for _type in ["UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"]:
    case(_type, "b3", ints(6, -1)("b"), 6)
    case(_type, "4b3", ints(6)("4b"), 6)
    case(_type, "4b3", ints(6)("4"), 6)
case("UnsortedSegmentSum", "+43", ints(3)("4"), 3)
case("ScatterNd", ints(6)("b1"), "b3", [6, 3])
case("ScatterNd", ints(3)("4b2"), "4b3", [3, 3, 3])
case("ScatterNd", ints(6)("41"), "4b", lambda rows: [6, rows])
case("ScatterNd", ints(3)("41"), "+43", [3, 3])
case("ScatterNd", ints(6)("b1"), BOOL("b3"), [6, 3])
