"""Records of measurements, their statistics, and the JSON file that holds them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from graphsplit.core.storage import forms

CONTESTANTS = ("plain", "towers", "mirrored", "graphsplit", "jax")
FIT_ONLY = ("jax",)  # whose steps are those of Keras


@dataclass
class Record:
    """One contestant at one workload and number of devices.

    Attributes:
      step_s: seconds per step (of `fit`: per batch), one entry per round; entries of the same round were measured
        side by side.
      first_s: seconds of the first call's parts; `total` is all of it.
      peak_bytes: largest resident size of the contestant's process after the steps.
      gpu_peak_bytes: the most that tensors took on each GPU, from the first call to the last step.
      check: mean of the first result, to see that contestants did the same work.
      graph: what `describe` said.
      skipped: why it was not measured, "" if it was.
      commit: of the code that was measured.
    """

    workload: str
    mode: str
    devices: int
    contestant: str
    batch: int = 0
    steps_per_round: int = 0
    step_s: list[float] = field(default_factory=list)
    first_s: dict[str, float] = field(default_factory=dict)
    before_bytes: int = 0
    peak_bytes: int = 0
    gpu_peak_bytes: dict[str, int] = field(default_factory=dict)
    check: float = 0.0
    graph: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.workload, self.mode, self.devices, self.contestant

    @property
    def median_s(self) -> float:
        """The median step time."""
        return statistics.median(self.step_s)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.step_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return (high - low) / 2 / self.median_s


@dataclass
class Results:
    """Everything that one run of the suite measured."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    planning: list[dict[str, float]] = field(default_factory=list)

    def find(self, workload: str, mode: str, devices: int, contestant: str) -> Record | None:
        """Return a measured record, None where it was skipped or never asked for."""
        key = (workload, mode, devices, contestant)
        return next((r for r in self.records if r.key == key and not r.skipped), None)

    def of(self, *modes: str) -> Results:
        """Return what was measured in these modes."""
        return replace(self, records=[record for record in self.records if record.mode in modes])

    def cells(self) -> list[tuple[str, str, int]]:
        """Return the (workload, mode, devices) of the records, in their order."""
        return list(dict.fromkeys((r.workload, r.mode, r.devices) for r in self.records))

    def ratio(self, cell: tuple[str, str, int], contestant: str, to: str) -> float | None:
        """Return the median over the rounds of one contestant's step time as a multiple of another's."""
        one, other = self.find(*cell, contestant), self.find(*cell, to)
        if one is None or other is None:
            return None
        return statistics.median(a / b for a, b in zip(one.step_s, other.step_s, strict=True))

    def compared(
        self, cell: tuple[str, str, int], contestant: str, to: str, value: Callable[[Record], float]
    ) -> float | None:
        """Return one contestant's value as a multiple of another's."""
        one, other = self.find(*cell, contestant), self.find(*cell, to)
        return None if one is None or other is None or not value(other) else value(one) / value(other)

    def save(self, path: Path) -> None:
        """Write the JSON file; a reader never sees half of it, and only a file of the benchmarks is replaced."""
        forms.write_json(str(path), asdict(self), indent=1)

    @staticmethod
    def load(path: Path) -> Results:
        """Read the JSON file."""
        found = json.loads(path.read_text())
        records = [Record(**record) for record in found["records"]]
        return Results(found["environment"], found["settings"], records, found["planning"])

    def described(self) -> Iterator[Record]:
        """Yield the records of graphsplit's steps that were measured."""
        yield from (r for r in self.records if r.contestant == "graphsplit" and not r.skipped and r.graph)
