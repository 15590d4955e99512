"""What graphsplit promises about speed, checked against results: each goal that applies is met or broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.results import Record, Results
from benchmarks.workloads import FIT

_NOISE = 1.02  # two timings of the same process differ by as much
_SYNTHETIC_US, _PLANNING_US = 40, 40


@dataclass(frozen=True)
class Outcome:
    """One goal in one cell: what was measured, and the most it may be."""

    text: str
    value: float
    most: float

    def __str__(self) -> str:
        return f"{self.text}: {self.value:.2f}, goal {self.most:.3g} or less"


def broken_goals(results: Results) -> list[Outcome]:
    """Return the goals that were missed, worst first."""
    missed = [outcome for outcome in outcomes(results) if outcome.value > outcome.most]
    return sorted(missed, key=lambda outcome: -outcome.value / outcome.most)


def met_goals(results: Results) -> list[Outcome]:
    """Return the goals that were met."""
    return [outcome for outcome in outcomes(results) if outcome.value <= outcome.most]


def outcomes(results: Results) -> Iterator[Outcome]:
    """Yield every goal that the results can decide."""
    for cell in results.cells():
        if cell[2] > 1:
            yield from _step_goals(results, cell)
        if cell[1] == FIT:
            yield from _fit_goals(results, cell)
        yield from _first_call_goals(results, cell)
        yield from _memory_goals(results, cell)
    for record in results.described():
        planning = record.graph["planning"]
        yield Outcome(f"planning {record.workload} {record.mode}, us/op", planning["plan_us_per_op"], _PLANNING_US)
    for found in results.planning:
        name = f"planning {found['operations']:.0f} synthetic operations, us/op"
        yield Outcome(name, found["plan_us_per_op"], _SYNTHETIC_US)


def _step_goals(results: Results, cell: tuple[str, str, int]) -> Iterator[Outcome]:
    """Never slower than MirroredStrategy, towers by hand or JAX; small steps, and `fit`, near the plain function."""
    limits = {"mirrored": 1.0, "towers": _NOISE, "jax": 1.0}
    if cell[1] == FIT:
        limits["plain"] = 1.0
    elif cell[0] == "polyfit":
        limits["plain"] = 1.3
    for other, most in limits.items():
        ratio = results.ratio(cell, "graphsplit", other)
        if ratio is not None:
            yield Outcome(f"{_name(cell)}: step as a multiple of {other}'s", ratio, most)


def _fit_goals(results: Results, cell: tuple[str, str, int]) -> Iterator[Outcome]:
    """The first batch and memory are no more than anybody else's on several devices."""
    for other in ("mirrored", "towers", "jax"):
        for what, figure in (("first batch", _first_s), ("peak memory", _peak_bytes)):
            ratio = results.compared(cell, "graphsplit", other, figure)
            if ratio is not None:
                yield Outcome(f"{_name(cell)}: {what} as a multiple of {other}'s", ratio, 1.0)


def _first_call_goals(results: Results, cell: tuple[str, str, int]) -> Iterator[Outcome]:
    """Stated for a large training step on 8 devices, and on 64 as a multiple of those."""
    if cell[:2] != ("resnet50", "training"):
        return
    if cell[2] == 8:
        for other, most in {"mirrored": 0.2, "plain": 2.2}.items():
            ratio = results.compared(cell, "graphsplit", other, _first_s)
            if ratio is not None:
                yield Outcome(f"{_name(cell)}: first call as a multiple of {other}'s", ratio, most)
    many, few = results.find(*cell, "graphsplit"), results.find(*cell[:2], 8, "graphsplit")
    if cell[2] == 64 and many and few and many.batch == few.batch:
        ratio = _first_s(many) / _first_s(few)
        yield Outcome(f"{_name(cell)}, {many.batch} rows: first call as a multiple of that on 8", ratio, 2.0)


def _memory_goals(results: Results, cell: tuple[str, str, int]) -> Iterator[Outcome]:
    if cell[:2] == ("resnet50", "training") and cell[2] == 8:
        ratio = results.compared(cell, "graphsplit", "mirrored", _peak_bytes)
        if ratio is not None:
            yield Outcome(f"{_name(cell)}: peak memory as a multiple of mirrored's", ratio, 1 / 3)


def _first_s(record: Record) -> float:
    return record.first_s["total"]


def _peak_bytes(record: Record) -> float:
    return record.peak_bytes


def _name(cell: tuple[str, str, int]) -> str:
    return f"{cell[0]} {cell[1]} on {cell[2]} devices"
