"""Timing: how long calls take on a machine whose speed changes, beside a reference whose time tells how it changed.

A machine that others use, too, changes its speed from one tenth of a second to the next. So calls take turns, and each
is timed beside the reference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Call = Callable[[], Any]

_LEAST_TURNS, _MOST_TURNS, TURNS_S = 7, 200, 15.0
_LEAST_S = 0.02  # that a call runs in its turn: the reference has left its own data in the caches
_WARM = 3
_REFERENCE = 8


def usual_seconds_of_calls(
    calls: Sequence[Call], beside: Call, least_s: float = TURNS_S, most_turns: int = _MOST_TURNS
) -> list[float]:
    """Return how long each of some calls takes until its results are there, warm.

    They take turns, call by call: of each call, the median of how many times as long it takes as the reference before
    and behind it, times the median of that.

    Args:
      calls: what is timed.
      beside: the reference.
      least_s: how long that goes on; slow calls take longer, as each has a few turns at least.
      most_turns: how often each is timed, at most.
    """
    relative, usual_s = relative_seconds_of_calls(calls, beside, least_s, most_turns)
    return [statistics.median(found) * usual_s for found in relative]


def relative_seconds_of_calls(
    calls: Sequence[Call], beside: Call, least_s: float = TURNS_S, most_turns: int = _MOST_TURNS
) -> tuple[list[list[float]], float]:
    """Return how many times as long as a reference each of some calls takes, turn by turn: `usual_seconds_of_calls`."""
    counts = [times_in_turn(call) for call in calls]
    _seconds(beside, 1)
    relative: list[list[float]] = [[] for _ in calls]
    began, references = time.perf_counter(), [_seconds(beside, 1)]
    for turn in range(most_turns):
        if turn >= _LEAST_TURNS and time.perf_counter() - began > least_s:
            break
        for call, count, found in zip(calls, counts, relative, strict=True):
            own_s = _seconds(call, count)
            references.append(_seconds(beside, 1))
            found.append(own_s / math.sqrt(references[-2] * references[-1]))
    return relative, statistics.median(references)


def seconds_of_warm_call(call: Call) -> float:
    """Return about how long a call takes that has run before."""
    _seconds(call, _WARM)
    return _seconds(call, _WARM)


def times_in_turn(call: Call) -> int:
    """Return how many times a call runs in its turn; it has run before."""
    _seconds(call, 2)
    return max(1, math.ceil(_LEAST_S / _seconds(call, 1)))


def _seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        numpy_of(call())
    return (time.perf_counter() - start) / count


def reference(device: str) -> Call:
    """Return a call of some products and sums, beside which others are timed."""
    x = tf.ones([256, 256]) / 256
    large = tf.ones([1_000_000])

    def run(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            for _ in range(_REFERENCE):
                value = tf.linalg.matmul(value, value)
                other = other + value[0, 0]
            return tf.reduce_sum(other)

    called = tf.function(run, autograph=False).get_concrete_function(x, large)
    return lambda: called(x, large)


def numpy_of(result: Any) -> None:
    """Wait until results are there."""
    for tensor in tf.nest.flatten(result):
        if hasattr(tensor, "numpy"):
            tensor.numpy()
