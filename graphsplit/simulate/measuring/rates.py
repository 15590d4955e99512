"""Rates: how fast a device does the work of each family of operations, by how much of it there is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from graphsplit.planning.costs.machine import Curve
from graphsplit.simulate.measuring.probes import Probe, Step, operation

_POOL_BYTES = 256_000_000  # more than caches have
_MOST_OPERANDS = 400
_LEAST_PART = 0.2  # of what an operation takes is its work
_SIDES = (32, 64, 128, 256, 512, 1024)
_IMAGES = ((2, 8, 16), (8, 8, 32), (8, 16, 64), (8, 32, 64), (4, 16, 256))  # rows, side, channels
_ENTRIES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
_OTHER_DTYPES = {"float64": (tf.float64, 512)}  # and the side of the products that are timed
CONVOLUTIONS = ("convolution", "input gradient", "filter gradient")
PLAIN: dict[str, tuple[Step, int]] = {
    "elementwise": (lambda v: v * 1.0001, 2),
    "reduction": (lambda v: v + tf.reduce_sum(v), 3),  # the sum reads once, what follows reads and writes
    "movement": (lambda v: tf.concat([v[1:], v[:1]], 0), 4),
}
"""Steps of families that only read and write, and how often what they are given passes."""


def rate_probes(device: str) -> dict[tuple[str, float], Probe]:
    """Return what tells how long work takes, by family, or other dtype of products, and FLOPs, or bytes of all else."""
    found: dict[tuple[str, float], Probe] = {}
    for side in _SIDES:
        found["matmul", 2.0 * side**3] = _matmul(device, side, tf.float32)
    for name, (dtype, side) in _OTHER_DTYPES.items():
        found[name, 2.0 * side**3] = _matmul(device, side, dtype)
    for rows, side, channels in _IMAGES:
        for family in CONVOLUTIONS:
            step, start = convolution_step(family, (rows, side, channels))
            found[family, 2.0 * rows * side**2 * 9 * channels**2] = operation(step, start, device)
        x, w = tf.ones([rows, side, side, channels]), tf.ones([3, 3, channels, 1]) / 9
        depthwise = functools.partial(tf.nn.depthwise_conv2d, filter=w, strides=[1, 1, 1, 1], padding="SAME")
        found["depthwise", 4.0 * 2 * rows * side**2 * channels] = operation(depthwise, x, device)
    for entries in _ENTRIES:
        operands = operands_of(entries)
        for family, (step, moved) in PLAIN.items():
            found[family, 4.0 * entries * moved] = operation(_of_others(step, operands), operands[0], device)
    return found


def host_probes(device: str) -> dict[str, Probe]:
    """Return what tells how long the host of GPUs takes for the largest product, and to read and write most bytes."""
    operands = operands_of(_ENTRIES[-1])
    step, _ = PLAIN["elementwise"]
    moved = operation(_of_others(step, operands), operands[0], device)
    return {"product": _matmul(device, _SIDES[-1], tf.float32), "moved": moved}


def host_rates_of(found: Mapping[str, float], overhead_s: float) -> tuple[float, float]:
    """Return the bytes that a host reads and writes in a second, and its FLOPs, given the seconds of `host_probes`."""
    own_s = {name: max(seconds - overhead_s, _LEAST_PART * seconds) for name, seconds in found.items()}
    return 4.0 * _ENTRIES[-1] * PLAIN["elementwise"][1] / own_s["moved"], 2.0 * _SIDES[-1] ** 3 / own_s["product"]


def rates_of(
    found: Mapping[tuple[str, float], float], overhead_s: float, argument_s: float
) -> tuple[dict[str, Curve], dict[str, float]]:
    """Return the curves of all families, and FLOPs a second of products of large matrices by dtype.

    Args:
      found: the seconds that work took: see `rate_probes`.
      overhead_s: what an operation takes besides.
      argument_s: what it takes that an operation is given an operand: those that only read and write are.
    """
    rates: dict[str, list[tuple[float, float]]] = {}
    for (family, amount), seconds in found.items():
        besides_s = overhead_s + (argument_s if family in PLAIN else 0.0)
        rates.setdefault(family, []).append((amount, amount / max(seconds - besides_s, _LEAST_PART * seconds)))
    curves = {family: _curve(points) for family, points in rates.items() if family not in _OTHER_DTYPES}
    products = {"float32": max(rate for _, rate in curves["matmul"][-2:])}
    return curves, {**products, **{name: rates[name][0][1] for name in _OTHER_DTYPES}}


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    found: list[tuple[float, float]] = []
    least_s = float("inf")
    for amount, rate in sorted(points, reverse=True):  # what is smaller takes no longer: else it had company
        least_s = min(least_s, amount / rate)
        found.append((amount, amount / least_s))
    return tuple(found[::-1])


def _matmul(device: str, side: int, dtype: tf.DType) -> Probe:
    w = tf.ones([side, side], dtype) / side
    return operation(lambda v: tf.linalg.matmul(v, w), tf.ones([side, side], dtype), device)


def convolution_step(family: str, image: tuple[int, int, int]) -> tuple[Step, tf.Tensor]:
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


def operands_of(entries: int) -> list[tf.Tensor]:
    """Return tensors that no cache has all of; of small ones, as many as a chain reads."""
    return [tf.ones([entries]) for _ in range(min(_MOST_OPERANDS, max(2, -(-_POOL_BYTES // (4 * entries)))))]


def _of_others(step: Step, operands: Sequence[tf.Tensor]) -> Step:
    """Return a step that waits for what it is given, and reads another operand each time, as most do in a step.

    There, much has passed through the caches since the operands were made.
    """
    others = itertools.cycle(operands)

    def after(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(next(others))

    return after
