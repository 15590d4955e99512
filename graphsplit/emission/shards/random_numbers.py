"""Random ops on the shards, as graph nodes: see `rules/families/random.py` for what is drawn and why it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import constant_node, copied, make_node
from graphsplit.core.protos.node_writer import Writer
from graphsplit.rules.factors import Draw

_SEEDS_APART = 0x9E3779B1  # any large odd number: seeds of neighbouring shards share no digits


def own_rows(
    original: Any,
    name: str,
    inputs: Sequence[str],
    shape: Sequence[int],
    each: int,
    draw: Draw,
    rows: Sequence[int],
    d: int,
) -> list[Any]:
    """Return the nodes that draw the numbers that shard `d`'s rows have on one device.

    Args:
      original: the `NodeDef` of the single device.
      name: of the node that yields the numbers.
      inputs: what the op reads; a shape operand already has this shard's rows.
      shape: of the whole result.
      each: how many entries its first axis has for each row.
      draw: how the op makes numbers from a counter.
      rows: of every shard.
    """
    per_row = int(np.prod(shape[1:], dtype=np.int64)) * each
    first = sum(rows[:d]) * per_row
    spare = first % draw.group
    nodes, given = _moved(name, inputs, [first // draw.group * draw.skip, 0])
    if not spare:
        return [*nodes, copied(original, name, given)]
    parts = {
        "shape": [spare + rows[d] * per_row],
        "begin": [spare],
        "size": [-1],
        "local_shape": [rows[d] * each, *shape[1:]],
    }
    own = f"{name}/graphsplit"
    nodes += [constant_node(f"{own}_{part}", np.array(value, np.int64), tf.int64) for part, value in parts.items()]
    flat = copied(original, f"{own}_flat", [f"{own}_shape", *given[1:]])
    flat.attr["Tshape"].type = tf.int64.as_datatype_enum
    dtype = tf.as_dtype(original.attr["dtype"].type)
    cut = make_node(f"{own}_rows", "Slice", [f"{own}_flat", f"{own}_begin", f"{own}_size"], T=dtype, Index=tf.int64)
    shaped = make_node(name, "Reshape", [f"{own}_rows", f"{own}_local_shape"], T=dtype, Tshape=tf.int64)
    return [*nodes, flat, cut, shaped]


def measured_rows(
    original: Any,
    name: str,
    inputs: Sequence[str],
    draw: Draw,
    first: str,
    w: Writer,
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
    rest = [flat.name, start, w.constant([-1])]
    cut = make_node(f"{name}/graphsplit_rows", "Slice", rest, T=dtype, Index=integer)
    return [flat, cut, make_node(name, "Reshape", [cut.name, inputs[0]], T=dtype, Tshape=local_dtype)]


def own_stream(original: Any, name: str, inputs: Sequence[str], draw: Draw, d: int) -> list[Any]:
    """Return the nodes that draw numbers of shard `d`'s own: another stream of the counter, or another seed."""
    if draw.skip:
        nodes, given = _moved(name, inputs, [0, (d + 1) << 32])
        return [*nodes, copied(original, name, given)]
    node = copied(original, name, inputs)
    node.attr["seed2"].i += (d + 1) * _SEEDS_APART % (1 << 31)
    return [node]


def _moved(name: str, inputs: Sequence[str], steps: Sequence[int]) -> tuple[list[Any], list[str]]:
    """Return inputs whose counter (the third) is moved on by `steps`, its low and its high word."""
    if not any(steps):
        return [], list(inputs)
    constant = constant_node(f"{name}/graphsplit_steps", np.array(steps, np.uint64), tf.uint64)
    counter = make_node(f"{name}/graphsplit_counter", "AddV2", [inputs[2], constant.name], T=tf.uint64)
    return [constant, counter], [*inputs[:2], counter.name, *inputs[3:]]
