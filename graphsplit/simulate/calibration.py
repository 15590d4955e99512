"""`calibrate`: a machine file for the machine at hand, out of measurements.

What operations take when nothing records them is fitted: steps on one device tell it.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.options import check_micro_batches
from graphsplit.core.devices import available_devices
from graphsplit.core.gpus import gpu_memory_bytes
from graphsplit.core.progress import phases, quiet
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.emission.emitter import emit
from graphsplit.errors import UnsupportedError
from graphsplit.inspect.placements import source_of
from graphsplit.inspect.recorded import timeline_of_source
from graphsplit.inspect.sources import StateKeeper
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.machine import Machine, Sample
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.plan import Plan
from graphsplit.simulate.calls import predicted_call
from graphsplit.simulate.measuring import microbenchmarks, timing
from graphsplit.simulate.measuring.sampling import kinds_of, samples_of
from graphsplit.simulate.prediction.replay import replay
from graphsplit.simulate.prediction.task_writing import machine_tasks

_LEAST_RECORDED, _MOST_RECORDED, _RECORDED_S = 2, 50, 0.3  # steps, and how long they take
_MEASURED = ("device", "link", "host", "host_link")  # tables of the file


def calibrate(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    name: str = "here",
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    **kwargs: Any,
) -> Machine:
    """Measure the devices of this process, and how long their operations take. This needs about two minutes.

    It measures products and convolutions with their gradients, memory, copies between devices, the cost of an empty
    operation and of a call, and how much slower devices are that work at once. Of GPUs, it also measures the host's
    memory and products, and copies to it.
    With a function, TensorFlow's profiler also measures its operations one by one on one device, and its whole steps.
    That makes predictions of this function, and of similar ones, more exact.

    Args:
      fn, *args, **kwargs: a function and tensors to call it with: it runs for a second or two. Variables keep their
        values.
      name: of the machine.
      micro_batches: the numbers of parts of the batch that are measured. Operations of `n` devices are as large as
        those of `n` micro-batches. Numbers above that of the rows are left out.

    Raises:
      ArgumentError: for numbers of micro-batches that are none.
      UnsupportedError: for a function that XLA compiles.

    >>> import graphsplit as gs
    >>> machine = gs.simulate.calibrate(name="laptop")  # doctest: +SKIP
    >>> gs.predict(fn, x, machine=machine, devices=2)  # doctest: +SKIP
    """
    with phases("calibrating", take_minutes=True) as progress:
        devices = available_devices()
        first = devices[0]
        progress("measuring products, convolutions, memory, copies and launching, for about two minutes")
        measured = microbenchmarks.measure(devices, 0 if "GPU" in first else threads_of_process())
        machine = replace(
            measured,
            name=name,
            device=replace(measured.device, name=_model(first), memory_bytes=float(_memory_bytes(first))),
            sources=dict.fromkeys(_MEASURED, f"measured on {platform.node()} by graphsplit calibrate"),
            calibrated=True,
        )
        return machine if fn is None else measure_function(machine, fn, args, kwargs, micro_batches, progress)


def measure_function(
    machine: Machine,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    micro_batches: Sequence[int] = (1,),
    progress: Callable[[str], None] = quiet,
) -> Machine:
    """Return a machine with the operations of a function measured, and what its step takes besides: see `calibrate`."""
    from graphsplit.api.decorators import parallelize

    function = fn.function if isinstance(fn, ParallelFunction) else fn
    if is_compiled_function(function):
        raise UnsupportedError(
            "calibrate measures operations one by one, and jit_compile=True makes XLA fuse them. Measure the "
            "function without jit_compile; predictions of the compiled one are made of the same operations."
        )
    for count in micro_batches:
        check_micro_batches(count)
    call = predicted_call(function, args, kwargs)
    rows = int(call.splitting.batch)
    counts = [count for count in dict.fromkeys(micro_batches) if count == 1 or count <= rows] or [1]
    device = available_devices()[0]
    alone = [parallelize(function, devices=[device], micro_batches=count) for count in counts]
    calls = [functools.partial(step, *args, **kwargs) for step in alone]
    progress("measuring the function as a whole")
    with StateKeeper([(variable.handle, variable.dtype) for variable in alone[0].variables(*args, **kwargs)]):
        seconds = timing.usual_seconds_of_calls(calls, timing.reference(device))
    measured = []
    for step, count, step_s in zip(alone, counts, seconds, strict=True):
        progress(f"measuring its operations, {count_text(count, 'part')} of the batch")
        plan = call.plan([device], micro_batches=count)
        source, arguments, title = source_of(step, args, kwargs)
        steps = max(_LEAST_RECORDED, min(_MOST_RECORDED, int(_RECORDED_S / step_s)))
        recorded = timeline_of_source(source, arguments, title, steps)
        measured.append(MeasuredStep(plan, samples_of(recorded, kinds_of(plan, emit(plan))), step_s))
    if machine.device.kind == "GPU":  # (kernels are recorded as they run, however long launching them takes)
        return with_samples(machine, pooled(measured, [1.0] * len(measured)))
    return fitted(machine, measured)


def _model(device: str) -> str:
    if "GPU" in device:
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
        return str(details.get("device_name", "GPU"))
    return f"core of {platform.machine()}"


def _memory_bytes(device: str) -> int:
    gpu_bytes = gpu_memory_bytes([device])
    return gpu_bytes if gpu_bytes is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_LONGER = (0.02, 1e6)  # times as long as an operation took while it was recorded
_PASSES, _CLOSE = 6, 2e-3


@dataclass(frozen=True)
class MeasuredStep:
    """A step on one device, in one or more parts of the batch.

    Attributes:
      plan: what ran.
      samples: its operations as recorded, by `sample_key`.
      seconds: how long a step takes that is not recorded.
    """

    plan: Plan = field(repr=False)
    samples: Mapping[str, Sample] = field(repr=False)
    seconds: float

    def predicted_s(self, machine: Machine) -> float:
        """Return how long it would take on a machine."""
        tasks = machine_tasks(self.plan, machine, Costs(machine.device))
        return machine.call_s(1, tasks.arguments_given) + replay(tasks.tasks, tasks.resources).seconds


def fitted(machine: Machine, measured: Sequence[MeasuredStep]) -> Machine:
    """Return a machine on which steps on one device are predicted to take what they took.

    What a call takes, and what every operation takes besides its work, is as it was measured for any function.
    Operations take as long as recorded, times what each step says: they are slower while they are recorded.
    """
    threads = threads_of_process()  # the one device had all of them
    one_device = replace(machine, host=replace(machine.host, threads=threads, threads_per_device=threads))
    longer = [1.0] * len(measured)

    def predicted_s(step: MeasuredStep, without: int = -1) -> float:
        return step.predicted_s(with_samples(one_device, pooled(measured, longer, without)))

    for _ in range(_PASSES):
        changed = False
        for k, step in enumerate(measured):
            now_s = predicted_s(step)
            if abs(now_s - step.seconds) > _CLOSE * step.seconds and now_s > (rest_s := predicted_s(step, k)):
                longer[k] = float(np.clip(longer[k] * (step.seconds - rest_s) / (now_s - rest_s), *_LONGER))
                changed = True
        if not changed:
            break
    return with_samples(machine, pooled(measured, longer))


def pooled(measured: Sequence[MeasuredStep], longer: Sequence[float], without: int = -1) -> dict[str, Sample]:
    """Return the samples of all steps: of what several did, the mean.

    Args:
      measured: the steps.
      longer: times as long as recorded, for each.
      without: the step whose operations count as if they took no time.
    """
    seconds: dict[str, list[float]] = {}
    works = {}
    for k, (step, factor) in enumerate(zip(measured, longer, strict=True)):
        for key, sample in step.samples.items():
            works[key] = sample.work
            seconds.setdefault(key, []).append(0.0 if k == without else sample.seconds * factor)
    return {key: Sample(works[key], statistics.fmean(times_s)) for key, times_s in seconds.items()}


def with_samples(machine: Machine, samples: Mapping[str, Sample]) -> Machine:
    """Return a machine on which operations take so long."""
    return replace(machine, device=replace(machine.device, samples=samples))


def threads_of_process() -> int:
    """Return how many operations this process runs at a time, whatever devices they are on."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
