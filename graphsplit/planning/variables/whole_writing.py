"""Whole values, written: what lies in parts is put together for those who read the whole, when it is their turn."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Layout, Shard, copies_of_pieces
from graphsplit.core.protos import make_node
from graphsplit.planning.variables.gathering import AT_A_TIME
from graphsplit.planning.variables.part_by_part import PartByPart
from graphsplit.planning.variables.row_writing import RowWriter
from graphsplit.program.program import Op, Program, Tensor


class _KeptWhole(NamedTuple):
    """A whole value, and the operations that have read it, by position."""

    value: Tensor
    readers: list[int]


class WholeWriter(RowWriter):
    """Appends what puts values together.

    Args:
      program: for variables that are each one.
      finder: what of it is done part by part.
      again: what operations read that is put together more than once, by position.
    """

    def __init__(self, program: Program, finder: PartByPart, again: Mapping[int, Sequence[Tensor]]):
        super().__init__(program)
        self._finder = finder
        self._parts: dict[tuple[Tensor, Shard], list[Tensor]] = {}
        self._again = again
        self._kept_by_column: dict[int | None, dict[Tensor, _KeptWhole]] = {}  # there; what was read last comes last
        self._gates: dict[int | None, int] = {}  # what has run when all have read what was there before

    @functools.cached_property
    def _room(self) -> Mapping[int | None, int]:
        """How many bytes there is room for in each column, of what is put together again."""
        bytes_by_column = Counter[int | None]()
        for tensor in {tensor for tensors in self._again.values() for tensor in tensors}:
            column = self._column(tensor)
            bytes_by_column[column] = max(bytes_by_column[column], AT_A_TIME * self._program.bytes(tensor))
        return bytes_by_column

    def _result(self, tensor: Tensor) -> Tensor:
        """Return the whole value: put together, once, where it is in parts."""
        if tensor not in self._results:
            self._results[tensor] = self._put_together(tensor)
        return self._results[tensor]

    def _as_read(self, op: Op, tensor: Tensor) -> Tensor:
        """Return the whole value for an operation: if it is one of the large, put together when there is room for it.

        What is there at a time is as in a cache that forgets what was read longest ago.
        """
        if tensor not in self._again.get(op.index, ()):
            return self._result(tensor)
        column, size = self._column(tensor), self._program.bytes
        whole_values = self._kept_by_column.setdefault(column, {})
        if (kept_value := whole_values.pop(tensor, None)) is None:
            waits: list[int] = []
            for other in [other for other in whole_values if other not in op.inputs]:
                if sum(map(size, whole_values)) + size(tensor) > self._room[column]:
                    waits += whole_values.pop(other).readers
            if waits:
                self._write_gate(column, waits)
            kept_value = _KeptWhole(self._put_together(tensor, self._gates.get(column)), [])
        kept_value.readers.append(op.index)
        whole_values[tensor] = kept_value
        return kept_value.value

    def _write_gate(self, column: int | None, waits: Sequence[int]) -> None:
        """Write what has run when all shards have ended some operations, and what earlier gates wait for."""
        ended = [copy for position in dict.fromkeys(waits) for copy in self._became[position]]
        last_gate = [self._gates[column]] if column in self._gates else []
        node = make_node(self._unused(f"gate_{len(self._ops)}"), "NoOp", [])
        self._gates[column] = self._new(node, (), [], {}, (*ended, *last_gate)).op

    def _column(self, tensor: Tensor) -> int | None:
        return self._program.ops[tensor.op].provenance.column

    def _put_together(self, tensor: Tensor, gate: int | None = None) -> Tensor:
        """Put a value together whose parts leave their devices when a gate opens, if there is one."""
        layout, op = self._finder.cut.get(tensor), self._program.ops[tensor.op]
        name = f"{op.name}/whole_{tensor.index}"
        parts = [self._results[tensor]] if layout is None else self._parts[tensor, layout]
        with self._serving(op):
            if gate is not None:
                copies = [] if layout is None else copies_of_pieces(layout)
                parts = [self._sent(f"{name}/part_{k}", part, gate) for k, part in enumerate(parts)]
                for part, copies_of_piece in zip(parts, copies, strict=False):  # (each group of devices has its own)
                    self._lay(part.op, layout=copies_of_piece)
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
