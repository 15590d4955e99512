"""What depends on data: arguments, draws, rows; and what follows from variables alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.sizes.symbolic_sizes import Shape, is_same
from graphsplit.program.graph.walks import reached
from graphsplit.program.program import Op, Program
from graphsplit.rules.families.random import is_random


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
    has = any(is_same(size, batch) for shape in op.out_shapes for size in shape or ())
    return has and not had and not (_rearranges(op) and _follows_from_variables(op, program))


def _rearranges(op: Op) -> bool:
    """Return whether an operation gives the entries that it reads, no more and no fewer: a reshape, a concatenation.

    A weight that is reshaped so that an axis is as long as the batch has no rows all the same.
    """
    read = [shape for i, shape in enumerate(op.in_shapes) if i not in op.constants]
    counts = [_entries(shape) for shape in (*read, *op.out_shapes)]
    return None not in counts and sum(counts[: len(read)]) == sum(counts[len(read) :])  # type: ignore[arg-type]


def _entries(shape: Shape | None) -> int | None:
    known = shape is not None and all(type(size) is int for size in shape)
    return math.prod(shape) if known and shape is not None else None  # type: ignore[arg-type]


def _follows_from_variables(op: Op, program: Program) -> bool:
    """Return whether an operation reads the value of a variable, or what follows from one."""
    ops = program.ops
    behind = reached([tensor.op for tensor in op.inputs], lambda i: [tensor.op for tensor in ops[i].inputs])
    return any(tf.resource in ops[i].out_dtypes for i in behind)
