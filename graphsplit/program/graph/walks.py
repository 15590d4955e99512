"""Walks: what follows from what, and in which order, over anything that numbers or names say."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import TypeVar

from graphsplit.errors import CheckError

Place = TypeVar("Place", bound=Hashable)


def reached(roots: Iterable[Place], following: Callable[[Place], Iterable[Place]]) -> Set[Place]:
    """Return what is reached from some places, themselves first, in the order in which it was found.

    >>> list(reached([4], lambda k: [k // 2] if k else []))
    [4, 2, 1, 0]
    """
    found = dict.fromkeys(roots)
    pending = list(found)
    while pending:
        for place in following(pending.pop()):
            if place not in found:
                found[place] = None
                pending.append(place)
    return found.keys()


def readers_of(sources: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return for each position those that it is a source of, in order.

    >>> readers_of([[], [0], [0, 1]])
    [[1, 2], [2], []]
    """
    sources = list(sources)
    readers: list[list[int]] = [[] for _ in sources]
    for k, own in enumerate(sources):
        for source in own:
            readers[source].append(k)
    return readers


def in_order(sources: Sequence[Iterable[int]], names: Sequence[str] | None = None) -> list[int]:
    """Return positions, each behind its sources, otherwise as they are given.

    Args:
      sources: of each position.
      names: by which an error calls the positions.

    Raises:
      CheckError: if some wait for each other; it names them.

    >>> in_order([[2], [], [1]])
    [1, 2, 0]
    """
    is_done, is_begun = [False] * len(sources), [False] * len(sources)
    order: list[int] = []
    for first in range(len(sources)):
        stack = [first]
        while stack:
            k = stack[-1]
            waiting = [] if is_done[k] else [source for source in sources[k] if not is_done[source]]
            if waiting:
                if is_begun[k]:
                    raise CheckError(f"Nodes of a graph wait for each other: {_circle(sources, names)}.")
                is_begun[k] = True
                stack += reversed(waiting)
                continue
            stack.pop()
            if not is_done[k]:
                is_done[k] = True
                order.append(k)
    return order


def _circle(sources: Sequence[Iterable[int]], names: Sequence[str] | None) -> str:
    try:
        graphlib.TopologicalSorter(dict(enumerate(sources))).prepare()
    except graphlib.CycleError as error:
        return ", ".join([repr(names[k]) if names else str(k) for k in error.args[1]])
    return ""
