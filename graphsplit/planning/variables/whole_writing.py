"""Whole values, written: what lies in parts is put together for those who read the whole, when it is their turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Layout, Replicate, Shard, group_of
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.planning.variables.gathering import Gather
from graphsplit.planning.variables.part_by_part import PartByPart
from graphsplit.planning.variables.row_writing import RowWriter
from graphsplit.program.program import Op, Program, Tensor

Group = tuple[str, ...]
Copies = Mapping[Group, Sequence[Replicate]]


class WholeWriter(RowWriter):
    """Appends what puts values together.

    Args:
      program: for variables that are each one.
      finder: what of it is done part by part.
      gathers: of what is put together more than once.
      copies: of each part on the devices of a group, where it is several, by that group.
    """

    def __init__(self, program: Program, finder: PartByPart, gathers: Sequence[Gather], copies: Copies):
        super().__init__(program)
        self._copies = copies
        self._finder = finder
        self._parts: dict[tuple[Tensor, Shard], list[Tensor]] = {}
        self._gathers = {(reader, gather.tensor): gather for gather in gathers for reader in gather.readers}
        self._gathered: dict[int, Tensor] = {}
        self._gates: dict[int | None, int] = {}  # of each column: what waits for all that its earlier gathers wait for

    def _result(self, tensor: Tensor) -> Tensor:
        """Return the whole value: put together, once, where it is in parts."""
        if tensor not in self._results:
            with self._serving(self._program.ops[tensor.op]):
                self._results[tensor] = self._put_together(tensor)
        return self._results[tensor]

    def _put_together(self, tensor: Tensor) -> Tensor:
        layout, name = self._finder.cut[tensor], f"{self._program.ops[tensor.op].name}/whole_{tensor.index}"
        return self._concatenated(name, self._parts[tensor, layout], layout.axis, tensor)

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
        layout, gate = self._finder.cut.get(tensor), self._gates.get(self._column(tensor))
        name = f"{self._program.ops[tensor.op].name}/gathered_{tensor.index}_{len(self._gathered)}"
        parts = [self._results[tensor]] if layout is None else self._parts[tensor, layout]
        if gate is not None:
            copies = self._copies.get(group_of(layout), ()) if layout is not None else ()
            parts = [self._sent(f"{name}/part_{k}", part, gate) for k, part in enumerate(parts)]
            for part, own in zip(parts, copies, strict=False):  # (each group of devices has its own)
                self._lay(part.op, layout=own)
        return parts[0] if layout is None else self._concatenated(name, parts, layout.axis, tensor)

    def _sent(self, name: str, tensor: Tensor, gate: int) -> Tensor:
        """Write what passes a value on when a gate opens."""
        shape, dtype = self._shape_of(tensor), self._type_of(tensor)
        node = make_node(self._unused(name), "Identity", [], T=dtype)
        return self._new(node, [tensor], [(shape, dtype)], {}, (gate,))

    def _concatenated(self, name: str, parts: Sequence[Tensor], axis: int, like: Tensor) -> Tensor:
        """Write the whole of parts: a tensor of the original."""
        value, result = np.array(axis, np.int32), (self._program.shape(like), self._program.dtype(like))
        operands = [*parts, self._constant(f"{name}/axis", value, tf.int32)]
        attributes: dict[str, Any] = {"N": len(parts), "T": result[1], "Tidx": tf.int32}
        whole = self._made("ConcatV2", self._unused(name), operands, [result], {len(parts): value}, **attributes)
        self._lay(whole.op, divides=True)
        return whole


def part_shape(shape: Any, layout: Layout, part: int) -> Any:
    """Return the shape of a part of a tensor."""
    if not isinstance(layout, Shard) or shape is None:
        return shape
    return (*shape[: layout.axis], layout.own((), part), *shape[layout.axis + 1 :])
