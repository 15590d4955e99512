"""Kernels: which operations a task of a plan becomes when it is emitted, without emitting the plan.

What a shard's copy of an operation needs besides is told by writing one. Constants are no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graphsplit.emission.communication import PAIRWISE
from graphsplit.emission.emitted_graph import Draft
from graphsplit.emission.shards.random_numbers import own_numbers
from graphsplit.emission.shards.row_counts import FixedRows, Site
from graphsplit.emission.shards.shard_copies import ShardCopies
from graphsplit.planning.communication.transfers import Concatenation, Merged, Packed, Relay, Slice, Sum, Zeros
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import OPERATION, SEND, PlannedTask
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import SIZES, Op
from graphsplit.rules import Sharded
from graphsplit.rules.families.random import part_drawn


class Kernel(NamedTuple):
    """An operation that a task becomes.

    Attributes:
      type: of the operation.
      bytes: that it reads and writes, if it is none of the program; 0 for what is small, numbers of rows and the like.
    """

    type: str
    bytes: int = 0


_PRIMITIVES = {Packed: "Pack", Slice: "SplitV", Concatenation: "ConcatV2", Relay: "Identity", Zeros: "ZerosLike"}
_WRITTEN_AS = {SIZES: "Identity", "Const": "Const"}
_AS_LARGE = frozenset({"Slice", "ConcatV2"})  # as what the operation makes


class Kernels:
    """Tells which operations tasks become.

    Args:
      plan: what is emitted. Its sizes are known, but for those that follow from data.
      tasks: all of it.
    """

    def __init__(self, plan: Plan, tasks: Sequence[PlannedTask]):
        self._plan = plan
        self._tasks = tasks
        self._draft = Draft(plan.program, plan.mesh.shards)
        site = Site(plan.default_device, dict(enumerate(plan.devices)), "", self._draft.add_sizes, {})
        self._copies = ShardCopies(self._draft, FixedRows(plan.rows, site), plan.places, lambda *_: None)

    def of(self, task: PlannedTask) -> list[Kernel]:
        """Return the operations that a task becomes, its own first; none for what is sent, or needs no kernel."""
        if task.kind == OPERATION and task.op is not None:
            return self._of_operation(self._plan.program.ops[task.op], task)
        value, result = task.value, sum(task.bytes)
        moved = result + sum([self._tasks[read.task].bytes[read.index] for read in task.reads if read is not None])
        if isinstance(value, Sum):
            return list(_sums(value, len(task.reads), result, moved))
        if isinstance(value, Merged):
            kinds = ["SquaredDifference", "AddV2", "Mean"] if value.which else ["Pack", "Unpack", "Mean"]
            return [Kernel(kind, moved) for kind in kinds]
        if value is None or (isinstance(value, Zeros) and not task.reads):
            return []
        return [Kernel(_PRIMITIVES[type(value)], moved)]

    def differ(self, op: Op, shards: Sharded | None) -> bool:
        """Return whether an operation may become other kernels on each of the shards."""
        return bool(op.bodies or (shards and (shards.draw or shards.shift)) or part_drawn(op.node) is not None)

    def _of_operation(self, op: Op, task: PlannedTask) -> list[Kernel]:
        sharded = self._plan.steps[op.index].shards if task.shard is not None else None
        if op.type in CONTROL_FLOW:  # what it hands on and others have made elsewhere is copied first
            reads = [read for read in task.reads[int(CONTROL_FLOW[op.type].chooses) :] if read is not None]
            return [Kernel(op.type), *[Kernel("Identity") for r in reads if self._tasks[r.task].kind == SEND]]
        if op.type in _WRITTEN_AS:
            return [Kernel(_WRITTEN_AS[op.type])]
        first, *nodes = self._written(op, sharded, task)
        result, name = (
            2 * sum(task.bytes),
            op.name if sharded is None else self._draft.prefixes[task.shard or 0] + op.name,
        )
        sizes = [result if node.op in _AS_LARGE or node.name == name else 0 for node in nodes]
        return [Kernel(first.op), *[Kernel(node.op, size) for node, size in zip(nodes, sizes, strict=True)]]

    def _written(self, op: Op, sharded: Sharded | None, task: PlannedTask) -> list[Any]:
        """Return what is written for an operation that calls nothing, itself first."""
        names, nodes = ["operand"] * len(op.inputs), self._draft.nodes
        if sharded is None or task.shard is None:
            nodes = own_numbers(op, op.name, names) if part_drawn(op.node) is not None else [op.node]
        else:
            nodes.clear()
            self._copies.write(op, sharded, task.shard, task.device, names, ())
        written = [node for node in nodes if node.op != "Const"]
        own_type = [node for node in written if node.op in (op.type, "Sum")][:1]
        return [*own_type, *[node for node in written if node is not own_type[0]]]


def _sums(value: Sum, parts: int, result: int, moved: int) -> Iterator[Kernel]:
    """Yield what adds up, see `collectives`, and divides."""
    if parts > 1 and value.reduction in ("sum", "mean"):
        yield Kernel("AddN", moved)
    elif parts > 1:
        yield from [Kernel(PAIRWISE[value.reduction], 3 * result)] * (parts - 1)
    if value.entries:
        yield Kernel("RealDiv", 2 * result)
