"""What becomes of a mean over the batch, decided once for everybody.

A rule says that the parts of a mean are reduced by `mean`. Where the result is read whole and nowhere else, each shard
adds up its own rows, and what the sums amount to is divided once, where it is reduced: `partial(mean)`. Where it stays
partial (a linear op follows), each shard's mean is weighted with its share of the rows: a `partial(sum)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from graphsplit.core.layouts import PARTIAL_MEAN, PARTIAL_SUM, Layout, is_whole
from graphsplit.core.sizes.symbolic_sizes import has_sizes
from graphsplit.program.program import Op
from graphsplit.rules import Sharded


def as_planned(op: Op, sharded: Sharded, demands: Iterable[Layout]) -> Sharded:
    """Return how an op runs whose rule says how, if it is a mean over the batch: as a sum, or weighted.

    Args:
      op: the operation.
      sharded: what its rule says.
      demands: the layouts in which its result is read.
    """
    if PARTIAL_MEAN not in sharded.gives:
        return sharded
    if all(map(is_whole, demands)) and entries_averaged(op):
        return sharded
    gives = tuple([PARTIAL_SUM if layout == PARTIAL_MEAN else layout for layout in sharded.gives])
    return replace(sharded, gives=gives, weighted=True)


def entries_averaged(op: Op) -> int:
    """Return of how many entries a mean is taken; 0 if that is not known, or if their sum might overflow.

    (A sum over the batch overflows in float16 long before its mean does.)
    """
    dtype, shapes = op.out_dtypes[0], (op.in_shapes[0], op.out_shapes[0])
    if dtype.size < (8 if dtype.is_complex else 4):
        return 0
    if any(shape is None or None in shape or has_sizes(shape) for shape in shapes):
        return 0
    before, after = (math.prod(size or 0 for size in shape or ()) for shape in shapes)
    return before // after if after else 0
