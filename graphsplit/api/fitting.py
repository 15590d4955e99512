"""Fitting: what operations, their start and a call take when nothing records them, told by steps on one device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from graphsplit.costs.machine import Machine, Sample
from graphsplit.costs.seconds import Costs
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.plan import Plan
from graphsplit.prediction.replay import replay
from graphsplit.prediction.task_writing import tasks_of

_TRUST = (0.05, 0.05, 0.2)  # how much it counts if a call, an operation's start, a recorded time are not as measured
_BESIDES = (0.2, 5.0)  # times as long as measured for any function
_LONGER = (0.02, 1e6)  # times as long as an operation took while it was recorded
_PASSES, _CLOSE = 6, 2e-3


@dataclass(frozen=True)
class MeasuredStep:
    """A step on one device, in one or more parts of the batch.

    Attributes:
      plan, graph: what ran.
      samples: its operations as recorded, by `sample_key`.
      seconds: how long a step takes that is not recorded.
    """

    plan: Plan = field(repr=False)
    graph: EmittedGraph = field(repr=False)
    samples: Mapping[str, Sample] = field(repr=False)
    seconds: float

    def predicted_s(self, machine: Machine) -> float:
        """Return how long it would take on a machine."""
        tasks = tasks_of(self.plan, self.graph, machine, Costs(machine.device))
        return machine.call_s(1, tasks.given) + replay(tasks.tasks, tasks.resources).seconds


def fitted(machine: Machine, measured: Sequence[MeasuredStep]) -> Machine:
    """Return a machine on which steps on one device are predicted to take what they took.

    What a call takes, and what every operation takes besides its work, is as it was measured for any function, but for
    what all steps together say otherwise (ridge regression: least squares of relative errors, from there on).
    Operations take as long as recorded, times what each step says: they are slower while they are recorded.
    """
    threads = threads_of_process()  # the one device had all of them
    own = replace(machine, host=replace(machine.host, threads=threads, threads_per_device=threads))
    call_s, overhead_s = _per_call_and_operation(own, measured)
    longer = [1.0] * len(measured)

    def predicted_s(step: MeasuredStep, without: int = -1) -> float:
        return step.predicted_s(_adjusted(own, call_s, overhead_s, pooled(measured, longer, without)))

    for _ in range(_PASSES):
        changed = False
        for k, step in enumerate(measured):
            now_s = predicted_s(step)
            if abs(now_s - step.seconds) > _CLOSE * step.seconds and now_s > (rest_s := predicted_s(step, k)):
                longer[k] = float(np.clip(longer[k] * (step.seconds - rest_s) / (now_s - rest_s), *_LONGER))
                changed = True
        if not changed:
            break
    return _adjusted(machine, call_s, overhead_s, pooled(measured, longer))


def _per_call_and_operation(machine: Machine, measured: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return what a call takes besides, and each operation."""
    prior = np.array([machine.host.call_s, machine.device.overhead_s])
    rows = []
    for step in measured:
        recorded_s, started_s = (
            step.predicted_s(_adjusted(machine, 0.0, overhead_s, step.samples)) for overhead_s in (0.0, prior[1])
        )
        rows.append([prior[0], started_s - recorded_s, recorded_s])
    seconds = np.array([[step.seconds] for step in measured])
    equations = np.vstack([np.array(rows) / seconds, np.diag(_TRUST)])
    found, *_ = np.linalg.lstsq(equations, np.concatenate([np.ones(len(rows)), _TRUST]), rcond=None)
    call_s, overhead_s = np.clip(found[:2], *_BESIDES) * prior
    return float(call_s), float(overhead_s)


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


def _adjusted(machine: Machine, call_s: float, overhead_s: float, samples: Mapping[str, Sample]) -> Machine:
    device = replace(machine.device, overhead_s=overhead_s, samples=samples)
    return replace(machine, device=device, host=replace(machine.host, call_s=call_s))


def threads_of_process() -> int:
    """Return how many operations this process runs at a time, whatever devices they are on."""
    return tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
