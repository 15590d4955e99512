"""How many rows an operation makes where TensorFlow does not infer it, and Python code may have told it.

Rows of a sparse tensor, none of them empty, are segments: so Keras multiplies a sparse matrix. Rows of a ragged tensor
are one less than its row splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphsplit.core.sizes.symbolic_sizes import as_size

_SEGMENTS = {
    **dict.fromkeys(("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum"), 1),
    **dict.fromkeys(("SparseSegmentMean", "SparseSegmentSqrtN", "SparseSegmentSum"), 2),
}
"""The operand that says to which segment each entry belongs."""


def rows_made(
    node: Any, inputs: Sequence[Any], ops: Sequence[Any], known: Callable[[Any], np.ndarray | None]
) -> int | None:
    """Return how many rows the first result of an operation has, if that follows from its operands' values.

    Args:
      node: the operation.
      inputs: what it reads.
      ops: the operations before it.
      known: returns the integers of a tensor, if they are known or follow from unknown sizes.
    """
    if node.op == "RaggedTensorToTensor" and node.attr["row_partition_types"].list.s[:1] == [b"ROW_SPLITS"]:
        shape = ops[inputs[3].op].out_shapes[inputs[3].index]
        return None if not shape or shape[0] is None else shape[0] - 1
    if node.op not in _SEGMENTS:
        return None
    column = ops[inputs[_SEGMENTS[node.op]].op]
    while column.type in ("Cast", "Identity"):
        column = ops[column.inputs[0].op]
    if column.type != "StridedSlice" or not _takes_first_column(column):
        return None
    filled = ops[column.inputs[0].op]
    if filled.type != "SparseFillEmptyRows" or column.inputs[0].index != 0:
        return None
    dense_shape = known(filled.inputs[2])
    return None if dense_shape is None else as_size(dense_shape.flat[0])


def _takes_first_column(op: Any) -> bool:
    """Return whether a slice is `x[:, 0]`."""
    masks = [op.attr(f"{name}_mask").i for name in ("begin", "end", "shrink_axis", "ellipsis", "new_axis")]
    begin, stride = op.constants.get(1), op.constants.get(3)
    if masks[0] & 1 and masks[1] & 1 and masks[2:] == [2, 0, 0] and begin is not None and stride is not None:
        return int(begin[1]) == 0 and bool(np.all(stride == 1))
    return False
