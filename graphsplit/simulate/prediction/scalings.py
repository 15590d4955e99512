"""`Scaling`: predictions for many numbers of devices, as a table and a curve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphsplit.core.notebooks import text_html
from graphsplit.core.requirements import needed
from graphsplit.core.storage import forms
from graphsplit.planning.amounts import aligned, count_text, format_bytes

_HEADERS = ("scaling", "variables", "devices", "rows", "step", "rows/s", "efficiency", "peak", "sent")
SUFFIXES = (".json", ".png", ".svg")


class Point(NamedTuple):
    """One prediction.

    Attributes:
      kind: `strong`: the batch as given, over more devices; `weak`: as many rows on each device as one device has.
      layout: of the variables.
      devices: how many.
      rows: of the whole batch.
      step_s: seconds.
      peak_bytes: of the device that holds most.
      sent_bytes: between devices.
      limit: what limits the step.
    """

    kind: str
    layout: str
    devices: int
    rows: int
    step_s: float
    peak_bytes: int
    sent_bytes: int
    limit: str

    @property
    def rows_per_s(self) -> float:
        """Rows of the batch that are computed in a second."""
        return self.rows / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Scaling:
    """What more devices would bring. Nothing has run: `print` it, or `save` it as `.json`, `.png` or `.svg`.

    Attributes:
      title: of the function.
      machine: its name.
      points: one for each kind, layout and number of devices.
      assumptions: on what it rests.
      skipped: which points there are none of, and why.
      notes: what a user might not expect.
    """

    title: str
    machine: str
    points: tuple[Point, ...]
    assumptions: tuple[str, ...] = field(default=(), repr=False)
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def efficiency(self, point: Point) -> float:
        """Return the rows a second of each device, over those of the fewest devices of the same kind and layout."""
        first = self._fewest(point)
        each = first.rows_per_s / first.devices
        return point.rows_per_s / point.devices / each if each else 0.0

    def _fewest(self, point: Point) -> Point:
        """Return the prediction for the fewest devices of the same kind and layout."""
        alike = [p for p in self.points if (p.kind, p.layout) == (point.kind, point.layout)]
        return min(alike, key=lambda p: p.devices)

    def _fastest(self) -> str:
        """Say how many rows a second there are at most, and how many times those of fewer devices that is."""
        if not self.points:
            return ""
        fastest = max(self.points, key=lambda p: p.rows_per_s)
        fewest, layout = self._fewest(fastest), f", {fastest.layout}" if fastest.layout else ""
        text = f": {fastest.rows_per_s:.4g} rows/s on {count_text(fastest.devices, 'device')}{layout}"
        if fewest is fastest or not fewest.rows_per_s:
            return text
        return f"{text}, {fastest.rows_per_s / fewest.rows_per_s:.3g} times as many as on {fewest.devices}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the points as `.json`, or the curves as `.png` or `.svg`.

        Raises:
          ArgumentError: for another suffix.
          UnsupportedError: for a picture, if matplotlib is not installed.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_suffix(path, "a scaling", SUFFIXES)
        if forms.suffix_of(path) == ".json":
            points = [point._asdict() for point in self.points]
            forms.write_json(path, {"predicted": True, "rests on": list(self.assumptions), "points": points}, 1)
        else:
            forms.write_figure(path, _figure(self))

    def __str__(self) -> str:
        lines = [f"Predicted scaling of {self.title} on {self.machine}{self._fastest()}"]
        lines += [f"  {line}" for line in aligned([_HEADERS, *map(self._cells, self.points)], left=2)]
        lines += [f"  {text}" for text in (*self.skipped, *[f"note: {note}" for note in self.notes])]
        return "\n".join([*lines, "It assumes:", *[f"  {text}" for text in self.assumptions]])

    def _cells(self, p: Point) -> tuple[str, ...]:
        return (
            p.kind,
            p.layout or "as they are",
            *(
                str(p.devices),
                str(p.rows),
                f"{p.step_s * 1e3:.2f} ms",
                f"{p.rows_per_s:.4g}",
                f"{self.efficiency(p):.0%}",
            ),
            *(format_bytes(p.peak_bytes), format_bytes(p.sent_bytes)),
        )

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the table, and the assumptions")


def _figure(scaling: Scaling) -> Any:
    figure = needed("matplotlib.figure", "plots", "A picture of a scaling").Figure
    kinds = list(dict.fromkeys(point.kind for point in scaling.points))
    drawn = figure(figsize=(6 * max(len(kinds), 1), 4.5), layout="constrained")
    for k, kind in enumerate(kinds):
        axes = drawn.add_subplot(1, len(kinds), k + 1)
        for layout in dict.fromkeys(point.layout for point in scaling.points):
            _curve(axes, [p for p in scaling.points if (p.kind, p.layout) == (kind, layout)], layout or "as they are")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("devices")
        axes.set_ylabel("rows a second, predicted")
        axes.set_title(f"{kind} scaling on {scaling.machine}", loc="left")
        axes.legend(frameon=False)
    return drawn


def _curve(axes: Any, points: Sequence[Point], label: str) -> None:
    axes.plot([p.devices for p in points], [p.rows_per_s for p in points], marker="o", label=label)
