"""How far predictions are off: `python -m benchmarks.prediction`. Steps are predicted, then run and timed.

Processes of their own calibrate: the machine, for each network, and the network's operations on one device. Others,
one for each number of devices, predict a step's plans from that and measure them in turns. The table goes into
docs/generated/predictions.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import prediction_worker as worker
from benchmarks.environment import load_average
from benchmarks.processes import NoAnswerError, in_a_process
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "prediction.json"
PAGE = ROOT / "docs" / "generated" / "predictions.md"
LAYOUTS = ("home", "mirrored", "sharded")
_DEVICES, _MICRO_BATCHES = "1,2,4,8", "1,4"
_BEGIN, _END = "<!-- table: python -m benchmarks.prediction -->", "<!-- end of table -->"
_LIMIT_S = 1800.0
_ENVIRONMENT = {
    # TensorFlow keeps memory that was freed, as on GPUs and where it uses oneDNN, and counts it: what is given back to
    # the operating system each time, page by page, makes an operation of 64 MB five times slower, or not, as it happens
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
}
_DIFFERENT = 1.1  # plans that are to be ranked
_SHORT_S, _NEAR = 1e-3, 0.15


@dataclass(frozen=True)
class Cell:
    """One step."""

    workload: str
    mode: str
    devices: int
    layout: str
    micro_batches: int

    def __str__(self) -> str:
        micro = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.workload} {self.mode} on {self.devices}, {self.layout}{micro}"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    workloads: Annotated[str, typer.Option(help="Comma-separated; all by default.")] = "",
    modes: Annotated[str, typer.Option(help="training, forward.")] = "training,forward",
    devices: Annotated[str, typer.Option(help="Numbers of logical CPU devices.")] = _DEVICES,
    layouts: Annotated[str, typer.Option(help="Of the variables.")] = ",".join(LAYOUTS),
    micro_batches: Annotated[str, typer.Option(help="Parts of each device's rows.")] = _MICRO_BATCHES,
    small: Annotated[bool, typer.Option("--small", help="Small networks, to see that everything works.")] = False,
    seconds: Annotated[float, typer.Option(help="For which each step is timed.")] = 3.0,
    output: Annotated[Path, typer.Option(help="The JSON file.")] = RESULTS,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Put the table into the page.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the JSON file has, measure the rest and what failed.")
    ] = False,
) -> None:
    """Predict and measure."""
    chosen = workloads.split(",") if workloads else list(WORKLOADS)
    found: dict[str, Any] = {"small": small, "seconds": seconds, "load": load_average(), "cells": []}
    if resume and output.exists():
        found = json.loads(output.read_text())
        found["cells"] = [entry for entry in found["cells"] if "error" not in entry]
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in itertools.product(chosen, modes.split(",")):
            if mode not in WORKLOADS[name].modes:
                continue
            cells = cells_of(name, mode, devices, layouts, micro_batches)
            done = [entry["cell"] for entry in found["cells"]]
            cells = [cell for cell in cells if asdict(cell) not in done]
            if not cells:
                continue
            machine, calibrated = (str(Path(folder) / f"{file}.toml") for file in (name, f"{name}_{mode}"))
            if not Path(machine).exists():  # (how much threads slow each other down changes within hours, too)
                in_a_process(worker.machine, machine, environment=_ENVIRONMENT, limit_s=_LIMIT_S)
            took = _answer(worker.calibrate, name, mode, small, machine, calibrated)
            for _, group in itertools.groupby(cells, key=lambda cell: cell.devices):
                together = list(group)
                asked = [asdict(cell) for cell in together], small, calibrated, seconds
                answers = took if "error" in took else _answer(worker.cells, *asked, took["alone_s"])
                if isinstance(answers, dict):
                    answers = [answers] * len(together)
                for cell, answer in zip(together, answers, strict=True):
                    found["cells"].append({"cell": asdict(cell), **answer})
                    print(f"{cell}: {_line(answer)}", flush=True)
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    print(text)
    if write:
        write_table(text)


def cells_of(
    name: str, mode: str, devices: str = _DEVICES, layouts: str = ",".join(LAYOUTS), micro_batches: str = _MICRO_BATCHES
) -> list[Cell]:
    """Return the cells of a network's step; on one device variables lie in one way."""
    return [
        Cell(name, mode, int(n), layout, int(micro))
        for n, layout, micro in itertools.product(devices.split(","), layouts.split(","), micro_batches.split(","))
        if n != "1" or layout == "home"
    ]


def _answer(function: Callable[..., Any], *arguments: object) -> Any:
    """Return the answer of a part of this in a process of its own, or why there is none: the others go on."""
    try:
        return in_a_process(function, *arguments, environment=_ENVIRONMENT, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        return {"error": str(error)}


def _line(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    return (
        f"predicted {answer['predicted_s'] * 1e3:.2f} ms, measured {answer['measured_s'] * 1e3:.2f} ms "
        f"({answer['predicted_s'] / answer['measured_s'] - 1:+.1%}); {answer['predict_s'] / answer['plan_s']:.2f} of "
        "planning"
    )


def table(found: dict[str, Any]) -> str:
    """Return what was found as a table: errors by network and number of devices, and what the goals say."""
    good = [entry for entry in found["cells"] if "error" not in entry]
    counts = sorted({entry["cell"]["devices"] for entry in good})
    lines = [
        "| network | step | " + " | ".join(f"N = {n}" for n in counts) + " | peak memory |",
        "|---|---|" + "---|" * (len(counts) + 1),
    ]
    for name, mode in dict.fromkeys((e["cell"]["workload"], e["cell"]["mode"]) for e in good):
        own = [e for e in good if (e["cell"]["workload"], e["cell"]["mode"]) == (name, mode)]
        by_count = [[_error(e) for e in _predicted(own) if e["cell"]["devices"] == n] for n in counts]
        memory = [abs(e["predicted_bytes"] / e["measured_bytes"] - 1) for e in own if e["measured_bytes"] > 0]
        cells = [_median_and_worst(errors) for errors in [*by_count, memory]]
        lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *summary(good, found)])


