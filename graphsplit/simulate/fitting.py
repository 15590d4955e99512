"""Fitting: what operations take when nothing records them, told by steps on one device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from graphsplit.planning.costs.machine import Machine, Sample
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.plan import Plan
from graphsplit.simulate.prediction.replay import replay
from graphsplit.simulate.prediction.task_writing import machine_tasks

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
        return machine.call_s(1, tasks.given) + replay(tasks.tasks, tasks.resources).seconds


def fitted(machine: Machine, measured: Sequence[MeasuredStep]) -> Machine:
    """Return a machine on which steps on one device are predicted to take what they took.

    What a call takes, and what every operation takes besides its work, is as it was measured for any function.
    Operations take as long as recorded, times what each step says: they are slower while they are recorded.
    """
    threads = threads_of_process()  # the one device had all of them
    own = replace(machine, host=replace(machine.host, threads=threads, threads_per_device=threads))
    longer = [1.0] * len(measured)

    def predicted_s(step: MeasuredStep, without: int = -1) -> float:
        return step.predicted_s(with_samples(own, pooled(measured, longer, without)))

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
    return {key: Sample(works[key], statistics.fmean(found)) for key, found in seconds.items()}


def with_samples(machine: Machine, samples: Mapping[str, Sample]) -> Machine:
    """Return a machine on which operations take so long."""
    return replace(machine, device=replace(machine.device, samples=samples))


def threads_of_process() -> int:
    """Return how many operations this process runs at a time, whatever devices they are on."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
