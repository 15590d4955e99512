"""Moments: mean and variance over rows of the batch, merged from those of each shard's own rows.

A variance is the mean of squared differences from a mean. Taken literally, the shards send each other what they have of
the mean, and then of the variance. But each can take the variance of its own rows around their own mean: of means `m_i`
and variances `v_i` of shares `w_i` of the rows, all together have the mean `m = sum(w_i m_i)` and the variance
`sum(w_i (v_i + (m_i - m)^2))` (Chan, Golub, LeVeque, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/). So both are
sent at once. No square of a mean is subtracted: it is as exact as in two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import MOMENTS, Shard
from graphsplit.core.protos import constant_value, make_node
from graphsplit.core.sizes import is_one
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.costs.exchanges import has_few_bytes
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import sides_of

PASSED_ON = frozenset({"StopGradient", "Identity", "PreventGradient"})
_EXACT = frozenset({tf.float32, tf.float64, tf.bfloat16})  # (a sum of squares overflows in float16)


def with_moments(program: Program, few_bytes: int) -> Program:
    """Return a program in which the variances around means are marked, each behind a difference from its own mean.

    Args:
      program: which.
      few_bytes: the most of a mean that is merged; see `Mesh.few_bytes`.
    """
    means: dict[int, Tensor] = {}  # of each variance, by position
    sides = sides_of(program)
    for op in program.ops:
        mean = _mean_of(program, op) if op.type == "Mean" else None
        if mean is None or mean in means.values() or sides.of(mean) != sides.of_op(op.index):
            continue
        if has_few_bytes(program, mean, few_bytes):
            means[op.index] = mean
    return _MomentsWriter(program, means).write() if means else program


def _mean_of(program: Program, variance: Op) -> Tensor | None:
    """Return the mean around which an operation takes a variance of the same tensor over the same axes, or None."""
    difference = _squared(program, program.ops[variance.inputs[0].op])
    if difference is None:
        return None
    x, around = difference
    mean = program.ops[around.op]
    while mean.type in PASSED_ON and not mean.controls:
        mean = program.ops[mean.inputs[0].op]
    is_alike = mean.type == "Mean" and mean.inputs[0] == x and mean.out_dtypes[0] in _EXACT
    if not is_alike or not mean.out_shapes[0] or program.shape(x) is None or varies_along(program, around, variance):
        return None
    axes, other_axes = (op.constants.get(1) for op in (mean, variance))
    if axes is None or other_axes is None or not np.array_equal(np.ravel(axes), np.ravel(other_axes)):
        return None
    return Tensor(mean.index, 0)


def _squared(program: Program, squares: Op) -> tuple[Tensor, Tensor] | None:
    """Return the two tensors whose difference an operation squares, however that is written; None for none."""
    if squares.type == "SquaredDifference":
        return squares.inputs[0], squares.inputs[1]
    if not is_square(program, squares):
        return None
    difference = program.ops[squares.inputs[0].op]
    return (difference.inputs[0], difference.inputs[1]) if difference.type == "Sub" else None


def is_square(program: Program, op: Op) -> bool:
    """Return whether an operation squares something, however that is written."""
    power = program.ops[op.inputs[1].op] if op.type == "Pow" else None
    if power is not None:
        return power.type == "Const" and bool(np.all(constant_value(power.node) == 2))
    return op.type == "Square" or (op.type == "Mul" and op.inputs[0] == op.inputs[1])


def varies_along(program: Program, tensor: Tensor, reduction: Op) -> bool:
    """Return whether a tensor, broadcast to what an operation reduces, may differ along the axes of the reduction."""
    shape, axes, rank = program.shape(tensor), reduction.constants.get(1), len(reduction.in_shapes[0] or ())
    if shape is None or axes is None:
        return True
    first = rank - len(shape)
    return any(axis % rank >= first and not is_one(shape[axis % rank - first]) for axis in np.ravel(axes))


def averaged_over(steps: Sequence[Step], collective: Collective) -> Shard | None:
    """Return the layout of what moments are taken of that a collective merges; None if it merges none."""
    first = collective.moves[0]
    shards = steps[first.tensor.op].shards
    layout = shards.wants[0] if shards and first.source in MOMENTS else None
    return layout if isinstance(layout, Shard) else None


class _MomentsWriter(ProgramWriter):
    def __init__(self, program: Program, mean_of_variance: Mapping[int, Tensor]):
        super().__init__(program)
        self._mean_of_variance = mean_of_variance
        self._means = {mean.op for mean in mean_of_variance.values()}

    def _visit(self, op: Op) -> None:
        mean = self._mean_of_variance.get(op.index)
        if mean is None:
            super()._visit(op)
            if op.index in self._means:
                self._lay(self._became[op.index][0], merged="mean")
            return
        operands = [self._result(self._program.ops[mean.op].inputs[0]), self._result(mean)]
        dtype, name = self._type_of(operands[0]), self._unused(f"{op.name}/own_difference")
        node = make_node(name, "SquaredDifference", [], T=dtype)
        squares = self._new(node, operands, [(self._shape_of(operands[0]), dtype)], {})
        self._lay(squares.op, merged="difference")
        variance = self._variance(op, mean, [squares, self._result(op.inputs[1])])
        self._lay(variance.op, merged="variance")
        is_alike = self._shape_of(variance) == op.out_shapes[0]
        result = variance if is_alike else self._reshaped(op, variance)
        self._note(op, [result], [result.op])

    def _variance(self, op: Op, mean: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Append a variance that has the shape of its mean: with axes of one entry, or without."""
        like, node = self._program.ops[mean.op], type(op.node)()
        node.CopyFrom(op.node)
        node.attr["keep_dims"].CopyFrom(like.node.attr["keep_dims"])
        variance_op = replace(op, node=node)
        return self._append(variance_op, op.name, operands, self._controls(op), like.out_shapes, op.constants)
