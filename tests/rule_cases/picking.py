"""Cases of slices, gathers and one-hot."""

import numpy as np

from tests.rule_cases.table import add, call, case, ints

case("Slice", "b4", [0, 1], lambda rows: [rows, 2])
case("Slice", "b4", [0, 1], [-1, 3])
case("Slice", "4b", [2, 0], lambda rows: [1, rows])
case("Slice", "+34", [0, 1], [3, 2])
add("Slice", lambda rows, x, place: call("Slice", x, call("Pack", [0, place]), [rows, 2]), ["b6", ints(4)("")])

_ALL = {"begin_mask": 1, "end_mask": 1}
case("StridedSlice", "b4", [0, 1], [0, 3], [1, 1], **_ALL)
case("StridedSlice", "b4", [0, 0], [0, 4], [1, 2], **_ALL)
case("StridedSlice", "b4", [0, -1], [0, -5], [1, -1], **_ALL)
case("StridedSlice", "b4", [0, 1], lambda rows: [rows, 2], [1, 1], shrink_axis_mask=2)
case("StridedSlice", "b4", [0, 0], [99, 2], [1, 1])
case("StridedSlice", "4b5", [1], [3], [1])
case("StridedSlice", "4b5", [1], [2], [1], shrink_axis_mask=1)
case("StridedSlice", "b45", [0, 2], [0, 3], [1, 1], ellipsis_mask=1)
case("StridedSlice", "b45", [0, 0, 2], [0, 0, 3], [1, 1, 1], ellipsis_mask=2, new_axis_mask=1)
case("StridedSlice", "b45", [0, 0, 1], [0, 0, 3], [1, 1, 1], new_axis_mask=2, **_ALL)
case("StridedSlice", "4b5", [1, 0, 0], [2, 0, 0], [1, 1, 1], shrink_axis_mask=1, ellipsis_mask=2, new_axis_mask=4)
case("StridedSlice", "+34", [0, 1], [3, 3], [1, 1])


def _at_a_place(*, gradient=False, **masks):
    """A slice that begins where the data says: a random crop, or the entry of one step."""

    def function(rows, x, place):
        begin, end = (call("Pack", [0, place + i]) for i in (0, 2))
        if gradient:
            return call("StridedSliceGrad", [rows, 6], begin, end, [1, 1], x, begin_mask=1, end_mask=1, **masks)
        return call("StridedSlice", x, begin, end, [1, 1], begin_mask=1, end_mask=1, **masks)

    return function


def _window_of(shape):
    """A window whose size does not follow from the data, and is stated."""
    return lambda rows, x, place: call("EnsureShape", call("StridedSlice", x, [place], [place + 2], [1]), shape=shape)


add("EnsureShape", _window_of([2, None]), ["6b", ints(4)("")])
add("EnsureShape", lambda rows, x, place: _window_of([2, rows])(rows, x, place), ["6b", ints(4)("")], at_home=1)
add("EnsureShape", _window_of([2, 4]), ["+64", ints(4)("")], partial=(0,))
add("StridedSlice", _at_a_place(), ["b6", ints(4)("")])
add("StridedSlice", _at_a_place(shrink_axis_mask=2), ["b6", ints(4)("")])
add("StridedSliceGrad", _at_a_place(gradient=True), ["b2", ints(4)("")])
add("StridedSliceGrad", _at_a_place(gradient=True, shrink_axis_mask=2), ["b", ints(4)("")])


def _of_two(*bounds, **masks):
    """A slice of two batches joined along the batch axis."""

    def function(rows, x, y):
        return call("StridedSlice", call("ConcatV2", [x, y], 0), *[b(rows) for b in bounds], **masks)

    return function


_ONE = (lambda rows: [0], lambda rows: [rows], lambda rows: [1])
_OTHER = (lambda rows: [0, -rows, 1], lambda rows: [0, 0, 2], lambda rows: [1, 1, 1])
add("StridedSlice", _of_two(*_ONE), ["b3", "b3"], answered=False)
add("StridedSlice", _of_two(*_ONE, begin_mask=1), ["b3", "b3"], answered=False)
add("StridedSlice", _of_two(*_OTHER, end_mask=2, new_axis_mask=1), ["b3", "b3"], answered=False)


