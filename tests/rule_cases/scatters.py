"""Cases of entries put at numbered places, and of counts."""

import keras
import numpy as np
import tensorflow as tf

from tests.rule_cases.table import POSITIVE, add, call, case, ints

for _type in ["TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMin", "TensorScatterMax"]:
    case(_type, "5b3", [[0], [3]], "2b3")
    case(_type, "54b", [[0, 1], [3, 2], [2, 2]], "3b")
    case(_type, "b5", [[0]], "15", expect={"at_home": 1})  # rows are numbered in the whole batch
    # One place in every row: the rows of places say which, so nothing is known of them when planning.
    add(
        _type,
        lambda rows, x, places, y, op_type=_type: call(op_type, x, places % rows, y),
        ["b5", ints(99)("b1"), "b5"],
        at_home=1,
    )
    # An element of each row.
    add(
        _type,
        lambda rows, x, places, y, op_type=_type: call(op_type, x, tf.stack([tf.range(rows), places], 1), y),
        ["b5", ints(5)("b"), "b"],
        answered=False,
    )
    if _type != "TensorScatterUpdate":  # Into what is whole: it is put together from the devices' parts, if it pays.
        case(_type, "21", ints(2)("b21"), "b21")
        case(_type, "22", ints(2)("3b1"), "3b2")
        case(_type, "93", ints(9)("b1"), "b3", expect={"at_home": 1, "answered": False})


def _updated(rows, x, update, start):
    return keras.ops.slice_update(x, start, update)


add("XlaDynamicUpdateSlice", _updated, ["b53", "b23", ints(4)("3")])
add("XlaDynamicUpdateSlice", _updated, ["5b", "2b", ints(4)("2")])
for _type in ["DynamicStitch", "ParallelDynamicStitch"]:
    add(_type, lambda rows, x, y, t=_type: call(t, [[0, 2], [[1], [3]]], [x, y]), ["2b3", "21b3"])
case("DenseBincount", ints(4)("b5"), 4, np.zeros(0))
case("DenseBincount", ints(4)("b5"), 4, POSITIVE("b5"))
case("DenseBincount", ints(4)("b5"), 4, np.zeros(0), binary_output=True)
case("DenseBincount", ints(4)("b"), 4, np.zeros(0))
case("DenseBincount", ints(4)("b"), 4, POSITIVE("b"))
case("DenseBincount", ints(4)("b"), 5, np.zeros(0), binary_output=True)
case("DenseBincount", ints(4)("5b"), 4, np.zeros(0))
case("HistogramFixedWidth", "b5", np.array([-1.0, 1.0]), 4)
