"""Chains: units of work in an order in which they can run, cut into consecutive parts of equal time. Plain Python.

The slowest part decides how fast a pipeline is. So the cut is one whose slowest part is at most a hundredth slower than
that of the best cut, and of those one over which the fewest bytes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

_SLACK = 1.01
_STEPS = 50  # of bisection: more than there are bits in a float's mantissa of what is compared


@dataclass(frozen=True)
class Sent:
    """A tensor that units have in common: the positions of the first and the last one, and its size."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Chain:
    """Units of work in the order in which they run.

    Attributes:
      seconds: how long each takes.
      sent: what they hand to each other.
      weights: bytes that each needs from before to after a step.
      kept: bytes that each keeps for the way back, of the whole batch.
      seams: how little each is the beginning of something: of cuts over which as much is sent, the least is taken.
    """

    seconds: tuple[float, ...]
    sent: tuple[Sent, ...] = ()
    weights: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    seams: tuple[int, ...] = ()

    def crossing(self) -> np.ndarray:
        """Return how many bytes are sent over a cut before each unit."""
        bytes_before = np.zeros(len(self.seconds))
        for tensor in self.sent:
            bytes_before[tensor.first + 1 : tensor.last + 1] += tensor.bytes
        return bytes_before

    def balance(self, starts: Sequence[int]) -> float:
        """Return the time of the slowest part, as a multiple of the mean."""
        parts = _parts(self.seconds, starts)
        return max(parts) * len(parts) / sum(parts) if sum(parts) else 1.0


@dataclass(frozen=True)
class Room:
    """The memory of the devices of the parts.

    Attributes:
      bytes: of each.
      alive: which share of the batch each part keeps at a time, at most.
    """

    bytes: float
    alive: tuple[float, ...]


def cut(chain: Chain, count: int, room: Room | None = None) -> tuple[int, ...] | None:
    """Return the first unit of each of so many parts; None if there is no such cut.

    No part is empty, and each has some work to do.

    >>> cut(Chain((1.0, 1.0, 2.0, 1.0, 1.0)), 3)
    (0, 2, 3)
    """
    search = _PartSearch(chain, count, room)
    best = search.fastest()
    return None if best is None else search.least_sent(best * _SLACK)


def _parts(values: Sequence[float], starts: Sequence[int]) -> list[float]:
    return [sum(values[a:b]) for a, b in pairwise([*starts, len(values)])]


class _PartSearch:
    def __init__(self, chain: Chain, count: int, room: Room | None):
        self._chain, self._count, self._room = chain, count, room
        self._time = np.array([0.0, *accumulate(chain.seconds)])
        nothing = (0,) * len(chain.seconds)
        self._weights = np.array([0, *accumulate(chain.weights or nothing)])
        self._kept_bytes = np.array([0, *accumulate(chain.kept or nothing)])
        self._works = np.array([0, *accumulate(second > 0 for second in chain.seconds)])

    def fastest(self) -> float | None:
        """Return the time of the slowest part of the best cut; None if there is none."""
        low, high = 0.0, float(self._time[-1])
        if not self._fits(high):
            return None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high

    def _fits(self, most: float) -> bool:
        """Return whether parts that each take as much as they may reach the end."""
        at = 0
        for part in range(self._count):
            at = self._furthest(part, at, most)
            if at < 0:
                return False
        return at == len(self._chain.seconds)

    def _furthest(self, part: int, start: int, most: float) -> int:
        """Return where a part that begins at `start` may end at the latest; -1 if it cannot be."""
        most_works = self._works[-1] - (self._count - part - 1)  # each later part needs some work
        end = int(np.searchsorted(self._time, self._time[start] + most * (1 + 1e-12), "right")) - 1
        end = min(end, int(np.searchsorted(self._works, most_works, "right")) - 1)
        while end > start and not self._has_room(part, start, end):
            end -= 1
        return end if self._works[end] > self._works[start] else -1

    def _has_room(self, part: int, start: int, end: int) -> bool:
        if self._room is None:
            return True
        kept_bytes = (self._kept_bytes[end] - self._kept_bytes[start]) * self._room.alive[part]
        return bool(self._weights[end] - self._weights[start] + kept_bytes <= self._room.bytes)

    def least_sent(self, most: float) -> tuple[int, ...]:
        """Return the cut of parts that take at most so long over which the fewest bytes are sent."""
        size, price = len(self._chain.seconds), self._chain.crossing()
        price = price + np.array(self._chain.seams or (0,) * size) / (1 + sum(self._chain.seams))
        best = np.full(size + 1, np.inf)
        best[0] = 0
        came: list[np.ndarray] = []
        for part in range(self._count):
            least_bytes, source = np.full(size + 1, np.inf), np.zeros(size + 1, int)
            for start in map(int, np.flatnonzero(np.isfinite(best))):
                ends = np.arange(start + 1, self._furthest(part, start, most) + 1)
                ends = ends[self._works[ends] > self._works[start]]
                better = ends[best[start] < least_bytes[ends]]
                least_bytes[better], source[better] = best[start], start
            least_bytes[:size] += price
            best = least_bytes
            came.append(source)
        starts = [size]
        for source in reversed(came):
            starts.append(int(source[starts[-1]]))
        return tuple(starts[:0:-1])
