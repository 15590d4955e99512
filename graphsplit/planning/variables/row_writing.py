"""Rows by their ids: what looks up rows of a table, adds them up or writes them goes to where they are.

Of a table whose rows lie on several devices, the ids of a batch are sent to all, and the rows that were looked up come
back: what travels grows with the batch, and not with the table. So do the gradients of the rows, which are added up
where these are, and what is written to them.

Each part takes ids for its own rows; an id of no part is the first one's, whose operation says what it says of such. Of
what is looked up, every part yields rows for all ids, which count where the id is its own.

Rows of a table that is copied are written to one copy, and what they are then goes to all: added up on each, in an
order of its own, they might differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Cut, Replicate
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.planning.variables.laid_variables import WRITES_ROWS
from graphsplit.program.program import Op, Program, Tensor


class RowWriter(ProgramWriter):
    """Appends what goes to where rows are."""

    def _look_up(self, op: Op, cut: Cut, parts: Sequence[Tensor], ids: Tensor) -> Tensor:
        """Write a gather of rows, and return them."""
        shape, dtype = op.out_shapes[0], op.out_dtypes[0]
        axis = self._constant(f"{op.name}/axis", np.array(0, np.int32), tf.int32)
        nothing = self._constant(f"{op.name}/nothing", np.zeros((), dtype.as_numpy_dtype), dtype)
        found = []
        for k, part in enumerate(parts):
            name = f"{op.name}/rows_{k}"
            local, own = self._own_ids(name, ids, cut, k)
            safe = self._select(f"{name}/safe", own, local, self._number(f"{name}/first", 0, local))
            rows = self._append(op, self._unused(name), [part, safe, axis], (), [shape], {2: np.array(0, np.int32)})
            self._lay(rows.op, devices=(cut.devices[k],))
            for _ in range(len(shape or ()) - len(self._shape_of(own) or ())):
                own = self._widened(f"{name}/wide", own)
            found.append(self._select(f"{name}/own_rows", own, rows, nothing, shape))
        return self._made("AddN", self._unused(f"{op.name}/sum"), found, [(shape, dtype)], {}, N=len(found), T=dtype)

    def _add_up(self, op: Op, cut: Cut, values: Tensor, ids: Tensor) -> list[Tensor]:
        """Write a sum of rows by their ids, and return its parts."""
        found, dtype = [], tf.as_dtype(op.attr("Tnumsegments").type)
        for k, length in enumerate(cut.lengths):
            name = f"{op.name}/rows_{k}"
            local, own = self._own_ids(name, ids, cut, k)
            elsewhere = self._number(f"{name}/elsewhere", -1, local)  # which is added to nothing
            segments = self._select(f"{name}/segments", own, local, elsewhere)
            count = np.array(length, dtype.as_numpy_dtype)
            operands = [values, segments, self._constant(f"{name}/count", count, dtype)]
            shape = (length, *(op.out_shapes[0] or ())[1:])
            added = self._append(op, self._unused(name), operands, (), [shape], {2: count})
            self._lay(added.op, devices=(cut.devices[k],))
            found.append(added)
        return found

    def _write_rows(
        self, op: Op, cut: Cut, handles: Sequence[Tensor], ids: Tensor, rows: Tensor, controls: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Write what writes rows of a variable; each part is given its own rows, as many as those are."""
        count, made = len(self._shape_of(ids) or ()), []
        rest = [int(size or 0) for size in (self._shape_of(rows) or ())[count:]]
        for k, handle in enumerate(handles):
            name = f"{op.name}/rows_{k}"
            local, own = self._own_ids(name, ids, cut, k)
            first = len(self._ops)
            which = self._where(f"{name}/which", self._flat(f"{name}/own", own, ()))
            chosen = self._taken(f"{name}/ids", self._flat(f"{name}/all_ids", local, ()), which)
            values = self._taken(f"{name}/values", self._flat(f"{name}/all_values", rows, rest), which)
            written = [handle, chosen, values]
            table = self._ops[handle.op].layout  # of a part that has copies
            if table is None:
                made.append(self._append(op, self._unused(name), written, controls[k], (), {}))
            for position in range(first, len(self._ops)):
                if self._ops[position].type != "Const":
                    self._lay(position, devices=(cut.devices[k],))
            if isinstance(table, Replicate):
                made.append(self._write_rows_of_copies(op, table, written, controls[k]))
        return made

    def _write_rows_of_copies(
        self, op: Op, table: Replicate, operands: Sequence[Tensor], controls: Sequence[int]
    ) -> Tensor:
        """Write what writes rows of one copy of a variable, and what brings them to all."""
        handle, ids, rows = operands
        dtype, indices = tf.as_dtype(op.attr("dtype").type), self._type_of(ids)
        types = {"dtype": dtype, "Tindices": indices}
        written = self._append(op, self._unused(f"{op.name}/rows_0"), [handle, ids, rows], controls, (), {})
        gather = make_node(self._unused(f"{op.name}/rows"), "ResourceGather", [], **types)
        found = self._new(gather, [handle, ids], [(self._shape_of(rows), dtype)], {}, (written.op,))
        for own in (written, found):
            self._lay(own.op, devices=table.devices[:1])
        node = make_node(self._unused(f"{op.name}/rows_of_all"), "ResourceScatterUpdate", [], **types)
        return self._new(node, [handle, ids, found], [], {}, tuple(controls))

    def _own_ids(self, name: str, ids: Tensor, cut: Cut, k: int) -> tuple[Tensor, Tensor]:
        """Return ids as a part counts them, and which of them are its own."""
        first = sum(cut.lengths[:k])
        local = self._plain("Sub", f"{name}/local", [ids, self._number(f"{name}/before", first, ids)], T=True)
        low, high = (first, first + cut.lengths[k]) if k else (cut.lengths[0], sum(cut.lengths))
        at_least = self._compared("GreaterEqual", f"{name}/low", ids, low)
        below = self._compared("Less", f"{name}/high", ids, high)
        between = self._plain("LogicalAnd", f"{name}/between", [at_least, below])
        return local, between if k else self._plain("LogicalNot", f"{name}/not_of_others", [between])

    def _flat(self, name: str, tensor: Tensor, rest: Sequence[int]) -> Tensor:
        shape, dtype = np.array([-1, *rest], np.int32), self._type_of(tensor)
        operands = [tensor, self._constant(f"{name}/shape", shape, tf.int32)]
        result = [((None, *rest), dtype)]
        return self._made("Reshape", self._unused(name), operands, result, {1: shape}, T=dtype, Tshape=tf.int32)

    def _where(self, name: str, flat: Tensor) -> Tensor:
        found = self._made("Where", self._unused(name), [flat], [((None, 1), tf.int64)], {}, T=tf.bool)
        return self._flat(f"{name}/flat", found, ())

    def _taken(self, name: str, flat: Tensor, which: Tensor) -> Tensor:
        axis, dtype = np.array(0, np.int32), self._type_of(flat)
        operands = [flat, which, self._constant(f"{name}/axis", axis, tf.int32)]
        types = {"Tparams": dtype, "Tindices": tf.int64, "Taxis": tf.int32, "batch_dims": 0}
        result = [((None, *self._shape_of(flat)[1:]), dtype)]
        return self._made("GatherV2", self._unused(name), operands, result, {2: axis}, **types)


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


def writes_rows(op: Op, table: Cut) -> bool:
    """Return whether an operation writes rows of the variable that is its first operand."""
    return op.type in WRITES_ROWS and op.in_shapes[1] is not None and bool(op.in_shapes[2]) and table.is_of_rows
