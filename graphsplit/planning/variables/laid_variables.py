"""What reads and writes a variable of which each device has a part: each does so with its own, by itself."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.layouts import (
    REPLICATE,
    SINGLE_DEVICE,
    Layout,
    MeshDivision,
    Nested,
    Replicate,
    Shard,
)
from graphsplit.program.program import Op, Program
from graphsplit.rules import Sharded
from graphsplit.rules.factors import LEFT_OUT, Shift

READS = frozenset({"ReadVariableOp"})
WRITES = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
WRITES_ROWS = frozenset({f"ResourceScatter{how}" for how in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")})


def of_variable(program: Program, op: Op, layouts: Sequence[Layout]) -> Sharded | None:
    """Return how what reads or writes a variable that lies along the axis is done: by each device with its own part."""
    is_handle = [program.dtype(tensor) == tf.resource for tensor in op.inputs]
    lying = [layout for is_own, layout in zip(is_handle, layouts, strict=True) if is_own and layout != SINGLE_DEVICE]
    if not lying:
        return None
    variable_layout = lying[0]
    if op.type in READS:
        return Sharded((variable_layout,), (variable_layout,))
    if op.type in WRITES:
        return Sharded((variable_layout, variable_layout), ())
    if op.type == "VariableShape" and isinstance(variable_layout, Replicate):
        return Sharded((variable_layout,), (REPLICATE,))
    if op.type in WRITES_ROWS:
        return _of_rows(program, op, variable_layout)
    if (
        op.type.startswith("ResourceApply")
        and lying == [variable_layout] * sum(is_handle)
        and _is_elementwise(program, op, is_handle)
    ):
        wants = [
            variable_layout if h or program.shape(t) != () else REPLICATE
            for h, t in zip(is_handle, op.inputs, strict=True)
        ]
        return Sharded(tuple(wants), ())
    return None


def _of_rows(program: Program, op: Op, variable_layout: Layout) -> Sharded | None:
    """Return how rows of a variable are written by their numbers: each device its own, or its part of each."""
    numbers, rows = op.in_shapes[1:]
    if isinstance(variable_layout, Replicate):
        return Sharded((variable_layout, REPLICATE, REPLICATE), ())
    if not isinstance(variable_layout, Shard) or numbers is None or not rows:
        return None
    if len(numbers) > 7:  # (`GatherNd`, by which a part picks its rows, takes no more coordinates)
        return None
    if variable_layout.axis > 0:
        return Sharded((variable_layout, REPLICATE, variable_layout.along(len(numbers) + variable_layout.axis - 1)), ())
    most = program.dtype(op.inputs[1]).max
    if (
        len(variable_layout.blocks) > 1
        or variable_layout.size(0) > most
        or any(type(size) is not int for size in rows[len(numbers) :])
    ):
        return None
    return Sharded((variable_layout, REPLICATE, REPLICATE), (), shift={1: Shift(variable_layout, others=LEFT_OUT)})


def _is_elementwise(program: Program, op: Op, is_handle: Sequence[bool]) -> bool:
    """Return whether an update has numbers and one gradient, so that each part is updated by itself."""
    pairs = zip(is_handle, op.inputs, strict=True)
    return sum(not handle and program.shape(tensor) != () for handle, tensor in pairs) == 1


def copies_of(division: MeshDivision) -> list[Replicate]:
    """Return how the whole, or each part, of a variable lies that has copies; nothing for one that has none."""
    rows = division.rows if isinstance(division, Nested) else [division]
    return [row for row in rows if isinstance(row, Replicate) and row.parts > 1]