def _gradient(shape, bounds, **masks):
    """The inverse of a slice: its result goes back into zeros of `shape`."""
    return lambda rows, dy: call(
        "StridedSliceGrad", shape(rows), *[b(rows) if callable(b) else b for b in bounds], dy, **masks
    )


add("StridedSliceGrad", _gradient(lambda n: [n, 4], ([0, 1], [0, 3], [1, 1]), **_ALL), ["b2"])
add("StridedSliceGrad", _gradient(lambda n: [n, 4], ([0, 1], lambda n: [n, 3], [1, 1])), ["b2"])
add("StridedSliceGrad", _gradient(lambda n: [n, 4], ([0, 0], [99, 4], [1, 2])), ["b2"])
add("StridedSliceGrad", _gradient(lambda n: [n, 4], ([0, 1], [0, 2], [1, 1]), shrink_axis_mask=2, **_ALL), ["b"])
add("StridedSliceGrad", _gradient(lambda n: [4, n, 5], ([1], [2], [1]), shrink_axis_mask=1), ["b5"])
add("StridedSliceGrad", _gradient(lambda n: [4, n, 5], ([0, 2], [0, 3], [1, 1]), ellipsis_mask=1), ["4b1"])
add(
    "StridedSliceGrad",
    _gradient(lambda n: [n, 4], ([0, 0, 1], [0, 0, 3], [1, 1, 1]), new_axis_mask=1, begin_mask=2, end_mask=2),
    ["1b2"],
)
# The slice took one batch of several that were joined.
add("StridedSliceGrad", _gradient(lambda n: [2 * n, 3], ([0], lambda n: [n], [1])), ["b3"])
add("StridedSliceGrad", _gradient(lambda n: [3 * n, 3], (lambda n: [n], lambda n: [-n], [1])), ["b3"])
add(
    "StridedSliceGrad",
    _gradient(lambda n: [2 * n, 3], (lambda n: [0, -n, 1], [0, 0, 2], [1, 1, 1]), end_mask=2, new_axis_mask=1),
    ["1b1"],
)
add("StridedSliceGrad", _gradient(lambda n: [3, 4], ([0, 0], [3, 4], [1, 1])), ["+34"], partial=(4,))

case("GatherV2", "53", ints(5)("b"), 0)
case("GatherV2", "53", ints(5)("b4"), 0)
case("GatherV2", "35", ints(5)("b"), 1)
case("GatherV2", "35", ints(5)("4b"), -1)
case("GatherV2", "b53", ints(5)("2"), 1)
case("GatherV2", "5b", ints(5)("2"), 0)
case("GatherV2", "b53", ints(5)("b2"), 1, batch_dims=1)
case("GatherV2", "b5", ints(5)("b"), 1, batch_dims=1)
case("GatherV2", "2b53", ints(5)("2b4"), 2, batch_dims=-1)
case("GatherV2", "b25", ints(5)("b3"), 2, batch_dims=1)
case("GatherV2", "253", ints(5)("2b"), 1, batch_dims=1)
case("GatherV2", "+53", ints(5)("4"), 0)
# Rows of the batch picked by rows of the batch: the table is gathered, the picking is not.
add("GatherV2", lambda rows, x, i: call("GatherV2", x, i % rows, 0), ["b3", ints(99)("b")])
case("GatherNd", "53", ints(5)("b1"))
case("GatherNd", "53", ints(3)("b42"))
case("GatherNd", "5b3", ints(5)("41"))
case("GatherNd", "+53", ints(3)("22"))
case("OneHot", ints(5)("b"), 5, 1.0, 0.0)
case("OneHot", ints(5)("b3"), 5, np.float64(2), np.float64(-1), axis=1)
case("OneHot", ints(5)("3b"), 5, 1.0, 0.0, axis=0)
