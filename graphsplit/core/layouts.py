"""Layouts: how one tensor of the single-device program lies on several devices.

Plain Python, no TensorFlow. The terms are those of GSPMD and DTensor. There is one mesh axis: the shards of the
batch. Every sharded dimension is a multiple of the batch, so a layout says *which* multiple and in which order, and
never how many rows there are: that is the plan's business (`apportion`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """The whole value, held at home and sent to the devices that use it."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Shard:
    """Cut along `axis`; device `d` holds the rows that the plan gives it.

    The axis consists of consecutive `blocks`. Block `i` is `blocks[i]` entries per row of the batch, ordered by row,
    and every device holds its own rows of every block, one block after the other. The ordinary batch axis is one
    block of one entry per row, `(1,)`. Flattening `[batch, 7, c]` to `[batch * 7, c]` gives `(7,)`; flattening
    time-major `[3, batch, c]` to `[3 * batch, c]` gives `(1, 1, 1)`, as does concatenating three batches.
    """

    axis: int
    blocks: tuple[int, ...] = (1,)

    def size(self, rows: int) -> int:
        """Return the length of the axis for `rows` rows of the batch."""
        return rows * sum(self.blocks)

    def pieces(self, rows: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, block by block, the number of entries each device holds: the order they have in the whole."""
        return [tuple(count * block for count in rows) for block in self.blocks]

    def between(self, begin: int, end: int, length: int) -> tuple[int, int] | None:
        """Return which blocks lie from `begin` to `end` on an axis of `length`, or None if either is inside of one.

        >>> Shard(0, (1, 2, 1)).between(10, 30, length=40)
        (1, 2)
        """
        rows, rest = divmod(length, sum(self.blocks))
        if not rows or rest or begin >= end:
            return None
        borders = [rows * entries for entries in itertools.accumulate(self.blocks, initial=0)]
        return (borders.index(begin), borders.index(end)) if begin in borders and end in borders else None

    def __str__(self) -> str:
        return f"shard({self.axis})" if self.blocks == (1,) else f"shard({self.axis}, blocks={_short(self.blocks)})"


@dataclass(frozen=True)
class Partial:
    """One full-shape part per device; `reduction` over the devices gives the value."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.reduction})"


Layout = Replicate | Shard | Partial
REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")


def apportion(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Share `rows` among devices in proportion to `weights`, whole rows, largest remainders first.

    The result sums to `rows` and differs from the exact shares by less than one row each
    (Hamilton's method). Equal weights give the first devices one row more.

    >>> apportion(10, [1, 1, 1])
    (4, 3, 3)
    >>> apportion(9, [3, 1])
    (7, 2)
    """
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda d: (shares[d] - exact[d], d))
    positive = [d for d in by_remainder if weights[d] > 0]
    for d in positive[: rows - sum(shares)]:
        shares[d] += 1
    return tuple(shares)


def _short(blocks: tuple[int, ...]) -> str:
    if len(blocks) > 4 and len(set(blocks)) == 1:
        return f"{len(blocks)} x {blocks[0]}"
    return str(blocks)
