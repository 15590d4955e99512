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

from graphsplit.core.layouts import Replicate, Shard
from graphsplit.core.protos import make_node
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.program.program import Op, Tensor
from graphsplit.rules import Sharded
from graphsplit.rules.factors import LEFT_OUT, ZEROS


class RowWriter(ProgramWriter):
    """Appends what goes to where rows are."""

    def _own_rows(self, op: Op, how: Sharded, k: int, device: str, operands: list[Tensor]) -> Tensor | None:
        """Replace the operands of an operation for a part by the numbers and rows of those that the part has.

        Return which of all numbers those are, if what is found for others does not count.
        """
        first = len(self._ops)
        for i, shift in how.shift.items():
            name = f"{op.name}/rows_{k}"
            local, are_own = self._own_ids(name, operands[i], shift.layout, k)
            if shift.others == ZEROS:  # (whoever has ids, shards perhaps, asks which of what is found counts)
                operands[i] = self._select(f"{name}/safe", are_own, local, self._number(f"{name}/other", 0, local))
                return are_own
            if shift.others == LEFT_OUT:
                own_entries = [are_own, local, operands[2]]
                if not self._shape_of(are_own):  # (`Where` takes no single number)
                    own_entries = [self._widened(f"{name}/one", tensor, 0) for tensor in own_entries]
                operands[1:3] = self._chosen(name, *own_entries)
            else:  # (-1 is passed over)
                operands[i] = self._select(f"{name}/safe", are_own, local, self._number(f"{name}/other", -1, local))
        for position in range(first, len(self._ops)):
            if self._ops[position].type != "Const":
                self._lay(position, devices=(device,))
        return None

    def _zeros_elsewhere(self, op: Op, k: int, are_own: Tensor, rows: Tensor) -> Tensor:
        """Write what is zero wherever numbers of rows are not a part's own."""
        name, shape, dtype = f"{op.name}/rows_{k}", self._shape_of(rows), self._type_of(rows)
        nothing = self._constant(f"{name}/nothing", np.zeros((), dtype.as_numpy_dtype), dtype)
        rank = len(op.in_shapes[0] or ())
        for _ in range(rank - 1 - int(op.constants[2]) % rank):
            are_own = self._widened(f"{name}/wide", are_own)
        return self._select(f"{name}/own_rows", are_own, rows, nothing, shape)

    def _write_rows_of_copies(
        self, op: Op, table: Replicate, operands: Sequence[Tensor], controls: Sequence[int]
    ) -> Tensor:
        """Write what writes rows of one copy of a variable, and what brings them to all."""
        handle, ids, rows = operands
        dtype, indices = tf.as_dtype(op.attr("dtype").type), self._type_of(ids)
        types = {"dtype": dtype, "Tindices": indices}
        written = self._append(op, self._unused(f"{op.name}/rows_0"), [handle, ids, rows], controls, (), {})
        gather = make_node(self._unused(f"{op.name}/rows"), "ResourceGather", [], **types)
        written_rows = self._new(gather, [handle, ids], [(self._shape_of(rows), dtype)], {}, (written.op,))
        for tensor in (written, written_rows):
            self._lay(tensor.op, devices=table.devices[:1])
        node = make_node(self._unused(f"{op.name}/rows_of_all"), "ResourceScatterUpdate", [], **types)
        return self._new(node, [handle, ids, written_rows], [], {}, tuple(controls))

    def _own_ids(self, name: str, ids: Tensor, layout: Shard, k: int) -> tuple[Tensor, Tensor]:
        """Return ids as a part counts them, and which of them are its own."""
        first, own_length = begin_of(layout, k), layout.own((), k)
        local = self._plain("Sub", f"{name}/local", [ids, self._number(f"{name}/before", first, ids)], T=True)
        low, high = (first, first + own_length) if k else (own_length, layout.size(0))
        at_least = self._compared("GreaterEqual", f"{name}/low", ids, low)
        below = self._compared("Less", f"{name}/high", ids, high)
        between = self._plain("LogicalAnd", f"{name}/between", [at_least, below])
        return local, between if k else self._plain("LogicalNot", f"{name}/not_of_others", [between])

    def _chosen(self, name: str, are_own: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Write those entries of tensors that are a part's own."""
        rank, chosen = len(self._shape_of(are_own)), []
        which = self._made("Where", self._unused(f"{name}/which"), [are_own], [((None, rank), tf.int64)], {}, T=tf.bool)
        for tensor in tensors:
            result, types = (None, *self._shape_of(tensor)[rank:]), {"Tparams": self._type_of(tensor)}
            node = make_node(self._unused(f"{name}/chosen"), "GatherNd", [], Tindices=tf.int64, **types)
            chosen.append(self._new(node, [tensor, which], [(result, self._type_of(tensor))], {}))
        return chosen


def begin_of(layout: Shard, part: int) -> int:
    """Return how many entries are before those of a part."""
    return sum([layout.own((), k) for k in range(part)])
