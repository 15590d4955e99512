"""How long the operations of a placement take on a machine: the costs by which steps are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from graphsplit.inspect.records import Edge, PlacedOp
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.costs.work import Described, Work, bytes_moved, bytes_of


def placed_times(
    ops: Mapping[str, PlacedOp], edges: Sequence[Edge], machine: Machine
) -> tuple[Callable[[PlacedOp], float], Callable[[int], float]]:
    """Return functions that tell how long an operation takes, and so many bytes that are sent to another device.

    Args:
      ops, edges: of the placement; sizes that are not known count as 1.
      machine: what runs them.
    """
    costs, link = Costs(machine.device), machine.link
    read: dict[str, list[int]] = {}
    for edge in dict.fromkeys(edges):
        if not edge.control and edge.source in ops and edge.output < len(ops[edge.source].shapes):
            read.setdefault(edge.target, []).append(bytes_of(_described(ops[edge.source], edge.output)))

    def seconds_of(op: PlacedOp) -> float:
        made = [bytes_of(_described(op, k)) for k in range(len(op.shapes))]
        moved = bytes_moved(op.type, [*read.get(op.name, ()), *made])
        dtype = op.dtypes[0] if op.dtypes else ""
        return costs.seconds(Work(family_of(op.type), dtype, float(op.flops or 0), float(moved)))

    return seconds_of, lambda count: link.latency_s + count / link.bytes_per_s


def _described(op: PlacedOp, output: int) -> Described:
    return op.shapes[output], tf.as_dtype(op.dtypes[output])
