"""`python -m benchmarks.report results.json docs/generated/measurements.md`: results as a page, losses included.

The page has the tables that answer a reader's questions. Every row goes into a second file, `--rows`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import beside, display
from benchmarks.goals import broken_goals, met_goals
from benchmarks.plots import draw
from benchmarks.results import Record, Results
from benchmarks.workloads import FIT, MODES
from graphsplit.core.storage import forms

ROOT = Path(__file__).parent.parent
_METHOD = """\
`python -m benchmarks {form}` runs every contestant in a process of its own. It asks the processes one after the
other to run some steps, in {rounds} rounds of about {round_s} s each, so that a slow spell of the machine hits all
of them. Step times are medians over the rounds, and ratios are medians of the ratios within each round. The first
call is timed once, from the call to its result, after the model was built.

* **plain**: the function as it is, a `tf.function` on one device.
* **towers**: the step traced again for each device under `tf.device`, gradients averaged by hand.
* **mirrored**: `tf.distribute.MirroredStrategy` with the same Keras model and optimizer. Its input is distributed
  before the clock starts.
* **graphsplit**: `gs.parallelize(step, devices=N)`.
{fit}
{devices} Memory is the largest resident size of a contestant's process (`getrusage`). TensorFlow and Keras are in it:
one process has about {floor_mb:.0f} MB before its first step.
"""
_FIT = """
`fit` is that of Keras 3, with the same network, optimizer and batches for all (JAX draws other weights), in rounds of
about {fit_round_s} s. Nobody is told how many threads to use, so **one device** has all cores. **towers** is a
`train_step` that cuts each batch by hand; **Keras on JAX** runs under `keras.distribution.DataParallel`, in a process
whose CPU is as many devices (`--xla_force_host_platform_device_count`, and two threads for each, `NPROC`: with one for
each of two cores, four devices wait for each other for ever), and gets its batches as arrays, without `tf.data`. Keras
imports TensorFlow there, too, where it is installed, so that memory has it in all rows.
"""
_LOGICAL = """\
Devices are logical CPU devices, each with one thread, and the plain function has one thread. This machine has
{cores} cores: beyond N = {cores} the tables show overhead, and no speed-up.
"""
_GPUS = """\
Devices are GPUs: {gpus}.{logical}
"""
_DIVIDED = """ Each is divided into logical GPUs of {memory_mb} MiB: kernels, placement and memory are those
of real devices, links between devices are not (a copy stays in one memory), and they share one GPU's arithmetic: N
devices are not N times as fast. TensorFlow gives MirroredStrategy its RING instead of NCCL there. Memory grows as
needed
(TF_FORCE_GPU_ALLOW_GROWTH)."""
_LINKS = (("PCIe 4.0 x16", 25e9), ("NVLink 4", 450e9))  # usable bytes per second in one direction


def main(
    source: Annotated[Path, typer.Argument()],
    target: Annotated[Path, typer.Argument()],
    rows: Annotated[Path | None, typer.Option(help="Where every row goes; by default beside the page.")] = None,
    many: Annotated[Path | None, typer.Option(help="Results on many more devices, with a batch of their own.")] = None,
    kept: Annotated[str, typer.Option(help="Where the raw results are kept, to be said on the page.")] = "",
) -> None:
    """Write the page `target` with the curves of the steps beside it, and all `rows`, from the results in `source`."""
    said = f"`{kept or os.path.relpath(source.resolve(), target.parent.resolve())}`"
    rows = rows or target.with_name(f"{target.stem}_rows.md")
    write(Results.load(source), target, rows, Results.load(many) if many else None, said)


def write(
    results: Results, target: Path, rows: Path, many: Results | None, source: str, quoted: Sequence[str] = ()
) -> None:
    """Write the page `target`, with pictures beside it, and every row; `quoted` are sections for the page's end."""
    for path in (target, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
    shown = os.path.relpath(rows, ROOT) if rows.is_relative_to(ROOT) else str(rows)
    forms.write(str(target), page(results, source, shown, _pictures(results, target), many, quoted).encode())
    forms.write(str(rows), every_row(results.of(*MODES), source, many).encode())


def where_and_when(environment: Mapping[str, Any], besides: Sequence[str] = ("Keras", "JAX")) -> str:
    """Return the day, versions and processor of a measurement.

    Args:
      environment: where it ran.
      besides: whose versions count, besides those of graphsplit and TensorFlow.
    """
    names = {key: name for key, name in _VERSIONS.items() if key in ("graphsplit", "tensorflow") or name in besides}
    versions = [f"{name} {environment.get(key, '?')}" for key, name in names.items()]
    cores, processor = environment.get("cores", "?"), environment.get("processor", "?")
    return f"{environment.get('date', '?')[:10]}, {', '.join(versions)}, {cores} cores of {processor}"


_VERSIONS = {"graphsplit": "graphsplit", "tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX"}


def page(
    everything: Results,
    source: str,
    rows: str,
    pictures: Sequence[str],
    many: Results | None = None,
    quoted: Sequence[str] = (),
) -> str:
    """Return the page for readers; `source` says where the results are, `rows` where every row is."""
    results = everything.of(*MODES)
    parts = [
        "# Measurements",
        f"{where_and_when(results.environment)}; {results.environment.get('load_average', math.nan):.1f} processes "
        "wanted to run in the minute before. "
        f"Written by `python -m benchmarks.all` from {source}; numbers are copied, not typed. These tables answer "
        f"questions. Every row of every contestant is in `{rows}`.",
        *_fits(everything.of(FIT)),
        "## Training steps",
        "**graphsplit** is compared with **plain**, the same `tf.function` on one device, with **mirrored**, "
        "`tf.distribute.MirroredStrategy`, and with **towers** written by hand: "
        "[how](#how-it-was-measured). N is the number of devices. A cell has graphsplit's "
        "milliseconds, the other's, and the median of the ratios within each round; where graphsplit is slower, it "
        f"is bold.{_crowded(results)}",
        *[f"![Step time against devices]({picture})" for picture in pictures],
        *_compared(results),
        "## Where graphsplit loses",
        _losses(everything, many),
        "## How much memory does it take?",
        "MB of the process at most, TensorFlow and Keras included.",
        _table(*display.side_by_side(results, lambda record: f"{record.peak_bytes / 1e6:.0f}")),
        *_gpu_memory(results),
        "## How long does the first call take?",
        "Seconds. graphsplit traces and plans once, where MirroredStrategy traces for each device.",
        _table(*display.side_by_side(results, lambda record: f"{record.first_s['total']:.2f}")),
        "## How much is sent?",
        "MB that cross devices in one step with variables on the default device, beside the least that a data-parallel "
        "step sends. [Layouts](../variables.md) send less through the busiest device.",
        _table(*display.sent(results)),
        *_many_devices(many),
        *(["## What guides quote", *quoted] if quoted else []),
        "## How it was measured",
        _method(everything),
        _table(["what", "value"], [[key, str(value)] for key, value in results.environment.items()]),
        *_other_commits(everything),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def every_row(results: Results, source: str, many: Results | None = None) -> str:
    """Return all that was measured, a row for each contestant."""
    parts = [
        "# Every row of the measurements",
        f"Written by `python -m benchmarks.report` from {source}. `docs/generated/measurements.md` says how it was "
        "measured, and has the tables that answer questions.",
        "## Steps",
        _table(display.STEP_COLUMNS, display.step_rows(results)),
        "## Time to the first result",
        "Parts of graphsplit's first call; `rest` is TensorFlow's own: placement, graph optimisation, the step itself.",
        _table(display.FIRST_CALL_COLUMNS, display.first_call_rows(results)),
        *(
            []
            if many is None
            else [
                "## Many devices",
                _table(display.STEP_COLUMNS, display.step_rows(many)),
                _table(display.FIRST_CALL_COLUMNS, display.first_call_rows(many)),
            ]
        ),
        "## Communication",
        _COMMUNICATION,
        _table(display.COMMUNICATION_COLUMNS, display.communication_rows(results)),
        "## Planning",
        _table(display.PLANNING_COLUMNS, display.planning_rows(results)),
        *_gpu_expectation(results),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_COMMUNICATION = """\
Tensors that cross devices in one step, by the plan, and the least that a data-parallel step sends whose variables are
on the default device: every parameter to N-1 devices, every gradient back, their rows of the inputs and of the
outputs. Whole values read on the shards count N-1 transfers each. `in graph` counts the same in the emitted graph,
from its nodes' devices. BatchNormalization in training has to send more than the bound: statistics of the whole
batch, and their gradients.

The rules, and the measurements behind them (a ResNet50 training step, 8 logical CPU devices of 2 cores):

* A reduction is one `AddN` on the default device, in the order of the devices. A chain of additions or a tree over
  the devices changed the CPU time of a step by no more than two runs of the same thing differ (AddN 684 to 700 ms,
  chain 697 to 722, tree 664 to 702). The tree took 6 % less memory and 0.3 to 0.6 s longer to the first step.
* A value that several linear operations read is reduced once before them, unless that moves more bytes.
* Constants are made on each device, equal ones once; whole values are sent once to each device that reads them.
* Vectors of up to 16 kB are packed, four or more: biases and scales are joined there and sent to each device as
  one, their gradients joined on each device and reduced as one. `python -m benchmarks.packing`, 32 vectors on 8
  devices: the step takes 0.64 of the time for vectors of 1 kB, 0.79 for 16 kB, 0.96 for 64 kB (on 2 devices 0.90,
  0.95, 0.97). The ResNet50 step: 0.96. What BatchNormalization sums in the middle of a step travels alone: each sum
  waits for another."""


def _method(results: Results) -> str:
    settings, machine = results.settings, results.environment
    devices = _LOGICAL if settings["kind"] == "cpu" else _GPUS
    logical = _DIVIDED.format(**settings) if settings.get("memory_mb") else ""
    steps = results.of(*MODES).records
    plain = [r.before_bytes for r in steps if r.contestant == "plain" and r.before_bytes]
    return _METHOD.format(
        form=f"--{settings['form']}" + (" --small" if settings["small"] else ""),
        rounds=settings["rounds"],
        round_s=settings["round_s"],
        devices=devices.format(cores=machine["cores"], gpus="; ".join(machine["gpus"]), logical=logical),
        floor_mb=min(plain, default=0) / 1e6,
        fit=_FIT.format(**settings) if results.of(FIT).records else "",
    )


def _gpu_memory(results: Results) -> list[str]:
    rows = display.gpu_memory_rows(results)
    head = "The most that tensors took on a GPU from the first call on (`tf.config.experimental.get_memory_info`):"
    return [head, _table(display.GPU_MEMORY_COLUMNS, rows)] if rows else []


def _other_commits(results: Results) -> list[str]:
    """Say which cells were measured again, and on which commit."""
    found: dict[str, dict[str, None]] = {}
    for record in results.records:
        if record.commit and record.commit != results.environment["commit"]:
            cell = f"{record.workload} {record.mode} on {record.devices}"
            found.setdefault(record.commit, {})[cell] = None
    return [f"Measured on commit {commit}: {', '.join(cells)} devices." for commit, cells in found.items()]


def _pictures(results: Results, target: Path) -> list[str]:
    """Draw the curves of the steps beside the page, and return the file's name; nothing without matplotlib."""
    try:
        return [path.name for path in draw(results.of(*MODES), target.parent, target.stem, ["step"], colours=32)]
    except ModuleNotFoundError as error:
        display.console.print(f"No pictures, {error.name} is missing: pip install 'graphsplit[benchmarks]'")
        return []


def _table(columns: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "Not measured."
    lines = [columns, ["---"] * len(columns), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _many_devices(many: Results | None) -> list[str]:
    if many is None:
        return []
    return [
        "## Many devices",
        _MANY.format(batch=many.records[0].batch),
        _table(display.STEP_COLUMNS, display.step_rows(many)),
    ]


_MANY = """\
With a batch of {batch}, so that every device has rows. Each device adds its own copy of the sharded operations to
the graph. The first call is longer by what TensorFlow does with each node and each copy between devices: it
instantiates, places and partitions them, and prepares their kernels."""


_QUESTIONS = {
    "plain": "Is a step faster than on one device?",
    "mirrored": "Is it faster than MirroredStrategy?",
    "towers": "Is it faster than towers written by hand?",
}


def _compared(results: Results) -> list[str]:
    """Return a table for each contestant that was measured beside graphsplit."""
    there = {record.contestant for record in results.records}
    tables = {title: _table(*display.ratios(results, other)) for other, title in _QUESTIONS.items() if other in there}
    return [text for title, table in tables.items() for text in (f"## {title}", table)]


def _crowded(results: Results) -> str:
    most = max(cell[2] for cell in results.cells())
    cores = results.environment["cores"]
    told = f" \\* More devices than the {cores} cores, which take turns: this is overhead, and no speed-up."
    return told if display.crowded(results, most) else ""


def _losses(results: Results, many: Results | None) -> str:
    every = [results] if many is None else [results, many]
    broken, met = ([goal for r in every for goal in goals(r)] for goals in (broken_goals, met_goals))
    if not broken and not met:
        return "None of the goals was measured."
    planning = sorted(goal.value for goal in broken if goal.text.startswith("planning"))
    lines = [f"* {goal}" for goal in broken if not goal.text.startswith("planning")]
    if planning:
        lines.append(
            f"* planning takes up to {planning[-1]:.0f} us an operation in {len(planning)} programs, goal 40 or less"
        )
    lines = lines or ["* Every goal that was measured is met."]
    lines.append(f"\nGoals met: {len(met)}; missed: {len(broken)}.")
    return "\n".join([*lines, "", _WHY] if broken else lines)


_WHY = """\
Why, and what is being done:

* **ResNet50 in `fit`, on logical CPU devices.** Each of four has 4 of 16 rows. A convolution of 4 rows uses a core less
  well than one of 16, and one device gives each of its kernels all cores. Each BatchNormalization also exchanges sums
  over the whole batch, which one device has. What was done: mean and variance travel together, and between GPUs in one
  hop. What is next: costs of kernels by their rows, so that a plan can say beforehand that one device is faster.
* **First batches.** The graph has the operations of a shard once for each device, and TensorFlow places, optimizes and
  instantiates each. What was done: one trace and one plan for all devices. What is next: shards as calls of one
  function, as `jit_compile=True` has them.
* **Forward passes of a few milliseconds.** Results of all rows are copied to one device, and there is nothing to hide
  that behind. Return less, or keep the results in their layout, if what follows can use them so.

Two timings of the same process differ by up to 2 %, and some of these differences are no larger. The goal of planning
is of a version that split the batch only; layouts of variables, meshes and what each device holds are planned, too. To
plan the 6,361 operations of ResNet50 in training takes a thirtieth of its first call."""


def answers(results: Results) -> str:
    """Return a table of what the steps' ratios say, for the page on performance."""
    ratios = {
        (cell, other): round(ratio, 2)
        for cell in results.of(*MODES).cells()
        for other in ("plain", "towers", "mirrored")
        if (ratio := results.ratio(cell, "graphsplit", other)) is not None
    }
    alone = [ratio for (cell, other), ratio in ratios.items() if (other, cell[1:]) == ("plain", ("training", 1))]
    towers = [ratio for (_, other), ratio in ratios.items() if other == "towers"]
    slower = [ratio for ratio in towers if ratio > 1]
    worst = f", slower in {len(slower)}, by at most {100 * (max(slower) - 1):.0f} per cent" if slower else ""
    two, eight = [[r for (cell, other), r in ratios.items() if (other, cell[2]) == ("mirrored", n)] for n in (2, 8)]
    rows = [
        (
            "what does the transpiled step cost on one device?",
            f"nothing: {_span(alone)} of the time of the plain `tf.function`, over {len(alone)} programs in training",
        ),
        (
            "against towers that one writes by hand?",
            f"no slower in {len(towers) - len(slower)} of {len(towers)} rows{worst}",
        ),
        ("against `MirroredStrategy` on two devices?", f"{_span(two)} of its time"),
        (
            "and on eight devices (more than there are cores, so this is overhead and no speed-up)?",
            f"{_span(eight)} of its time",
        ),
    ]
    return _table(["question", "answer"], [list(row) for row in rows])


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "(not measured)"


def _fits(results: Results) -> list[str]:
    """Return what a batch of `fit`, the first one and memory are for each contestant."""
    if not results.records:
        return []
    devices = sorted({record.devices for record in results.records})
    head = (
        f"Keras' `fit` on {', '.join(map(str, devices))} devices. The first batch has tracing, planning and compiling "
        "in it; [how](#how-it-was-measured). The fastest, or smallest, is bold."
    )
    tables = []
    for title, (figure, text) in beside.PANELS.items():
        rows = []
        for cell in results.cells():
            records = {name: results.find(*cell, name) for name in beside.NAMES}
            figures = {name: figure(record) for name, record in records.items() if record is not None}
            least = min(figures.values(), default=0.0)
            shown = {name: f"**{text(size)}**" if size == least else text(size) for name, size in figures.items()}
            rows.append([cell[0], *[shown.get(name, "-") for name in beside.NAMES]])
        tables += [f"{title[0].upper()}{title[1:]}:", _table(["network", *beside.NAMES.values()], rows)]
    skipped = [f"{r.workload}, {beside.NAMES[r.contestant]}: {r.skipped}." for r in results.records if r.skipped]
    return ["## How fast is `fit`?", head, *tables, *([f"Left out: {' '.join(skipped)}"] if skipped else [])]


def _gpu_expectation(results: Results) -> list[str]:
    if results.settings["kind"] == "gpu":
        return []
    links = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in _LINKS)
    head = (
        f"**By calculation, not measured**: the bytes of the table above over one link of the home device ({links}), "
        "one transfer after the other, overlapping nothing, without latency."
    )
    rows = [
        [r.workload, r.mode, str(r.devices), *[display.milliseconds(_bytes(r) / rate) for _, rate in _LINKS]]
        for r in results.described()
        if r.devices > 1
    ]
    columns = ["workload", "mode", "N", *[f"{name}, ms" for name, _ in _LINKS]]
    return ["## What to expect on GPUs", head, _table(columns, rows)]


def _bytes(record: Record) -> float:
    return float(record.graph["communication"]["total"]["transfer_bytes"])


if __name__ == "__main__":
    typer.run(main)
