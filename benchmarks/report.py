"""`python -m benchmarks.report results.json docs/measurements.md`: results as a page, losses included."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import display
from benchmarks.goals import broken_goals, met_goals
from benchmarks.plots import draw
from benchmarks.results import Record, Results
from graphsplit.core import forms

_METHOD = """\
Written by `python -m benchmarks.report` from {source}; numbers are copied, not typed.

## How it was measured

`python -m benchmarks {form}`. Every contestant runs in a process of its own. The processes of one workload and number
of devices N exist at the same time; the parent asks one after the other to run k steps, {rounds} rounds of about
{round_s} s each, so that slow spells of the machine hit everybody. Step times are medians over the rounds, ± half the
distance of the quartiles; ratios are medians of the ratios within each round. The first call is timed once, from the
call to its result on the host, after the model was built.

* **plain**: the function as it is, a `tf.function` on one device.
* **towers**: the step traced again for each device under `tf.device`, gradients averaged by hand.
* **mirrored**: `tf.distribute.MirroredStrategy`, same Keras model and optimizer; its input is distributed beforehand,
  outside of the clock.
* **ceiling**: N independent processes of the plain function with 1/N of the batch each, all stepping at the same time;
  the slowest counts. They exchange nothing and do not compute the same thing: nobody can be asked to be faster. (Where
  a step is short, sharing one process is cheaper than N processes, and everyone passes it.)
* **graphsplit**: `gs.parallelize(step, devices=N)`.

{devices}
Memory is the largest resident size of a contestant's process, summed over processes, TensorFlow and Keras included
(about {floor_mb:.0f} MB before the first step of one process).
"""
_LOGICAL = """\
Devices are logical CPU devices, modelled as devices of one core: one intra-op thread each, at most as many inter-op
threads as cores for all of them, and the plain function has one thread. This machine has {cores} cores: beyond
N = {cores} the curves show overhead, not speed-up.
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
    many: Annotated[Path | None, typer.Option(help="Results on many more devices, with a batch of their own.")] = None,
    kept: Annotated[str, typer.Option(help="Where the raw results are kept, to be said on the page.")] = "",
) -> None:
    """Write the page `target`, and the curves of the steps beside it, from the results in `source`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    results, more = Results.load(source), Results.load(many) if many else None
    said = f"`{kept or os.path.relpath(source.resolve(), target.parent.resolve())}`"
    forms.write(str(target), page(results, said, _pictures(results, target), more).encode())


def page(results: Results, source: str, pictures: Sequence[str], many: Results | None = None) -> str:
    """Return the page; `source` says where the results are, and `pictures` lie beside the page."""
    parts = [
        "# Measurements",
        _method(results, source),
        "## Environment",
        _table(["what", "value"], [[key, str(value)] for key, value in results.environment.items()]),
        *_other_commits(results),
        "## In short",
        f"graphsplit's step as a multiple of {_yardstick(results)} / of MirroredStrategy's; below 1, it is faster.",
        _table(display.summary_columns(results), display.summary_rows(results)),
        *(["## Scaling", *[f"![Step time against devices]({picture})" for picture in pictures]] if pictures else []),
        "## Where graphsplit loses",
        _losses(results, many),
        "## Steps",
        _table(display.STEP_COLUMNS, display.step_rows(results)),
        *_gpu_memory(results),
        "## Time to the first result",
        "Parts of graphsplit's first call; `rest` is TensorFlow's own: placement, graph optimisation, the step itself.",
        _table(display.FIRST_CALL_COLUMNS, display.first_call_rows(results)),
        *_many_devices(many),
        "## Communication",
        _COMMUNICATION,
        _table(display.COMMUNICATION_COLUMNS, display.communication_rows(results)),
        "## Planning",
        _table(display.PLANNING_COLUMNS, display.planning_rows(results)),
        *_gpu_expectation(results),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_COMMUNICATION = """\
Tensors that cross devices in one step, by the plan, and the least that a data-parallel step with variables at home
sends: every parameter to N-1 devices, every gradient back, their rows of the inputs and of the outputs. Whole values
read on the shards count N-1 transfers each. `in graph` counts the same in the emitted graph, from its nodes' devices.
BatchNormalization in training has to send more than the bound: statistics of the whole batch, and their gradients.

