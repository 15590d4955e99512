"""Buffers: which operations take memory of their own for what they make, and what loops keep in lists of tensors.

A loop whose iterations put tensors into a list returns all of them, for a gradient's loop to take out again. Such a
list has no shape and is never sent; what it holds is on the device of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import SIZES, Op, Program, Tensor
from graphsplit.program.reading.trip_counts import origin

SAME_BUFFER = frozenset(
    {
        *("Bitcast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze"),
        *("StopGradient", "Switch", "Merge", "TensorListFromTensor"),
    }
)
"""Operations that hand on the buffer that they read."""
NO_BUFFER = frozenset({"Const", "Placeholder", "ReadVariableOp", SIZES})
"""Operations whose result is there at any time: nothing is held for it."""
_ELEMENT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Operations that put a tensor into a list, their first operand, and which operand that tensor is."""
_SHARES = SAME_BUFFER | {"TensorListGetItem"}
"""Operations whose result is the buffer of their first operand, or a part of it."""
_THERE = frozenset({"Const", "ReadVariableOp"})
"""Operations whose result was there before, in the graph or in a variable."""


def kept_each_iteration(op: Op, size_of: Callable[[Program, Op, int], int]) -> dict[int, int]:
    """Return the bytes that each iteration of a loop puts into the lists that it returns, by output.

    Args:
      op: the operation; of one that is no loop nothing is returned.
      size_of: the bytes of an operand of an operation of the body.
    """
    flow = CONTROL_FLOW.get(op.type) if op.bodies else None
    if flow is None or not flow.loops:
        return {}
    body, bytes_by_output, counted = op.bodies[function_names(op.node)[1]], dict[int, int](), set[Tensor]()
    for k, output in enumerate(body.outputs[: len(op.out_dtypes)]):
        if op.out_dtypes[k] == tf.variant:
            for reader, operand in _put(body, output):
                maker = _made(body, reader.inputs[operand])
                if maker is not None and maker not in counted:
                    counted.add(maker)
                    bytes_by_output[k] = bytes_by_output.get(k, 0) + size_of(body, reader, operand)
    return bytes_by_output


def has_lists_of_unknown_size(op: Op) -> bool:
    """Return whether a loop returns lists of lists, which loops inside of it have filled, or of unknown sizes."""
    flow = CONTROL_FLOW.get(op.type) if op.bodies else None
    if flow is None or not flow.loops:
        return False
    body = op.bodies[function_names(op.node)[1]]
    lists = [tensor for tensor in body.outputs[: len(op.out_dtypes)] if body.dtype(tensor) == tf.variant]
    put = [reader.inputs[operand] for output in lists for reader, operand in _put(body, output)]
    shapes = [body.shape(tensor) for tensor in put if body.dtype(tensor) != tf.variant]
    is_known = len(shapes) == len(put) and all(shape is not None and None not in shape for shape in shapes)
    return not is_known or any(body.ops[origin(body, output).op].bodies for output in lists)


def _put(body: Program, output: Tensor) -> Iterator[tuple[Op, int]]:
    """Yield what is put into a list in an iteration: the operations that do, and which of their operands it is."""
    while True:
        op = body.ops[output.op]
        if op.type in _ELEMENT:
            yield op, _ELEMENT[op.type]
        elif op.type != "Identity":
            return
        output = op.inputs[0]


def _made(body: Program, tensor: Tensor) -> Tensor | None:
    """Return what an iteration makes that a tensor is the buffer of; None if it is there before: lists hold no copies.

    (What is the same in all iterations, the weights of a recurrent layer, and rows of what the loop runs over.) What a
    value was before an iteration is what the iteration before has made.
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
