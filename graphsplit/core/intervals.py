"""Intervals, of time or of positions: what they cover, and how much is there at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence


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


def alive(spans: Iterable[tuple[float, float, int]]) -> list[tuple[float, int]]:
    """Return how much there is, and since when, of what is there from a begin to just before an end.

    >>> alive([(0, 3, 10), (1, 2, 5)])
    [(0, 10), (1, 15), (2, 10), (3, 0)]
    """
    changes = Counter[float]()
    for begin, end, size in spans:
        changes[begin] += size
        changes[end] -= size
    times = sorted(changes)
    return list(zip(times, itertools.accumulate([changes[time] for time in times]), strict=True))
