"""Orders: in which order units of work stand, so that parts of equal time can be cut out of it.

The order in which a function was traced is the user's, layer by layer, and nearly always good enough: units are small.
It is not where a few large ones stand side by side, and cut one after the other leave parts of unequal time. Then other
orders are tried, drawn with a fixed seed, in which nothing stands before what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from graphsplit.graph.walks import readers_of
from graphsplit.planning.chains import Chain, slowest

_GOOD = 1.02  # of the mean: what better order there may be gains less
_WORTH = 1.005  # less gain is not worth another order than the traced one
_TRIES = 200
_MOST_STEPS = 400_000  # units times tries


def better_order(seconds: Sequence[float], needs: Sequence[set[int]], count: int) -> list[int] | None:
    """Return an order of units from which so many parts can be cut that are nearer to equal; None if there is none.

    Args:
      seconds: how long each unit takes.
      needs: for each unit those that must not be of a later part, all of them before it.
      count: of parts.
    """
    mean = sum(seconds) / count
    best, found = slowest(Chain(tuple(seconds)), count), None
    draw = random.Random(0)
    for _ in range(min(_TRIES, _MOST_STEPS // max(len(seconds), 1))):
        if best is None or best <= _GOOD * mean:
            break
        order = _drawn(needs, draw)
        time = slowest(Chain(tuple([seconds[k] for k in order])), count)
        if time is not None and time < best / _WORTH:
            best, found = time, order
    return found


def _drawn(needs: Sequence[set[int]], draw: random.Random) -> list[int]:
    """Return an order at random: now and then what was made ready last goes first, so that ways are followed."""
    missing, readers = [len(own) for own in needs], readers_of(needs)
    ready, order = [k for k, count in enumerate(missing) if not count], list[int]()
    while ready:
        k = ready.pop() if draw.random() < 0.5 else ready.pop(draw.randrange(len(ready)))
        order.append(k)
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order
