"""Microbenchmarks: what the devices at hand do in a second, measured by small graphs of TensorFlow's operations.

A device's rates tell how fast it does the work of each family of operations, by how much of it there is.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from graphsplit.core.hosts import host_device, host_name
from graphsplit.planning.costs.machine import Curve, Device, Host, Link, Machine
from graphsplit.simulate.measuring.timing import (
    Probe,
    TimedCall,
    TimedStep,
    chain,
    chains,
    figures,
    operation,
    reference,
    traced,
)

TURNS_S = 75.0
_LONG = 12
_TINY_LONG = 1200
_LEAST_S = 1e-7
_LARGE_ENTRIES = 4_000_000
_LOGICAL_DEVICES = 64  # as many as one likes
_VARIABLES = 128
_BESIDE_SIDE, _BESIDE_ENTRIES, _BESIDE_IMAGE, _BESIDE_IMAGES = 512, 250_000, (8, 16, 64), 4

_ProbeName = tuple[str, str, float]
"""What a probe is of: a figure, the family or dtype, how much work; "" and 0 where there is none."""


def measure(devices: Sequence[str], threads: int, least_s: float = TURNS_S) -> Machine:
    """Measure devices, in turns, and return a machine of them. It takes half a minute more than what is asked for.

    Args:
      devices: full names.
      threads: how many run operations of these devices; 0: kernels run by themselves, as on GPUs.
      least_s: for which all is timed in turns.
    """
    first, is_gpu = devices[0], not threads
    probes: dict[_ProbeName, Probe] = {
        ("overhead", "", 0): operation(lambda v: v + 1.0, tf.constant([1.0]), first, _TINY_LONG),
        ("call", "", 0): Probe((chain(lambda v: v + 1.0, tf.constant([1.0]), [first]),), sum),
        ("argument", "", 0): _argument(first),
        **{("rate", *key): probe for key, probe in rate_probes(first).items()},
        **_slowdown_probes(devices, threads),
    }
    if len(devices) > 1:
        probes["latency", "", 1] = _latency(devices[0], devices[1], 1)
        if is_gpu:
            probes["latency", "", _LARGE_ENTRIES] = _latency(devices[0], devices[1], _LARGE_ENTRIES)
        else:
            probes["device call", "", 0] = _device_call(devices)
    if is_gpu:
        host = host_device(host_name(first))
        probes.update({("host", name, 0): probe for name, probe in host_probes(host).items()})
        probes["host link", "", 1] = _latency(first, host, 1)
        probes["host link", "", _LARGE_ENTRIES] = _latency(first, host, _LARGE_ENTRIES, _LONG * 8)
    seconds_by_probe = figures(probes, reference(first), least_s)

    def of(what: str, amount: float = 0) -> float:
        return max(0.0, seconds_by_probe.get((what, "", amount), 0.0))

    times = {key[1:]: seconds for key, seconds in seconds_by_probe.items() if key[0] == "rate"}
    curves, products = rates_of(times, of("overhead"), of("argument"))

    def link(name: str, what: str) -> Link:
        latency_s = max(of(what, 1), _LEAST_S)
        return Link(name, 4 * _LARGE_ENTRIES / max(of(what, _LARGE_ENTRIES) - latency_s, _LEAST_S), latency_s)

    between = link("between GPUs", "latency")
    if len(devices) < 2:
        between = Link("one device: nothing is sent", math.inf, 0.0, shared=True, copies=False)
    elif not is_gpu:
        between = Link("shared memory: nothing is copied", math.inf, between.latency_s, shared=True, copies=False)
    device = Device(
        name="",
        kind="GPU" if is_gpu else "CPU",
        matrix_flops_per_s=products,
        vector_flops_per_s=products,
        bytes_per_s=max([rate for _, rate in curves.get("elementwise", ())], default=0.0),
        memory_bytes=0.0,
        overhead_s=of("overhead"),
        curves=curves,
    )
    if is_gpu:  # (kernels run by themselves)
        of_host = {key[1]: seconds for key, seconds in seconds_by_probe.items() if key[0] == "host"}
        bytes_per_s, flops_per_s = host_rates_of(of_host, of("overhead"))
        host_of_gpus = Host(os.cpu_count() or 1, call_s=of("call"), bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
        return Machine("", device, len(devices), between, host=host_of_gpus, host_link=link("to the host", "host link"))
    slowdown_of = _slowdowns(seconds_by_probe)
    host_of_cpus = Host(
        threads=threads,
        threads_per_device=tf.config.threading.get_intra_op_parallelism_threads() or threads,
        slowdown=slowdown_of["matmul"],
        slowdown_of=slowdown_of,
        call_s=of("call"),
        device_call_s=of("device call"),
        argument_s=of("argument"),
    )
    return Machine("", device, _LOGICAL_DEVICES, between, host=host_of_cpus)


def _latency(first: str, second: str, entries: int, length: int = _TINY_LONG // 2) -> Probe:
    """Return what tells how long it takes that two operations that follow each other are on different devices."""
    x = tf.ones([entries])
    few, many = length // 4, length
    sides = dict.fromkeys([first, second] if host_device(host_name(first)) == second else [first])  # (others are alike)
    orders = [([first, second] * many)[:many], *[[side] * many for side in sides]]

    def difference(seconds: Sequence[float]) -> float:
        apart_s, *alone_s = [long_s - short_s for short_s, long_s in zip(seconds[::2], seconds[1::2], strict=True)]
        return (apart_s - sum(alone_s) / len(alone_s)) / (many - few)

    lengths = [part for order in orders for part in (order[:few], order)]
    return Probe(tuple([chain(lambda v: v + 1.0, x, part) for part in lengths]), difference)


def _slowdown_probes(devices: Sequence[str], threads: int) -> dict[_ProbeName, Probe]:
    """Return what tells how many times as long operations take while 2, 3, ... threads work on such, by family.

    Each thread has a device of its own if possible. What only reads and writes has the memory in common.
    """
    probes: dict[_ProbeName, Probe] = {}
    if threads < 2:
        return probes

    def add(family: str, of_count: Callable[[int], TimedCall]) -> None:
        alone = of_count(1)
        for count in range(2, threads + 1):
            probes["slowdown", family, count] = Probe((alone, of_count(count)), _ratio)

    add("matmul", lambda count: _products(devices, count, _BESIDE_SIDE, _LONG))
    for family in CONVOLUTIONS:
        step, x = convolution_step(family, _BESIDE_IMAGE)
        of_image = functools.partial(_without_number, step)
        add(family, lambda count, of_image=of_image, x=x: chains(devices, count, x, _BESIDE_IMAGES, of_image))  # type: ignore[misc]
    operands = operands_of(_BESIDE_ENTRIES)
    for family, (step, _) in PLAIN.items():
        add(family, lambda count, step=step: _moved(step, devices, count, operands))  # type: ignore[misc]
    return probes


def _ratio(seconds: Sequence[float]) -> float:
    alone_s, together_s = seconds
    return together_s / alone_s


def _slowdowns(ratio_by_probe: Mapping[_ProbeName, float]) -> dict[str, tuple[float, ...]]:
    """Return slowdowns by family, of 1, 2, ... threads.

    Where each operation has all cores to itself, two at a time take twice as long; never more, as one could run after
    the other.
    """
    slowdowns: dict[str, list[float]] = {family: [1.0] for family in ("matmul", *CONVOLUTIONS, *PLAIN)}
    for (what, family, count), ratio in ratio_by_probe.items():
        if what == "slowdown":
            slowdowns[family].append(min(max(1.0, ratio), float(count)))
    return {family: tuple(ratios) for family, ratios in slowdowns.items()}


def _device_call(devices: Sequence[str]) -> Probe:
    """Return what tells what a call takes longer for each device after the first that it has something to do on."""
    x = tf.constant([1.0])

    def run(value: tf.Tensor) -> list[tf.Tensor]:
        sums = []
        for device in devices:
            with tf.device(device):
                sums.append(value + 1.0)
        return sums

    alone = chain(lambda v: v + 1.0, x, [devices[0]] * len(devices))
    return Probe((alone, traced(run, x)), lambda seconds: (seconds[1] - seconds[0]) / (len(devices) - 1))


def _argument(device: str) -> Probe:
    """Return what tells what a call takes longer for each tensor that the graph is given."""
    with tf.device(device):
        variables = [tf.Variable(float(k)) for k in range(_VARIABLES)]

    def sums(operands: Sequence[tf.Variable]) -> TimedCall:
        def run(value: tf.Tensor) -> tf.Tensor:
            with tf.device(device):
                for variable in operands:
                    value = value + variable
                return value

        return traced(run, tf.constant(1.0))

    calls = (sums([variables[0]] * _VARIABLES), sums(variables))
    return Probe(calls, lambda seconds: (seconds[1] - seconds[0]) / (_VARIABLES - 1))


def _products(devices: Sequence[str], count: int, side: int, length: int) -> TimedCall:
    """Return a call of so many chains of products that do not wait for each other."""
    x = tf.ones([side, side]) / side
    return chains(devices, count, x, length, lambda value, _: tf.linalg.matmul(value, x))


def _moved(step: TimedStep, devices: Sequence[str], count: int, operands: Sequence[tf.Tensor]) -> TimedCall:
    """Return a call of so many chains of a step whose operands no cache has."""
    per_chain = len(operands) // count

    def after(value: tf.Tensor, number: int) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(operands[number])

    return chains(devices, count, operands[0], min(per_chain, _LONG * 8), after)


def _without_number(step: TimedStep, value: tf.Tensor, _: int) -> tf.Tensor:
    return step(value)


_POOL_BYTES = 256_000_000  # more than caches have
_MOST_OPERANDS = 400
_LEAST_PART = 0.2  # of what an operation takes is its work
_SIDES = (32, 64, 128, 256, 512, 1024)
_IMAGES = ((2, 8, 16), (8, 8, 32), (8, 16, 64), (8, 32, 64), (4, 16, 256))  # rows, side, channels
_ENTRIES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
_OTHER_DTYPES = {"float64": (tf.float64, 512)}  # and the side of the products that are timed
CONVOLUTIONS = ("convolution", "input gradient", "filter gradient")
PLAIN: dict[str, tuple[TimedStep, int]] = {
    "elementwise": (lambda v: v * 1.0001, 2),
    "reduction": (lambda v: v + tf.reduce_sum(v), 3),  # the sum reads once, what follows reads and writes
    "movement": (lambda v: tf.concat([v[1:], v[:1]], 0), 4),
}
"""Steps of families that only read and write, and how often what they are given passes."""


def rate_probes(device: str) -> dict[tuple[str, float], Probe]:
    """Return what tells how long work takes, by family, or other dtype of products, and FLOPs, or bytes of all else."""
    probes: dict[tuple[str, float], Probe] = {}
    for side in _SIDES:
        probes["matmul", 2.0 * side**3] = _matmul(device, side, tf.float32)
    for name, (dtype, side) in _OTHER_DTYPES.items():
        probes[name, 2.0 * side**3] = _matmul(device, side, dtype)
    for rows, side, channels in _IMAGES:
        for family in CONVOLUTIONS:
            step, start = convolution_step(family, (rows, side, channels))
            probes[family, 2.0 * rows * side**2 * 9 * channels**2] = operation(step, start, device)
        x, w = tf.ones([rows, side, side, channels]), tf.ones([3, 3, channels, 1]) / 9
        depthwise = functools.partial(tf.nn.depthwise_conv2d, filter=w, strides=[1, 1, 1, 1], padding="SAME")
        probes["depthwise", 4.0 * 2 * rows * side**2 * channels] = operation(depthwise, x, device)
    for entries in _ENTRIES:
        operands = operands_of(entries)
        for family, (step, moved) in PLAIN.items():
            probes[family, 4.0 * entries * moved] = operation(_of_others(step, operands), operands[0], device)
    return probes


def host_probes(device: str) -> dict[str, Probe]:
    """Return what tells how long the host of GPUs takes for the largest product, and to read and write most bytes."""
    operands = operands_of(_ENTRIES[-1])
    step, _ = PLAIN["elementwise"]
    moved = operation(_of_others(step, operands), operands[0], device)
    return {"product": _matmul(device, _SIDES[-1], tf.float32), "moved": moved}


def host_rates_of(seconds_by_probe: Mapping[str, float], overhead_s: float) -> tuple[float, float]:
    """Return the bytes that a host reads and writes in a second, and its FLOPs, given the seconds of `host_probes`."""
    own_s = {name: max(seconds - overhead_s, _LEAST_PART * seconds) for name, seconds in seconds_by_probe.items()}
    return 4.0 * _ENTRIES[-1] * PLAIN["elementwise"][1] / own_s["moved"], 2.0 * _SIDES[-1] ** 3 / own_s["product"]


def rates_of(
    seconds_by_work: Mapping[tuple[str, float], float], overhead_s: float, argument_s: float
) -> tuple[dict[str, Curve], dict[str, float]]:
    """Return the curves of all families, and FLOPs a second of products of large matrices by dtype.

    Args:
      seconds_by_work: what work took: see `rate_probes`.
      overhead_s: what an operation takes besides.
      argument_s: what it takes that an operation is given an operand: those that only read and write are.
    """
    rates: dict[str, list[tuple[float, float]]] = {}
    for (family, amount), seconds in seconds_by_work.items():
        besides_s = overhead_s + (argument_s if family in PLAIN else 0.0)
        rates.setdefault(family, []).append((amount, amount / max(seconds - besides_s, _LEAST_PART * seconds)))
    curves = {family: _curve(points) for family, points in rates.items() if family not in _OTHER_DTYPES}
    products = {"float32": max(rate for _, rate in curves["matmul"][-2:])}
    return curves, {**products, **{name: rates[name][0][1] for name in _OTHER_DTYPES}}


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    descending: list[tuple[float, float]] = []
    least_s = float("inf")
    for amount, rate in sorted(points, reverse=True):  # what is smaller takes no longer: else it had company
        least_s = min(least_s, amount / rate)
        descending.append((amount, amount / least_s))
    return tuple(descending[::-1])


def _matmul(device: str, side: int, dtype: tf.DType) -> Probe:
    w = tf.ones([side, side], dtype) / side
    return operation(lambda v: tf.linalg.matmul(v, w), tf.ones([side, side], dtype), device)


def convolution_step(family: str, image: tuple[int, int, int]) -> tuple[TimedStep, tf.Tensor]:
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


def _of_others(step: TimedStep, operands: Sequence[tf.Tensor]) -> TimedStep:
    """Return a step that waits for what it is given, and reads another operand each time, as most do in a step.

    There, much has passed through the caches since the operands were made.
    """
    next_operands = itertools.cycle(operands)

    def after(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(next(next_operands))

    return after
