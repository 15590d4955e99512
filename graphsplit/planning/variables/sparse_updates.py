"""Sparse gradients: rows, and the numbers of a table's rows to which they belong; one number may have several.

A table's parts need not have all rows of the batch. What is added to rows of a table is added up by numbers first, as
a dense gradient is: each shard adds up its own, or each part of the table what it has, whichever moves less
(`part_by_part`). That is done where the rows are more bytes than the table, and in a branch, whose sides change
nothing.

And whether all entries of rows are finite, put into a table of truth values (as Keras does for `LossScaleOptimizer`),
is one truth value for each row before it is put there. Of several rows with one number the last counts, as before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import make_node
from graphsplit.core.sizes import Shape, has_sizes
from graphsplit.planning.costs.work import SMALL_BYTES
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.planning.variables.part_by_part import most_bytes
from graphsplit.program.program import Op, Program, Tensor

ADDS_ROWS = {"ResourceScatterAdd": "AssignAddVariableOp", "ResourceScatterSub": "AssignSubVariableOp"}
"""What adds to rows of a variable, and what adds to all of it."""

_TRUTHS = frozenset({"All", "Any"})


def is_sum_of_rows(op: Op, shape: Sequence[int | None] | None) -> bool:
    """Return whether an operation adds whole rows to those of a variable of a shape, so that they can be added up."""
    numbers, rows = op.in_shapes[1:3] if op.type in ADDS_ROWS else (None, None)
    if not shape or None in shape or numbers is None or rows is None:
        return False
    return len(rows) >= len(numbers) and tuple(rows[len(numbers) :]) == tuple(shape[1:])


class RowAdder(ProgramWriter):
    """Appends sums of rows."""

    def _added_up(self, name: str, numbers: Tensor, rows: Tensor, shape: Shape) -> Tensor:
        """Append a tensor of a shape whose rows are sums of rows with the same number.

        (Numbers below zero are passed over by such sums, and refused by what writes rows: as those that are too large.)
        """
        assert shape[0] is not None
        dtype, count = self._type_of(rows), np.array(shape[0], np.int64)
        is_none = self._compared("Less", f"{name}/is_none", numbers, 0)
        too_large = self._number(f"{name}/too_large", shape[0], numbers)
        numbers = self._select(f"{name}/numbers", is_none, too_large, numbers, self._shape_of(numbers))
        types = {"T": dtype, "Tindices": self._type_of(numbers), "Tnumsegments": tf.int64}
        operands = [rows, numbers, self._constant(f"{name}/count", count, tf.int64)]
        result = [(tuple(shape), dtype)]
        return self._made("UnsortedSegmentSum", self._unused(f"{name}/added_up"), operands, result, {2: count}, **types)


def with_sums_of_rows(program: Program, names: Collection[str], shapes: Mapping[str, Sequence[int | None]]) -> Program:
    """Return a program in which rows are added up, and truth values joined, before they are put into a table.

    Rows are where they are more bytes than the table; fewer are sent as they are.

    Args:
      program: the function.
      names: of the placeholders of the handles of variables in parts.
      shapes: of captured variables, by the names of their handles' placeholders.
    """
    writer = _SumsWriter(program, names, shapes)
    return writer.write() if any(map(writer.is_written, program.ops)) else program


class _SumsWriter(RowAdder):
    def __init__(self, program: Program, names: Collection[str], shapes: Mapping[str, Sequence[int | None]]):
        super().__init__(program)
        self._held_shapes = {name: tuple(shape) for name, shape in shapes.items() if name in names}

    def is_written(self, op: Op) -> bool:
        """Return whether an operation is written in another way."""
        return self._has_many_rows(op) or self._joins_rows(op) is not None

    def _has_many_rows(self, op: Op) -> bool:
        shape = self._held_shapes.get(self._program.ops[op.inputs[0].op].name) if op.type in ADDS_ROWS else None
        if not is_sum_of_rows(op, shape) or has_sizes(op.in_shapes[2]):
            return False  # (of an unknown batch, nobody knows which are more)
        size = math.prod([count or 0 for count in shape or ()]) * self._program.dtype(op.inputs[2]).size
        return bool(most_bytes(self._program, op.inputs[2]) > size > SMALL_BYTES)

    def _joins_rows(self, op: Op) -> Op | None:
        """Return what puts rows into a table of equal truth values, all of which an operation joins, or None."""
        table = self._program.ops[op.inputs[0].op] if op.type in _TRUTHS else None
        if table is None or table.type != "TensorScatterUpdate" or op.attr("keep_dims").b:
            return None
        shapes, axes = [shape or () for shape in table.in_shapes], op.constants.get(1)
        if self._program.ops[table.inputs[0].op].type != "Fill" or axes is None or not all(shapes):
            return None
        is_known = all(type(size) is int and size > 0 for shape in shapes for size in shape)
        is_all = {int(axis) % len(shapes[0]) for axis in np.ravel(axes)} == {*range(len(shapes[0]))}
        return table if is_known and is_all and shapes[1][-1] == 1 and len(shapes[0]) > 1 else None

    def _visit(self, op: Op) -> None:
        table = self._joins_rows(op)
        if table is not None:
            self._write_joined(op, table)
        elif self._has_many_rows(op):
            handle, numbers, rows = [self._result(tensor) for tensor in op.inputs]
            total = self._added_up(op.name, numbers, rows, self._held_shapes[self._program.ops[op.inputs[0].op].name])
            node = make_node(op.name, ADDS_ROWS[op.type], [], dtype=self._type_of(rows))
            self._note(op, (), [self._new(node, [handle, total], [], {}, self._controls(op)).op])
        else:
            super()._visit(op)

    def _write_joined(self, op: Op, table: Op) -> None:
        """Write what joins all truth values: those of each row first, which are then put into a table of one column."""
        places, rows = [self._result(tensor) for tensor in table.inputs[1:]]
        value = self._result(self._program.ops[table.inputs[0].op].inputs[1])
        (count, *_), (*outer_dims, _), shape = [sizes or () for sizes in table.in_shapes]
        axes, length = np.arange(len(outer_dims), len(shape), dtype=np.int32), np.array([count], np.int32)
        operands = [rows, self._constant(f"{op.name}/columns", axes, tf.int32)]
        of_rows = [(tuple(outer_dims), tf.bool)]
        joined = self._made(op.type, self._unused(f"{op.name}/of_rows"), operands, of_rows, {1: axes}, Tidx=tf.int32)
        operands, column = [self._constant(f"{op.name}/length", length, tf.int32), value], [((count,), tf.bool)]
        types = {"T": tf.bool, "index_type": tf.int32}
        base = self._made("Fill", self._unused(f"{op.name}/base"), operands, column, {0: length}, **types)
        types = {"T": tf.bool, "Tindices": self._type_of(places)}
        name, axis = self._unused(f"{op.name}/column"), np.zeros(1, np.int32)
        put = self._made("TensorScatterUpdate", name, [base, places, joined], column, {}, **types)
        operands = [put, self._constant(f"{op.name}/rows", axis, tf.int32)]
        result = self._made(op.type, op.name, operands, [((), tf.bool)], {1: axis}, Tidx=tf.int32)
        self._note(op, [result], [result.op])
