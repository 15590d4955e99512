"""Bodies: what loops and branches take, turn by turn, and the bytes of the lists that their turns fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphsplit.emission.shards.sizes import described_on
from graphsplit.planning.buffers import kept_each_turn
from graphsplit.planning.costs.seconds import Costs, sample_key
from graphsplit.planning.costs.work import Described, bytes_of, work_of
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op, Program
from graphsplit.program.reading.trip_counts import turns_of

_TURN_OPS = 3  # `Switch`, `Merge` and `NextIteration` of each value that a loop carries, in every turn


@dataclass(frozen=True)
class BodyTime:
    """How long a loop or branch takes.

    Attributes:
      seconds: in all turns.
      unknown: why that is only the least; "" if it is known.
    """

    seconds: float
    unknown: str = ""


def seconds_of_bodies(op: Op, plans: Mapping[str, Any], rows: tuple[int, ...], d: int | None, costs: Costs) -> BodyTime:
    """Return how long an operation takes that runs functions: all turns of a loop, the longest branch.

    Args:
      op: the loop, branch or call.
      plans: how the shard runs its functions (`LocalPlan`), by name; empty where they run on whole tensors.
      rows: of every shard.
      d: which shard; None for whole tensors.
      costs: of single operations.
    """
    found = [_seconds_of_body(body, plans.get(name), rows, d, costs) for name, body in op.bodies.items()]
    unknown = next((time.unknown for time in found if time.unknown), "")
    flow = CONTROL_FLOW.get(op.type)
    if flow is None or not flow.loops:
        branches = flow is not None and len(found) > 1
        return BodyTime((max if branches else sum)([time.seconds for time in found]), unknown)
    turns = turns_of(op)
    carried = _TURN_OPS * len(op.inputs) * costs.device.overhead_s
    each = sum([time.seconds for time in found]) + carried
    if turns is None:
        return BodyTime(each, f"how often {op.type} {op.name!r} turns is known only when it runs")
    return BodyTime(int(turns.number) * each, unknown)


def _seconds_of_body(body: Program, plan: Any, rows: tuple[int, ...], d: int | None, costs: Costs) -> BodyTime:
    seconds, unknown = 0.0, ""
    for op, plans, reads, makes in body_operations(body, plan, rows, d):
        if op.bodies:
            inner = seconds_of_bodies(op, plans, rows, d, costs)
            seconds, unknown = seconds + inner.seconds, unknown or inner.unknown
            continue
        work = work_of(op.type, op.attr, reads, makes, costs.unknown_size)
        seconds += costs.seconds(work, sample_key(op.node, reads, makes))
        if work.is_least:
            unknown = unknown or f"the sizes of {op.type} {op.name!r} are known only when it runs"
    return BodyTime(seconds, unknown)


class BodyOperation(NamedTuple):
    """An operation of a function that a loop, branch or call runs.

    Attributes:
      op: of the function.
      plans: how it runs functions in turn, by name.
      reads, makes: shapes and dtypes, of the shard's part.
    """

    op: Op
    plans: Mapping[str, Any]
    reads: Sequence[Described]
    makes: Sequence[Described]


def body_operations(body: Program, plan: Any, rows: tuple[int, ...], d: int | None) -> Iterator[BodyOperation]:
    """Yield what runs of a function: see `seconds_of_bodies`."""
    for i, op in enumerate(body.ops):
        step = plan.steps[i] if plan is not None else None
        sharded = step.shards if step is not None else None
        if step is not None and not (step.home or sharded):
            continue
        yield BodyOperation(op, sharded.bodies if sharded else {}, *described_on(body, op, sharded, rows, d))


def bytes_in_lists(
    op: Op, plans: Any, rows: tuple[int, ...], d: int | None, unknown_size: int | None
) -> dict[int, int]:
    """Return what a loop has put into the lists that it returns, by output; nothing for others than loops.

    Args:
      op: the operation that runs functions.
      plans: how the shard runs its functions (`LocalPlan`), by name; empty where they run on whole tensors.
      rows: of every shard.
      d: which shard; None for whole tensors.
      unknown_size: what sizes count as that are not known.
    """
    turns = turns_of(op)
    if turns is None:
        return {}
    plan = plans.get(function_names(op.node)[1])

    def size_of(body: Program, reader: Op, operand: int) -> int:
        sharded = plan.steps[reader.index].shards if plan is not None else None
        reads, _ = described_on(body, reader, sharded, rows, d)
        return bytes_of(reads[operand], unknown_size)

    return {k: int(turns.number) * size for k, size in kept_each_turn(op, size_of).items()}
