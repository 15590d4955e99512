"""Microbenchmarks: what the devices at hand do in a second, measured by small graphs of TensorFlow's operations.

Each graph is a chain: its operations run one after the other. How long one takes is told by two chains, of which one is
longer: what a call takes besides is in both.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.costs.machine import Curve

Step = Callable[[tf.Tensor], tf.Tensor]
_SHORT, _LONG, _LONGEST = 4, 12, 400
_CHAIN_S = 0.01  # that the longer chain takes, about
_TINY_LONG = 1200
_ROUNDS, _ROUND_S = 5, 0.05
_LEAST_ROUNDS, _MOST_ROUNDS, _ALL_ROUNDS_S = 4, 8, 15.0
_REFERENCE = 8
_POOL_BYTES = 256_000_000  # more than caches have
_SLOWDOWN_ROUNDS = 3
_WAKE_ROUNDS, _SHORT_SIDE = 9, 160
_ENOUGH_S = 0.5  # of rounds: slow calls are timed twice
_SIDES = (32, 64, 128, 256, 512, 1024)
_IMAGES = ((2, 8, 16), (8, 8, 32), (8, 16, 64), (8, 32, 64), (4, 16, 256))  # rows, side, channels
_ENTRIES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)


def seconds_of_call(call: Callable[[], Any]) -> float:
    """Return how long a call takes until its results are there: the fastest of some rounds, warm."""
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
    return min(found)


def usual_seconds_of_calls(calls: Sequence[Callable[[], Any]], beside: Callable[[], Any]) -> tuple[list[float], float]:
    """Return how long each of some calls takes until its results are there, and a reference beside them, warm.

    They take turns, as the speed of a machine may change while they are timed: the median of how many times as long as
    the reference each takes, times the median of that.
    """
    for call in (*calls, beside):
        numpy_of(call())
    first = [_round(call) for call in (*calls, beside)]
    more = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(_ALL_ROUNDS_S / sum(first))))
    rounds = [first, *[[_round(call) for call in (*calls, beside)] for _ in range(more)]]
    reference_s = statistics.median([times[-1] for times in rounds])
    relative = [statistics.median([times[k] / times[-1] for times in rounds]) for k in range(len(calls))]
    return [ratio * reference_s for ratio in relative], reference_s


def _round(call: Callable[[], Any], least_s: float = 0.15) -> float:
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() - start < least_s:
        numpy_of(call())
        count += 1
    return (time.perf_counter() - start) / count


def reference(device: str) -> Callable[[], Any]:
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


def seconds_of_step(step: Step, x: tf.Tensor, device: str, longer: int = 0) -> float:
    """Return how long one operation takes on a device: the slope between chains of two lengths."""
    short = _seconds_of_chain(step, x, [device] * _SHORT)
    longer = longer or max(_LONG, min(_LONGEST, int(_CHAIN_S / short * _SHORT)))
    long = _seconds_of_chain(step, x, [device] * longer)
    # (a slope below a part of the mean is noise)
    return max((long - short) / (longer - _SHORT), long / longer / 4)


def _chain(step: Step, x: tf.Tensor, devices: Sequence[str]) -> Callable[[], Any]:
    """Return a call of a graph of operations one after the other, as TensorFlow runs emitted graphs: as they are."""

    def run(value: tf.Tensor) -> tf.Tensor:
        for device in devices:
            with tf.device(device):
                value = step(value)
        return tf.reduce_sum(value)

    with _as_written():
        concrete = tf.function(run, autograph=False).get_concrete_function(x)
        concrete(x)

    return lambda: concrete(x)


def _seconds_of_chain(step: Step, x: tf.Tensor, devices: Sequence[str]) -> float:
    """Return how long a call of a chain takes.

    The optimizer is off around all calls: to turn it off and on for each takes longer than a call.
    """
    with _as_written():
        return seconds_of_call(_chain(step, x, devices))


class _as_written:  # noqa: N801  # used like a function
    """Without TensorFlow's graph optimizer, which merges and drops operations."""

    def __enter__(self) -> None:
        self._before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    def __exit__(self, *_: object) -> None:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": self._before})


