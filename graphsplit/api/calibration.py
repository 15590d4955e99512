"""`calibrate`: a machine file for the machine at hand, out of measurements."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from graphsplit.api.parallel_function import ParallelFunction
from graphsplit.api.predicted_calls import PredictedCall, predicted_call
from graphsplit.api.predictions import predict_call
from graphsplit.core.devices import available_devices
from graphsplit.core.errors import UnsupportedError
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.costs.machine import Device, Host, Link, Machine
from graphsplit.placement.sources import StateKeeper
from graphsplit.placement.timeline import timeline_of
from graphsplit.prediction import microbenchmarks
from graphsplit.prediction.sampling import samples_of

_RECORDINGS = 3
_DTYPES = (tf.float32, tf.float64)
_LARGE_ENTRIES = 4_000_000
_MOST_OVERHEAD = 3
_LONGER = (0.1, 1e6)  # times as long as an operation took while it was recorded
_MOST_TRIALS, _CLOSE = 8, 1e-3
_LOGICAL_DEVICES = 64


def calibrate(fn: Callable[..., Any] | None = None, *args: Any, name: str = "here", **kwargs: Any) -> Machine:
    """Measure the devices of this process, and what their operations take. It takes about a minute.

    Measured are products and convolutions with their gradients, memory, copies between devices, the cost of an
    operation with nothing to do and of a call, and how much slower all devices are that work at once. With a function,
    its operations are measured one by one as well, on one device, by TensorFlow's profiler: that is nearer to the truth
    for this function and others like it.

    Args:
      fn, *args, **kwargs: a function and tensors to call it with: it runs for a second or two. Variables keep their
        values.
      name: of the machine.

    Raises:
      UnsupportedError: for a function that XLA compiles.

    >>> import graphsplit as gs
    >>> machine = gs.calibrate(name="laptop")  # doctest: +SKIP
    >>> gs.predict(fn, x, machine=machine, devices=2)  # doctest: +SKIP
    """
    devices = available_devices()
    first = devices[0]
    is_gpu = "GPU" in first
    overhead = microbenchmarks.overhead_s(first)
    curves = microbenchmarks.curves(first, overhead)
    rates = {dtype.name: microbenchmarks.matmul_rate(first, dtype) for dtype in _DTYPES}
    fastest = max(rate for _, rate in curves["elementwise"])
    device = Device(
        name=_model(first),
        kind="GPU" if is_gpu else "CPU",
        matrix_flops_per_s=rates,
        vector_flops_per_s=rates,
        bytes_per_s=fastest,
        memory_bytes=float(_memory_bytes(first)),
        overhead_s=overhead,
        curves=curves,
    )
    found = Machine(
        name=name,
        device=device,
        devices=len(devices) if is_gpu else _LOGICAL_DEVICES,  # as many logical ones as one likes
        link=_link(devices),
        host=_host(devices, first),
        sources=dict.fromkeys(("device", "link", "host"), f"measured on {platform.node()} by graphsplit calibrate"),
        calibrated=True,
    )
    return found if fn is None else measure_function(found, fn, args, kwargs)


def measure_function(
    machine: Machine, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Machine:
    """Return a machine with the operations of a function measured, and what its step takes besides."""
    from graphsplit.api.decorators import parallelize

    function = fn.function if isinstance(fn, ParallelFunction) else fn
    if is_compiled_function(function):
        raise UnsupportedError(
            "calibrate measures operations one by one, and jit_compile=True lets XLA make other ones of them. Measure "
            "the function without jit_compile; predictions of the compiled one are made of the same operations."
        )
    alone = parallelize(function, devices=[available_devices()[0]])
    recordings = [timeline_of(alone, *args, **kwargs) for _ in range(_RECORDINGS)]
    samples = samples_of(recordings)
    sampled = replace(machine, device=replace(machine.device, samples=samples))
    if machine.device.kind == "GPU":
        return sampled
    with StateKeeper([(variable.handle, variable.dtype) for variable in alone.variables(*args, **kwargs)]):
        measured_s = microbenchmarks.seconds_of_call(lambda: alone(*args, **kwargs))
    return _explained(sampled, predicted_call(function, args, kwargs), measured_s)


def _explained(machine: Machine, call: PredictedCall, measured_s: float) -> Machine:
    """Return a machine on which a step on one device is predicted to take what it took.

    What the profiler does not see of an operation (scheduling, buffers) is the same for all, up to some times what one
    with nothing to do takes; beyond that, operations take longer one after another than they do while recorded. The
    one device had all threads of this process.
    """
    threads = threads_of_process()
    own = replace(machine, host=replace(machine.host, threads=threads, threads_per_device=threads))

    def predicted_s(overhead: float, longer: float) -> float:
        return predict_call(call, _adjusted(own, overhead, longer), 1).step_s

    most = _MOST_OVERHEAD * machine.device.overhead_s
    overhead = _solved(lambda value: predicted_s(value, 1.0), measured_s, 0.0, most)
    longer = _solved(lambda value: predicted_s(overhead, value), measured_s, *_LONGER)
    return _adjusted(machine, overhead, longer)


def _adjusted(machine: Machine, overhead: float, longer: float) -> Machine:
    samples = {key: s._replace(seconds=s.seconds * longer) for key, s in machine.device.samples.items()}
    return replace(machine, device=replace(machine.device, overhead_s=overhead, samples=samples))


def _solved(of: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a function that grows has a value, or the end that is nearest to it (regula falsi)."""
    at_low, at_high = of(low), of(high)
    if at_low >= wanted or at_high <= at_low:
        return low
    if at_high <= wanted:
        return high
    for _ in range(_MOST_TRIALS):
        middle = low + (wanted - at_low) / (at_high - at_low) * (high - low)
        found = of(middle)
        if abs(found - wanted) <= _CLOSE * wanted:
            return middle
        low, at_low, high, at_high = (middle, found, high, at_high) if found < wanted else (low, at_low, middle, found)
    return middle


def _link(devices: tuple[str, ...]) -> Link:
    if len(devices) < 2:
        return Link("one device: nothing is sent", float("inf"), 0.0, shared=True, copies=False)
    latency = microbenchmarks.latency_s(devices[0], devices[1])
    if "CPU" in devices[0]:
        return Link("one memory: what is sent is handed on", float("inf"), latency, shared=True, copies=False)
    large = microbenchmarks.latency_s(devices[0], devices[1], _LARGE_ENTRIES)
    return Link("between GPUs", 4 * _LARGE_ENTRIES / max(large - latency, 1e-7), latency)


def _host(devices: tuple[str, ...], first: str) -> Host:
    call_s = microbenchmarks.call_s(first)
    if "GPU" in first:
        return Host(threads=os.cpu_count() or 1, call_s=call_s)
    threads, each = threads_of_process(), tf.config.threading.get_intra_op_parallelism_threads()
    together = microbenchmarks.slowdown(devices, threads)
    return Host(threads=threads, threads_per_device=each or threads, slowdown=together, call_s=call_s)


def threads_of_process() -> int:
    """Return how many operations this process runs at a time, whatever devices they are on."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1


def _model(device: str) -> str:
    if "GPU" in device:
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
        return str(details.get("device_name", "GPU"))
    return f"core of {platform.machine()}"


def _memory_bytes(device: str) -> int:
    from graphsplit.core.logical_gpus import gpu_memory_bytes

    known = gpu_memory_bytes([device])
    return known if known is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
