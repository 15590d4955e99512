"""Timing: how long calls take on a machine whose speed changes, beside a reference whose time tells how it changed.

A machine that others use, too, changes its speed from one tenth of a second to the next. So calls take turns, and each
is timed beside the reference.

Probes are small graphs that are timed so. A figure is computed from what its own calls took in one round, next to each
other; what counts is the median of all rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

TimedCall = Callable[[], Any]

_LEAST_TURNS, _MOST_TURNS, TURNS_S = 7, 200, 15.0
_LEAST_S = 0.02  # that a call runs in its turn: the reference has left its own data in the caches
_WARM = 3
_REFERENCE = 8


def usual_seconds_of_calls(
    calls: Sequence[TimedCall], beside: TimedCall, least_s: float = TURNS_S, most_turns: int = _MOST_TURNS
) -> list[float]:
    """Return how long each of some calls takes until its results are there, warm.

    They take turns, call by call: of each call, the median of how many times as long it takes as the reference before
    and behind it, times the median of that.

    Args:
      calls: what is timed.
      beside: the reference.
      least_s: how long that goes on; slow calls take longer, as each runs in a few rounds at least.
      most_turns: how often each is timed, at most.
    """
    relative, usual_s = relative_seconds_of_calls(calls, beside, least_s, most_turns)
    return [statistics.median(ratios) * usual_s for ratios in relative]


def relative_seconds_of_calls(
    calls: Sequence[TimedCall], beside: TimedCall, least_s: float = TURNS_S, most_turns: int = _MOST_TURNS
) -> tuple[list[list[float]], float]:
    """Return how many times as long as a reference each call takes, round by round: `usual_seconds_of_calls`."""
    counts = [times_in_turn(call) for call in calls]
    _seconds(beside, 1)
    relative: list[list[float]] = [[] for _ in calls]
    began, references = time.perf_counter(), [_seconds(beside, 1)]
    for turn in range(most_turns):
        if turn >= _LEAST_TURNS and time.perf_counter() - began > least_s:
            break
        for call, count, ratios in zip(calls, counts, relative, strict=True):
            own_s = _seconds(call, count)
            references.append(_seconds(beside, 1))
            ratios.append(own_s / math.sqrt(references[-2] * references[-1]))
    return relative, statistics.median(references)


def seconds_of_warm_call(call: TimedCall) -> float:
    """Return about how long a call takes that has run before."""
    _seconds(call, _WARM)
    return _seconds(call, _WARM)


def times_in_turn(call: TimedCall) -> int:
    """Return how many times a call runs in its turn; it has run before."""
    _seconds(call, 2)
    return max(1, math.ceil(_LEAST_S / _seconds(call, 1)))


def _seconds(call: TimedCall, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        numpy_of(call())
    return (time.perf_counter() - start) / count


def reference(device: str) -> TimedCall:
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


TimedStep = Callable[[tf.Tensor], tf.Tensor]
ProbeKey = TypeVar("ProbeKey", bound=Hashable)
_SHORT, _LONG, _LONGEST = 2, 8, 400
_CHAIN_S = 0.01  # that the longer chain takes, about
_LEAST_PART = 0.25  # of the mean: a slope that is less is noise


@dataclass(frozen=True)
class Probe:
    """What is timed for one figure.

    Attributes:
      calls: that are timed, one after the other.
      figure: what the seconds of each tell.
    """

    calls: tuple[TimedCall, ...]
    figure: Callable[[Sequence[float]], float]


def figures(probes: Mapping[ProbeKey, Probe], reference: TimedCall, least_s: float) -> dict[ProbeKey, float]:
    """Return what probes tell.

    Args:
      probes: by name.
      reference: by which the speed of the machine is told (`timing.reference`).
      least_s: how long that goes on, at least.
    """
    calls = [call for probe in probes.values() for call in probe.calls]
    with as_written():
        turns, reference_s = relative_seconds_of_calls(calls, reference, least_s)
    figure_by_probe, first = {}, 0
    for name, probe in probes.items():
        turns_of_probe = turns[first : first + len(probe.calls)]
        first += len(probe.calls)
        each_turn = [
            probe.figure([reference_s * times for times in turn]) for turn in zip(*turns_of_probe, strict=True)
        ]
        figure_by_probe[name] = statistics.median(each_turn)
    return figure_by_probe


def operation(step: TimedStep, x: tf.Tensor, device: str, longer: int = 0) -> Probe:
    """Return what tells how long one operation takes on a device: the slope between chains of two lengths.

    What a call takes besides is in both.
    """
    short = chain(step, x, [device] * _SHORT)
    longer = longer or max(_LONG, min(_LONGEST, int(_CHAIN_S / seconds_of_warm_call(short) * _SHORT)))

    def slope(seconds: Sequence[float]) -> float:
        short_s, long_s = seconds
        return max((long_s - short_s) / (longer - _SHORT), _LEAST_PART * long_s / longer)

    return Probe((short, chain(step, x, [device] * longer)), slope)


def chain(step: TimedStep, x: tf.Tensor, devices: Sequence[str]) -> Callable[[], Any]:
    """Return a call of a graph of operations one after the other, as TensorFlow runs emitted graphs: as they are."""

    def run(value: tf.Tensor) -> tf.Tensor:
        for device in devices:
            with tf.device(device):
                value = step(value)
        return tf.reduce_sum(value)

    return traced(run, x)


def chains(
    devices: Sequence[str], count: int, x: tf.Tensor, length: int, step: Callable[[tf.Tensor, int], tf.Tensor]
) -> Callable[[], Any]:
    """Return a call of so many chains that do not wait for each other; a step is told its number among all."""

    def run(value: tf.Tensor) -> list[tf.Tensor]:
        sums = []
        for k in range(count):
            with tf.device(devices[k % len(devices)]):
                current = value
                for i in range(length):
                    current = step(current, k * length + i)
                sums.append(tf.reduce_sum(current))
        return sums

    return traced(run, x)


def traced(run: Callable[[tf.Tensor], Any], x: tf.Tensor) -> Callable[[], Any]:
    """Return a call of a function that is a graph from now on, and has run."""
    with as_written():
        called = tf.function(run, autograph=False).get_concrete_function(x)
        called(x)
    return lambda: called(x)


class as_written:  # noqa: N801  # used like a function
    """Without TensorFlow's graph optimizer, which merges and drops operations.

    To turn it off and on for each call takes longer than a call: it is off around all of them.
    """

    def __enter__(self) -> None:
        self._was_disabled = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    def __exit__(self, *_: object) -> None:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": self._was_disabled})
