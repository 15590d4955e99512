"""The README's chart: a training step, its first call and its memory, beside MirroredStrategy and one device.

python -m benchmarks.beside [--devices 4] [--rounds 7] [--small] [--draw-only]

Three workloads, each contestant in a process of its own, steps interleaved. Writes `benchmarks/results/beside.json`,
and from it `docs/beside.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.plots import png
from benchmarks.results import Results
from benchmarks.runner import Cell, Settings, measure
from graphsplit.core.storage import forms

WORKLOADS = {"mlp": "MLP", "resnet50": "ResNet50", "transformer": "transformer"}
CONTESTANTS = {"plain": "one device", "mirrored": "MirroredStrategy", "graphsplit": "graphsplit"}
COLOURS = ("0.6", "tab:orange", "tab:blue")
RESULTS = Path(__file__).parent / "results" / "beside.json"
PICTURE = Path(__file__).parents[1] / "docs" / "beside.png"


def main() -> None:
    """Measure, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--draw-only", action="store_true", help="from the file of the last run")
    options = parser.parse_args()
    if not options.draw_only:
        settings = Settings(rounds=options.rounds, round_s=1.0, small=options.small)
        results = Results(environment(), {"rounds": options.rounds, "small": options.small})
        for workload in WORKLOADS:
            results.records += measure(Cell(workload, "training", options.devices), [*CONTESTANTS], settings, print)
        RESULTS.parent.mkdir(exist_ok=True)
        results.save(RESULTS)
    draw(Results.load(RESULTS), PICTURE)


def draw(results: Results, path: Path) -> None:
    """Draw three panels of bars, each as multiples of one device, with the value above each bar."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {
        "a step": (lambda record: record.median_s, lambda s: f"{s * 1e3:.0f} ms"),
        "the first call": (lambda record: record.first_s["total"], lambda s: f"{s:.1f} s"),
        "peak memory": (lambda record: record.peak_bytes / 1e9, lambda gb: f"{gb:.1f} GB"),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.9), layout="constrained")
    for axis, (title, (value, text)) in zip(axes, panels.items(), strict=True):
        for k, contestant in enumerate(CONTESTANTS):
            for at, workload in enumerate(WORKLOADS):
                records = {r.contestant: r for r in results.records if r.workload == workload}
                height = value(records[contestant]) / value(records["plain"])
                label = CONTESTANTS[contestant] if at == 0 else None
                axis.bar(at + 0.29 * (k - 1), height, 0.27, color=COLOURS[k], label=label)
                axis.text(at + 0.29 * (k - 1), height, f" {text(value(records[contestant]))}", **_LABEL)
        axis.set_title(f"{title}, in multiples of one device", fontsize=9)
        axis.set_xticks(range(len(WORKLOADS)), WORKLOADS.values(), fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.2)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    forms.write(str(path), png(figure, 64))
    plt.close(figure)


_LABEL = {"ha": "center", "va": "bottom", "fontsize": 6.5, "rotation": 90}


if __name__ == "__main__":
    main()
