"""Measuring: one cell (workload, mode, number of devices) after the other, its contestants side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import free_bytes
from benchmarks.processes import Group, NoAnswerError
from benchmarks.results import Record
from benchmarks.workloads import workload

_WARM_UP_STEPS = 3
_MOST_STEPS = 2000
Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: how often each contestant is timed.
      round_s: about how many seconds one timing takes.
      kind: "cpu" (logical devices) or "gpu".
      memory_mb: of each logical GPU; None where GPUs are not divided.
      small: whether networks have their small size.
      batch: rows of a batch instead of the workload's own.
      limit_s: how long any answer may take.
      reserve_bytes: memory that stays free; a contestant that would start with less is left out.
    """

    rounds: int = 5
    round_s: float = 0.3
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
    records = {
        name: Record(cell.workload, cell.mode, cell.devices, name, batch, processes=_processes(name, cell, batch))
        for name in contestants
    }
    with ExitStack() as stack:
        groups = {name: _start(record, settings, stack) for name, record in records.items()}
        for name, record in records.items():
            report(f"{cell}: first step of {name}")
            _attempt(record, groups[name], _prepare, settings)
        for name, record in records.items():
            _attempt(record, groups[name], _calibrate, settings)
        for number in range(settings.rounds):
            report(f"{cell}: round {number + 1} of {settings.rounds}")
            for name, record in records.items():
                _attempt(record, groups[name], _time, settings)
        report(f"{cell}: reading the graphs")
        for name, record in records.items():
            _attempt(record, groups[name], _describe, settings)
    return list(records.values())


def _processes(contestant: str, cell: Cell, batch: int) -> int:
    return min(cell.devices, batch) if contestant == "separate" else 1


def _start(record: Record, settings: Settings, stack: ExitStack) -> Group | None:
    free = free_bytes()
    if free is not None and free < settings.reserve_bytes:
        record.skipped = f"only {free / 1e9:.1f} GB of memory are free"
        return None
    group = stack.enter_context(Group(record.processes, settings.kind, settings.limit_s))
    alone = record.contestant in ("plain", "separate")
    group.send("start", devices=1 if alone else record.devices, kind=settings.kind, memory_mb=settings.memory_mb)
    return group


def _attempt(
    record: Record, group: Group | None, action: Callable[[Record, Group, Settings], None], settings: Settings
) -> None:
    """Do something with a contestant that has not failed yet; note why if it fails."""
    if group is None or record.skipped:
        return
    try:
        action(record, group, settings)
    except NoAnswerError as error:
        record.skipped = str(error)
        group.close()


def _prepare(record: Record, group: Group, settings: Settings) -> None:
    group.answers()
    shared = {
        "contestant": record.contestant,
        "name": record.workload,
        "small": settings.small,
        "mode": record.mode,
    }
    rows = [record.batch // len(group) + (d < record.batch % len(group)) for d in range(len(group))]
    group.send_each("prepare", [{**shared, "batch": own} for own in rows])
    answers = group.answers()
    record.first_s = _largest(answer["first_s"] for answer in answers)
    record.before_bytes = sum(answer["before_bytes"] for answer in answers)
    record.check = sum(answer["check"] * own for answer, own in zip(answers, rows, strict=True)) / record.batch


def _largest(parts: Any) -> dict[str, float]:
    """Return the parts of the process that was last."""
    return max(parts, key=lambda seconds: seconds["total"])


def _calibrate(record: Record, group: Group, settings: Settings) -> None:
    step_s = _step_s(group, _WARM_UP_STEPS)
    if step_s * _WARM_UP_STEPS < settings.round_s:
        step_s = _step_s(group, _steps(step_s, settings.round_s / 3))
    record.steps_per_round = _steps(step_s, settings.round_s)


def _steps(step_s: float, seconds: float) -> int:
    return max(1, min(_MOST_STEPS, round(seconds / step_s)))


def _step_s(group: Group, steps: int) -> float:
    """Return seconds per step of the slowest process, all of them stepping at the same time."""
    return float(max(answer["seconds"] for answer in group.ask("time", steps=steps)) / steps)


def _time(record: Record, group: Group, _: Settings) -> None:
    record.step_s.append(_step_s(group, record.steps_per_round))


def _describe(record: Record, group: Group, _: Settings) -> None:
    answers = group.ask("memory")
    record.peak_bytes = sum(answer["peak_bytes"] for answer in answers)
    record.gpu_peak_bytes = answers[0]["gpu_peak_bytes"] if len(answers) == 1 else {}
    if record.contestant != "separate":
        record.graph = group.ask("describe")[0]
