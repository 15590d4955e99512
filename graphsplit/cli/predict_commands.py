"""The commands `predict`, `machines`, `calibrate`, `validate`: options, and checks before TensorFlow starts."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Annotated

import typer

from graphsplit.cli.checks import check_machine_file, split_spec, split_target
from graphsplit.cli.running import start_tensorflow, with_messages
from graphsplit.core.errors import ArgumentError
from graphsplit.core.storage import forms
from graphsplit.costs.machine_schema import parse

Target = Annotated[str, typer.Argument(metavar="WHAT", help="A function, module:function.")]
Specs = Annotated[
    list[str] | None, typer.Option("--spec", metavar="SPEC", help="An argument: 'float32[64,784]'; repeat.")
]


def machines_like(incomplete: str) -> list[str]:
    """Return what completes the name of a machine: those that come along, and machine files here.

    Shells wait for it, so the files are not read as machines, for which TensorFlow would be imported.
    """
    names = list[str]()
    for file in (importlib.resources.files("graphsplit.costs") / "machines").iterdir():
        table = parse(file.name, file.read_text("utf-8"))
        names += [table["name"], f"{table['devices']}x{table['device']['name']}"]
    files = filter(Path.is_file, Path().glob("*.toml"))
    own = [str(path) for path in files if "[device]" in path.read_text("utf-8", "replace")]
    return sorted(name for name in [*names, *own] if name.startswith(incomplete))


Machine = Annotated[
    str,
    typer.Option(
        "--machine", autocompletion=machines_like, help="8xH100-SXM5, dgx-a100, here.toml; see `graphsplit machines`."
    ),
]
MicroBatches = Annotated[int | None, typer.Option("--micro-batches", min=1, help="Parts of each device's rows.")]


@with_messages
def predict(
    target: Target,
    machine: Machine,
    spec: Specs = None,
    devices: Annotated[str, typer.Option("--devices", help="Numbers of devices, with commas: 1,2,4,8.")] = "1",
    layout: Annotated[
        str, typer.Option("--layout", help="Layouts of variables, with commas: home, replicated, sharded.")
    ] = "",
    micro_batches: MicroBatches = None,
    weak: Annotated[bool, typer.Option("--weak", help="Also weak scaling: as many rows per device.")] = False,
    output: Annotated[
        list[str] | None,
        typer.Option("-o", "--output", metavar="FILE", help="A file to write: .json; a table: .png, too."),
    ] = None,
) -> None:
    """Predict how long a step takes on a machine, and what each device holds, without running it."""
    counts = parse_counts(devices)
    for path in output or ():
        forms.check(path)
    check_call(target, spec or ())
    start_tensorflow()
    from graphsplit.cli import predicting

    predicting.predict(
        target,
        specs=spec or (),
        machine=machine,
        devices=counts,
        layouts=[name for name in layout.replace(" ", "").split(",") if name],
        micro_batches=micro_batches,
        weak=weak,
        outputs=output or (),
    )


@with_messages
def machines(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", autocompletion=machines_like, help="One machine: all its figures and their sources."
        ),
    ] = None,
) -> None:
    """List the machines that come with graphsplit."""
    start_tensorflow()
    from graphsplit.cli import predicting

    predicting.machines(name)


@with_messages
def calibrate(
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The file to write, here.toml.")],
    target: Annotated[str | None, typer.Argument(metavar="[WHAT]", help="A function to measure as well.")] = None,
    spec: Specs = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Logical CPU devices; 2.")] = None,
    micro_batches: Annotated[
        str, typer.Option("--micro-batches", help="In how many parts of the batch to measure WHAT.")
    ] = "1,2,4,8",
) -> None:
    """Measure this machine: products, convolutions, memory, copies between devices, the cost of launching."""
    counts = parse_counts(micro_batches, "--micro-batches")
    check_machine_file(output)
    if target is not None:
        check_call(target, spec or ())
    start_tensorflow()
    from graphsplit.cli import predicting

    predicting.calibrate(output, target, spec or (), devices, counts)


@with_messages
def validate(
    target: Target,
    machine: Machine,
    spec: Specs = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many.")] = 2,
    micro_batches: Annotated[int, typer.Option("--micro-batches", min=1, help="Parts of each device's rows.")] = 1,
    steps: Annotated[int, typer.Option("--rounds", min=1, help="The most steps that are timed.")] = 50,
) -> None:
    """Run a step here, and show what was predicted beside what was measured."""
    check_call(target, spec or ())
    start_tensorflow()
    from graphsplit.cli import predicting

    predicting.validate(
        target,
        specs=spec or (),
        machine=machine,
        devices=devices,
        micro_batches=micro_batches,
        steps=steps,
    )


COMMANDS = (predict, machines, calibrate, validate)


def parse_counts(text: str, option: str = "--devices") -> list[int]:
    """Return what an option says: numbers.

    >>> parse_counts("1,2, 4")
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(f"{option} {text!r} is not understood; write numbers of at least 1, with commas: 1,2,4,8.")
    return [int(part) for part in parts]


def check_call(target: str, specs: list[str] | tuple[()]) -> None:
    """Raise `ArgumentError` for what can be seen to be wrong with a function and its arguments."""
    split_target(target)
    for text in specs:
        if None in split_spec(text)[1]:
            raise ArgumentError(f"--spec {text!r}: a prediction needs all sizes; write a number for each.")
