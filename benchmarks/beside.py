"""The README's chart: `fit` on four devices, a batch, the first batch and memory, beside what else one would use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.plots import png
from benchmarks.results import Record, Results
from benchmarks.workloads import FIT
from graphsplit.core.storage import forms

WORKLOADS = {"mlp": "MLP", "transformer": "transformer", "resnet50": "ResNet50"}
NAMES = {
    "plain": "one device",
    "graphsplit": "graphsplit",
    "mirrored": "MirroredStrategy",
    "towers": "towers by hand",
    "jax": "Keras on JAX, DataParallel",
}
PANELS: dict[str, tuple[Callable[[Record], float], Callable[[float], str]]] = {
    "a batch": (lambda record: record.median_s, lambda s: f"{s * 1e3:.{1 if s < 0.01 else 0}f} ms"),
    "the first batch": (lambda record: record.first_s["total"], lambda s: f"{s:.1f} s"),
    "peak memory": (lambda record: record.peak_bytes, lambda size: f"{size / 1e9:.1f} GB"),
}
_COLOURS = {
    "plain": "0.6",
    "graphsplit": "tab:blue",
    "mirrored": "tab:orange",
    "towers": "tab:brown",
    "jax": "tab:green",
}
_WIDTH = 0.17


def heights(results: Results, workload: str, devices: int) -> dict[str, dict[str, tuple[float, str]]]:
    """Return for each panel how high the bar of each contestant is, as a multiple of one device, and its label."""
    records = {name: results.find(workload, FIT, devices, name) for name in NAMES}
    plain = records["plain"]
    if plain is None:
        return {title: {} for title in PANELS}
    return {
        title: {
            name: (figure(record) / figure(plain), text(figure(record)))
            for name, record in records.items()
            if record is not None
        }
        for title, (figure, text) in PANELS.items()
    }


def caption(results: Results, measured_on: str) -> str:
    """Return the chart of the README with its caption, which says on what it was measured."""
    devices = max(record.devices for record in results.of(FIT).records)
    rivals = ", ".join([label for name, label in NAMES.items() if name not in ("plain", "graphsplit")])
    return "\n".join(
        [
            f"![`fit` of {', '.join(WORKLOADS.values())}: a batch, the first batch and memory, beside {rivals} and "
            "one device](docs/beside.png)",
            "",
            f"*Keras' `fit` on {devices} logical devices, {measured_on}.",
            "All use all cores; what a strategy costs is the comparison. "
            "[Measurements](docs/generated/measurements.md) has all rows, and why graphsplit loses where it does.*",
        ]
    )


def draw(results: Results, path: Path) -> None:
    """Draw three panels of bars, each as multiples of one device, with the figure above each bar."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    devices = max(record.devices for record in results.of(FIT).records)
    bars = {workload: heights(results, workload, devices) for workload in WORKLOADS}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.1), layout="constrained")
    for axis, title in zip(axes, PANELS, strict=True):
        for k, (name, label) in enumerate(NAMES.items()):
            shown = [
                (at, *bars[workload][title][name]) for at, workload in enumerate(bars) if name in bars[workload][title]
            ]
            middles = [at + _WIDTH * (k - len(NAMES) // 2) for at, *_ in shown]
            axis.bar(middles, [height for _, height, _ in shown], 0.9 * _WIDTH, color=_COLOURS[name], label=label)
            for middle, (_, height, text) in zip(middles, shown, strict=True):
                axis.text(middle, height, f" {text}", ha="center", va="bottom", fontsize=6.5, rotation=90)
        axis.set_title(f"{title}, in multiples of one device", fontsize=9)
        axis.set_xticks(range(len(WORKLOADS)), WORKLOADS.values(), fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=9, frameon=False)
    forms.write(str(path), png(figure, 64))
    plt.close(figure)
