"""`python -m benchmarks.serving`: requests to a transpiled SavedModel beside the same requests to the original.

Two tables. Latency and rows per second for requests of 1 to 1024 rows, original and transpiled in turns in one process,
so that what disturbs one disturbs the others; medians, and their ratios. And what a device more costs: the size of the
graph, the time to load it and the time to the first answer, for 1 to 64 devices.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import graphsplit as gs
from benchmarks.display import console, progress, times
from benchmarks.environment import load_average
from benchmarks.timing import in_turns
from graphsplit.core.storage import forms
from graphsplit.planning.amounts import count_text

Names = Annotated[str, typer.Option(help="Comma-separated numbers.")]


@dataclass(frozen=True)
class Request:
    """Requests of one size to one model; `devices` is 0 for the original."""

    rows: int
    devices: int
    latency_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.latency_s)

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.median_s


@dataclass(frozen=True)
class Growth:
    """What a model for so many devices costs before its first request; `devices` is 0 for the original."""

    devices: int
    graph_bytes: int
    transpile_s: float
    load_s: float
    first_s: float
    sharded: bool


def main(
    rows: Names = "1,2,4,8,16,32,64,128,256,512,1024",
    devices: Names = "1,2,4",
    growth: Names = "1,2,4,8,16,32,64",
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each size to each model.")] = 30,
    model: Annotated[str, typer.Option(help="dense, conv or lstm.")] = "conv",
    replicate_weights: Annotated[bool, typer.Option("--replicate-weights", help="A copy on every device.")] = False,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the numbers.")] = None,
) -> None:
    """Measure a transpiled SavedModel beside the original."""
    counts, sizes = _numbers(devices), _numbers(growth)
    gs.use_logical_devices(max([*counts, *sizes, 1]), threads_per_device=1)
    with tempfile.TemporaryDirectory() as folder:
        shape = MODELS[model](f"{folder}/0")
        costs = measure_growth(folder, sorted({*counts, *sizes}), shape, replicate_weights)
        requests = measure_requests(folder, counts, _numbers(rows), rounds, shape)
    show(requests, costs, counts, sizes)
    if output is not None:
        found = {
            "model": model,
            "load_average": load_average(),
            "requests": list(map(asdict, requests)),
            "growth": list(map(asdict, costs)),
        }
        forms.write_json(str(output), found, indent=1)
        console.print(f"Written: {output}")


def measure_growth(folder: str, devices: Sequence[int], shape: Sequence[int], replicate: bool) -> list[Growth]:
    """Transpile the model in `folder/0` to `folder/n` for every number of devices, load each and ask it once."""
    import tensorflow as tf

    found = []
    for count in [0, *devices]:
        start = time.perf_counter()
        report = None
        if count:
            target = f"{folder}/{count}"
            report = gs.serving.transpile_saved_model(f"{folder}/0", target, count, replicate_weights=replicate)
        transpiled = time.perf_counter()
        loaded = tf.saved_model.load(f"{folder}/{count}")
        ready = time.perf_counter()
        loaded.signatures["serving_default"](tf.zeros([2 * max(devices), *shape]))
        first = time.perf_counter()
        graph = Path(folder, str(count), "saved_model.pb").stat().st_size
        sharded = report is not None and "serving_default" in report.plans
        found.append(
            Growth(count, graph, transpiled - start if count else 0.0, ready - transpiled, first - ready, sharded)
        )
    return found


def measure_requests(
    folder: str, devices: Sequence[int], rows: Sequence[int], rounds: int, shape: Sequence[int]
) -> list[Request]:
    """Ask the original (0) and the transpiled models in turns."""
    import tensorflow as tf

    loaded = {count: tf.saved_model.load(f"{folder}/{count}") for count in [0, *devices]}
    models = {count: model.signatures["serving_default"] for count, model in loaded.items()}
    found = []
    with progress() as bar:
        task = bar.add_task("requests", total=len(rows))
        for size in rows:
            batch = tf.random.normal([size, *shape])
            calls = {count: functools.partial(function, batch) for count, function in models.items()}
            taken = in_turns(calls, rounds, prepare=2)  # the first ones still allocate
            found += [Request(size, count, tuple([own.wall for own in each])) for count, each in taken.items()]
            bar.advance(task)
    return found


def show(requests: Sequence[Request], costs: Sequence[Growth], counts: Sequence[int], sizes: Sequence[int]) -> None:
    """Print both tables."""
    from rich.box import MARKDOWN
    from rich.table import Table

    by_key = {(request.rows, request.devices): request for request in requests}
    table = Table(title="Requests: original, and transpiled over it (rows/s, more is better)", box=MARKDOWN)
    for header in ("rows", "original ms", "rows/s", *(count_text(count, "device") for count in counts)):
        table.add_column(header, justify="right")
    for rows in dict.fromkeys(request.rows for request in requests):
        single = by_key[rows, 0]
        ratios = [times(by_key[rows, count].rows_per_s / single.rows_per_s) for count in counts]
        table.add_row(str(rows), f"{single.median_s * 1e3:.2f}", f"{single.rows_per_s:.0f}", *ratios)
    console.print(table)
    table = Table(title="What a device more costs", box=MARKDOWN)
    for header in ("devices", "split", "graph kB", "kB a device more", "transpile s", "load s", "first answer s"):
        table.add_column(header, justify="right")
    first = costs[min(1, len(costs) - 1)]
    for cost in costs:
        if cost.devices and cost.devices not in sizes:
            continue
        added = cost.devices - first.devices
        more = f"{(cost.graph_bytes - first.graph_bytes) / added / 1e3:.1f}" if added > 0 else "-"
        seconds = [f"{value:.2f}" for value in (cost.transpile_s, cost.load_s, cost.first_s)]
        name = str(cost.devices) if cost.devices else "original"
        table.add_row(name, "yes" if cost.sharded else "no", f"{cost.graph_bytes / 1e3:.1f}", more, *seconds)
    console.print(table)


def _dense(folder: str) -> tuple[int, ...]:
    import keras

    layers = [keras.layers.Dense(512, "relu") for _ in range(4)]
    return _export(folder, (256,), [*layers, keras.layers.Dense(10)])


def _conv(folder: str) -> tuple[int, ...]:
    import keras

    layers: list[Any] = []
    for filters in (16, 32, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU(), keras.layers.MaxPooling2D()]
    return _export(folder, (32, 32, 3), [*layers, keras.layers.Flatten(), keras.layers.Dense(10)])


def _lstm(folder: str) -> tuple[int, ...]:
    import keras

    return _export(folder, (20, 32), [keras.layers.LSTM(64), keras.layers.Dense(10)])


def _export(folder: str, shape: tuple[int, ...], layers: list[Any]) -> tuple[int, ...]:
    import keras

    keras.Sequential([keras.Input(shape), *layers]).export(folder, verbose=False)
    return shape


MODELS: dict[str, Callable[[str], tuple[int, ...]]] = {"dense": _dense, "conv": _conv, "lstm": _lstm}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    typer.run(main)
