"""Calls that are timed in turns, so that a slow spell of the machine hits all of them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from graphsplit.simulate.measuring.timing import numpy_of

Name = TypeVar("Name")
Within = Callable[[], AbstractContextManager[Any]]


class Took(NamedTuple):
    """What a call took, in seconds: by the clock, and of the processor."""

    wall: float
    processor: float


def took(call: Callable[[], Any], count: int = 1, within: Within = contextlib.nullcontext) -> Took:
    """Return what each of some calls takes, until the last one's results are here.

    Args:
      call, count: what is called, and how often.
      within: makes a context for all of them, whose entering and leaving is not timed.
    """
    with within():
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            result = call()
        numpy_of(result)
        return Took((time.perf_counter() - wall) / count, (time.process_time() - processor) / count)


def in_turns(
    calls: Mapping[Name, Callable[[], Any]],
    rounds: int,
    count: int = 1,
    prepare: int = 1,
    within: Mapping[Name, Within] | None = None,
) -> dict[Name, list[Took]]:
    """Return what each call takes in each round.

    Args:
      calls: by their names.
      rounds, prepare: how often each has its turn, after rounds that only prepare.
      count: so many calls in a row are one turn.
      within: contexts of the turns of some calls, as of `took`.
    """
    found: dict[Name, list[Took]] = {name: [] for name in calls}
    for number in range(-prepare, rounds):
        for name, call in calls.items():
            own = took(call, count, (within or {}).get(name, contextlib.nullcontext))
            if number >= 0:
                found[name].append(own)
    return found


def medians(found: Sequence[Took]) -> Took:
    """Return the median of each figure."""
    return Took(*[statistics.median(figures) for figures in zip(*found, strict=True)])


def ratios(above: Sequence[Took], below: Sequence[Took]) -> Took:
    """Return the medians of the ratios within rounds."""
    return medians([Took(a.wall / b.wall, a.processor / b.processor) for a, b in zip(above, below, strict=True)])
