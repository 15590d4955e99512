"""Bytes of lists of tensors: what the turns of a loop put into them for its gradient, or for who reads all turns."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from graphsplit.costs.work import bytes_of
from graphsplit.emission.sizes import described, shapes_on
from graphsplit.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.prediction.buffers import SAME_BUFFER
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.trip_counts import origin, turns_of

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
    op = body.ops[reader]
    sharded = plan.steps[reader].shards if plan is not None else None
    wants = sharded.wants if sharded is not None and d is not None else None
    tensor = op.inputs[operand]
    dtype = body.ops[tensor.op].out_dtypes[tensor.index]
    [element] = described(
        shapes_on([op.in_shapes[operand]], None if wants is None else [wants[operand]], rows, d or 0), [dtype]
    )
    return bytes_of(element, unknown_size)
