"""Ops that read or write rows by numbers which are those of the rows themselves: each shard its own.

Which image a box is of, which entry of a flat batch is added to: where the numbers are known to be those of the rows
that they belong to (`program/reading/row_numbers.py`), nothing of other shards is read. The numbers count the whole, so
each shard takes off what comes before its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphsplit.core.layouts import REPLICATE, Joined, Layout, Shard
from graphsplit.core.sizes.symbolic_sizes import is_same, quotient
from graphsplit.program.program import Op
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


def own_images(operands: str, result: str, size: int | None = None) -> LayoutRule:
    """Return the rule of crops that are cut from the images of their own rows.

    Args:
      operands: a letter for each: `r` has a row, `e` several entries for each row, `n` their numbers, `-` is whole.
      result: a letter.
      size: the operand with the shape of the images, if these are the result.
    """

    def rule(op: Op, layouts: Sequence[Layout]) -> Answer | None:
        found, numbers = _cut(op, layouts), op.numbers.get(operands.index("n"))
        if found is None or numbers is None or (size is not None and size not in op.constants):
            return None
        cut, rows = found
        images = op.out_shapes[0] if size is not None else op.in_shapes[operands.index("r")]
        entries = _entries(op, operands.index("n"), cut, rows)
        if not images or not is_same(images[0], rows) or entries is None or not numbers.are_of(rows, 1):
            return None
        kinds: dict[str, Layout] = {"r": cut, "e": entries, "n": entries, "-": REPLICATE}
        resize = () if size is None else (Resize(size, 0, op.constants[size]),)
        wants, shift = tuple([kinds[letter] for letter in operands]), {operands.index("n"): Shift(cut)}
        return Sharded(wants, (kinds[result],), resize, shift=shift)

    return rule


def own_elements(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """`(params, indices)`: elements of each row, by indices that begin with the number of the row."""
    found, numbers, params = _cut(op, layouts), op.numbers.get(1), op.in_shapes[0]
    if found is None or numbers is None or not params or not is_same(params[0], found[1]):
        return None
    cut, rows = found
    entries, indices = _entries(op, 1, cut, rows), op.in_shapes[1]
    if entries is None or not indices or not indices[-1] or not numbers.are_of(rows, 1):
        return None
    return Sharded((cut, entries), (entries,), shift={1: Shift(cut, int(indices[-1]))})


def own_updates(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """`(tensor, indices, updates)`: elements of each row, put where indices say that begin with the row's number."""
    found, numbers, tensor, indices = _cut(op, layouts), op.numbers.get(1), op.in_shapes[0], op.in_shapes[1]
    if found is None or numbers is None or not tensor or not is_same(tensor[0], found[1]):
        return None
    cut, rows = found
    entries = _entries(op, 1, cut, rows)
    if entries is None or not indices or len(indices) < 2 or not indices[-1] or not numbers.are_of(rows, 1):
        return None
    return Sharded((cut, entries, entries), (cut,), shift={1: Shift(cut, int(indices[-1]))})


def own_scatter(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """`(indices, updates, shape)`: the inverse."""
    found, numbers, shape, indices = _cut(op, layouts), op.numbers.get(0), op.constants.get(2), op.in_shapes[0]
    if found is None or numbers is None or shape is None or not indices or not indices[-1]:
        return None
    cut, rows = found
    entries = _entries(op, 0, cut, rows)
    if entries is None or not is_same(shape[0], rows) or not numbers.are_of(rows, 1):
        return None
    shift = {0: Shift(cut, int(indices[-1]))}
    return Sharded((entries, entries, REPLICATE), (cut,), (Resize(2, 0, shape),), shift=shift)


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
