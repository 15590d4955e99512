"""Timing: how long calls take on a machine whose speed changes, beside a reference whose time tells how it changed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Call = Callable[[], Any]

_ROUNDS, _ROUND_S, _ENOUGH_S = 5, 0.05, 0.5  # slow calls are timed twice
_LEAST_TURNS, _MOST_TURNS, TURNS_S = 7, 200, 15.0
_LEAST_S = 0.02  # that a call runs in its turn: the reference has left its own data in the caches
_REFERENCE = 8


def seconds_of_call(call: Call) -> float:
    """Return how long a call takes until its results are there: the median of some rounds, warm."""
    numpy_of(call())
    start = time.perf_counter()
    numpy_of(call())
    count = max(1, int(_ROUND_S / (time.perf_counter() - start + 1e-9)))
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        numpy_of(result)
        found.append((time.perf_counter() - start) / count)
        if len(found) > 1 and count * sum(found) > _ENOUGH_S:
            break
    return statistics.median(found)


def usual_seconds_of_calls(
    calls: Sequence[Call], beside: Call, least_s: float = TURNS_S, most_turns: int = _MOST_TURNS
) -> tuple[list[float], float]:
    """Return how long each of some calls takes until its results are there, and a reference beside them, warm.

    They take turns, call by call, as the speed of a machine may change while they are timed, from one tenth of a second
    to the next: of each call, the median of how many times as long it takes as the reference before and behind it,
    times the median of that. (50 turns tell that to 2 %, where medians of the calls' own times are off by 5 %.)

    Args:
      calls: what is timed.
      beside: the reference.
      least_s: how long that goes on; slow calls take longer, as each has a few turns at least.
      most_turns: how often each is timed, at most.
    """
    counts = [_count(call) for call in calls]
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
    usual_s = statistics.median(references)
    return [statistics.median(found) * usual_s for found in relative], usual_s


def _count(call: Call) -> int:
    """Return how often a call runs in its turn; it has run before."""
    _seconds(call, 2)
    return max(1, math.ceil(_LEAST_S / _seconds(call, 1)))


def _seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        numpy_of(call())
    return (time.perf_counter() - start) / count


def reference(device: str) -> Call:
    """Return a call of some products and sums, by which the speed of a device at two times can be compared."""
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
