"""Ops that read or write rows by numbers which are those of the rows themselves: each shard its own.

Which image a box is of, which entry of a flat batch is added to: where the numbers are known to be those of the rows
that they belong to (`program/row_numbers.py`), nothing of other shards is read. The numbers count the whole, so
each shard takes off what comes before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphsplit.core.layouts import REPLICATE, Joined, Layout, Shard
from graphsplit.core.sizes.symbolic_sizes import is_same, quotient
from graphsplit.program.program import Op
from graphsplit.program.row_numbers import has_columns
from graphsplit.rules.blocks import rows_of
from graphsplit.rules.factors import Resize, Shift
from graphsplit.rules.registry import Answer, LayoutRule, Sharded


def own_segments(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """`(data, ids, count)`: entries of rows, added to entries of the same rows."""
    found, numbers, total = _cut(op, layouts), op.numbers.get(1), op.constants.get(2)
    if found is None or numbers is None or total is None:
        return None
    cut, rows = found
    given, count = _entries(op, 1, cut, rows), quotient(total.item(), rows)
    if given is None or type(count) is not int or not count or not numbers.are_of(rows, count):
        return None
    result = Shard(0, (count,), cut.partition)
    return Sharded((given, given, REPLICATE), (result,), (Resize(2, (), np.asarray(total)),), shift={1: Shift(result)})


def own_rows(operands: str, result: str, shape: int | None = None) -> LayoutRule:
    """Return the rule of ops whose entries are of the rows that they are numbered by: crops of images, their elements.

    Args:
      operands: a letter for each: `r` has a row, `e` several entries for each row, `n` their numbers, or vectors of
        indices that begin with these; `-` is whole.
      result: a letter.
      shape: the operand with the shape of the rows, if these are the result.
    """
    numbering = operands.index("n")

    def rule(op: Op, layouts: Sequence[Layout]) -> Answer | None:
        found, numbers, indices = _cut(op, layouts), op.numbers.get(numbering), op.in_shapes[numbering]
        own = op.in_shapes[operands.index("r")] if shape is None else op.constants.get(shape)
        if found is None or numbers is None or not indices or own is None or not len(own):
            return None
        cut, rows = found
        entries, is_vectors = _entries(op, numbering, cut, rows), has_columns(op.type)
        columns = int(indices[-1] or 0) if is_vectors and len(indices) > 1 else 0
        if not is_same(own[0], rows) or entries is None or (is_vectors and not columns):
            return None
        if not numbers.are_of(rows, 1):
            return None
        kinds: dict[str, Layout] = {"r": cut, "e": entries, "n": entries, "-": REPLICATE}
        resize = () if shape is None else (Resize(shape, 0, op.constants[shape]),)
        wants, shift = tuple([kinds[letter] for letter in operands]), {numbering: Shift(cut, columns)}
        return Sharded(wants, (kinds[result],), resize, shift=shift)

    return rule


def _cut(op: Op, layouts: Sequence[Layout]) -> tuple[Shard, Any] | None:
    """Return how the rows of an op's operands are cut, and how many there are."""
    for layout, shape in zip(layouts, op.in_shapes, strict=True):
        if not isinstance(layout, Shard) or isinstance(layout.partition, Joined) or not shape:
            continue
        rows = rows_of(layout, shape[0])
        if layout.axis == 0 and len(layout.blocks) == 1 and rows is not None:
            return Shard(0, (1,), layout.partition), rows
    return None


def _entries(op: Op, operand: int, cut: Shard, rows: Any) -> Shard | None:
    """Return how an operand is cut that has some entries for each row; None if it has not."""
    shape = op.in_shapes[operand]
    each = None if not shape or shape[0] is None else quotient(shape[0], rows)
    return Shard(0, (each,), cut.partition) if type(each) is int and each else None
