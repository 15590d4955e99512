"""Whole values, written: what lies in parts is put together for those who read the whole, when it is their turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Cut, in_groups
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.planning.variables.gathering import Gather
from graphsplit.planning.variables.laid_variables import copies_of
from graphsplit.planning.variables.part_by_part import PartByPart
from graphsplit.planning.variables.row_writing import RowWriter
from graphsplit.program.program import Op, Program, Tensor


class WholeWriter(RowWriter):
    """Appends what puts values together.

    Args:
      program: for variables that are each one.
      finder: what of it is done part by part.
      gathers: of what is put together more than once.
    """

    def __init__(self, program: Program, finder: PartByPart, gathers: Sequence[Gather]):
        super().__init__(program)
        self._finder = finder
        self._parts: dict[tuple[Tensor, Cut], list[Tensor]] = {}
        self._gathers = {(reader, gather.tensor): gather for gather in gathers for reader in gather.readers}
        self._gathered: dict[int, Tensor] = {}
        self._gates: dict[int | None, int] = {}  # of each column: what waits for all that its earlier gathers wait for

    def _result(self, tensor: Tensor) -> Tensor:
        """Return the whole value: put together, once, where it is in parts."""
        if tensor not in self._results:
            with self._serving(self._program.ops[tensor.op]):
                self._results[tensor] = self._put_together(tensor)
            self._lay(self._results[tensor].op, divides=True)
        return self._results[tensor]

    def _put_together(self, tensor: Tensor) -> Tensor:
        division, op, dtype = self._finder.cut[tensor], self._program.ops[tensor.op], self._program.dtype(tensor)
        parts, name, shape = (
            self._parts[tensor, division],
            f"{op.name}/whole_{tensor.index}",
            self._program.shape(tensor),
        )
        if len(parts) == 1:
            return parts[0]
        return self._concatenated(name, parts, division.axis, shape, dtype)

    def _as_read(self, op: Op, tensor: Tensor) -> Tensor:
        """Return the whole value for an operation: put together when that is its turn, if it is one of the large."""
        gather = self._gathers.get((op.index, tensor))
        if gather is None:
            return self._result(tensor)
        if id(gather) not in self._gathered:
            if gather.waits:
                self._gates[self._column(tensor)] = self._write_gate(gather)
            with self._serving(self._program.ops[tensor.op]):
                self._gathered[id(gather)] = self._gather(tensor)
        return self._gathered[id(gather)]

    def _write_gate(self, gather: Gather) -> int:
        """Write what has run when all shards have ended what a gather waits for."""
        waits = [copy for position in gather.waits for copy in self._became[position]]
        node = make_node(self._unused(f"gate_{len(self._gathered)}"), "NoOp", [])
        before = self._gates.get(self._column(gather.tensor))
        return self._new(node, (), [], {}, (*waits, *(() if before is None else (before,)))).op

    def _column(self, tensor: Tensor) -> int | None:
        return self._program.ops[tensor.op].provenance.column

    def _gather(self, tensor: Tensor) -> Tensor:
        """Put a value together that leaves its devices when the gate opens."""
        op, shape, dtype = self._program.ops[tensor.op], self._program.shape(tensor), self._program.dtype(tensor)
        division = self._finder.cut.get(tensor)
        name = f"{op.name}/gathered_{tensor.index}_{len(self._gathered)}"
        parts = [self._results[tensor]] if division is None else self._parts[tensor, division]
        gate = self._gates.get(self._column(tensor))
        if gate is not None:
            shapes = [part_shape(shape, division, k) for k in range(len(parts))]
            nodes = [make_node(self._unused(f"{name}/part_{k}"), "Identity", [], T=dtype) for k in range(len(parts))]
            sent = zip(nodes, parts, shapes, strict=True)
            parts = [self._new(node, [part], [(own, dtype)], {}, (gate,)) for node, part, own in sent]
            if division is not None and division.groups:  # (each group has its own)
                copies = zip(parts, copies_of(in_groups(division)), strict=True)
                for part, own in copies:
                    self._lay(part.op, layout=own)
        if division is None:
            return parts[0]
        whole = self._concatenated(name, parts, division.axis, shape, dtype)
        self._lay(whole.op, divides=True)
        return whole

    def _concatenated(self, name: str, parts: Sequence[Tensor], axis: int, shape: Any, dtype: tf.DType) -> Tensor:
        value = np.array(axis, np.int32)
        operands = [*parts, self._constant(f"{name}/axis", value, tf.int32)]
        attributes: dict[str, Any] = {"N": len(parts), "T": dtype, "Tidx": tf.int32}
        return self._made("ConcatV2", self._unused(name), operands, [(shape, dtype)], {len(parts): value}, **attributes)


def part_shape(shape: Any, cut: Cut | None, part: int) -> Any:
    """Return the shape of a part of a tensor; of the whole where it is not cut."""
    if cut is None or shape is None:
        return shape
    return (*shape[: cut.axis], cut.lengths[part], *shape[cut.axis + 1 :])
