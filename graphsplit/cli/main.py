"""The command line: `graphsplit demo`, `devices`, `doctor`, `inspect`, `transpile`, `predict`, `worker`, ..."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from graphsplit.cli.checks import check_inspect, check_transpile, parse_devices, parse_split
from graphsplit.cli.predict_commands import add_commands
from graphsplit.cli.worker_command import add_command
from graphsplit.core.errors import ArgumentError, GraphsplitError, StrictError
from graphsplit.core.requirements import explained
from graphsplit.core.storage.forms import PLACEMENT_SUFFIXES, TIMELINE_SUFFIXES
from graphsplit.core.version import __version__

# TensorFlow reports its build and missing drivers on every start; a newcomer would read that as failure.
_ASKED_LEVEL = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

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
def polyfit(
    devices: Devices = 4,
    batch: Batch = 100,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 2000,
) -> None:
    """Fit 5x^2 + 0x + 3 on one device and on several, and compare."""

    def fit() -> None:
        from graphsplit.demos.polyfit import run

        run(devices, batch, steps)

    _run(fit)


@demo.command()
def digits(
    devices: Devices = 4,
    batch: Batch = 100,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training data.")] = 5,
) -> None:
    """Train a convolutional network with BatchNormalization on handwritten digits, on one device and on several."""

    def train() -> None:
        from graphsplit.demos.digits import run

        run(devices, batch, epochs)

    _run(train)


@app.command()
def devices() -> None:
    """List the devices that TensorFlow has here."""

    def show() -> None:
        from graphsplit.demos.display import show_devices

        show_devices()

    _run(show)


@app.command()
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

    def check() -> None:
        if memory_mb is not None and devices is None:
            raise ArgumentError(f"--memory-mb {memory_mb} divides the GPUs; say into how many devices: --devices 4.")

    def examine() -> None:
        from graphsplit.cli.doctor import doctor as run

        if not run(devices, memory_mb):
            raise typer.Exit(code=1)

    _run(examine, check)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(metavar="WHAT", help="A SavedModel's directory, or module:function.")],
    spec: Annotated[
        list[str] | None, typer.Option("--spec", help="An argument: 'float32[64,784]', ? for any size; repeat.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", help="Split over so many devices, or GPU:0,GPU:1,... (need not exist).")
    ] = None,
    actual: Annotated[bool, typer.Option("--actual", help="Run once, and show where TensorFlow ran it.")] = False,
    signature: Annotated[str, typer.Option("--signature", help="The SavedModel's signature.")] = "serving_default",
    output: Annotated[
        list[str] | None, typer.Option("-o", "--output", help=f"A file to write: {', '.join(PLACEMENT_SUFFIXES)}.")
    ] = None,
    timeline: Annotated[
        str | None, typer.Option("--timeline", help=f"Record one step: {', '.join(TIMELINE_SUFFIXES)}.")
    ] = None,
) -> None:
    """Show which operation runs on which device, and what is sent between devices."""
    outputs, specs = output or (), spec or ()

    def show() -> None:
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

    _run(show, lambda: check_inspect(target, specs, outputs, timeline))


@app.command()
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

    def check() -> None:
        parse_split(split)
        if strip and (devices or signatures or replicate or inputs or outputs):
            raise ArgumentError("--strip-devices only removes requests for devices; leave the other options out.")
        check_transpile(source, target, devices, overwrite, strip)

    def run() -> None:
        from graphsplit.cli import transpile as command
        from graphsplit.saved_models.options import TranspileOptions

        if strip:
            command.strip(source, target, overwrite)
            return
        options = TranspileOptions(
            devices=parse_devices(devices or ""),
            split=parse_split(split),
            strict=strict if strict_share is None else strict_share,
            signatures=_names(signatures) or None,
            overwrite=overwrite,
            replicate_weights=replicate,
        )
        command.transpile(source, target, options, inputs=_names(inputs), outputs=_names(outputs))

    _run(run, check)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep what TensorFlow's libraries write to the terminal while they load, and show it only if that fails.

    They report on every start which CPU instructions and which GPU drivers they did not find, before any setting of
    the log level is read; a newcomer would take it for failure. It is C++, so the file descriptor is redirected.
    With `TF_CPP_MIN_LOG_LEVEL=0` or `1` all of it is shown.
    """
    if _ASKED_LEVEL in ("0", "1"):
        yield
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(terminal, kept.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def _run(action: Callable[[], None], check: Callable[[], None] = lambda: None, keras: bool = True) -> None:
    """Check, start TensorFlow (and Keras), act; a graphsplit error is a message for the user, not a traceback."""
    try:
        check()
        with _quiet_start():
            import tensorflow as tf

            tf.config.list_physical_devices()
            if keras:
                importlib.import_module("keras")  # loads more of TensorFlow's libraries

            tf.get_logger().setLevel("ERROR")
        action()
    except ImportError as error:
        if (said := explained(error)) is error:
            raise
        typer.secho(f"Error: {said}", err=True, fg="red")
        raise typer.Exit(code=2) from error
    except GraphsplitError as error:
        typer.secho(f"Error: {error}{_hint(error)}", err=True, fg="red")
        raise typer.Exit(code=2) from error


def _hint(error: GraphsplitError) -> str:
    """Return what to type where devices are missing, or work at home is refused."""
    if isinstance(error, StrictError):
        return "\nOn the command line: leave out --strict, or give --strict-share 0.1."
    asked = getattr(error, "asked", None)
    if not isinstance(asked, int):
        return ""
    from graphsplit.core.devices import available_devices, short_name

    there = available_devices()
    if "GPU" in there[0]:
        return f"\nOn the command line: --devices {len(there)} takes the GPUs there are."
    return (
        f"\nOn the command line: --devices {asked} makes so many logical CPU devices first; now there "
        f"{'is' if len(there) == 1 else 'are'} {', '.join(map(short_name, there))}."
    )


add_commands(app, _run)
add_command(app, _run)
