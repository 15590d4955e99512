"""Random numbers: each shard draws the numbers that its rows have on one device.

TensorFlow's stateless ops use Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), a function
of a key and a counter. An op makes its numbers in groups; group `i` is made from `counter + i * skip`. So a shard whose
rows begin at number `n` starts at the counter of the group that holds `n`, and drops what that group has before it.

A part along another axis (the heads of one device, of a dropout's mask) is a run of numbers of each row. Along an axis
of a mesh, an op that draws such a part says of what it is a part, as an attribute: whoever plans the rows then still
knows where its numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, Shard
from graphsplit.program.program import Op, Program
from graphsplit.rules.factors import Declined, Draw, Factors, Resize
from graphsplit.rules.known import known, shape_operand
from graphsplit.rules.registry import Rule, Sharded, register, rule_of

_PHILOX, _AUTOMATIC = 1, 3
_PART = "_graphsplit_part"  # the attribute
_MOST_RUNS = 256  # of one part: each is an op of its own
_LEAST_SAVED = 4096  # numbers that a run spares a device: to draw them takes longer than to launch the run
_RESERVED = 256  # numbers that a truncated normal may throw away for each that it keeps
_COUNTER = 4  # 32-bit words that one counter gives
STATEFUL_RANDOM = frozenset({"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"})


class PartDrawn(NamedTuple):
    """An op draws some entries of an axis: from `begin`, of as many as the axis has in all."""

    axis: int
    begin: int
    length: int


def part_drawn(node: Any) -> PartDrawn | None:
    """Return of what a node draws a part; None if it draws all."""
    return PartDrawn(*node.attr[_PART].list.i) if _PART in node.attr else None


def note_part(node: Any, part: PartDrawn | None) -> None:
    """Let a node say that it draws a part, or (None) all."""
    node.attr.pop(_PART, None)
    if part is not None:
        node.attr[_PART].list.i.extend(part)


@register("StatelessRandomNormalV2", "StatelessRandomUniformFullIntV2", "StatelessRandomUniformIntV2")
@register("StatelessRandomUniformV2", "StatelessTruncatedNormalV2")
def stateless_random(op: Op) -> Factors | Declined:
    """`(shape, key, counter, algorithm, ...)`: the first axis can be cut, because rows follow each other."""
    sizes, result, algorithm = (
        shape_operand(op, 0),
        known(op.out_shapes[0] or None, "its shape is"),
        op.constants.get(3),
    )
    if algorithm is None or int(algorithm) not in (_PHILOX, _AUTOMATIC):
        return Declined("its algorithm is not Philox")
    part = part_drawn(op.node)
    dims = (None if part is not None and part.axis == 0 else 0, *[None] * (len(result) - 1))
    inputs = (None,) * len(op.inputs)
    return Factors(inputs, (dims,), resize={0: (Resize(0, 0, sizes),)}, draw=draw_of(op))


def draw_of(op: Op) -> Draw:
    """Return how a stateless op makes numbers from a counter."""
    group = _COUNTER // 2 if op.out_dtypes[0] in (tf.float64, tf.int64, tf.uint64) else _COUNTER
    return Draw(group, group * _RESERVED // _COUNTER if "Truncated" in op.type else 1)


def is_stateless_random(op_type: str) -> bool:
    """Return whether ops of a type draw numbers that follow from what they read."""
    rule = rule_of(op_type)
    return rule is not None and rule.function is stateless_random


def drawn_in_parts(op: Op, layout: Shard, shards: int) -> Sharded | None:
    """Return how each device of an axis of a mesh draws its own part; None where all of it is as good.

    Args:
      op: an op with the rule above.
      layout: of the parts.
      shards: how many there are.
    """
    shape = [int(size) for size in op.out_shapes[0] or () if type(size) is int]
    factors = _STATELESS_RULE.factors(op)
    if isinstance(factors, Declined) or len(shape) < len(op.out_shapes[0] or ()) or len(layout.blocks) > 1:
        return None
    runs, inner = math.prod(shape[: layout.axis]), math.prod(shape[layout.axis + 1 :])
    saved = inner * min(layout.size(0) - part_length for part_length in layout.pieces((1,) * shards)[0])
    if runs > _MOST_RUNS or saved < _LEAST_SAVED:
        return None
    resize = (Resize(0, layout.axis, shape_operand(op, 0)),)
    return Sharded((REPLICATE,) * len(op.inputs), (layout,), resize, draw=factors.draw)


_STATELESS_RULE = Rule(stateless_random)


def has_seeded_kernels(program: Program) -> bool:
    """Return whether a program draws numbers that a seed determines, and whose kernels remember how many they drew.

    Kernels belong to a trace, so another trace of the same function draws the first numbers once more.
    """
    return next(seeded_kernels(program), None) is not None


def seeded_kernels(program: Program, line: str = "") -> Iterator[str]:
    """Yield those kernels, with the line of the user's code: in loops, branches and calls that of the outermost one."""
    for op in program.ops:
        at = line or program.line_of(op)
        if op.type in STATEFUL_RANDOM and (op.node.attr["seed"].i or op.node.attr["seed2"].i):
            yield f"{op.type} ({at})" if at else op.type
        for body in op.bodies.values():
            yield from seeded_kernels(body, at or op.name)


def is_random(op_type: str) -> bool:
    """Return whether ops of a type draw random numbers. (Keys and counters are none yet.)"""
    if "RandomGet" in op_type:
        return False
    return "Random" in op_type or "Multinomial" in op_type or op_type == "TruncatedNormal"
