"""Lookups: where rows travel, and not the table that they are taken from or added to, because that is fewer bytes.

On the shards a lookup needs the whole table on every device; run once, where the table is, it needs the ids of all
shards, and sends each its rows. A sum of rows by their ids makes a table on every shard, all of which are added up; run
once, it needs the rows. Neither computes anything that would be worth spreading over devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphsplit.core.layouts import REPLICATE, Partial, Shard, is_whole
from graphsplit.planning.costs.work import SMALL_BYTES
from graphsplit.planning.places import Places
from graphsplit.planning.propagation.forward_propagation import NaturalForms
from graphsplit.planning.state import State
from graphsplit.planning.steps import RowsMoved
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program, Tensor

_LOOKUPS = frozenset({"GatherV2", "GatherNd"})  # from the first operand, by the second
_SUMS = frozenset({"UnsortedSegmentSum", "ScatterNd"})


def rows_moved(program: Program, natural: NaturalForms, places: Places, state: State) -> dict[int, RowsMoved]:
    """Return the operations, by position, that run once, since then fewer bytes move, and what moves.

    Args:
      program: what is planned.
      natural: how its operations run otherwise.
      places: of the shards.
      state: where lives what the program does not compute.
    """
    finder, moved_by_op = _Finder(program, natural, places, state), dict[int, RowsMoved]()
    readers: dict[Tensor, list[Op]] = {}
    for i in sorted(reached([*[tensor.op for tensor in program.outputs], *program.effects], finder.sources)):
        op, answer = program.ops[i], natural.answers[i]
        if answer is None:
            continue
        for k, (tensor, want) in enumerate(zip(op.inputs, answer.wants, strict=True)):
            if want == REPLICATE and k not in answer.makes and is_whole(natural.layout(tensor)):
                readers.setdefault(tensor, []).append(op)
        result = Tensor(i, 0)
        # (a sum that is not added up right behind the operation is one of several, which are added up together)
        if op.type in _SUMS and isinstance(answer.gives[0], Partial) and is_whole(natural.layout(result)):
            moved_by_op.update(finder.moved([op], result, adds=True))
    for table, ops in readers.items():
        if all(op.type in _LOOKUPS and op.inputs[0] == table for op in ops) and not finder.is_on_every_device(table):
            moved_by_op.update(finder.moved(ops, table, adds=False))
    return moved_by_op


class _Finder:
    def __init__(self, program: Program, natural: NaturalForms, places: Places, state: State):
        self._program = program
        self._natural = natural
        self._places = places
        self._state = state

    def sources(self, position: int) -> list[int]:
        return self._program.ops[position].sources

    def _behind(self, tensor: Tensor) -> Iterable[Op]:
        return [self._program.ops[i] for i in reached([tensor.op], self.sources)]

    def moved(self, ops: Sequence[Op], table: Tensor, *, adds: bool) -> dict[int, RowsMoved]:
        """Return what moves for operations on a table if they run once; nothing if that is not fewer bytes."""
        devices, size = len(set(self._places.on_shards(ops[0]))), self._program.bytes(table)
        if devices < 2 or size <= SMALL_BYTES:
            return {}
        moved_by_op, counted = {}, list[Tensor]()
        for op in ops:
            rows = self._rows(op)
            moved = [t for t in rows if t.op == op.index or self._natural.answers[t.op] is not None]
            moved_by_op[op.index] = RowsMoved(tuple(moved), table, adds)
            counted += rows if adds else moved  # (what is added up is work, wherever it is)
        sizes = [self._program.bytes(tensor) for tensor in counted]
        # (of one device's share of each nothing has to move; and as many rows as a table has are exchanged, not added)
        fewer = 0 not in sizes and sum(sizes) < (size if adds else devices * size)
        return moved_by_op if fewer and not any(map(self._waits_for_work, ops)) else {}

    def _rows(self, op: Op) -> list[Tensor]:
        """Return what of an operation's operands and results shards would have in pieces."""
        answer = self._natural.answers[op.index]
        assert answer is not None
        pieces = [tensor for tensor, want in zip(op.inputs, answer.wants, strict=True) if isinstance(want, Shard)]
        return [*pieces, *[Tensor(op.index, k) for k, layout in enumerate(answer.gives) if isinstance(layout, Shard)]]

    def _waits_for_work(self, op: Op) -> bool:
        """Return whether shards that take turns would have to meet for ids that they compute in a network.

        (What follows from integers, ids of words, is there before the first of them begins; and a sum is at the end.)
        """
        if op.type in _SUMS or not self._places.mesh.has_turns:
            return False
        computed = [
            op_behind for op_behind in self._behind(op.inputs[1]) if self._natural.answers[op_behind.index] is not None
        ]
        return any(dtype.is_floating for op_behind in computed for dtype in op_behind.out_dtypes)

    def is_on_every_device(self, table: Tensor) -> bool:
        """Return whether every device has a table, or puts it together from what lies on several."""
        op = self._program.ops[table.op]
        if self._state.is_everywhere(op) or op.divides:
            return True
        copied = {i for i, copies in self._program.copied.items() if not copies.readers}
        return bool(copied) and any(op_behind.index in copied for op_behind in self._behind(table))
