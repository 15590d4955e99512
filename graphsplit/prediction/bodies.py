"""Bodies: what loops and branches take, turn by turn, operation after operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphsplit.costs.seconds import Costs, sample_key
from graphsplit.costs.work import Described, work_of
from graphsplit.emission.sizes import described, shapes_on
from graphsplit.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program
from graphsplit.program.trip_counts import turns_of

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
    return BodyTime(turns.number * each, unknown)


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
        wants, gives = (sharded.wants, sharded.gives) if sharded and d is not None else (None, None)
        read_dtypes = [body.ops[tensor.op].out_dtypes[tensor.index] for tensor in op.inputs]
        reads = described(shapes_on(op.in_shapes, wants, rows, d or 0), read_dtypes)
        makes = described(shapes_on(op.out_shapes, gives, rows, d or 0), op.out_dtypes)
        yield BodyOperation(op, sharded.bodies if sharded else {}, reads, makes)
