"""`scaling`: predictions for many numbers of devices, as a table and a curve."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from graphsplit.api.calls.parallel_function import step_of
from graphsplit.api.layouts.predicted_layouts import VariableLayouts, layout_name
from graphsplit.api.options import Options
from graphsplit.core.device_mesh import BATCH_AXIS, mesh_axes
from graphsplit.core.notebooks import text_html
from graphsplit.core.progress import phase
from graphsplit.core.requirements import needed
from graphsplit.core.storage import forms
from graphsplit.core.user_code import with_users_traceback
from graphsplit.errors import ArgumentError
from graphsplit.planning.amounts import aligned, count_text, format_bytes
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of
from graphsplit.simulate.calls import PredictedCall, check_renamed, predict_call, predicted_call, why_too_many
from graphsplit.simulate.prediction.predictions import Prediction, checked_unknown_size

KINDS = ("strong", "weak")


@with_users_traceback
@phase("scaling")
def scaling(
    fn: Callable[..., Any],
    *args: Any,
    machine: str | os.PathLike[str] | Machine,
    devices: Sequence[int],
    mesh: Mapping[str, int] | None = None,
    variables: Sequence[VariableLayouts] | None = None,
    kinds: Sequence[str] = KINDS,
    micro_batches: int | None = None,
    unknown_size: int | None = None,
    **kwargs: Any,
) -> Scaling:
    """Return predictions for many numbers of devices: `print` the table, `save` the curve. Nothing runs.

    Args:
      fn, *args, **kwargs: as for `predict`.
      machine: see `predict`. If it has too few devices, a cluster of such machines is predicted.
      devices: how many, `[1, 2, 4, 8]`.
      mesh: as for `predict`. The axis beside the batch axis keeps its size; the batch axis has the other devices.
      variables: their layouts, `["home", "replicated", "sharded"]`, or as for `predict`; None keeps their layouts.
      kinds: `"strong"`, the batch as given over more devices; `"weak"`, on each device as many rows as are given.
      micro_batches, unknown_size: see `predict`.

    Raises:
      ArgumentError: as `predict`, for weak scaling if no argument is split, and for a number of devices that is no
        multiple of those of an axis of the mesh.

    >>> import tensorflow as tf, graphsplit as gs
    >>> found = gs.scaling(tf.nn.relu, tf.TensorSpec([4096, 512]), machine="dgx-a100", devices=[1, 2])
    >>> [(point.kind, point.devices, point.rows) for point in found.points]
    [('strong', 1, 4096), ('strong', 2, 4096), ('weak', 1, 4096), ('weak', 2, 8192)]
    """
    target, counts = machine_of(machine), _checked_counts(devices)
    unknown_size = checked_unknown_size(unknown_size)
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        raise ArgumentError(f"kinds must be some of {', '.join(map(repr, KINDS))}, got {list(kinds)!r}.")
    check_renamed(fn, kwargs)
    fn, args, kwargs = step_of(fn, args, kwargs)
    call = predicted_call(fn, args, kwargs, micro_batches=micro_batches, mesh=mesh_axes(mesh) or None)
    _check_counts(call, counts)
    batch = int(call.splitting.batch)
    if "weak" in kinds and not batch and max(counts) > 1:
        raise ArgumentError(f"Weak scaling of {call.title}: no argument is split, so there are no rows to add.")
    calls, usual = {batch: call}, call.options.variables
    names = [layout_name(usual if layout is None else layout) for layout in variables or (None,)]
    points, skipped, notes, assumptions = list[Point](), list[str](), list[str](), tuple[str, ...]()
    over = list[str]()
    for kind, count in itertools.product(kinds, counts):
        options = _with_rows_of_mesh(call.options, count)
        shares = options.mesh.rows if options.mesh else count
        rows = batch * (1 if kind == "strong" else shares)
        if shares > rows > 0:
            skipped.append(f"{kind} scaling on {count} devices: {rows} rows are too few: some devices get none")
            continue
        larger = target.covering(count)
        for layout in variables or (None,):
            name = layout_name(layout)
            which = f"{kind} scaling on {count_text(count, 'device')}{f', {name}' if name else ''}"
            if why := why_too_many(call, count, layout):
                skipped.append(f"{which}: {why}")
                continue
            with phase(", ".join(filter(None, [kind, count_text(count, "device"), layout_name(layout)]))):
                if rows not in calls:
                    calls[rows] = call.with_rows(rows)
                prediction = predict_call(calls[rows].with_options(options), larger, count, layout, unknown_size)
            points.append(_point(kind, prediction, rows, count))
            if not points[-1].fits:
                most, has = map(format_bytes, (points[-1].peak_bytes, int(larger.device.memory_bytes)))
                over.append(f"{which}, does not fit: {most} on the fullest, and each has {has}")
            notes += prediction.notes
            assumptions = prediction.assumptions
    points.sort(key=lambda p: (kinds.index(p.kind), names.index(p.layout), p.devices))
    remarks = tuple(dict.fromkeys(skipped)), tuple(dict.fromkeys([*over, *notes]))
    return Scaling(call.title, target.name, tuple(points), assumptions, *remarks)


def _check_counts(call: PredictedCall, counts: Sequence[int]) -> None:
    """Raise `ArgumentError` for a number of devices that is no multiple of those along the other axes of the mesh."""
    axes = call.options.mesh
    columns, fixed_axes = axes.each, {k: n for k, n in axes.asked.items() if k != axes.growing}
    has_rows = not fixed_axes or axes.growing in dict(axes.sizes)
    wrong = [count for count in counts if count % columns or (not has_rows and count != columns)]
    if wrong:
        raise ArgumentError(
            f"devices={list(counts)!r}: mesh {axes} has {columns} devices along {' x '.join(map(repr, fixed_axes))}, "
            f"and {wrong[0]} is no multiple of it, or there is no axis of the batch for the others. Choose other "
            f"numbers of devices, or give the mesh, mesh={ {BATCH_AXIS: 1, **fixed_axes}!r}."
        )


def _with_rows_of_mesh(options: Options, devices: int) -> Options:
    """Return options whose mesh has so many devices, more or fewer along the axis of the rows."""
    axes = options.mesh
    return options if axes.is_of_rows else replace(options, mesh=axes.grown(devices // axes.each), devices=None)


def _point(kind: str, prediction: Prediction, rows: int, count: int) -> Point:
    return Point(
        kind,
        prediction.layout,
        count,
        rows,
        prediction.step_s,
        max([memory.peak_bytes for memory in prediction.of_devices.values()], default=0),
        prediction.sent_bytes,
        prediction.limit,
        not prediction.over(),
    )


def _checked_counts(devices: object) -> list[int]:
    counts = list(devices) if isinstance(devices, (list, tuple, range)) else []
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise ArgumentError(f"devices must be numbers of devices, each at least 1, [1, 2, 4, 8], got {devices!r}.")
    return sorted(dict.fromkeys(counts))


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
      fits: whether no device holds more than it has.
    """

    kind: str
    layout: str
    devices: int
    rows: int
    step_s: float
    peak_bytes: int
    sent_bytes: int
    limit: str
    fits: bool = True

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
        first_rate = first.rows_per_s / first.devices
        return point.rows_per_s / point.devices / first_rate if first_rate else 0.0

    def _fewest(self, point: Point) -> Point:
        """Return the prediction for the fewest devices of the same kind and layout."""
        alike = [p for p in self.points if (p.kind, p.layout) == (point.kind, point.layout)]
        return min(alike, key=lambda p: p.devices)

    def _fastest(self) -> str:
        """Say how many rows a second there are at most, where they fit, and how many times those of fewer devices."""
        fitting = [p for p in self.points if p.fits]
        if not fitting:
            return ": none of these fits" if self.points else ""
        fastest = max(fitting, key=lambda p: p.rows_per_s)
        fewest, layout = self._fewest(fastest), f", {fastest.layout}" if fastest.layout else ""
        text = f": {fastest.rows_per_s:.4g} rows/s on {count_text(fastest.devices, 'device')}{layout}"
        if fewest is fastest or not fewest.rows_per_s:
            return text
        times = f"{text}, {fastest.rows_per_s / fewest.rows_per_s:.3g} times as many as on {fewest.devices}"
        return times if fewest.fits else f"{times} if it had room there"

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
