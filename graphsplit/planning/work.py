"""What depends on data: arguments, draws, rows; and what follows from variables alone."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.symbolic_sizes import is_same
from graphsplit.program.program import Op, Program
from graphsplit.rules.random import is_random


def data_in(program: Program, batch: int) -> list[bool]:
    """Return of each operation whether it depends on more than variables: arguments, draws, rows born on the way."""
    found: list[bool] = []
    for op in program.ops:
        found.append(is_data(op, found, program, batch))
    return found


def is_data(op: Op, before: Sequence[bool], program: Program, batch: int) -> bool:
    """Return whether an operation depends on more than variables, given that of those before it."""
    if op.type == "Placeholder":
        return bool(op.out_dtypes[0] != tf.resource)
    if any(before[tensor.op] for tensor in op.inputs) or is_random(op.type):
        return True
    if any(program.ops[t.op].out_dtypes[t.index] == tf.resource for t in op.inputs):
        return False
    had = any(is_same(size, batch) for shape in op.in_shapes for size in shape or ())
    return not had and any(is_same(size, batch) for shape in op.out_shapes for size in shape or ())
