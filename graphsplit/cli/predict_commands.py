"""The commands `predict`, `machines`, `calibrate`, `validate`."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Annotated, Any

import typer

import graphsplit as gs
from graphsplit.cli.commands import (
    CALIBRATED,
    check_machine_file,
    names_in,
    number,
    parse_counts,
    start_tensorflow,
    why_not_calibrated,
)
from graphsplit.core.storage import files, forms
from graphsplit.planning.costs.machine_schema import parse

Target = Annotated[str, typer.Argument(metavar="WHAT", help="A function, module:function.")]
Specs = Annotated[
    list[str] | None,
    typer.Option("--spec", metavar="SPEC", help="An argument: 'float32[64,784]'; repeat."),
]


def machines_like(incomplete: str) -> list[str]:
    """Return what completes the name of a machine: those that come along, and machine files here.

    Shells wait for it, so the files are not read as machines, for which TensorFlow would be imported.
    """
    names = list[str]()
    for file in (importlib.resources.files("graphsplit.planning.costs") / "machines").iterdir():
        table = parse(file.name, file.read_text("utf-8"))
        names += [table["name"], f"{table['devices']}x{table['device']['name']}"]
    files = filter(Path.is_file, Path().glob("*.toml"))
    files_here = [str(path) for path in files if "[device]" in path.read_text("utf-8", "replace")]
    return sorted(name for name in [*names, *files_here] if name.startswith(incomplete))


MachineOption = Annotated[
    str,
    typer.Option(
        "--machine",
        metavar="MACHINE",
        autocompletion=machines_like,
        help="8xH100-SXM5, dgx-a100, here.toml; see `graphsplit machines`.",
    ),
]
MicroBatches = Annotated[int | None, number("--micro-batches", "Parts of each device's rows.")]


def predict(
    target: Target,
    machine: MachineOption,
    spec: Specs = None,
    devices: Annotated[
        str, typer.Option("--devices", metavar="NUMBERS", help="Numbers of devices, with commas: 1,2,4,8.")
    ] = "1",
    layout: Annotated[
        str,
        typer.Option(
            "--layout", metavar="LAYOUTS", help="Layouts of variables, with commas: home, replicated, sharded."
        ),
    ] = "",
    micro_batches: MicroBatches = None,
    weak: Annotated[bool, typer.Option("--weak", help="Also weak scaling: as many rows per device.")] = False,
    output: Annotated[
        list[str] | None,
        typer.Option("-o", "--output", metavar="FILE", help="A file to write: .json; a table: .png, too."),
    ] = None,
) -> None:
    """Predict how long a step takes on a machine, and what each device holds, without running it."""
    counts, layouts = parse_counts(devices), names_in(layout)
    for path in output or ():
        forms.check(path)
    start_tensorflow()
    from graphsplit.cli.targets import function_of
    from graphsplit.planning.costs.machine_files import machine as machine_of

    chosen = machine_of(machine)  # what is wrong with it is said before the user's module is imported
    fn, arguments = function_of(target, spec or ())
    options: dict[str, Any] = {"machine": chosen, "micro_batches": micro_batches}
    prediction: Any
    if len(counts) > 1 or len(layouts) > 1 or weak:
        kinds = ("strong", "weak") if weak else ("strong",)
        prediction = gs.scaling(fn, *arguments, devices=counts, variables=layouts or None, kinds=kinds, **options)
    else:
        prediction = gs.predict(fn, *arguments, devices=counts[0], variables=layouts[0] if layouts else None, **options)
    print(prediction)
    for path in output or ():
        prediction.save(path)
        print(f"Written: {path}")


def machines(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=machines_like,
            help="One machine: its file, all figures with sources.",
        ),
    ] = None,
) -> None:
    """List the machines that come with graphsplit."""
    start_tensorflow()
    from graphsplit.planning.amounts import aligned
    from graphsplit.planning.costs.machine_files import known_machines, machine_text
    from graphsplit.planning.costs.machine_files import machine as machine_of
    from graphsplit.simulate.prediction.predictions import amount

    if name is not None:
        print(machine_text(machine_of(name)), end="")
        return
    rows: list[tuple[str, ...]] = [
        ("machine", "devices", "memory", "FLOP/s: float32", "bfloat16", "between devices"),
    ]
    for known_machine in known_machines().values():
        device, rates, sent = (
            known_machine.device,
            known_machine.device.matrix_flops_per_s,
            known_machine.link.bytes_per_s,
        )
        products = [amount(rates[kind]) if kind in rates else "" for kind in ("float32", "bfloat16")]
        link = "no copies" if sent == float("inf") else f"{amount(sent)}B/s"
        rows.append(
            (
                known_machine.name,
                f"{known_machine.devices} {device.name}",
                f"{amount(device.memory_bytes)}B",
                *products,
                link,
            )
        )
    print(*aligned(rows, left=len(rows[0])), sep="\n")
    print("All figures of one, and where they come from: graphsplit machines dgx-a100.")
    print("So many devices of a box: 4xA100-SXM4-80GB. A cluster: 2x8xA100-SXM4-80GB, or 2xdgx-a100.")


def calibrate(
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to write, here.toml.")],
    target: Annotated[str | None, typer.Argument(metavar="[WHAT]", help="A function to measure as well.")] = None,
    spec: Specs = None,
    devices: Annotated[int | None, number("--devices", "Logical CPU devices; 2.")] = None,
    micro_batches: Annotated[
        str, typer.Option("--micro-batches", metavar="NUMBERS", help="In how many parts of the batch to measure WHAT.")
    ] = "1,2,4,8",
) -> None:
    """Measure this machine: products, convolutions, memory, copies between devices, the cost of launching."""
    counts = parse_counts(micro_batches, "--micro-batches")
    check_machine_file(output)
    start_tensorflow()
    from graphsplit.cli.targets import example, function_of
    from graphsplit.planning.costs.machine_files import machine_text

    _start(devices)
    fn, arguments = (None, []) if target is None else function_of(target, spec or ())
    measured = gs.simulate.calibrate(fn, *map(example, arguments), micro_batches=counts)
    files.write(output, f"# {CALIBRATED}\n{machine_text(measured)}".encode(), why_not_calibrated)
    print(f"Written: {output}. Name it as the machine: graphsplit predict ... --machine {output}")


def validate(
    target: Target,
    machine: MachineOption,
    spec: Specs = None,
    devices: Annotated[int, number("--devices", "How many devices.")] = 2,
    micro_batches: Annotated[int, number("--micro-batches", "Parts of each device's rows.")] = 1,
    rounds: Annotated[int, number("--rounds", "The most steps that are timed.")] = 50,
) -> None:
    """Run a step here, and show what was predicted beside what was measured."""
    start_tensorflow()
    from graphsplit.cli.targets import example, function_of
    from graphsplit.inspect.sources import StateKeeper
    from graphsplit.planning.costs.machine_files import machine as machine_of
    from graphsplit.simulate.measuring.timing import reference, usual_seconds_of_calls

    chosen = machine_of(machine)
    _start(devices)
    fn, arguments = function_of(target, spec or ())
    fn = fn.function if isinstance(fn, gs.ParallelFunction) else fn
    prediction = gs.predict(fn, *arguments, machine=chosen, devices=devices, micro_batches=micro_batches)
    split = gs.parallelize(fn, devices=devices, micro_batches=micro_batches)
    tensors = [example(spec) for spec in arguments]
    with StateKeeper([(v.handle, v.dtype) for v in split.variables(*tensors)]):
        beside = reference(gs.available_devices()[0])
        (measured,) = usual_seconds_of_calls([lambda: split(*tensors)], beside, most_turns=rounds)
    print(prediction)
    off = prediction.step_s / measured - 1
    print(
        f"Measured: {measured * 1e3:.2f} ms a step, the median of up to {rounds} rounds. Predicted: "
        f"{prediction.step_s * 1e3:.2f} ms, {abs(off):.1%} {'more' if off > 0 else 'less'}."
    )
    print(gs.inspect.timeline(split, *tensors))


COMMANDS = (predict, machines, calibrate, validate)


def _start(devices: int | None) -> None:
    """Make logical CPU devices where there are no GPUs: each as good as a core, as predictions take them to be."""
    import tensorflow as tf

    from graphsplit.core.gpus import has_gpus

    if not has_gpus():
        count = devices or 2
        gs.use_logical_devices(max(count, 2), threads_per_device=1)
        tf.config.threading.set_inter_op_parallelism_threads(min(count, os.cpu_count() or 1))
