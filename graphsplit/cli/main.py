"""The command line: `graphsplit demo`, `devices`, `doctor`, `inspect`, `transpile`, `predict`, `worker`, ..."""

from __future__ import annotations

from typing import Annotated

import typer

from graphsplit.cli import predict_commands
from graphsplit.cli.checks import check_inspect, check_transpile, parse_devices, parse_split
from graphsplit.cli.running import start_tensorflow, with_messages
from graphsplit.clusters.addresses import check_port
from graphsplit.core.errors import ArgumentError
from graphsplit.core.storage.forms import PLACEMENT_SUFFIXES
from graphsplit.core.version import __version__

app = typer.Typer(
    help="Run TensorFlow functions on several devices, with exactly one device's results.", no_args_is_help=True
)
demo = typer.Typer(help="See it work, on GPUs if there are any, else on logical CPU devices.", no_args_is_help=True)
app.add_typer(demo, name="demo")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"graphsplit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run TensorFlow functions on several devices, with exactly one device's results."""


Devices = Annotated[int, typer.Option("--devices", min=1, help="How many devices.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Rows in each step's batch.")]


@demo.command()
@with_messages
def polyfit(
    devices: Devices = 4,
    batch: Batch = 100,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 2000,
) -> None:
    """Fit 5x^2 + 0x + 3 on one device and on several, and compare."""
    start_tensorflow()
    from graphsplit.demos.polyfit import run

    run(devices, batch, steps)


@demo.command()
@with_messages
def digits(
    devices: Devices = 4,
    batch: Batch = 100,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training data.")] = 5,
) -> None:
    """Train a convolutional network with BatchNormalization on handwritten digits, on one device and on several."""
    start_tensorflow()
    from graphsplit.demos.digits import run

    run(devices, batch, epochs)


@app.command()
@with_messages
def devices() -> None:
    """List the devices that TensorFlow has here."""
    start_tensorflow()
    from graphsplit.demos.display import show_devices

    show_devices()


@app.command()
@with_messages
def doctor(
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="How many devices to check; by default all GPUs, or four CPU devices."),
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option("--memory-mb", min=1, help="Divide the GPUs into --devices parts of so many MiB.")
    ] = None,
) -> None:
    """Print the devices that TensorFlow and the driver find, and compare results on each device and on all of them.

    The exit status is 1 if results differ, or if TensorFlow does not use a GPU that the driver has.
    """
    if memory_mb is not None and devices is None:
        raise ArgumentError(f"--memory-mb {memory_mb} divides the GPUs; say into how many devices: --devices 4.")
    start_tensorflow()
    from graphsplit.cli.doctor import doctor as run

    if not run(devices, memory_mb):
        raise typer.Exit(code=1)


@app.command()
@with_messages
def inspect(
    target: Annotated[str, typer.Argument(metavar="WHAT", help="A SavedModel's directory, or module:function.")],
    spec: Annotated[
        list[str] | None,
        typer.Option("--spec", metavar="SPEC", help="An argument: 'float32[64,784]', ? for any size; repeat."),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", help="Split over so many devices, or GPU:0,GPU:1,... (need not exist).")
    ] = None,
    actual: Annotated[bool, typer.Option("--actual", help="Run once, and show where TensorFlow ran it.")] = False,
    signature: Annotated[str, typer.Option("--signature", help="The SavedModel's signature.")] = "serving_default",
    output: Annotated[
        list[str] | None,
        typer.Option("-o", "--output", metavar="FILE", help=f"A file to write: {', '.join(PLACEMENT_SUFFIXES)}."),
    ] = None,
    timeline: Annotated[
        str | None, typer.Option("--timeline", metavar="FILE", help="Record one step, for ui.perfetto.dev: step.json.")
    ] = None,
) -> None:
    """Show which operation runs on which device, and what is sent between devices."""
    outputs, specs = output or (), spec or ()
    check_inspect(target, specs, outputs, timeline)
    start_tensorflow()
    from graphsplit.cli.inspect import inspect as run

    run(
        target,
        specs=specs,
        devices=None if devices is None else parse_devices(devices),
        actual=actual,
        signature=signature,
        outputs=outputs,
        timeline=timeline,
    )


@app.command()
@with_messages
def transpile(
    source: Annotated[str, typer.Argument(metavar="IN", help="A SavedModel's directory, or a graph: .pb, .pbtxt.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Where to write.")],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            help="Required: GPU:0,GPU:1,..., the default device first; or how many GPUs (without GPUs, CPU devices).",
        ),
    ] = None,
    signatures: Annotated[str, typer.Option("--signatures", help="Names, with commas; all by default.")] = "",
    split: Annotated[str, typer.Option("--split", help="The axis to split: 0, none, or x=0,mask=none.")] = "0",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if work on the batch would run on one device.")
    ] = False,
    strict_share: Annotated[
        float | None,
        typer.Option("--strict-share", min=0, max=1, help="Fail if more than this share would: 0.1."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a model or graph.")] = False,
    strip: Annotated[bool, typer.Option("--strip-devices", help="Only remove the devices in the graph.")] = False,
    replicate: Annotated[
        bool, typer.Option("--replicate-weights", help="A copy of the weights in every device's memory.")
    ] = False,
    inputs: Annotated[
        str, typer.Option("--inputs", help="Of a graph: its arguments; by default its placeholders.")
    ] = "",
    outputs: Annotated[
        str, typer.Option("--outputs", help="Of a graph: its results; by default what no operation reads.")
    ] = "",
) -> None:
    """Turn a finished SavedModel, or a graph, into one that runs on several devices."""
    axes = parse_split(split)
    if strip and (devices or signatures or replicate or inputs or outputs):
        raise ArgumentError("--strip-devices only removes requests for devices; leave the other options out.")
    check_transpile(source, target, devices, overwrite, strip)
    start_tensorflow()
    from graphsplit.cli import transpile as command
    from graphsplit.saved_models.options import TranspileOptions

    if strip:
        command.strip(source, target, overwrite)
        return
    options = TranspileOptions(
        devices=parse_devices(devices or ""),
        split=axes,
        strict=strict if strict_share is None else strict_share,
        signatures=_names(signatures) or None,
        overwrite=overwrite,
        replicate_weights=replicate,
    )
    command.transpile(source, target, options, inputs=_names(inputs), outputs=_names(outputs))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


for _command in predict_commands.COMMANDS:
    app.command()(_command)


@app.command()
@with_messages
def worker(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where clients connect.")] = 2222,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="How many logical CPU devices.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of an operation on the CPU.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="This machine has a public address, and the port is closed to it.")
    ] = False,
) -> None:
    """Let other machines use this one's devices, until it is ended. They connect with graphsplit.connect."""
    check_port(port, insecure)
    start_tensorflow(keras=False)
    from graphsplit.clusters.worker import serve

    serve(port, devices, threads)
