"""Where the blocks of a sharded axis begin and end, whatever number of rows there is."""

from __future__ import annotations

import itertools
from typing import Any

from graphsplit.core.layouts import Shard
from graphsplit.core.symbolic_sizes import is_same, quotient


def rows_of(layout: Shard, length: Any) -> Any:
    """Return how many rows an axis of `length` has that lies in `layout`, or None if that is not known (or none).

    >>> from graphsplit.core.symbolic_sizes import rows
    >>> rows_of(Shard(0, (1, 2)), rows(3))
    rows
    """
    count = None if length is None else quotient(length, sum(layout.blocks))
    return None if count is None or is_same(count, 0) else count


def blocks_between(layout: Shard, begin: Any, end: Any, length: Any) -> tuple[int, int] | None:
    """Return which blocks lie from `begin` to `end` on an axis of `length`, or None if either is inside of one.

    >>> from graphsplit.core.symbolic_sizes import rows
    >>> blocks_between(Shard(0, (1, 2, 1)), rows(1), rows(3), rows(4))
    (1, 2)
    """
    count = rows_of(layout, length)
    if count is None:
        return None
    borders = [count * entries for entries in itertools.accumulate(layout.blocks, initial=0)]
    first, last = (next((i for i, b in enumerate(borders) if is_same(b, place)), None) for place in (begin, end))
    return None if first is None or last is None or first >= last else (first, last)
