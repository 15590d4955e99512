"""Microbenchmarks: what the devices at hand do in a second, measured by small graphs of TensorFlow's operations."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from graphsplit.core.hosts import host_device, host_name
from graphsplit.planning.costs.machine import Device, Host, Link, Machine
from graphsplit.simulate.measuring.probes import Probe, Step, chain, chains, figures, operation, traced
from graphsplit.simulate.measuring.rates import (
    CONVOLUTIONS,
    PLAIN,
    convolution_step,
    host_probes,
    host_rates_of,
    operands_of,
    rate_probes,
    rates_of,
)
from graphsplit.simulate.measuring.timing import Call, reference

TURNS_S = 75.0
_LONG = 12
_TINY_LONG = 1200
_LEAST_S = 1e-7
_LARGE_ENTRIES = 4_000_000
_LOGICAL_DEVICES = 64  # as many as one likes
_VARIABLES = 128
_BESIDE_SIDE, _BESIDE_ENTRIES, _BESIDE_IMAGE, _BESIDE_IMAGES = 512, 250_000, (8, 16, 64), 4

_Key = tuple[str, str, float]
"""What a probe is of: a figure, the family or dtype, how much work; "" and 0 where there is none."""


def measure(devices: Sequence[str], threads: int, least_s: float = TURNS_S) -> Machine:
    """Measure devices, in turns, and return a machine of them. It takes half a minute more than what is asked for.

    Args:
      devices: full names.
      threads: how many run operations of these devices; 0: kernels run by themselves, as on GPUs.
      least_s: for which all is timed in turns.
    """
    first, is_gpu = devices[0], not threads
    probes: dict[_Key, Probe] = {
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
    found = figures(probes, reference(first), least_s)

    def of(what: str, amount: float = 0) -> float:
        return max(0.0, found.get((what, "", amount), 0.0))

    times = {key[1:]: seconds for key, seconds in found.items() if key[0] == "rate"}
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
        of_host = {key[1]: seconds for key, seconds in found.items() if key[0] == "host"}
        bytes_per_s, flops_per_s = host_rates_of(of_host, of("overhead"))
        own = Host(os.cpu_count() or 1, call_s=of("call"), bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
        return Machine("", device, len(devices), between, host=own, host_link=link("to the host", "host link"))
    slowdown_of = _slowdowns(found)
    own = Host(
        threads=threads,
        threads_per_device=tf.config.threading.get_intra_op_parallelism_threads() or threads,
        slowdown=slowdown_of["matmul"],
        slowdown_of=slowdown_of,
        call_s=of("call"),
        device_call_s=of("device call"),
        argument_s=of("argument"),
    )
    return Machine("", device, _LOGICAL_DEVICES, between, host=own)


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


def _slowdown_probes(devices: Sequence[str], threads: int) -> dict[_Key, Probe]:
    """Return what tells how many times as long operations take while 2, 3, ... threads work on such, by family.

    Each thread has a device of its own if possible. What only reads and writes has the memory in common.
    """
    found: dict[_Key, Probe] = {}
    if threads < 2:
        return found

    def add(family: str, of_count: Callable[[int], Call]) -> None:
        alone = of_count(1)
        for count in range(2, threads + 1):
            found["slowdown", family, count] = Probe((alone, of_count(count)), _ratio)

    add("matmul", lambda count: _products(devices, count, _BESIDE_SIDE, _LONG))
    for family in CONVOLUTIONS:
        step, x = convolution_step(family, _BESIDE_IMAGE)
        of_image = functools.partial(_without_number, step)
        add(family, lambda count, of_image=of_image, x=x: chains(devices, count, x, _BESIDE_IMAGES, of_image))  # type: ignore[misc]
    operands = operands_of(_BESIDE_ENTRIES)
    for family, (step, _) in PLAIN.items():
        add(family, lambda count, step=step: _moved(step, devices, count, operands))  # type: ignore[misc]
    return found


def _ratio(seconds: Sequence[float]) -> float:
    alone_s, together_s = seconds
    return together_s / alone_s


def _slowdowns(found: Mapping[_Key, float]) -> dict[str, tuple[float, ...]]:
    """Return slowdowns by family, of 1, 2, ... threads.

    Where each operation has all cores to itself, two at a time take twice as long; never more, as one could run after
    the other.
    """
    slowdowns: dict[str, list[float]] = {family: [1.0] for family in ("matmul", *CONVOLUTIONS, *PLAIN)}
    for (what, family, count), ratio in found.items():
        if what == "slowdown":
            slowdowns[family].append(min(max(1.0, ratio), float(count)))
    return {family: tuple(ratios) for family, ratios in slowdowns.items()}


def _device_call(devices: Sequence[str]) -> Probe:
    """Return what tells what a call takes longer for each device after the first that it has something to do on."""
    x = tf.constant([1.0])

    def run(value: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for device in devices:
            with tf.device(device):
                found.append(value + 1.0)
        return found

    alone = chain(lambda v: v + 1.0, x, [devices[0]] * len(devices))
    return Probe((alone, traced(run, x)), lambda seconds: (seconds[1] - seconds[0]) / (len(devices) - 1))


def _argument(device: str) -> Probe:
    """Return what tells what a call takes longer for each tensor that the graph is given."""
    with tf.device(device):
        variables = [tf.Variable(float(k)) for k in range(_VARIABLES)]

    def sums(read: Sequence[tf.Variable]) -> Call:
        def run(value: tf.Tensor) -> tf.Tensor:
            with tf.device(device):
                for variable in read:
                    value = value + variable
                return value

        return traced(run, tf.constant(1.0))

    calls = (sums([variables[0]] * _VARIABLES), sums(variables))
    return Probe(calls, lambda seconds: (seconds[1] - seconds[0]) / (_VARIABLES - 1))


def _products(devices: Sequence[str], count: int, side: int, length: int) -> Call:
    """Return a call of so many chains of products that do not wait for each other."""
    x = tf.ones([side, side]) / side
    return chains(devices, count, x, length, lambda value, _: tf.linalg.matmul(value, x))


def _moved(step: Step, devices: Sequence[str], count: int, operands: Sequence[tf.Tensor]) -> Call:
    """Return a call of so many chains of a step whose operands no cache has."""
    each = len(operands) // count

    def after(value: tf.Tensor, number: int) -> tf.Tensor:
        with tf.control_dependencies([value]):
            return step(operands[number])

    return chains(devices, count, operands[0], min(each, _LONG * 8), after)


def _without_number(step: Step, value: tf.Tensor, _: int) -> tf.Tensor:
    return step(value)
