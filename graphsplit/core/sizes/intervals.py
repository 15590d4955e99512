"""Intervals of time."""

from __future__ import annotations

from collections.abc import Sequence


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each from a begin to an end, in any order.

    >>> covered([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)])
    3.5
    """
    length, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        length += max(0.0, b - max(a, end))
        end = max(end, b)
    return length
