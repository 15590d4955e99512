"""Random ops on the shards, as graph nodes: see `rules/families/random.py` for what is drawn and why it is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import NodeWriter, constant_node, copied, make_node
from graphsplit.errors import CheckError
from graphsplit.program.program import Op
from graphsplit.rules.factors import Draw
from graphsplit.rules.families.random import draw_of, note_part, part_drawn


def own_numbers(op: Op, name: str, inputs: Sequence[str], rows: range | None = None) -> list[Any]:
    """Return the nodes that draw those numbers that somebody has of what one device would draw.

    Args:
      op: of the single device, or of a device of an axis, which draws a part.
      name: of the node that yields the numbers.
      inputs: what it reads; a shape operand already says how many numbers there are along each axis.
      rows: which entries of its first axis are drawn; None for all.

    Raises:
      CheckError: if it is not known how many there are: see `measured_rows`.
    """
    draw, shape = draw_of(op), [size for size in op.out_shapes[0] or () if type(size) is int]
    if op.out_shapes[0] is None or len(shape) < len(op.out_shapes[0]):
        raise CheckError(f"{op.type} {op.name!r} draws numbers of the shape {op.out_shapes[0]}, as if it were known.")
    entries_of_axis, part = [range(size) for size in shape], part_drawn(op.node)
    if part is not None:
        entries_of_axis[part.axis], shape[part.axis] = range(part.begin, part.begin + shape[part.axis]), part.length
    entries_of_axis[0] = entries_of_axis[0] if rows is None else rows
    firsts, length = _runs(shape, entries_of_axis)
    local, dtype = [len(entries) for entries in entries_of_axis], tf.as_dtype(op.attr("dtype").type)
    if len(firsts) == 1:
        return _run(op.node, name, inputs, local, firsts[0], draw)
    prefix = f"{name}/graphsplit"
    nodes = [constant_node(f"{prefix}_length", np.array([length], np.int64), tf.int64)]
    names = [f"{prefix}_run_{i}" for i in range(len(firsts))]
    for run, first in zip(names, firsts, strict=True):
        nodes += _run(op.node, run, [f"{prefix}_length", *inputs[1:]], [length], first, draw)
        nodes[-1].attr["Tshape"].type = tf.int64.as_datatype_enum
    return [
        *nodes,
        constant_node(f"{prefix}_axis", np.array(0, np.int32), tf.int32),
        make_node(f"{prefix}_all", "ConcatV2", [*names, f"{prefix}_axis"], N=len(names), T=dtype, Tidx=tf.int32),
        constant_node(f"{prefix}_local_shape", np.array(local, np.int64), tf.int64),
        make_node(name, "Reshape", [f"{prefix}_all", f"{prefix}_local_shape"], T=dtype, Tshape=tf.int64),
    ]


def _runs(shape: Sequence[int], entries_of_axis: Sequence[range]) -> tuple[list[int], int]:
    """Return where numbers begin that follow each other in the whole, and how many each time.

    >>> _runs((2, 4, 3), (range(2), range(1, 3), range(3)))
    ([3, 15], 6)
    """
    cut = [axis for axis, size in enumerate(shape) if len(entries_of_axis[axis]) < size]
    last = cut[-1] if cut else 0
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    firsts = [0]
    for axis in range(last):
        firsts = [first + strides[axis] * entry for first in firsts for entry in entries_of_axis[axis]]
    return [first + strides[last] * entries_of_axis[last].start for first in firsts], strides[last] * len(
        entries_of_axis[last]
    )


def _run(original: Any, name: str, inputs: Sequence[str], local: Sequence[int], first: int, draw: Draw) -> list[Any]:
    """Return the nodes that draw numbers of a local shape that follow each other from a first one."""
    spare = first % draw.group
    nodes, moved_inputs = _moved(name, inputs, first // draw.group * draw.skip)
    if not spare:
        return [*nodes, _drawing_all(copied(original, name, moved_inputs))]
    parts = {"shape": [spare + math.prod(local)], "begin": [spare], "size": [-1], "local_shape": [*local]}
    prefix = f"{name}/graphsplit"
    nodes += [constant_node(f"{prefix}_{part}", np.array(value, np.int64), tf.int64) for part, value in parts.items()]
    flat = _drawing_all(copied(original, f"{prefix}_flat", [f"{prefix}_shape", *moved_inputs[1:]]))
    flat.attr["Tshape"].type = tf.int64.as_datatype_enum
    dtype = tf.as_dtype(original.attr["dtype"].type)
    cut = make_node(
        f"{prefix}_rows", "Slice", [f"{prefix}_flat", f"{prefix}_begin", f"{prefix}_size"], T=dtype, Index=tf.int64
    )
    shaped = make_node(name, "Reshape", [f"{prefix}_rows", f"{prefix}_local_shape"], T=dtype, Tshape=tf.int64)
    return [*nodes, flat, cut, shaped]


def _drawing_all(node: Any) -> Any:
    note_part(node, None)
    return node


def measured_rows(
    original: Any,
    name: str,
    inputs: Sequence[str],
    draw: Draw,
    first: str,
    w: NodeWriter,
) -> list[Any]:
    """Return the nodes that draw the numbers of a shard whose place is only known in each run: see `own_rows`.

    Args:
      first: the reference of the number of its first number, 64 bits.
      w: writes the arithmetic on sizes.
    """
    integer, local_dtype = tf.int64, tf.as_dtype(original.attr["Tshape"].type)
    group = w.constant(draw.group)
    spare, groups = w("FloorMod", first, group, T=integer), w("FloorDiv", first, group, T=integer)
    low = w("Mul", groups, w.constant(draw.skip), T=integer)
    steps = w("Pack", low, w.constant(0), N=2, axis=0, T=integer)
    counter = w("AddV2", inputs[2], w.cast(steps, integer, tf.uint64), T=tf.uint64)
    own_shape = w.cast(inputs[0], local_dtype, integer)
    count = w("AddV2", spare, w("Prod", own_shape, w.constant([0]), T=integer, Tidx=integer), T=integer)
    flat_shape, start = (w("Pack", size, N=1, axis=0, T=integer) for size in (count, spare))
    flat = copied(original, f"{name}/graphsplit_flat", [flat_shape, inputs[1], counter, *inputs[3:]])
    flat.attr["Tshape"].type = integer.as_datatype_enum
    dtype = tf.as_dtype(original.attr["dtype"].type)
    slice_inputs = [flat.name, start, w.constant([-1])]
    cut = make_node(f"{name}/graphsplit_rows", "Slice", slice_inputs, T=dtype, Index=integer)
    return [flat, cut, make_node(name, "Reshape", [cut.name, inputs[0]], T=dtype, Tshape=local_dtype)]


def _moved(name: str, inputs: Sequence[str], steps: int) -> tuple[list[Any], list[str]]:
    """Return inputs whose counter (the third) is moved on by so many steps; it has a low and a high word."""
    if not steps:
        return [], list(inputs)
    constant = constant_node(f"{name}/graphsplit_steps", np.array([steps, 0], np.uint64), tf.uint64)
    counter = make_node(f"{name}/graphsplit_counter", "AddV2", [inputs[2], constant.name], T=tf.uint64)
    return [constant, counter], [*inputs[:2], counter.name, *inputs[3:]]
