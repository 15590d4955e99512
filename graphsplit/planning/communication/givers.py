"""Givers: what gives a reader a tensor in the layout in which it reads it. Tasks list it, emission writes it."""

from __future__ import annotations

from typing import NamedTuple

from graphsplit.core.layouts import Layout, Shard, SingleDevice, is_whole
from graphsplit.planning.decisions import Decisions
from graphsplit.program.program import Tensor


class Made(NamedTuple):
    """It is read as its operation makes it, on the shards or once."""

    on_shards: bool


class Moved(NamedTuple):
    """It is what the move into a layout makes."""

    layout: Layout


def giver_of(plan: Decisions, tensor: Tensor, layout: Layout, on_shards: bool) -> Made | Moved | None:
    """Return what gives a tensor to a reader; None if the reader's device has it, or makes it for itself.

    Args:
      plan: which tensor is made in which layouts, and every move.
      tensor: which.
      layout: in which it is read. A `SingleDevice` that names no device stands for whichever makes it.
      on_shards: whether the shards read it, each what it has in that layout.
    """
    op, step = plan.program.ops[tensor.op], plan.steps[tensor.op]
    gives = step.shards.gives[tensor.index] if step.shards else None
    is_everywhere = plan.state.is_everywhere(op)
    if on_shards and gives == layout:
        return Made(True)
    if not isinstance(layout, SingleDevice):
        is_constant = op.type == "Const" and isinstance(layout, Shard)
        return None if is_constant or (is_whole(layout) and is_everywhere) else Moved(layout)
    if step.home and layout.device in ("", plan.owners.of_ops[tensor.op]):
        return Made(False)
    if is_everywhere:
        return None
    if layout.device:
        return Moved(layout)
    if gives is not None and is_whole(gives):
        return Made(True)
    return Moved(SingleDevice(plan.owners.of(tensor)))
