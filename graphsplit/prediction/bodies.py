"""Bodies: what loops and branches take, turn by turn, and the bytes of the lists that their turns fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.costs.seconds import Costs, sample_key
from graphsplit.costs.work import Described, bytes_of, work_of
from graphsplit.emission.shards.sizes import described_on
from graphsplit.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.planning.memory import SAME_BUFFER
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import origin, turns_of

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
        yield BodyOperation(op, sharded.bodies if sharded else {}, *described_on(body, op, sharded, rows, d))


_ELEMENT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Operations that put a tensor into a list, their first operand, and which operand that tensor is."""

_SHARES = SAME_BUFFER | {"TensorListGetItem"}
"""Operations whose result is the buffer of their first operand, or a part of it."""


_THERE = frozenset({"Const", "ReadVariableOp"})
"""Operations whose result was there before, in the graph or in a variable."""


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
    flow = CONTROL_FLOW.get(op.type)
    turns = turns_of(op) if flow is not None and flow.loops else None
    if turns is None:
        return {}
    name = function_names(op.node)[1]
    body, plan = op.bodies[name], plans.get(name)
    found, held = {}, set[Tensor | None]()
    for k, output in enumerate(body.outputs[: len(op.out_dtypes)]):
        if op.out_dtypes[k] == tf.variant:
            found[k] = 0
            for reader, operand in _put(body, output):
                made = _made(body, body.ops[reader].inputs[operand])
                if made is not None and made not in held:
                    held.add(made)
                    found[k] += turns.number * _bytes_of(body, operand, reader, plan, rows, d, unknown_size)
    return found


def _made(body: Program, tensor: Tensor) -> Tensor | None:
    """Return what a turn makes that a tensor is the buffer of; None if it is there before: lists hold no copies.

    (What is the same in all turns, the weights of a recurrent layer, and rows of what the loop runs over.) What a value
    was before a turn is what the turn before has made.
    """
    seen = set()
    while tensor not in seen:
        seen.add(tensor)
        tensor = origin(body, tensor)
        op = body.ops[tensor.op]
        if op.type in _SHARES:
            tensor = op.inputs[0]
            continue
        if op.index not in body.inputs:
            return None if op.type in _THERE else tensor
        k = body.inputs.index(op.index)
        if k >= len(body.outputs):
            return None
        tensor = body.outputs[k]
    return None


def _put(body: Program, output: Tensor) -> list[tuple[int, int]]:
    """Return what is put into a list in a turn: the operations that do, and which of their operands it is."""
    found = []
    while True:
        op = body.ops[output.op]
        if op.type in _ELEMENT:
            found.append((op.index, _ELEMENT[op.type]))
        elif op.type != "Identity":
            return found
        output = op.inputs[0]


def _bytes_of(
    body: Program, operand: int, reader: int, plan: Any, rows: tuple[int, ...], d: int | None, unknown_size: int | None
) -> int:
    sharded = plan.steps[reader].shards if plan is not None else None
    reads, _ = described_on(body, body.ops[reader], sharded, rows, d)
    return bytes_of(reads[operand], unknown_size)
