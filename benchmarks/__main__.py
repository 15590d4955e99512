"""`python -m benchmarks --quick | --full | --gpu`: measure, print, write JSON and pictures."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.display import console, progress, show
from benchmarks.environment import commit, load_average
from benchmarks.gpus import memory_of_each
from benchmarks.processes import Worker
from benchmarks.results import CONTESTANTS, FIT_ONLY, Results
from benchmarks.runner import Cell, Settings, measure
from benchmarks.workloads import FIT, MODES, WORKLOADS

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Form:
    """What a run measures unless it is told otherwise.

    Attributes:
      contestants: who takes part.
      rounds, round_s: how often and for about how long each is timed.
      planning_ops: sizes of the synthetic programs that are planned.
      limit_s: a contestant that takes longer for one answer is left out.
    """

    contestants: list[str]
    rounds: int
    round_s: float
    planning_ops: list[int]
    limit_s: float = 150.0


_FORMS = {
    "quick": Form(["plain", "mirrored", "graphsplit"], 5, 0.3, [1000, 10_000]),
    "full": Form(list(CONTESTANTS), 5, 0.3, [1000, 10_000, 100_000]),
    "gpu": Form(["plain", "mirrored", "graphsplit"], 7, 0.5, [1000]),
}
_QUICK_CELLS = [("polyfit", 2), ("polyfit", 8), ("mlp", 2), ("mini_googlenet", 2)]
_DEVICES = {"quick": [2], "full": [1, 2, 4, 8], "gpu": [1, 2, 4]}
_FIT_DEVICES = 4  # `fit` is compared on so many

Names = Annotated[str, typer.Option(help="Comma-separated; everything the form covers by default.")]


def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="All of it, most of an hour; or a few minutes.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="On 1, 2 and 4 GPUs; one GPU is divided.")] = False,
    workloads: Names = "",
    modes: Names = "",
    devices: Names = "",
    contestants: Names = "",
    rounds: Annotated[int, typer.Option(min=0, help="How often each contestant is timed; 0: as the form says.")] = 0,
    round_seconds: Annotated[float, typer.Option(help="About how long one timing takes.")] = 0.0,
    fit_round_seconds: Annotated[float, typer.Option(help="The same, of `fit`.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Rows of a batch; by default each workload's own.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="Small networks, to see that everything works.")] = False,
    kind: Annotated[str, typer.Option(help="cpu: logical devices; gpu; by default as the form says.")] = "",
    memory_mb: Annotated[int, typer.Option(help="Of each logical GPU; by default equal shares of a GPU.")] = 0,
    limit_seconds: Annotated[float, typer.Option(help="A contestant that takes longer to answer is left out.")] = 0.0,
    minutes: Annotated[float, typer.Option(help="No cell begins later than this; --resume measures the rest.")] = 0.0,
    planning_ops: Annotated[str, typer.Option(help="Sizes of the synthetic programs to plan.")] = "",
    output: Annotated[Path | None, typer.Option(help="The JSON file; pictures go beside it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the JSON file has and measure the rest.")] = False,
) -> None:
    """Measure graphsplit beside its alternatives."""
    form = "gpu" if gpu else "full" if full else "quick"
    usual = _FORMS[form]
    cells = choose_cells(form, _split(workloads), _split(modes), [int(n) for n in _split(devices)])
    chosen = _split(contestants) or usual.contestants
    _check(chosen, CONTESTANTS, "contestants")
    settings = Settings(
        rounds=rounds or usual.rounds,
        round_s=round_seconds or usual.round_s,
        fit_round_s=fit_round_seconds or Settings.fit_round_s,
        kind=kind or ("gpu" if gpu else "cpu"),
        small=small,
        batch=batch or None,
        limit_s=limit_seconds or usual.limit_s,
    )
    if settings.kind == "gpu":
        settings = replace(settings, memory_mb=memory_mb or memory_of_each(max(cell.devices for cell in cells), chosen))
    end = time.time() + 60 * (minutes or math.inf)
    path = output or RESULTS / f"{form}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [int(n) for n in _split(planning_ops)] or usual.planning_ops
    results = Results.load(path) if resume and path.exists() else _new_results(form, settings, sizes)
    left = run(results, [cell for cell in cells if _is_open(results, cell, chosen)], chosen, settings, path, end)
    results.save(path)
    show(results)
    if left:
        console.print(f"Out of time before {', '.join(map(str, left))}. The same command with --resume measures them.")
    console.print(f"Written: {path}", *_pictures(results, path), sep="\n  ")


def choose_cells(form: str, workloads: list[str], modes: list[str], devices: list[int]) -> list[Cell]:
    """Return what to measure: the form's cells, or those asked for."""
    _check(workloads, WORKLOADS, "workloads")
    if form == "quick" and not (workloads or devices or modes):
        return [Cell(name, "training", count) for name, count in _QUICK_CELLS]
    every = form != "quick"
    usual = list(WORKLOADS) if every else list(dict.fromkeys(name for name, _ in _QUICK_CELLS))
    counts = devices or _DEVICES[form]
    fits = [
        Cell(name, FIT, count)
        for count in devices or [_FIT_DEVICES]
        for name in workloads or usual
        if WORKLOADS[name].fits and FIT in (modes or ([FIT] if form == "full" else []))
    ]
    return fits + [  # should time run out, every workload has the same points on its curve
        Cell(name, mode, count)
        for count in counts
        for mode in MODES
        for name in workloads or usual
        if mode in WORKLOADS[name].modes and mode in (modes or (MODES if every else ["training"]))
    ]


