"""Stored examples, parsed. (Ops on strings are entry by entry: see `elementwise`.)"""

from __future__ import annotations

from graphsplit.core.sizes.symbolic_sizes import are_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors
from graphsplit.rules.registry import register


@register("ParseExample", "ParseExampleV2")
def parse_example(op: Op) -> Factors | Declined:
    """Each serialized example gives one row of every dense feature; features of other kinds mix the rows."""
    shapes = [shape.dim for shape in op.attr("dense_shapes").list.shape]
    if len(op.out_shapes) != len(shapes):
        return Declined("sparse and ragged features of several examples are one list")
    if any(dim.size < 0 for dims in shapes for dim in dims):
        return Declined("features of different lengths are padded to the longest of all rows")
    if op.in_shapes[0] is None or len(op.in_shapes[0]) != 1 or op.in_shapes[1] is None:
        return Declined("it is not known to take a vector of examples")
    names: Dims = None if are_same(op.in_shapes[1], (0,)) else (0,)
    rest: tuple[Dims, ...] = (None,) * (len(op.in_shapes) - 2)
    return Factors(((0,), names, *rest), tuple((0, *(None,) * len(dims)) for dims in shapes))
