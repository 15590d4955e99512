"""Rows by their ids: what looks up rows of a table, adds them up or writes them goes to where they are.

Of a table whose rows lie on several devices, the ids of a batch are sent to all, and the rows that were looked up come
back: what travels grows with the batch, and not with the table. So do the gradients of the rows, which are added up
where these are, and what is written to them.

Rows of a table that is copied are written to one copy, and what they are then goes to the others: added up on each, in
an order of its own, they might differ.
"""

from __future__ import annotations

from graphsplit.core.layouts import Copied, Cut, Division
from graphsplit.program.program import Op, Program, Tensor

_WRITES = frozenset({f"ResourceScatter{how}" for how in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")})


def finds_rows(program: Program, op: Op, table: Cut) -> bool:
    """Return whether an operation looks up rows of its first operand, fewer bytes than that has."""
    if op.type != "GatherV2" or not table.is_of_rows or op.in_shapes[1] is None or op.out_shapes[0] is None:
        return False
    axis, dtype = op.constants.get(2), op.out_dtypes[0]
    plain = axis is not None and int(axis) == 0 and not op.attr("batch_dims").i and not op.controls
    numeric = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return plain and numeric and program.bytes(Tensor(op.index, 0)) < program.bytes(op.inputs[0])


def adds_up_rows(program: Program, op: Op, table: Cut) -> bool:
    """Return whether an operation adds up rows by their ids, of fewer bytes than what is wanted has."""
    if op.type != "UnsortedSegmentSum" or not table.is_of_rows or op.in_shapes[1] is None or op.controls:
        return False
    return program.bytes(op.inputs[0]) < program.bytes(Tensor(op.index, 0))


def writes_rows(op: Op, table: Division) -> bool:
    """Return whether an operation writes rows of the variable that is its first operand."""
    known = op.type in _WRITES and op.in_shapes[1] is not None and bool(op.in_shapes[2])
    return known and (isinstance(table, Copied) or table.is_of_rows)
