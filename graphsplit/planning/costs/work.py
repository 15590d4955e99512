"""Work: what one execution of an operation does, in floating-point operations and in bytes read and written.

Whether it depends on data (arguments, draws, rows), or follows from variables alone; and from where on it pays to
spread it, or to send something packed. Planning decides these before it knows a machine, by measurements that are named
here. What follows for a machine is told by prediction: `gs.predict`, `plan="auto"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.sizes import Shape, has_sizes, is_same
from graphsplit.planning.costs.families import FREE, PASSED_ON, family_of
from graphsplit.program.flops import count_flops, has_flops
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program
from graphsplit.rules.families.random import is_random

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
    shapes = [[_known(shape, unknown_size) for shape, _ in side] for side in (inputs, outputs)]
    flops = count_flops(op_type, attr, *shapes) or 0
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


def flops_of(op: Op, unknown_size: int | None = None) -> int:
    """Return the floating-point operations of one execution: 0 where no formula is known, bodies of loops once.

    Args:
      op: which.
      unknown_size: what a size counts as that follows from data; None: what has one has no floating-point operations.
    """
    if op.bodies:
        return sum(map(flops_of_all, op.bodies.values()))
    if not has_flops(op.type):
        return 0
    shapes = [[_as_planned(shape, unknown_size) for shape in shapes] for shapes in (op.in_shapes, op.out_shapes)]
    return count_flops(op.type, op.attr, *shapes) or 0


def has_uncounted_flops(op: Op, unknown_size: int | None = None) -> bool:
    """Return whether an operation has a formula, and shapes that say too little for it: of an unknown rank."""
    shapes = [[_as_planned(shape, unknown_size) for shape in shapes] for shapes in (op.in_shapes, op.out_shapes)]
    return has_flops(op.type) and count_flops(op.type, op.attr, *shapes) is None


def flops_of_all(program: Program) -> int:
    """Return the floating-point operations of a program."""
    return sum(map(flops_of, program.ops))


def _as_planned(shape: Shape | None, unknown_size: int | None) -> Shape | None:
    """Return a shape as numbers: unknown sizes as what they count as while planning."""
    return None if shape is None else tuple([unknown_size if size is None else int(size) for size in shape])


def data_in(program: Program, batch: int) -> list[bool]:
    """Return of each operation whether it depends on more than variables: arguments, draws, rows born on the way."""
    have_data: list[bool] = []
    for op in program.ops:
        have_data.append(is_data(op, have_data, program, batch))
    return have_data


def is_data(op: Op, have_data: Sequence[bool], program: Program, batch: int) -> bool:
    """Return whether an operation depends on more than variables, given that of those before it."""
    if op.type == "Placeholder":
        return bool(op.out_dtypes[0] != tf.resource)
    if any(have_data[tensor.op] for tensor in op.inputs) or is_random(op.type):
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
    shapes = [shape for i, shape in enumerate(op.in_shapes) if i not in op.constants]
    counts = [_entries(shape) for shape in (*shapes, *op.out_shapes)]
    return None not in counts and sum(counts[: len(shapes)]) == sum(counts[len(shapes) :])  # type: ignore[arg-type]


def _entries(shape: Shape | None) -> int | None:
    is_static = shape is not None and all(type(size) is int for size in shape)
    return math.prod(shape) if is_static and shape is not None else None  # type: ignore[arg-type]


def _follows_from_variables(op: Op, program: Program) -> bool:
    """Return whether an operation reads the value of a variable, or what follows from one."""
    ops = program.ops
    behind = reached([tensor.op for tensor in op.inputs], lambda i: [tensor.op for tensor in ops[i].inputs])
    return any(tf.resource in ops[i].out_dtypes for i in behind)


def may_repeat(program: Program, op: Op, bytes_for_it: int) -> bool:
    """Return whether several devices may compute what one could: nobody can tell, and it is little work.

    Args:
      program, op: an operation of it.
      bytes_for_it: of what it makes, and of what it reads if that counts too: the work is little beside these.
    """
    shapes = [*op.in_shapes, *op.out_shapes]
    if op.stateful or op.controls or op.bodies or op.device or op.index in program.inputs or op.symbols:
        return False
    if any(shape is None or None in shape or has_sizes(shape) for shape in shapes):
        return False
    if not {tf.resource, tf.variant, tf.string}.isdisjoint([*op.out_dtypes, *map(program.dtype, op.inputs)]):
        return False
    entry_bytes = max([dtype.size for dtype in op.out_dtypes], default=1)
    return flops_of(op) * entry_bytes <= MOST_FLOPS_REPEATED * bytes_for_it


SMALL_BYTES = 16_384
"""Up to this size tensors travel packed. `python -m benchmarks.packing`: a fifth faster on 8 devices; of four times the
size, even. Nor is what is smaller sent in another way to save bytes: rows of a table, columns in exchange for rows."""

BUCKET_BYTES = 65_536
"""The most bytes of a bucket of sums, unless somebody asks for another size. `python -m benchmarks.packing
--buckets`, 32 layers on 4 devices: without buckets 1.18 of the time, with those of 8 kB 1.00, of 1 MB 1.03."""

BUCKET_BYTES_BETWEEN_HOSTS = 524_288
"""The most of one whose sums pass from host to host. Between two processes on loopback a transfer takes 0.15 to 0.2 ms
whatever it carries, and then 500 to 800 MB/s pass: it costs as much as 114 kB (0.175 ms at 650 MB/s). Of a transfer of
4.6 times that, 18 % is the start; and it takes 1 ms, little to wait for of a step that takes at least 7 there."""

FEWEST_IN_BUCKET = 4
"""A bucket of fewer takes as many nodes as it saves."""

MOST_FLOPS_REPEATED = 32
"""For each entry that something small is made of: more is work, and is done once."""

FLOPS_PER_BYTE = 1
"""That must be spread for each byte moved: a product with four columns pays, with one it does not."""

LEAST_OTHER_FLOPS = 1_000_000
"""For which anything is cut that has neither the batch's rows nor an argument's."""

LEAST_OTHER_BYTES = 65_536
"""As many bytes of such a thing."""

LEAST_SHARE = 0.01
"""Of all work: where less is done whole, nobody looks for what could be cut of it."""

COPY_BYTES = 1024
"""Less than this is not worth a thought: the copy of a tensor between devices costs as much, whatever it carries. So
each shard makes it by itself, a sum of it is added up in one place, and it decides nothing along an axis of a mesh."""
