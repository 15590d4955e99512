"""Probes: small graphs that are timed in turns, and what their times tell of a machine.

A figure is computed from what its own calls took in one turn, next to each other; what counts is the median of all
turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from graphsplit.simulate.measuring.timing import Call, relative_seconds_of_calls, seconds_of_warm_call

Step = Callable[[tf.Tensor], tf.Tensor]
Key = TypeVar("Key", bound=Hashable)
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

    calls: tuple[Call, ...]
    figure: Callable[[Sequence[float]], float]


def figures(probes: Mapping[Key, Probe], reference: Call, least_s: float) -> dict[Key, float]:
    """Return what probes tell.

    Args:
      probes: by name.
      reference: by which the speed of the machine is told (`timing.reference`).
      least_s: how long that goes on, at least.
    """
    calls = [call for probe in probes.values() for call in probe.calls]
    with as_written():
        turns, reference_s = relative_seconds_of_calls(calls, reference, least_s)
    found, first = {}, 0
    for name, probe in probes.items():
        own = turns[first : first + len(probe.calls)]
        first += len(probe.calls)
        each_turn = [probe.figure([reference_s * times for times in turn]) for turn in zip(*own, strict=True)]
        found[name] = statistics.median(each_turn)
    return found


def operation(step: Step, x: tf.Tensor, device: str, longer: int = 0) -> Probe:
    """Return what tells how long one operation takes on a device: the slope between chains of two lengths.

    What a call takes besides is in both.
    """
    short = chain(step, x, [device] * _SHORT)
    longer = longer or max(_LONG, min(_LONGEST, int(_CHAIN_S / seconds_of_warm_call(short) * _SHORT)))

    def slope(seconds: Sequence[float]) -> float:
        short_s, long_s = seconds
        return max((long_s - short_s) / (longer - _SHORT), _LEAST_PART * long_s / longer)

    return Probe((short, chain(step, x, [device] * longer)), slope)


def chain(step: Step, x: tf.Tensor, devices: Sequence[str]) -> Callable[[], Any]:
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
        found = []
        for k in range(count):
            with tf.device(devices[k % len(devices)]):
                own = value
                for i in range(length):
                    own = step(own, k * length + i)
                found.append(tf.reduce_sum(own))
        return found

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
        self._before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    def __exit__(self, *_: object) -> None:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": self._before})
