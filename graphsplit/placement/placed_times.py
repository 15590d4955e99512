"""How long the operations of a placement take on a machine: the costs by which steps are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graphsplit.costs.families import family_of
from graphsplit.costs.machine import Machine
from graphsplit.costs.seconds import Costs
from graphsplit.costs.work import Described, Work, bytes_moved, bytes_of
from graphsplit.placement.records import Edge, PlacedOp


class PlacedTimes:
    """Seconds of operations and of what is sent.

    Args:
      ops, edges: of a placement.
      machine: what runs them.
    """

    def __init__(self, ops: Mapping[str, PlacedOp], edges: Sequence[Edge], machine: Machine):
        self._costs = Costs(machine.device)
        self._link = machine.link
        self._read: dict[str, list[int]] = {}
        for edge in dict.fromkeys(edges):
            if not edge.control and edge.source in ops and edge.output < len(ops[edge.source].shapes):
                size = bytes_of(_described(ops[edge.source], edge.output))
                self._read.setdefault(edge.target, []).append(size)

    def seconds_of(self, op: PlacedOp) -> float:
        """Return how long an operation takes; sizes that are not known count as 1."""
        made = [bytes_of(_described(op, k)) for k in range(len(op.shapes))]
        moved = bytes_moved(op.type, [*self._read.get(op.name, ()), *made])
        dtype = op.dtypes[0] if op.dtypes else ""
        return self._costs.seconds(Work(family_of(op.type), dtype, float(op.flops or 0), float(moved)))

    def seconds_of_sent(self, count: int) -> float:
        """Return how long it takes to send so many bytes to another device."""
        return self._link.latency_s + count / self._link.bytes_per_s


def _described(op: PlacedOp, output: int) -> Described:
    return op.shapes[output], tf.as_dtype(op.dtypes[output])
