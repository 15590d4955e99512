"""Measuring: one cell (workload, mode, number of devices) after the other, its contestants side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.environment import free_bytes
from benchmarks.processes import NoAnswerError, Worker
from benchmarks.results import Record
from benchmarks.workloads import FIT, workload

_WARM_UP_STEPS = 3
_MOST_STEPS = 2000
Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: how often each contestant is timed.
      round_s: about how many seconds one timing takes.
      fit_round_s: the same for batches of `fit`, of which each call has a beginning and an end.
      kind: "cpu" (logical devices) or "gpu".
      memory_mb: of each logical GPU; None where GPUs are not divided.
      small: whether networks have their small size.
      batch: rows of a batch instead of the workload's own.
      limit_s: how long any answer may take.
      reserve_bytes: memory that stays free; a contestant that would start with less is left out.
    """

    rounds: int = 5
    round_s: float = 0.3
    fit_round_s: float = 3.0
    kind: str = "cpu"
    memory_mb: int | None = None
    small: bool = False
    batch: int | None = None
    limit_s: float = 900.0
    reserve_bytes: int = 1_500_000_000


@dataclass(frozen=True)
class Cell:
    """What is measured side by side."""

    workload: str
    mode: str
    devices: int

    def __str__(self) -> str:
        return f"{self.workload} {self.mode}, {self.devices} device{'s' if self.devices > 1 else ''}"


def measure(cell: Cell, contestants: list[str], settings: Settings, report: Report) -> list[Record]:
    """Measure one cell and return a record for every contestant."""
    batch = workload(cell.workload, settings.small, settings.batch).batch
    records = {name: Record(cell.workload, cell.mode, cell.devices, name, batch) for name in contestants}
    with ExitStack() as stack:
        workers = {name: _start(record, settings, stack) for name, record in records.items()}
        for name, record in records.items():
            report(f"{cell}: first step of {name}")
            _attempt(record, workers[name], _prepare, settings)
        for name, record in records.items():
            _attempt(record, workers[name], _calibrate, settings)
        for number in range(settings.rounds):
            report(f"{cell}: round {number + 1} of {settings.rounds}")
            for name, record in records.items():
                _attempt(record, workers[name], _time, settings)
        report(f"{cell}: reading the graphs")
        for name, record in records.items():
            _attempt(record, workers[name], _describe, settings)
    return list(records.values())


def _start(record: Record, settings: Settings, stack: ExitStack) -> Worker | None:
    free = free_bytes()
    if free is not None and free < settings.reserve_bytes:
        record.skipped = f"only {free / 1e9:.1f} GB of memory are free"
        return None
    is_jax, is_fit = record.contestant == "jax", record.mode == FIT
    kind = "jax" if is_jax else settings.kind
    worker = stack.enter_context(Worker(kind, settings.limit_s, _of_jax(record.devices) if is_jax else None))
    worker.send(
        "start",
        devices=1 if record.contestant == "plain" else record.devices,
        kind=kind,
        memory_mb=settings.memory_mb,
        threads=None if is_fit else 1,
        module="benchmarks.keras_fit" if is_fit else "benchmarks.contestants",
    )
    return worker


def _of_jax(devices: int) -> dict[str, str]:
    """Return the environment in which Keras runs on JAX with so many devices of one CPU.

    XLA has as many threads as there are cores, unless NPROC says otherwise. With two for four devices, MLP's all-reduce
    waited until XLA ended the process: "Expected 4 threads to join the rendezvous, but only 2 of them arrived".
    """
    return {
        "NPROC": str(max(2 * devices, os.cpu_count() or 1)),
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def _attempt(
    record: Record, worker: Worker | None, action: Callable[[Record, Worker, Settings], None], settings: Settings
) -> None:
    """Do something with a contestant that has not failed yet; note why if it fails."""
    if worker is None or record.skipped:
        return
    try:
        action(record, worker, settings)
    except NoAnswerError as error:
        record.skipped = str(error)
        worker.close()


def _prepare(record: Record, worker: Worker, settings: Settings) -> None:
    worker.answer()
    answer = worker.ask(
        "prepare",
        contestant=record.contestant,
        name=record.workload,
        small=settings.small,
        batch=record.batch,
        mode=record.mode,
    )
    record.first_s, record.before_bytes, record.check = (answer[part] for part in ("first_s", "before_bytes", "check"))


def _calibrate(record: Record, worker: Worker, settings: Settings) -> None:
    round_s = _round_s(record, settings)
    step_s = _step_s(worker, _WARM_UP_STEPS)
    if step_s * _WARM_UP_STEPS < round_s:
        step_s = _step_s(worker, _steps(step_s, round_s / 3))
    record.steps_per_round = _steps(step_s, round_s)


def _round_s(record: Record, settings: Settings) -> float:
    return settings.fit_round_s if record.mode == FIT else settings.round_s


def _steps(step_s: float, seconds: float) -> int:
    return max(1, min(_MOST_STEPS, round(seconds / step_s)))


def _step_s(worker: Worker, steps: int) -> float:
    return float(worker.ask("time", steps=steps)["seconds"] / steps)


def _time(record: Record, worker: Worker, _: Settings) -> None:
    record.step_s.append(_step_s(worker, record.steps_per_round))


def _describe(record: Record, worker: Worker, _: Settings) -> None:
    answer = worker.ask("memory")
    record.peak_bytes, record.gpu_peak_bytes = answer["peak_bytes"], answer["gpu_peak_bytes"]
    record.graph = worker.ask("describe")
