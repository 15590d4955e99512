"""The command line: `graphsplit demo`, `graphsplit devices`, `graphsplit inspect`, `graphsplit transpile`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Annotated

import typer

# TensorFlow reports its build and missing drivers on every start; a newcomer would read that as failure.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

app = typer.Typer(
    help="Run TensorFlow functions on several devices, with exactly one device's results.", no_args_is_help=True
)
demo = typer.Typer(help="See it work, on GPUs if there are any, else on logical CPU devices.", no_args_is_help=True)
app.add_typer(demo, name="demo")

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
def inspect(
    target: Annotated[str, typer.Argument(help="The directory of a SavedModel, or module:function.")],
    spec: Annotated[list[str] | None, typer.Option("--spec", help="An argument: float32[64,784]; repeat.")] = None,
    devices: Annotated[int | None, typer.Option("--devices", min=1, help="Split it over this many.")] = None,
    actual: Annotated[bool, typer.Option("--actual", help="Run it once, and see where TensorFlow ran what.")] = False,
    signature: Annotated[str, typer.Option("--signature", help="Of a SavedModel.")] = "serving_default",
    output: Annotated[list[str] | None, typer.Option("-o", "--output", help="out.html, .svg, .json, ...")] = None,
    timeline: Annotated[str | None, typer.Option("--timeline", help="One step: trace.json or .png.")] = None,
) -> None:
    """Show which operation runs on which device, and what moves between them."""
    from graphsplit.cli.inspect import inspect as run

    _run(
        lambda: run(
            target,
            specs=spec or (),
            devices=devices,
            actual=actual,
            signature=signature,
            outputs=output or (),
            timeline=timeline,
        )
    )


@app.command()
def transpile(
    source: Annotated[str, typer.Argument(metavar="IN", help="A SavedModel's directory; a graph's .pb or .pbtxt.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Where to write.")],
    devices: Annotated[
        str | None, typer.Option("--devices", help="GPU:0,GPU:1,... or a number. First is home.")
    ] = None,
    signatures: Annotated[str, typer.Option("--signatures", help="Which ones, with commas; all by default.")] = "",
    split: Annotated[str, typer.Option("--split", help="An axis; none; or x=0,mask=none.")] = "0",
    strict: Annotated[bool, typer.Option("--strict", help="Fail if work on the batch would run at home.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, once the new one is whole.")] = False,
    strip: Annotated[bool, typer.Option("--strip-devices", help="Only remove all requests for devices.")] = False,
    replicate: Annotated[
        bool, typer.Option("--replicate-weights", help="A copy of the weights in every device's memory.")
    ] = False,
    inputs: Annotated[str, typer.Option("--inputs", help="Of a graph; by default its placeholders.")] = "",
    outputs: Annotated[str, typer.Option("--outputs", help="Of a graph; by default what nobody reads.")] = "",
) -> None:
    """Turn a finished SavedModel, or a graph, into one that runs on several devices."""

    def run() -> None:
        from graphsplit.cli.transpile import transpile as run

        run(
            source,
            target,
            devices=devices,
            signatures=_names(signatures),
            split=split,
            strict=strict,
            overwrite=overwrite,
            strip=strip,
            replicate_weights=replicate,
            inputs=_names(inputs),
            outputs=_names(outputs),
        )

    _run(run)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep what TensorFlow's libraries write to the terminal while they load, and show it only if that fails.

    They report on every start which CPU instructions and which GPU drivers they did not find, before any setting of
    the log level is read; a newcomer would take it for failure. It is C++, so the file descriptor is redirected.
    """
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


def _run(action: object) -> None:
    """Run a demo; a graphsplit error is a message for the user, not a traceback."""
    with _quiet_start():
        import tensorflow as tf

        tf.config.list_physical_devices()
        import keras  # noqa: F401  (loads more of TensorFlow's libraries)
    from graphsplit.core.errors import GraphsplitError

    assert callable(action)
    try:
        action()
    except GraphsplitError as error:
        typer.secho(f"Error: {error}", err=True, fg="red")
        raise typer.Exit(code=2) from error
