"""A fixed, seeded sample of the cases of a test: every value of every parameter, then as many pairs as fit."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Mapping, Sequence

Values = Mapping[str, object]  # what the parameters of a case are


def sample(cases: Mapping[str, Values], count: int) -> set[str]:
    """Return the names of `count` of the cases, of all of them if there are no more.

    Which ones hangs on the names alone: a case that is added or removed changes little of the sample, and who adds one
    does not choose. Each value of each parameter that has at most `count` of them occurs, in a few more cases if need
    be. Of pairs of such values, each next case brings as many as it can.

    Args:
      cases: what is to be sampled, by name.
    """
    left = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    if count >= len(left):
        return set(left)
    parameters = [
        parameter
        for parameter in next(iter(cases.values()), {})
        if 1 < len({_same(values[parameter]) for values in cases.values()}) <= count
    ]
    if not parameters:
        return set(left[:count])
    brings = {name: _brings([_same(cases[name][p]) for p in parameters], parameters) for name in left}
    wanted = set().union(*(values for values, _ in brings.values()))
    chosen: set[str] = set()
    seen: set[tuple[object, ...]] = set()
    # What a case brings only gets less, so that a case waits for its turn by what it brought when it was last asked.
    turns = [(*(-len(found) for found in brings[name]), k) for k, name in enumerate(left)]
    heapq.heapify(turns)
    while len(chosen) < count or not wanted <= seen:
        k = turns[0][-1]
        now = (*(-len(found - seen) for found in brings[left[k]]), k)
        if now > turns[0]:
            heapq.heapreplace(turns, now)
            continue
        heapq.heappop(turns)
        chosen.add(left[k])
        seen.update(*brings[left[k]])
    return chosen


def _same(value: object) -> object:
    """Return what two equal values have in common; objects are what they are."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)


def _brings(values: Sequence[object], parameters: Sequence[str]) -> tuple[set[tuple[object, ...]], ...]:
    """Return the values of a case, and their pairs."""
    singles = list(zip(parameters, values, strict=True))
    return set(singles), set(itertools.combinations(singles, 2))
