"""Settling: something is decided, what stands in its way is taken into account, and it is decided again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from graphsplit.errors import CheckError

SettledT = TypeVar("SettledT")
ObstacleKey = TypeVar("ObstacleKey")


def settled(attempt: Callable[[dict[ObstacleKey, str]], tuple[SettledT, Mapping[ObstacleKey, str]]]) -> SettledT:
    """Return what an attempt makes in whose way nothing stands.

    Args:
      attempt: makes something for all obstacles that are known, and returns it with those that it finds besides: what
        is in the way, and why. What follows from each may be less than before, and never more, so there is an end.

    Raises:
      CheckError: if an attempt finds nothing but what was known to it.
    """
    known_obstacles: dict[ObstacleKey, str] = {}
    while True:
        result, obstacles = attempt(dict(known_obstacles))
        if not obstacles:
            return result
        if obstacles.keys() <= known_obstacles.keys():
            again = [f"{key}: {why}" for key, why in obstacles.items()]
            raise CheckError(f"What was taken into account stands in the way again: {', '.join(again)}.")
        known_obstacles.update(obstacles)
