"""Where variables live: what each layout costs on logical devices, and what it sends, beside MirroredStrategy.

python -m benchmarks.layouts [--workload resnet50_adam] [--devices 8] [--rounds 7] [--small] [--bytes-only]
python -m benchmarks.layouts --predict 8xA100-SXM4-80GB 8xV100-PCIE-16GB

On the logical devices of one CPU copies are free, so steps show nothing but what a layout costs; what it is for is the
bytes through the busiest device, which are counted in TensorFlow's own partition graphs, and the steps over processes
(`python -m benchmarks.layouts_over_workers`). Each way runs in a process of its own; steps are interleaved. `--predict`
compares the layouts by prediction, for machines with GPUs, and says how far "auto" is from the best of the others.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.processes import Worker
from benchmarks.results import Record
from benchmarks.runner import Cell, Settings, measure

LAYOUTS = {
    "graphsplit": "home",
    "layout_mirrored": "mirrored",
    "layout_sharded": "sharded",
    "layout_kept": "sharded, not again",
    "layout_auto": "auto",
}
PREDICTED = {"mlp": 1024, "resnet50_adam": 512, "transformer": 256, "large_table": 256}
"""The rows of the whole batch of each workload, for eight GPUs."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="resnet50_adam")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ways", default=",".join([*LAYOUTS, "mirrored"]), help="who is timed; the first is 1")
    parser.add_argument("--steps-only", action="store_true", help="time, and count no bytes")
    parser.add_argument("--bytes-only", action="store_true", help="count bytes, and time nothing")
    parser.add_argument("--predict", nargs="+", metavar="MACHINE", help="predict steps on these, run nothing")
    options = parser.parse_args()
    if options.predict:
        show_predicted(options.predict, options.devices)
        return
    settings = Settings(rounds=options.rounds, round_s=1.0, small=options.small)
    if not options.bytes_only:
        show_steps(Cell(options.workload, "training", options.devices), options.ways.split(","), settings)
    if not options.steps_only:
        show_bytes(options.workload, options.devices, settings)


def show_steps(cell: Cell, ways: list[str], settings: Settings) -> None:
    """Print step, first call and nodes as multiples of those of "home"."""
    records = measure(cell, ways, settings, lambda _: None)
    home = records[0]
    print(f"{cell}: step, first call and nodes as multiples of those of 'home'", flush=True)
    for record in records:
        name = LAYOUTS.get(record.contestant, "MirroredStrategy")
        if record.skipped or home.skipped:
            print(f"  {name:<18} left out: {record.skipped or home.skipped}")
            continue
        ratio = statistics.median(a / b for a, b in zip(record.step_s, home.step_s, strict=True))
        first = record.first_s["total"] / home.first_s["total"]
        nodes = record.graph["nodes"] / home.graph["nodes"]
        print(
            f"  {name:<18} step {ratio:.2f}, first call {first:.2f}, nodes {nodes:.2f} {_absolute(record)}", flush=True
        )


def _absolute(record: Record) -> str:
    milliseconds, first = 1e3 * record.median_s, record.first_s["total"]
    return f"({milliseconds:.0f} ms, {first:.1f} s, {record.graph['nodes']}, {record.peak_bytes / 1e9:.2f} GB)"


def show_predicted(machines: list[str], devices: int) -> None:
    """Print the predicted step of each workload by layout, and of "auto" as a multiple of the best other one."""
    import tensorflow as tf

    import graphsplit as gs
    from benchmarks.steps import make_parts, single_device_step
    from benchmarks.workloads import data, workload
    from graphsplit.planning.costs.machine_files import machine as machine_of

    layouts = ["home", "replicated", "sharded", {"slots of *": "sharded", "*": "replicated"}, "auto"]
    for name, rows in PREDICTED.items():
        found = workload(name, small=False, batch=rows)
        step = single_device_step(make_parts(found), "training")
        specs = [tf.TensorSpec((rows, *array.shape[1:]), array.dtype) for array in data(found, 1)]
        for machine, count in [(machine, min(devices, machine_of(machine).devices)) for machine in machines]:
            made = [gs.predict(step, *specs, machine=machine, devices=count, variables=layout) for layout in layouts]
            seconds = [one.step_s for one in made]
            text = ", ".join(f"{1e3 * own:.3f}" for own in seconds)
            print(
                f"{name}, {rows} rows, {count} devices of {machine}: home, replicated, sharded, ZeRO-1, auto: "
                f"{text} ms; auto {seconds[-1] / min(seconds[:-1]):.3f} of the best other",
                flush=True,
            )


def show_bytes(workload: str, devices: int, settings: Settings) -> None:
    """Print the bytes through the busiest device as multiples of the weights'."""
    least = {"mirrored": 2, "sharded": 3, "sharded, not again": 2}
    print(f"{workload}, {devices} devices: bytes through the busiest device in P, the bytes of the weights", flush=True)
    for layout in LAYOUTS.values():
        found = _counted(workload, devices, layout, settings)
        sent, received = found["sent"] / found["weights"], found["received"] / found["weights"]
        bound = least[layout] * (devices - 1) / devices if layout in least else devices - 1
        print(
            f"  {layout:<18} sends {sent:.3f}, receives {received:.3f}; {max(sent, received) / bound:.3f} of "
            f"{bound:.3f} (weights {found['weights'] / 1e6:.1f} MB; planned {found['planned'] / found['weights']:.3f})",
            flush=True,
        )


def _counted(workload: str, devices: int, layout: str, settings: Settings) -> dict[str, Any]:
    with Worker(settings.kind, settings.limit_s) as worker:
        worker.ask("start", devices=devices, kind=settings.kind)
        return worker.ask("traffic", name=workload, small=settings.small, layout=layout)


def count(name: str, small: bool, layout: str, devices: list[str]) -> dict[str, Any]:
    """Return the bytes through the busiest device in a training step, counted and planned, and those of the weights."""
    import tensorflow as tf

    import graphsplit as gs
    from benchmarks.partitions import busiest
    from benchmarks.steps import make_parts, single_device_step
    from benchmarks.workloads import data, workload
    from graphsplit.planning.device_bytes import traffic

    found = workload(name, small)
    parts = make_parts(found)
    kind, _, kept = layout.partition(",")
    if layout != "auto":
        gs.set_variable_layout([parts.model, parts.optimizer], kind, devices, reshard_after_forward=not kept)
    automatic = "auto" if layout == "auto" else None
    step = gs.parallelize(single_device_step(parts, "training"), devices=devices, variables=automatic)
    arguments = [tf.constant(array) for array in data(found, found.batch)]
    sent, received = busiest(step, *arguments)
    weights = sum(int(v.dtype == "float32") * 4 * v.value.shape.num_elements() for v in parts.model.trainable_variables)
    planned = max(traffic(step.plan(*arguments)).busiest[1:])
    return {"sent": sent, "received": received, "weights": weights, "planned": planned}


if __name__ == "__main__":
    main()
