"""Constants of the shards: every device makes its own, whole or its piece, instead of being sent it."""

from __future__ import annotations

import numpy as np

from graphsplit.core.layouts import Layout, Shard
from graphsplit.core.protos.graphdefs import constant_node, constant_value
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.shards.row_counts import RowCounts
from graphsplit.planning.mesh import Mesh
from graphsplit.program.program import SIZES, Op

_ROLE = "constant"


class Constants:
    """The constants that have been written, by device."""

    def __init__(self, draft: Draft, counts: RowCounts, mesh: Mesh):
        self._draft = draft
        self._counts = counts
        self._mesh = mesh
        self._made: dict[tuple[int, Layout | None, int | None, str], str] = {}
        self._first: dict[str, int] = {}
        self._copies: dict[tuple[int, int | None], int] = {}

    def get(self, op: Op, layout: Layout, d: int | None, device: str) -> str:
        """Return the reference of a constant on a device, for shard `d` or (None) for what runs once; make it once."""
        cut = layout if isinstance(layout, Shard) else None
        if d is not None and cut is None and op.type == "Const" and not self._counts.waits_for(d):
            d = self._first.setdefault(device, d)  # shards of one device share what is the same for all
        key = (op.index, cut, d, device)
        if key not in self._made:
            self._made[key] = self._make(op, cut, d, device)
        return self._made[key]

    def _make(self, op: Op, cut: Shard | None, d: int | None, device: str) -> str:
        name, origin = self._name(op, cut, d), Origin(op.index, d, _ROLE)
        if cut is not None:
            assert d is not None
            value = own_rows(constant_value(op.node), cut, self._mesh.rows, d)
            self._draft.add(constant_node(name, value, op.out_dtypes[0], device), origin)
        elif op.type == SIZES:
            assert op.yields is not None
            return self._counts.operand(name, d, op.yields, op.out_dtypes[0])
        else:
            wait = "" if d is None else self._counts.waits_for(d)
            self._draft.copy(op, name, device, [wait] if wait else [], d, _ROLE)
        return name

    def _name(self, op: Op, cut: Shard | None, d: int | None) -> str:
        number = self._copies[op.index, d] = self._copies.get((op.index, d), -1) + 1
        if d is None:
            return f"{self._draft.scope}/constant_{number}/{op.name}"
        return self._draft.prefixes[d] + op.name + (f"/{'slice' if cut else 'copy'}_{number}" if cut or number else "")


def own_rows(value: np.ndarray, layout: Shard, rows: tuple[int, ...], d: int) -> np.ndarray:
    """Return shard `d`'s piece of every block of `value`."""
    pieces = layout.pieces(rows)
    if value.size and not any(value.strides):  # one number repeated: nothing to pick, and it stays one number
        shape = list(value.shape)
        shape[layout.axis] = sum(block[d] for block in pieces)
        return np.broadcast_to(value.reshape(-1)[0], shape)
    chosen, start = [], 0
    for block in pieces:
        first = start + sum(block[:d])
        chosen.append(np.arange(first, first + block[d]))
        start += sum(block)
    return np.take(value, np.concatenate(chosen), layout.axis)
