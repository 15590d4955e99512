"""Work: what one execution of an operation does, in floating-point operations and in bytes read and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.sizes.symbolic_sizes import Shape
from graphsplit.planning.costs.families import FREE, PASSED_ON, family_of
from graphsplit.program.flops import count_flops, has_flops
from graphsplit.program.program import Op, Program

Described = tuple[Shape | None, tf.DType]
"""Shape and dtype of a tensor."""

_OPAQUE = frozenset({tf.resource, tf.variant})
_STRING_BYTES = 16

_THROUGH_HANDLES = {
    "AssignAddVariableOp": 2,
    "AssignSubVariableOp": 2,
    "ResourceApplyAdam": 6,
    "ResourceApplyAdaMax": 6,
    "ResourceApplyAdagrad": 4,
    "ResourceApplyAdagradV2": 4,
    "ResourceApplyGradientDescent": 2,
    "ResourceApplyKerasMomentum": 4,
    "ResourceApplyMomentum": 4,
    "ResourceApplyRMSProp": 6,
    "ResourceGather": 1,
    "ResourceGatherNd": 1,
    "ResourceScatterAdd": 2,
    "ResourceScatterSub": 2,
    "ResourceScatterUpdate": 1,
}
"""Operations that read or write variables through handles, which have no size, and how many times as many bytes as
their largest tensor has that is: of Adam's step, the variable and both of its slots, each read and written."""


@dataclass(frozen=True)
class Work:
    """What one execution of an operation does.

    Attributes:
      family: of operations that reach about the same share of what a machine can do: see `families`.
      dtype: of its numbers, `float32`; that of its first result.
      flops: floating-point operations.
      bytes: read and written.
      is_least: whether sizes are not known, and it does this much or more.
    """

    family: str
    dtype: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    is_least: bool = False

    def times(self, count: float) -> Work:
        """Return the work of so many executions."""
        return Work(self.family, self.dtype, count * self.flops, count * self.bytes, self.is_least)


def work_of(
    op_type: str,
    attr: Callable[[str], Any],
    inputs: Sequence[Described],
    outputs: Sequence[Described],
    unknown_size: int | None = None,
) -> Work:
    """Return the work of one execution.

    Args:
      op_type: `MatMul`.
      attr: attribute name -> `AttrValue`.
      inputs, outputs: what it reads and makes.
      unknown_size: what a size counts as that is not known; None: as 1, and the work is the least that there can be.

    >>> x = ((8, 4), tf.float32)
    >>> work_of("Mul", lambda _: None, [x, x], [x])
    Work(family='elementwise', dtype='float32', flops=32, bytes=384, is_least=False)
    """
    family, dtype = family_of(op_type), outputs[0][1].name if outputs else ""
    if family in (FREE, PASSED_ON):
        return Work(family, dtype)
    found = [[_known(shape, unknown_size) for shape, _ in side] for side in (inputs, outputs)]
    flops = count_flops(op_type, attr, *found) or 0
    moved = bytes_moved(op_type, [bytes_of(described, unknown_size) for described in (*inputs, *outputs)])
    is_least = unknown_size is None and not all(map(is_known, (*inputs, *outputs)))
    return Work(family, dtype, flops, moved, is_least)


def bytes_moved(op_type: str, sizes: Sequence[int]) -> int:
    """Return how many bytes an operation reads and writes, given those of all that it reads and makes.

    >>> bytes_moved("AssignSubVariableOp", [0, 400])
    1200
    """
    return sum(sizes) + _THROUGH_HANDLES.get(op_type, 0) * max(sizes, default=0)


def is_known(described: Described) -> bool:
    """Return whether the size of a tensor is known; handles and lists have none that counts."""
    shape, dtype = described
    return dtype in _OPAQUE or (shape is not None and None not in shape)


def bytes_of(described: Described, unknown_size: int | None = None) -> int:
    """Return the size of a tensor in bytes; unknown sizes count as given, or as 1, and a string as 16 bytes."""
    shape, dtype = described
    if dtype in _OPAQUE:
        return 0
    entries = math.prod(_known(shape, unknown_size) or ())
    return int(entries) * (_STRING_BYTES if dtype == tf.string else int(dtype.size))


def _known(shape: Shape | None, unknown_size: int | None) -> tuple[int, ...] | None:
    """Return a shape as numbers; that of a tensor of unknown rank has one axis."""
    stand_in = 1 if unknown_size is None else unknown_size
    return tuple([stand_in if size is None else int(size) for size in ((None,) if shape is None else shape)])


def flops_of(op: Op) -> int:
    """Return the floating-point operations of one execution: 0 where no formula is known, bodies of loops once."""
    if op.bodies:
        return sum(map(flops_of_all, op.bodies.values()))
    if not has_flops(op.type):
        return 0
    shapes = [[_as_planned(shape) for shape in shapes] for shapes in (op.in_shapes, op.out_shapes)]
    return count_flops(op.type, op.attr, *shapes) or 0


def flops_of_all(program: Program) -> int:
    """Return the floating-point operations of a program."""
    return sum(map(flops_of, program.ops))


def _as_planned(shape: Shape | None) -> Shape | None:
    """Return a shape as numbers: unknown sizes as what they count as while planning."""
    return None if shape is None else tuple([None if size is None else int(size) for size in shape])
