"""Operations at home whose results have rows of the batch, and so are cut again: strings, tables, ragged and sparse."""

from __future__ import annotations

from collections.abc import Callable

from graphsplit.core.layouts import Layout, Shard
from graphsplit.program.program import Op, Program, Tensor

_MAKES_DENSE = frozenset({"RaggedTensorToTensor", "SparseTensorDenseMatMul", "SparseToDense"})


def rows_at_home(
    program: Program, op: Op, layout_of: Callable[[Tensor], Layout], batch: int
) -> tuple[Shard, str] | None:
    """Return how the result of an op at home is cut, and why the op is there ("" if that has been said), or None.

    A lookup has a row for each row of its words; words of texts, made dense, have one for each text. A ragged or sparse
    argument is whole, as its parts have no rows of the batch; what it becomes when it is made dense has.

    Args:
      program: what is planned.
      op: one of its operations, that runs at home.
      layout_of: the layout in which readers meet a tensor.
      batch: the number of rows; less than 2 if nothing is to be cut.
    """
    shape, like = op.out_shapes[0] if op.out_shapes else None, _rows_like(program, op)
    if not shape:
        return None
    if like is not None:
        layout, before = layout_of(like), program.shape(like)
        if not isinstance(layout, Shard) or before is None or layout.axis >= len(shape):
            return None
        size = before[layout.axis]
        return (layout, "") if size is not None and size == shape[layout.axis] else None
    of_whole_parts = not any(isinstance(layout_of(tensor), Shard) for tensor in op.inputs)
    if op.type in _MAKES_DENSE and of_whole_parts and int(batch) > 1 and shape[0] == batch:
        return Shard(0), "its rows are only equal once they are dense"
    return None


def _rows_like(program: Program, op: Op) -> Tensor | None:
    """Return a tensor of which the result of `op` has the rows, as far as the type of the op tells."""
    if op.type == "LookupTableFindV2" or (op.type == "GatherV2" and op.device):
        return op.inputs[1]
    if op.type == "RaggedTensorToTensor":
        sliced = program.ops[op.inputs[3].op]
        words = program.ops[sliced.inputs[0].op] if sliced.type == "StridedSlice" else sliced
        return words.inputs[0] if words.type == "StringSplitV2" else None
    return None
