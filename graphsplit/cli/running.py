"""What all commands do alike: start TensorFlow quietly, and turn errors into messages."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import typer

from graphsplit.core.requirements import explained
from graphsplit.errors import GraphsplitError, StrictError


class Commands(typer.core.TyperGroup):
    """Commands in which TensorFlow is quiet, and which end with a message, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        # TensorFlow reports its build and missing drivers on every start; a newcomer would read that as failure.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        try:
            return super().invoke(ctx)
        except ImportError as error:
            if (said := explained(error)) is error:
                raise
            typer.secho(f"Error: {said}", err=True, fg="red")
            raise typer.Exit(code=2) from error
        except GraphsplitError as error:
            typer.secho(f"Error: {error}{_hint(error)}", err=True, fg="red")
            raise typer.Exit(code=2) from error


def number(name: str, text: str, least: float = 1, most: float = math.inf) -> Any:
    """Return an option that is a number between two others. (typer's own has `<int range> [x>=1]` in its help.)"""

    def check(value: float | None) -> float | None:
        if value is None or least <= value <= most:
            return value
        numbers = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise typer.BadParameter(f"It takes a number {numbers}, got {value}.")

    return typer.Option(name, metavar="N", help=text, callback=check)


def start_tensorflow(keras: bool = True) -> None:
    """Import TensorFlow, and Keras, which takes seconds: what would be lost by then is checked before."""
    with _quiet_start():
        import tensorflow as tf

        tf.config.list_physical_devices()
        if keras:
            importlib.import_module("keras")  # loads more of TensorFlow's libraries

        tf.get_logger().setLevel("ERROR")


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep what TensorFlow's libraries write to the terminal while they load, and show it only if that fails.

    They report on every start which CPU instructions and which GPU drivers they did not find, before any setting of
    the log level is read; a newcomer would take it for failure. It is C++, so the file descriptor is redirected.
    With `TF_CPP_MIN_LOG_LEVEL=0` or `1` all of it is shown.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1"):
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


def _hint(error: GraphsplitError) -> str:
    """Return what to type where devices are missing, or work at home is refused."""
    if isinstance(error, StrictError):
        return "\nOn the command line: leave out --strict."
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