def run(
    results: Results, cells: list[Cell], contestants: list[str], settings: Settings, path: Path, end: float = math.inf
) -> list[Cell]:
    """Measure the cells, saving after each; return those that should have begun after the time `end`."""
    with progress() as bar:
        task = bar.add_task("starting", total=len(cells))
        for position, cell in enumerate(cells):
            if time.time() > end:
                return cells[position:]
            start, load = time.time(), load_average()
            records = measure(
                cell,
                contestants_of(cell, contestants),
                settings,
                lambda text: bar.update(task, description=text, refresh=True),
            )
            for record in records:
                record.commit = commit()
            results.records = [r for r in results.records if r.key not in {new.key for new in records}] + records
            results.save(path)
            bar.advance(task)
            bar.console.print(f"{cell}: {time.time() - start:.0f} s, load before {load:.1f}", highlight=False)
    return []


def _new_results(form: str, settings: Settings, sizes: list[int]) -> Results:
    """Return results with the environment, and the planning of synthetic programs of these sizes."""
    results = Results({}, {"form": form, **asdict(settings)})
    with Worker(settings.kind, settings.limit_s) as worker:
        results.environment = {**worker.ask("environment"), "load_average": load_average()}
        for size in sizes:
            with console.status(f"planning {size} operations"):
                results.planning.append({"devices": 8, **worker.ask("synthetic", operations=size, devices=8)})
    return results


def _is_open(results: Results, cell: Cell, contestants: list[str]) -> bool:
    """Return whether a cell has contestants that were not measured yet; it is then measured as a whole."""
    there = [results.find(cell.workload, cell.mode, cell.devices, name) for name in contestants_of(cell, contestants)]
    return None in there


def contestants_of(cell: Cell, contestants: list[str]) -> list[str]:
    """Return those that take part in a cell: a step of TensorFlow's is none of JAX's."""
    return [name for name in contestants if cell.mode == FIT or name not in FIT_ONLY]


def _pictures(results: Results, path: Path) -> list[str]:
    try:
        from benchmarks.plots import draw

        return [str(picture) for picture in draw(results, path.parent, path.stem)]
    except ModuleNotFoundError as error:
        return [f"no pictures, {error.name} is missing: pip install 'graphsplit[benchmarks]'"]


def _split(text: str) -> list[str]:
    return [part for part in text.replace(" ", "").split(",") if part]


def _check(names: list[str], known: object, what: str) -> None:
    assert isinstance(known, (dict, tuple))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what}: {', '.join(unknown)}; there are {', '.join(known)}")


if __name__ == "__main__":
    typer.run(main)
