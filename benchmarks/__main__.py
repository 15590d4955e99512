"""`python -m benchmarks --quick | --full`: measure, print, write JSON and pictures."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.display import console, progress, show
from benchmarks.environment import load_average
from benchmarks.processes import Group
from benchmarks.results import CONTESTANTS, Results
from benchmarks.runner import Cell, Settings, measure
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"
_QUICK_CELLS = [("polyfit", 2), ("polyfit", 8), ("mlp", 2), ("mini_googlenet", 2)]
_QUICK_CONTESTANTS = ["plain", "mirrored", "ceiling", "graphsplit"]
_FULL_DEVICES = [1, 2, 4, 8, 16]

Names = Annotated[str, typer.Option(help="Comma-separated; everything the form covers by default.")]


def main(
    full: Annotated[bool, typer.Option("--full/--quick", help="All of it, hours; or a few minutes.")] = False,
    workloads: Names = "",
    modes: Names = "",
    devices: Names = "",
    contestants: Names = "",
    rounds: Annotated[int, typer.Option(min=0, help="How often each contestant is timed; 0: as the form says.")] = 0,
    round_seconds: Annotated[float, typer.Option(help="About how long one timing takes.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Rows of a batch; by default each workload's own.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="Small networks, to see that everything works.")] = False,
    kind: Annotated[str, typer.Option(help="cpu: logical devices; gpu.")] = "cpu",
    limit_seconds: Annotated[float, typer.Option(help="A contestant that takes longer to answer is left out.")] = 600,
    planning_ops: Annotated[str, typer.Option(help="Sizes of the synthetic programs to plan.")] = "",
    output: Annotated[Path | None, typer.Option(help="The JSON file; pictures go beside it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the JSON file has and measure the rest.")] = False,
) -> None:
    """Measure graphsplit beside its alternatives."""
    cells = choose_cells(full, _split(workloads), _split(modes), [int(n) for n in _split(devices)])
    chosen = _split(contestants) or (list(CONTESTANTS) if full else _QUICK_CONTESTANTS)
    _check(chosen, CONTESTANTS, "contestants")
    settings = Settings(
        rounds=rounds or (9 if full else 5),
        round_s=round_seconds or (1.0 if full else 0.3),
        kind=kind,
        small=small,
        batch=batch or None,
        limit_s=limit_seconds,
    )
    path = output or RESULTS / f"{'full' if full else 'quick'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [int(n) for n in _split(planning_ops)] or ([1000, 10_000, 100_000] if full else [1000, 10_000])
    results = Results.load(path) if resume and path.exists() else _new_results(full, settings, sizes)
    run(results, [cell for cell in cells if _is_open(results, cell, chosen)], chosen, settings, path)
    results.save(path)
    show(results)
    console.print(f"Written: {path}", *_pictures(results, path), sep="\n  ")


def choose_cells(full: bool, workloads: list[str], modes: list[str], devices: list[int]) -> list[Cell]:
    """Return what to measure: the form's cells, or those asked for."""
    _check(workloads, WORKLOADS, "workloads")
    if not full and not (workloads or devices or modes):
        return [Cell(name, "training", count) for name, count in _QUICK_CELLS]
    names = workloads or (list(WORKLOADS) if full else list(dict.fromkeys(name for name, _ in _QUICK_CELLS)))
    counts = devices or (_FULL_DEVICES if full else [2])
    return [
        Cell(name, mode, count)
        for name in names
        for mode in WORKLOADS[name].modes
        if mode in (modes or (WORKLOADS[name].modes if full else ["training"]))
        for count in counts
    ]


def run(results: Results, cells: list[Cell], contestants: list[str], settings: Settings, path: Path) -> None:
    """Measure the cells, saving after each."""
    with progress() as bar:
        task = bar.add_task("starting", total=len(cells))
        for cell in cells:
            start, load = time.time(), load_average()
            records = measure(
                cell, contestants, settings, lambda text: bar.update(task, description=text, refresh=True)
            )
            results.records = [r for r in results.records if r.key not in {new.key for new in records}] + records
            results.save(path)
            bar.advance(task)
            bar.console.print(f"{cell}: {time.time() - start:.0f} s, load before {load:.1f}", highlight=False)


def _new_results(full: bool, settings: Settings, sizes: list[int]) -> Results:
    """Return results with the environment, and the planning of synthetic programs of these sizes."""
    results = Results({}, {"form": "full" if full else "quick", **asdict(settings)})
    with Group(1, settings.kind, settings.limit_s) as group:
        results.environment = {**group.ask("environment")[0], "load_average": load_average()}
        for size in sizes:
            with console.status(f"planning {size} operations"):
                results.planning.append({"devices": 8, **group.ask("synthetic", operations=size, devices=8)[0]})
    return results


def _is_open(results: Results, cell: Cell, contestants: list[str]) -> bool:
    """Return whether a cell has contestants that were not measured yet; it is then measured as a whole."""
    return any(results.find(cell.workload, cell.mode, cell.devices, name) is None for name in contestants)


def _pictures(results: Results, path: Path) -> list[str]:
    try:
        from benchmarks.plots import draw

        return [str(picture) for picture in draw(results, path.parent, path.stem)]
    except ModuleNotFoundError as error:
        return [f"no pictures, {error.name} is missing: pip install 'graphsplit[bench]'"]


def _split(text: str) -> list[str]:
    return [part for part in text.replace(" ", "").split(",") if part]


def _check(names: list[str], known: object, what: str) -> None:
    assert isinstance(known, (dict, tuple))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what}: {', '.join(unknown)}; there are {', '.join(known)}")


if __name__ == "__main__":
    typer.run(main)
