"""How long the operations of a placement take on a machine: the costs by which steps are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from graphsplit.costs.families import family_of
from graphsplit.costs.machine import Link, Machine
from graphsplit.costs.seconds import Costs
from graphsplit.costs.work import Described, Work, bytes_moved, bytes_of
from graphsplit.placement.records import Edge, PlacedOp


@dataclass(frozen=True, eq=False)
class PlacedTimes:
    """Seconds of operations and of what is sent.

    Attributes:
      costs: of operations.
      link: between devices.
      read: the bytes of what each operation reads, by name.
    """

    costs: Costs
    link: Link
    read: Mapping[str, Sequence[int]]

    def seconds_of(self, op: PlacedOp) -> float:
        """Return how long an operation takes; sizes that are not known count as 1."""
        made = [bytes_of(_described(op, k)) for k in range(len(op.shapes))]
        moved = bytes_moved(op.type, [*self.read.get(op.name, ()), *made])
        dtype = op.dtypes[0] if op.dtypes else ""
        return self.costs.seconds(Work(family_of(op.type), dtype, float(op.flops or 0), float(moved)))

    def seconds_of_sent(self, count: int) -> float:
        """Return how long it takes to send so many bytes to another device."""
        return self.link.latency_s + count / self.link.bytes_per_s


def placed_times(ops: Mapping[str, PlacedOp], edges: Sequence[Edge], machine: Machine) -> PlacedTimes:
    """Return how long the operations of a placement take.

    Args:
      ops, edges: of the placement.
      machine: what runs them.
    """
    read: dict[str, list[int]] = {}
    for edge in dict.fromkeys(edges):
        if not edge.control and edge.source in ops and edge.output < len(ops[edge.source].shapes):
            read.setdefault(edge.target, []).append(bytes_of(_described(ops[edge.source], edge.output)))
    return PlacedTimes(Costs(machine.device), machine.link, read)


def _described(op: PlacedOp, output: int) -> Described:
    return op.shapes[output], tf.as_dtype(op.dtypes[output])
