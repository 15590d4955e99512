"""Work: how many floating-point operations an operation does, on all rows; and what depends on data."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.symbolic_sizes import Shape, is_same
from graphsplit.program.flops import count_flops
from graphsplit.program.program import Op, Program
from graphsplit.rules.random import is_random


def flops_of(op: Op) -> int:
    """Return the floating-point operations of one execution: 0 where no formula is known, bodies of loops once."""
    if op.bodies:
        return sum(map(flops_of_all, op.bodies.values()))
    shapes = [[_known(shape) for shape in shapes] for shapes in (op.in_shapes, op.out_shapes)]
    return count_flops(op.type, op.attr, *shapes) or 0


def flops_of_all(program: Program) -> int:
    """Return the floating-point operations of a program."""
    return sum(map(flops_of, program.ops))


def _known(shape: Shape | None) -> Shape | None:
    """Return a shape as numbers: unknown sizes as what they count as while planning."""
    return None if shape is None else tuple([None if size is None else int(size) for size in shape])


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
