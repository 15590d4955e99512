"""Where the blocks of a sharded axis begin and end, whatever number of rows there is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from graphsplit.core.layouts import BATCH, EvenCut, Joined, OtherRows, Shard
from graphsplit.core.sizes.symbolic_sizes import is_same, quotient


def rows_of(layout: Shard, length: Any) -> Any:
    """Return how many rows an axis of `length` has that lies in `layout`, or None if that is not known (or none).

    Of batches that are joined it is those of the one for which the shards were made.

    >>> from graphsplit.core.sizes.symbolic_sizes import rows
    >>> rows_of(Shard(0, (1, 2)), rows(3))
    rows
    >>> rows_of(Shard(0, (1, 1), Joined((BATCH, OtherRows(10)))), 13)
    3
    """
    if not isinstance(layout.partition, Joined):
        count = None if length is None else quotient(length, sum(layout.blocks))
        return None if count is None or is_same(count, 0) else count
    each = sum([block for block, part in zip(layout.blocks, layout.parts, strict=True) if part == BATCH])
    count = quotient(length - layout.size(0), each) if isinstance(length, int) and each else None
    return None if count is None or count < 1 else count


def blocks_beside(layout: Shard, count: int) -> tuple[int, ...]:
    """Return of which blocks zeros consist that stand beside an axis that lies so, `count` for each row.

    What is cut evenly is cut alike there, as its neighbours are that were joined with it.

    >>> blocks_beside(Shard(0, (4,), EvenCut(3)), 8), blocks_beside(Shard(0), 2)
    ((4, 4), (1, 1))
    """
    each = layout.blocks[0] if isinstance(layout.partition, EvenCut) and len(layout.blocks) == 1 else 1
    return (each,) * (count // each) if each and count % each == 0 else (1,) * count


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

    >>> from graphsplit.core.sizes.symbolic_sizes import rows
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