The rules, and the measurements behind them (a ResNet50 training step, 8 logical CPU devices of 2 cores):

* A reduction is one `AddN` at home, in the order of the devices. A chain of additions or a tree over the devices
  changed the CPU time of a step by no more than two runs of the same thing differ (AddN 684 to 700 ms, chain 697 to
  722, tree 664 to 702). The tree took 6 % less memory and 0.3 to 0.6 s longer to the first step.
* A value that several linear operations read is reduced once before them, unless that moves more bytes.
* Constants are made on each device, equal ones once; whole values are sent once to each device that reads them.
* Vectors of up to 16 kB are packed, four or more: biases and scales are joined at home and sent to each device as one,
  their gradients joined on each device and reduced as one. `python -m benchmarks.packing`, 32 vectors on 8 devices:
  the step takes 0.64 of the time for vectors of 1 kB, 0.79 for 16 kB, 0.96 for 64 kB (on 2 devices 0.90, 0.95, 0.97).
  The ResNet50 step: 0.96. What BatchNormalization sums in the middle of a step travels alone: each sum waits for
  another."""


def _method(results: Results, source: str) -> str:
    settings, machine = results.settings, results.environment
    devices = _LOGICAL if settings["kind"] == "cpu" else _GPUS
    logical = _DIVIDED.format(**settings) if settings.get("memory_mb") else ""
    plain = [r.before_bytes for r in results.records if r.contestant == "plain" and r.before_bytes]
    return _METHOD.format(
        source=source,
        form=f"--{settings['form']}" + (" --small" if settings["small"] else ""),
        rounds=settings["rounds"],
        round_s=settings["round_s"],
        devices=devices.format(cores=machine["cores"], gpus="; ".join(machine["gpus"]), logical=logical),
        floor_mb=min(plain, default=0) / 1e6,
    )


def _yardstick(results: Results) -> str:
    return {"ceiling": "the ceiling's", "plain": "the plain function's"}[display.yardstick(results)]


def _gpu_memory(results: Results) -> list[str]:
    rows = display.gpu_memory_rows(results)
    head = "The most that tensors took on a GPU from the first call on (`tf.config.experimental.get_memory_info`)."
    return ["## Memory on GPUs", head, _table(display.GPU_MEMORY_COLUMNS, rows)] if rows else []


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
        return [path.name for path in draw(results, target.parent, target.stem, ["step"], colours=32)]
    except ModuleNotFoundError as error:
        display.console.print(f"No pictures, {error.name} is missing: pip install 'graphsplit[bench]'")
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
        _table(display.FIRST_CALL_COLUMNS, display.first_call_rows(many)),
    ]


_MANY = """\
With a batch of {batch}, so that every one of 64 devices has rows. New for each device is its share of the graph; what
takes time there is TensorFlow's own work on every node and every copy between devices: instantiating, placing,
partitioning, preparing kernels. It grows with the sharded operations and with nothing else."""


def _losses(results: Results, many: Results | None) -> str:
    every = [results] if many is None else [results, many]
    broken, met = ([goal for r in every for goal in goals(r)] for goals in (broken_goals, met_goals))
    if not broken and not met:
        return "None of the goals was measured."
    lines = [f"* {line}" for line in broken] or ["* Every goal that was measured is met."]
    lines.append(f"\nGoals met: {len(met)}; missed: {len(broken)}.")
    return "\n".join([*lines, "", _WHY] if broken else lines)


_WHY = """\
Why: two timings of the same process differ by up to 2 %, and some of these by no more. Beyond that:

* MiniGoogLeNet with BatchNormalization: its statistics are those of the whole batch, as on one device, so at every one
  of its 19 normalizations each device waits three times for the slowest. MirroredStrategy does not wait: it normalizes
  each device's rows by their own statistics, which is another result.
* The LSTM's loops turn 32 times, forward, in 2 ms: each device hands the weights that it was sent from turn to turn,
  which a loop that reads variables in place does not.
* The forward MiniGoogLeNet: both devices share one pool of threads, and what one core made the other often reads; the
  ceiling's processes keep to their cores. MirroredStrategy loses the same.
* The polynomial fit: 16 devices each get 8 points.

On N devices more than the machine has cores, everyone pays for taking turns; the ceiling's processes do so too."""


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
