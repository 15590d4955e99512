"""Scaling curves as PNG files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import CONTESTANTS, Record, Results
from graphsplit.core.storage import forms

_LOOKS = {
    "plain": ("0.5", "-"),
    "towers": ("tab:brown", "--"),
    "mirrored": ("tab:orange", "-"),
    "jax": ("tab:green", "-"),
    "graphsplit": ("tab:blue", "-"),
}
_CURVES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "step": ("step, seconds", lambda record: record.median_s),
    "first_call": ("first call, seconds", lambda record: record.first_s["total"]),
    "memory": ("peak memory, GB", lambda record: record.peak_bytes / 1e9),
}


def draw(
    results: Results, folder: Path, stem: str, measures: Iterable[str] = tuple(_CURVES), colours: int | None = None
) -> list[Path]:
    """Write one picture per measure, a panel per workload, a curve per contestant; return the files.

    Args:
      results: what was measured.
      folder, stem: where the pictures lie, and what their names begin with.
      measures: `"step"`, `"first_call"`, `"memory"`.
      colours: how many a picture has, for a small file; None for all that it needs.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((workload, mode) for workload, mode, _ in results.cells()))
    written = []
    for measure in measures:
        label, value = _CURVES[measure]
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, layout="constrained")
        for axis, (workload, mode) in zip(axes.flat, panels, strict=False):
            _panel(axis, results, workload, mode, value)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        figure.supylabel(label)
        figure.supxlabel("devices")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(CONTESTANTS))
        path = folder / f"{stem}_{measure}.png"
        forms.write(str(path), png(figure, colours))
        plt.close(figure)
        written.append(path)
    return written


def png(figure: Any, colours: int | None) -> bytes:
    """Return a picture as a PNG file, of few colours if it has to be small."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    if colours is None:
        return content.getvalue()
    from PIL import Image  # matplotlib writes its pictures with it

    fewer = io.BytesIO()
    Image.open(content).convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(fewer, "PNG", optimize=True)
    return fewer.getvalue()


def _panel(axis: Any, results: Results, workload: str, mode: str, value: Callable[[Record], float]) -> None:
    for contestant in CONTESTANTS:
        records = [
            r
            for r in results.records
            if (r.workload, r.mode, r.contestant) == (workload, mode, contestant) and not r.skipped
        ]
        if records:
            colour, line = _LOOKS[contestant]
            points = sorted((r.devices, value(r)) for r in records)
            axis.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=".", label=contestant)
    devices = sorted({r.devices for r in results.records if (r.workload, r.mode) == (workload, mode)})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(devices, [str(n) for n in devices])
    axis.set_title(f"{workload}, {mode}", fontsize=9)
