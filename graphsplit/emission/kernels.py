"""Kernels: which operations a task of a plan becomes when it is emitted, without emitting it.

`shards/shard_copies.py` and `communication/` write these nodes; a test compares the two. Constants, and what keeps an
order, are no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphsplit.core.layouts import PARTIAL_MEAN
from graphsplit.emission.communication.primitives import PAIRWISE
from graphsplit.graph.function_calls import CONTROL_FLOW
from graphsplit.planning.communication.transfers import Concatenation, Relay, Slice, Sum, Zeros
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.tasks import OPERATION, SEND, PlannedTask
from graphsplit.program.program import COPIES, SIZES, Op
from graphsplit.rules import Sharded
from graphsplit.rules.factors import DROPPED, LEFT_OUT, ZEROS, Shift


class Kernel(NamedTuple):
    """An operation that a task becomes.

    Attributes:
      type: of the operation.
      bytes: that it reads and writes, if it is none of the program; 0 for what is small, numbers of rows and the like.
    """

    type: str
    bytes: int = 0


_PRIMITIVES = {Slice: "SplitV", Concatenation: "ConcatV2", Relay: "Identity", Zeros: "ZerosLike"}
_WRITTEN_AS = {COPIES: "Identity", SIZES: "Identity"}


def kernels_of(plan: Decisions, tasks: Sequence[PlannedTask], task: PlannedTask) -> list[Kernel]:
    """Return the operations that a task becomes, its own first; none for what is sent, or needs no kernel.

    Args:
      plan: what is emitted. Its sizes are known, but for those that follow from data.
      tasks: all of them.
      task: one that runs an operation, or makes values of a move.
    """
    if task.kind == OPERATION and task.op is not None:
        op, own = plan.program.ops[task.op], plan.steps[task.op].shards if task.shard is not None else None
        is_mean = own is not None and PARTIAL_MEAN in own.gives and plan.mesh.shards > 1
        first = Kernel("Sum" if is_mean else _WRITTEN_AS.get(op.type, op.type))
        brought = list(_brought(op, tasks, task)) if op.type in CONTROL_FLOW else []
        return [first, *brought, *(_beside(plan, op, own, task) if own is not None else ())]
    value, moved = task.value, sum(task.bytes) + sum([_read_bytes(tasks, read) for read in task.reads])
    if isinstance(value, Sum):
        return list(_sums(value, task, moved))
    if value is None or (isinstance(value, Zeros) and not task.reads):
        return []
    return [Kernel(_PRIMITIVES[type(value)], moved)]


def _read_bytes(tasks: Sequence[PlannedTask], read: object) -> int:
    return tasks[read.task].bytes[read.index] if read is not None else 0  # type: ignore[attr-defined]


def _sums(value: Sum, task: PlannedTask, moved: int) -> Iterator[Kernel]:
    """Yield what adds up, see `primitives.add`, and divides."""
    parts, result = len(task.reads), sum(task.bytes)
    if parts > 1 and value.reduction in ("sum", "mean"):
        yield Kernel("AddN", moved)
    elif parts > 1:
        yield from [Kernel(PAIRWISE[value.reduction], 3 * result)] * (parts - 1)
    if value.entries:
        yield Kernel("RealDiv", 2 * result)


def _brought(op: Op, tasks: Sequence[PlannedTask], task: PlannedTask) -> Iterator[Kernel]:
    """Yield the copies of what a loop or branch hands on and others have made elsewhere."""
    for read in task.reads[int(CONTROL_FLOW[op.type].chooses) :]:
        if read is not None and tasks[read.task].kind == SEND:
            yield Kernel("Identity")


def _beside(plan: Decisions, op: Op, own: Sharded, task: PlannedTask) -> Iterator[Kernel]:
    """Yield what a shard's copy of an operation needs besides: see `shard_copies.py`."""
    result = sum(task.bytes)
    for shift in own.shift.values():
        yield from _shifted(op, shift, task)
    if own.weighted and plan.mesh.shards > 1:
        yield Kernel("Mul", 2 * result)
    if own.draw is None or task.shard is None:
        return
    if plan.random == "independent":
        yield from [Kernel("AddV2")] if own.draw.skip else []
        return
    shape = [int(size or 0) for size in op.out_shapes[0] or ()]
    [rows] = [*own.gives[0].pieces(plan.rows)] if len(own.gives[0].blocks) == 1 else [plan.rows]  # type: ignore[union-attr]
    first = sum(rows[: task.shard]) * math.prod(shape[1:])
    if first // own.draw.group * own.draw.skip:
        yield Kernel("AddV2")
    if first % own.draw.group:
        yield from (Kernel("Slice", 2 * result), Kernel("Reshape"))


def _shifted(op: Op, shift: Shift, task: PlannedTask) -> Iterator[Kernel]:
    """Yield what finds a shard's own rows among numbers of all rows."""
    yield Kernel("Sub")
    if shift.others not in (DROPPED, LEFT_OUT, ZEROS):
        return
    yield from map(Kernel, ["GreaterEqual", "Less", "LogicalAnd", *([] if task.shard else ["LogicalNot"])])
    if shift.others == LEFT_OUT:
        yield from map(Kernel, ["Where", *["Reshape"] * 4, *["GatherV2"] * 2])
        return
    yield Kernel("SelectV2")
    if shift.others == ZEROS:
        behind = len(op.in_shapes[0] or ()) - 1 - int(op.constants[2]) % len(op.in_shapes[0] or ())
        yield from [Kernel("ExpandDims")] * behind
        yield Kernel("SelectV2", 3 * sum(task.bytes))
