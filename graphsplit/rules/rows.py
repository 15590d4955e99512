"""Rows and blocks of rows that a shard has: where they begin and end, whatever number of rows there is.

Some operations read or write rows by numbers which are those of the rows themselves: which image a box is of, which
entry of a flat batch is added to. Where the numbers are known to be those of the rows that they belong to
(`program/row_numbers.py`), nothing of other shards is read. The numbers count the whole, so each shard takes off what
comes before its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphsplit.core.layouts import BATCH, REPLICATE, EvenCut, Joined, Layout, OtherRows, Shard
from graphsplit.core.sizes import as_size, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.program.row_numbers import has_columns
from graphsplit.rules.factors import Resize, Shift
from graphsplit.rules.registry import Answer, LayoutRule, Sharded


def rows_of(layout: Shard, length: Any) -> Any:
    """Return how many rows an axis of `length` has that lies in `layout`, or None if that is not known (or none).

    Of batches that are joined it is those of the one for which the shards were made.

    >>> from graphsplit.core.sizes import rows
    >>> rows_of(Shard(0, (1, 2)), rows(3))
    rows
    >>> rows_of(Shard(0, (1, 1), Joined((BATCH, OtherRows(10)))), 13)
    3
    """
    if not isinstance(layout.partition, Joined):
        count = None if length is None else quotient(length, sum(layout.blocks))
        return None if count is None or is_same(count, 0) else count
    per_row = sum([block for block, part in zip(layout.blocks, layout.parts, strict=True) if part == BATCH])
    count = quotient(length - layout.size(0), per_row) if isinstance(length, int) and per_row else None
    return None if count is None or count < 1 else count


def blocks_beside(layout: Shard, count: int) -> tuple[int, ...]:
    """Return of which blocks zeros consist that stand beside an axis that lies so, `count` for each row.

    What is cut evenly is cut alike there, as its neighbours are that were joined with it.

    >>> blocks_beside(Shard(0, (4,), EvenCut(3)), 8), blocks_beside(Shard(0), 2)
    ((4, 4), (1, 1))
    """
    block = layout.blocks[0] if isinstance(layout.partition, EvenCut) and len(layout.blocks) == 1 else 1
    return (block,) * (count // block) if block and count % block == 0 else (1,) * count


def beside(layout: Shard, ahead: Any, behind: Any, length: Any) -> tuple[Shard, Shard] | None:
    """Return how zeros lie before and behind an axis of `length` that lies so; None if there are not some for each row.

    Args:
      layout: of the axis.
      ahead, behind: how many zeros there are.
      length: of the axis.
    """
    rows = rows_of(layout, length)
    counts = [None if rows is None else quotient(count, rows) for count in (ahead, behind)]
    if isinstance(layout.partition, Joined) or not all(isinstance(count, int) for count in counts):
        return None
    before, after = (replace(layout, blocks=blocks_beside(layout, count or 0)) for count in counts)
    return before, after


def blocks_between(layout: Shard, begin: Any, end: Any, length: Any) -> tuple[int, int] | None:
    """Return which blocks lie from `begin` to `end` on an axis of `length`, or None if either is inside of one.

    >>> from graphsplit.core.sizes import rows
    >>> blocks_between(Shard(0, (1, 2, 1)), rows(1), rows(3), rows(4))
    (1, 2)
    """
    count = 1 if isinstance(layout.partition, Joined) and BATCH not in layout.parts else rows_of(layout, length)
    if count is None:
        return None
    sizes = zip(layout.blocks, layout.parts, strict=True)
    lengths = [block * (part.length if isinstance(part, (EvenCut, OtherRows)) else count) for block, part in sizes]
    borders = list(itertools.accumulate(lengths, initial=0))
    first, last = (next((i for i, b in enumerate(borders) if is_same(b, place)), None) for place in (begin, end))
    return None if first is None or last is None or first >= last else (first, last)


def own_segments(numbering: int) -> LayoutRule:
    """Return the rule of ops that add entries of rows to entries of the same rows: the rows' own, several for each.

    Args:
      numbering: the operand that numbers what is added to; the other one is added, the third says how much there is.
    """

    def rule(op: Op, layouts: Sequence[Layout]) -> Answer | None:
        cut_and_rows, numbers, total = _cut(op, layouts), op.numbers.get(numbering), op.constants.get(2)
        indices = op.in_shapes[numbering]
        if cut_and_rows is None or numbers is None or total is None or not total.size or not indices:
            return None
        cut, rows = cut_and_rows
        columns = int(indices[-1] or 0) if has_columns(op.type) else 0
        size, position = (total.flat[0], 0) if has_columns(op.type) else (total.item(), ())
        entries, count = _entries(op, numbering, cut, rows), quotient(size, rows)
        if entries is None or count is None or is_same(count, 0) or has_columns(op.type) != bool(columns):
            return None
        if not numbers.are_of(rows, count):
            return None
        result = Shard(0, (as_size(count),), cut.partition)
        resize, shift = Resize(2, position, np.asarray(total)), {numbering: Shift(result, columns)}
        return Sharded((entries, entries, REPLICATE), (result,), (resize,), shift=shift)

    return rule


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
        cut_and_rows, numbers, indices = _cut(op, layouts), op.numbers.get(numbering), op.in_shapes[numbering]
        row_shape = op.in_shapes[operands.index("r")] if shape is None else op.constants.get(shape)
        if cut_and_rows is None or numbers is None or not indices or row_shape is None or not len(row_shape):
            return None
        cut, rows = cut_and_rows
        entries, is_vectors = _entries(op, numbering, cut, rows), has_columns(op.type)
        columns = int(indices[-1] or 0) if is_vectors and len(indices) > 1 else 0
        if not is_same(row_shape[0], rows) or entries is None or (is_vectors and not columns):
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
    per_row = None if not shape or shape[0] is None else quotient(shape[0], rows)
    return Shard(0, (per_row,), cut.partition) if type(per_row) is int and per_row else None