def summary(good: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Return the figures that the goals are about."""
    if not _predicted(good):
        return ["Nothing was measured."]
    predicted = _predicted(good)
    errors = [_error(entry) for entry in predicted]
    everything = sum([len(cells_of(name, mode)) for name in WORKLOADS for mode in WORKLOADS[name].modes])
    apart, wrong = ranked(good)
    to_two = [_error(e) for e in predicted if e["cell"]["devices"] == 2]
    ratio = [e["predict_s"] / e["plan_s"] for e in good]
    lines = [
        f"Each entry is the median and the worst error of the steps with all layouts and micro-batches; {len(good)} "
        f"of {everything} steps, the load of the machine was {found['load']:.1f} when this began. Steps are timed in "
        "turns with the same step, undivided, in another process, on one device, "
        "and count as at the speed that the machine had when that was calibrated. Of it itself no error counts: "
        f"there are {len(errors)} errors.",
        f"Step time: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}. Goals: 5 %, 15 %.",
        *_longer_text(predicted),
        f"Of {apart} pairs of plans that differ by more than 10 %, {wrong} are ranked wrongly. Goal: none.",
        *_regret_text(good),
        f"Predicting takes {statistics.median(ratio):.2f} of the time of planning in median, {max(ratio):.2f} at most. "
        "Goal: 2.",
    ]
    if to_two:
        lines.append(f"From one device to two: median {statistics.median(to_two):.1%}. Goal: 10 %.")
    grappler = [e["grappler_s"] / e["measured_s"] - 1 for e in good if e.get("grappler_s")]
    if grappler:
        worst = max(map(abs, grappler))
        lines.append(
            f"TensorFlow's own simulator (Grappler's virtual cluster) on the same graphs, {len(grappler)} of them: "
            f"median error {statistics.median(map(abs, grappler)):.0%}, worst {worst:.0%}."
        )
    return lines


def _longer_text(good: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many of the steps are near that take long enough to be split."""
    errors = [_error(entry) for entry in good if entry["measured_s"] > _SHORT_S]
    if not errors:
        return []
    near = sum(error <= _NEAR for error in errors) / len(errors)
    return [
        f"Of those that take more than a millisecond, {len(errors)}: median {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}; {near:.0%} of them within 15 %."
    ]


def _regret_text(good: Sequence[dict[str, Any]]) -> list[str]:
    found = regrets(good)
    if not found:
        return []
    return [
        "The fastest by prediction of all plans of a step is slower than the fastest by "
        f"{statistics.median(found):.1%} in median of {len(found)} steps, {max(found):.1%} at most. Goals: 2 %, 10 %."
    ]


def _predicted(good: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps but for undivided ones on one device: they were calibrated, and the others are timed by them."""
    return [e for e in good if (e["cell"]["devices"], e["cell"]["micro_batches"]) != (1, 1)]


def ranked(good: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of plans of one step differ by more than 10 %, and how many of them are ranked wrongly."""
    apart = wrong = 0
    for group in _by_step(good):
        for a, b in itertools.combinations(group, 2):
            fast, slow = sorted((a, b), key=lambda entry: entry["measured_s"])
            if slow["measured_s"] > _DIFFERENT * fast["measured_s"]:
                apart += 1
                wrong += slow["predicted_s"] <= fast["predicted_s"]
    return apart, wrong


def regrets(good: Sequence[dict[str, Any]]) -> list[float]:
    """Return by how much the plan that is predicted to be the fastest of a step is slower than the fastest, for each.

    That is what `plan="auto"` chooses from: numbers of devices, layouts and micro-batches.
    """
    found = []
    for group in _by_step(good):
        chosen = min(group, key=lambda entry: entry["predicted_s"])
        found.append(chosen["measured_s"] / min(entry["measured_s"] for entry in group) - 1)
    return found


def _by_step(good: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the cells of each network's step that has more than one."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in good:
        groups.setdefault((entry["cell"]["workload"], entry["cell"]["mode"]), []).append(entry)
    return [group for group in groups.values() if len(group) > 1]


def _error(entry: dict[str, Any]) -> float:
    return abs(entry["predicted_s"] / entry["measured_s"] - 1)


def _median_and_worst(errors: Sequence[float]) -> str:
    return f"{statistics.median(errors):.0%}, {max(errors):.0%}" if errors else ""


def write_table(text: str) -> None:
    """Replace the table of docs/generated/predictions.md."""
    page = PAGE.read_text()
    before, rest = page.split(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{time.strftime('%Y-%m-%d')}\n\n{text}\n{_END}{rest.split(_END)[1]}")


if __name__ == "__main__":
    app()
