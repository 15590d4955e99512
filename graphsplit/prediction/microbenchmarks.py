"""Microbenchmarks: what the devices at hand do in a second, measured by small graphs of TensorFlow's operations.

Each graph is a chain: its operations run one after the other. How long one takes is told by two chains, of which one is
longer: what a call takes besides is in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.costs.machine import Curve
from graphsplit.prediction.timing import seconds_of_call, usual_seconds_of_calls

Step = Callable[[tf.Tensor], tf.Tensor]
_SHORT, _LONG, _LONGEST = 4, 12, 400
_CHAIN_S = 0.01  # that the longer chain takes, about
_TINY_LONG = 1200
_POOL_BYTES = 256_000_000  # more than caches have
_TOGETHER_S = 3.0  # for which what is compared is timed in turns
_SHORT_SIDE, _BESIDE_ENTRIES, _BESIDE_IMAGE = 160, 250_000, (8, 16, 64)
_SIDES = (32, 64, 128, 256, 512, 1024)
_IMAGES = ((2, 8, 16), (8, 8, 32), (8, 16, 64), (8, 32, 64), (4, 16, 256))  # rows, side, channels
_ENTRIES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)


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
    step, start = _convolution_step(family, image)
    seconds = seconds_of_step(step, start, device)
    rows, side, channels = image
    flops = 2.0 * rows * side**2 * 9 * channels**2
    return flops, flops / max(seconds - overhead, 0.2 * seconds)


def _convolution_step(family: str, image: tuple[int, int, int]) -> tuple[Step, tf.Tensor]:
    """Return a convolution with a filter of 3 x 3, or one of its gradients, of what it makes itself, and its start."""
    rows, side, channels = image
    x = tf.ones([rows, side, side, channels]) / 3
    w = tf.ones([3, 3, channels, channels]) / (9 * channels)
    size, strides = tf.shape(x), [1, 1, 1, 1]

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

    return step, w if family == "filter gradient" else x


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


def slowdowns(devices: Sequence[str], threads: int) -> dict[str, tuple[float, ...]]:
    """Return how many times as long operations take while 1, 2, ... threads work on such, by family.

    Each thread has a device of its own if possible. Where each operation has all cores to itself, two at a time take
    twice as long; never more, as one could run after the other. What only reads and writes has the memory in common.
    """
    counts = range(1, threads + 1)
    found = {"matmul": slowdown([_products_at_once(devices, count) for count in counts])}
    for family in _KINDS:
        of_images, x = _convolution_step(family, _BESIDE_IMAGE)
        chains = [_at_once(devices, count, x, _SHORT, lambda v, _, step=of_images: step(v)) for count in counts]  # type: ignore[misc]
        found[family] = slowdown(chains)
    for family, (step, _) in _PLAIN.items():
        found[family] = slowdown([_moved_at_once(step, devices, count) for count in counts])
    return found


def slowdown(calls: Sequence[Callable[[], Any]]) -> tuple[float, ...]:
    """Return how many times as long as the first of some calls each takes, of which each has one chain more to run.

    They are timed in turns: what else a machine does is the same for all.
    """
    alone, *together = calls
    with _as_written():
        seconds, alone_s = usual_seconds_of_calls(together, alone, _TOGETHER_S)
    return (1.0, *[min(max(1.0, both_s / alone_s), float(n)) for n, both_s in enumerate(seconds, 2)])


def wake_s(devices: Sequence[str]) -> float:
    """Return how long a thread without work takes from an operation that waits for it to its start.

    It is what two short chains of products on two devices take longer than one of them.
    """
    if len(devices) < 2:
        return 0.0
    alone, both = [_products_at_once(devices, count, _SHORT_SIDE, _SHORT) for count in (1, 2)]
    with _as_written():
        (both_s,), alone_s = usual_seconds_of_calls([both], alone, _TOGETHER_S)
    return max(0.0, both_s - alone_s)


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
        (apart_s,), alone_s = usual_seconds_of_calls([lambda: called(x)], alone, _TOGETHER_S)
    return max(0.0, apart_s - alone_s) / (len(devices) - 1)


def _products_at_once(devices: Sequence[str], count: int, side: int = 512, products: int = _LONG) -> Callable[[], Any]:
    """Return a call of so many chains of products that do not wait for each other."""
    x = tf.ones([side, side]) / side
    return _at_once(devices, count, x, products, lambda value, _: tf.linalg.matmul(value, x))


def _moved_at_once(step: Step, devices: Sequence[str], count: int) -> Callable[[], Any]:
    """Return a call of so many chains of a step whose operands no cache has."""
    operands = [tf.ones([_BESIDE_ENTRIES]) for _ in range(_POOL_BYTES // (4 * _BESIDE_ENTRIES))]
    each = len(operands) // count

    def after(value: tf.Tensor, number: int) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(operands[number])

    return _at_once(devices, count, operands[0], min(each, _LONG * 8), after)


def _at_once(
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

    with _as_written():
        called = tf.function(run, autograph=False).get_concrete_function(x)
        called(x)
    return lambda: called(x)