def overhead_s(device: str) -> float:
    """Return what an operation takes that has next to nothing to do."""
    return seconds_of_step(lambda v: v + 1.0, tf.constant([1.0]), device, _TINY_LONG)


def call_s(device: str) -> float:
    """Return what a call of a function takes that has next to nothing to do."""
    return _seconds_of_chain(lambda v: v + 1.0, tf.constant([1.0]), [device])


def latency_s(first: str, second: str, entries: int = 1) -> float:
    """Return what it takes that two operations that follow each other are on different devices."""
    x = tf.ones([entries])
    alternating = [first, second] * (_TINY_LONG // 4)
    lengths = (len(alternating) // 4, len(alternating))
    apart = [_seconds_of_chain(lambda v: v + 1.0, x, alternating[:n]) for n in lengths]
    together = [_seconds_of_chain(lambda v: v + 1.0, x, [first] * n) for n in lengths]
    slopes = [(pair[1] - pair[0]) / (lengths[1] - lengths[0]) for pair in (apart, together)]
    return max(slopes[0] - slopes[1], 1e-7)


def curves(device: str, overhead: float) -> dict[str, Curve]:
    """Return rates by family: FLOPs a second of products, bytes a second of all else, by how many."""
    return {
        "matmul": _curve([_matmul(device, side, overhead) for side in _SIDES]),
        **{family: _curve([_convolution(family, device, image, overhead) for image in _IMAGES]) for family in _KINDS},
        "depthwise": _curve([_depthwise(device, image, overhead) for image in _IMAGES]),
        **{
            family: _curve([_moved(step, device, entries, overhead, moved) for entries in _ENTRIES])
            for family, (step, moved) in _PLAIN.items()
        },
    }


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    found: list[tuple[float, float]] = []
    least_s = float("inf")
    for amount, rate in sorted(points, reverse=True):  # what is smaller takes no longer: else it had company
        least_s = min(least_s, amount / rate)
        found.append((amount, amount / least_s))
    return tuple(found[::-1])


def _matmul(device: str, side: int, overhead: float, dtype: tf.DType = tf.float32) -> tuple[float, float]:
    w = tf.ones([side, side], dtype) / side
    seconds = seconds_of_step(lambda v: tf.linalg.matmul(v, w), tf.ones([side, side], dtype), device)
    flops = 2.0 * side**3
    return flops, flops / max(seconds - overhead, 0.2 * seconds)


def matmul_rate(device: str, dtype: tf.DType) -> float:
    """Return the FLOPs a second of a product of large matrices."""
    return max(_matmul(device, side, 0.0, dtype)[1] for side in _SIDES[-2:])


_KINDS = ("convolution", "input gradient", "filter gradient")


def _convolution(family: str, device: str, image: tuple[int, int, int], overhead: float) -> tuple[float, float]:
    rows, side, channels = image
    x = tf.ones([rows, side, side, channels]) / 3
    w = tf.ones([3, 3, channels, channels]) / (9 * channels)
    size, strides, start = tf.shape(x), [1, 1, 1, 1], w if family == "filter gradient" else x

    def step(v: tf.Tensor) -> tf.Tensor:
        if family == "convolution":
            return tf.nn.conv2d(v, w, 1, "SAME")
        if family == "input gradient":
            return tf.raw_ops.Conv2DBackpropInput(
                input_sizes=size, filter=w, out_backprop=v, strides=strides, padding="SAME"
            )
        with tf.control_dependencies([v]):
            return tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=[3, 3, channels, channels], out_backprop=x, strides=strides, padding="SAME"
            )

    seconds = seconds_of_step(step, start, device)
    flops = 2.0 * rows * side**2 * 9 * channels**2
    return flops, flops / max(seconds - overhead, 0.2 * seconds)


def _depthwise(device: str, image: tuple[int, int, int], overhead: float) -> tuple[float, float]:
    """Return the bytes that a depthwise convolution with the usual filter of 3 x 3 reads and writes, and its rate."""
    rows, side, channels = image
    w = tf.ones([3, 3, channels, 1]) / 9
    x = tf.ones([rows, side, side, channels])
    seconds = seconds_of_step(lambda v: tf.nn.depthwise_conv2d(v, w, [1, 1, 1, 1], "SAME"), x, device)
    count = 4.0 * 2 * rows * side**2 * channels
    return count, count / max(seconds - overhead, 0.2 * seconds)


_PLAIN: dict[str, tuple[Step, int]] = {
    "elementwise": (lambda v: v * 1.0001, 2),
    "reduction": (lambda v: v + tf.reduce_sum(v), 3),  # the sum reads once, what follows reads and writes
    "movement": (lambda v: tf.concat([v[1:], v[:1]], 0), 4),
}


def _moved(step: Step, device: str, entries: int, overhead: float, moved: int) -> tuple[float, float]:
    """Return the bytes that an operation reads and writes, and its rate: of what no cache has, as in a step.

    There, much has passed through the caches since the operands were made. So each of the chain reads others.
    """
    different = min(_LONGEST, max(2, -(-_POOL_BYTES // (4 * entries))))
    operands = itertools.cycle([tf.ones([entries]) for _ in range(different)])

    def after(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(next(operands))

    seconds = seconds_of_step(after, next(operands), device)
    count = 4.0 * entries * moved
    return count, count / max(seconds - overhead, 0.2 * seconds)


def slowdown(devices: Sequence[str], threads: int) -> tuple[float, ...]:
    """Return how many times as long a product takes while 1, 2, ... threads work, on devices of their own if possible.

    Where each operation has all cores to itself, two at a time take twice as long; never more, as one could run after
    the other. Each round measures all: what else a machine does is the same for them.
    """
    calls = [_products_at_once(devices, count) for count in range(1, threads + 1)]
    rounds = [[seconds_of_call(call) for call in calls] for _ in range(_SLOWDOWN_ROUNDS)]
    ratios = [statistics.median([times[k] / times[0] for times in rounds]) for k in range(threads)]
    return tuple([min(max(1.0, ratio), float(count)) for count, ratio in enumerate(ratios, 1)])


def wake_s(devices: Sequence[str]) -> float:
    """Return how long a thread without work takes from an operation that waits for it to its start.

    It is what two short chains of products on two devices take longer than one of them.
    """
    if len(devices) < 2:
        return 0.0
    calls = [_products_at_once(devices, count, _SHORT_SIDE, _SHORT) for count in (1, 2)]
    rounds = [[seconds_of_call(call) for call in calls] for _ in range(_WAKE_ROUNDS)]
    return max(0.0, statistics.median([both - one for one, both in rounds]))


def device_call_s(devices: Sequence[str]) -> float:
    """Return what a call of a function takes longer for each device after the first that it has something to do on."""
    if len(devices) < 2:
        return 0.0
    x = tf.constant([1.0])

    def run(value: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for device in devices:
            with tf.device(device):
                found.append(value + 1.0)
        return found

    called = tf.function(run, autograph=False).get_concrete_function(x)
    alone = _chain(lambda v: v + 1.0, x, [devices[0]] * len(devices))
    with _as_written():
        rounds = [(seconds_of_call(alone), seconds_of_call(lambda: called(x))) for _ in range(_WAKE_ROUNDS)]
    return max(0.0, statistics.median([apart - one for one, apart in rounds])) / (len(devices) - 1)


def _products_at_once(devices: Sequence[str], count: int, side: int = 512, products: int = _LONG) -> Callable[[], Any]:
    """Return a call of so many chains of products that do not wait for each other."""
    x = tf.ones([side, side]) / side

    def run(value: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for k in range(count):
            with tf.device(devices[k % len(devices)]):
                own = value
                for _ in range(products):
                    own = tf.linalg.matmul(own, value)
                found.append(tf.reduce_sum(own))
        return found

    called = tf.function(run, autograph=False)
    return lambda: called(x)
