"""What all commands do alike: understand what people type, start TensorFlow quietly, and turn errors into messages.

What people type is checked before TensorFlow is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from graphsplit.core.requirements import explained, needed
from graphsplit.core.storage import files
from graphsplit.errors import ArgumentError, GraphsplitError, StrictError


class Commands(typer.core.TyperGroup):
    """Commands in which TensorFlow is quiet, and which end with a message, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        # TensorFlow reports its build and missing drivers on every start; a newcomer would read that as failure.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        try:
            return super().invoke(ctx)
        except ImportError as error:
            if (explanation := explained(error)) is error:
                raise
            typer.secho(f"Error: {explanation}", err=True, fg="red")
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
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        except BaseException:
            output.seek(0)
            os.write(terminal, output.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def _hint(error: GraphsplitError) -> str:
    """Return what to type where devices are missing, or work that runs once is refused."""
    if isinstance(error, StrictError):
        return "\nOn the command line: leave out --strict."
    wanted_devices = getattr(error, "asked", None)
    if not isinstance(wanted_devices, int):
        return ""
    from graphsplit.core.devices import available_devices, short_name

    present_devices = available_devices()
    if "GPU" in present_devices[0]:
        return f"\nOn the command line: --devices {len(present_devices)} takes the GPUs there are."
    return (
        f"\nOn the command line: --devices {wanted_devices} makes so many logical CPU devices first; now there "
        f"{'is' if len(present_devices) == 1 else 'are'} {', '.join(map(short_name, present_devices))}."
    )


CALIBRATED = "written by graphsplit calibrate"
"""What a machine file says of itself that may be replaced by another one."""


def check_machine_file(path: str) -> None:
    """Raise `ArgumentError` or `StorageError` unless a machine file can be written to `path`."""
    if not path.endswith(".toml"):
        raise ArgumentError(f"-o {path!r}: a machine file ends in .toml.")
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"-o {path!r}: there is no directory {str(Path(path).parent)!r}.")
    needed("tomli_w", "machines", "Writing a machine file")
    files.check_writable(path, why_not_calibrated)


def why_not_calibrated(path: Path) -> str:
    """Return why a file may not be replaced by a machine file, "" if it may."""
    kind = files.kind_of(path)
    if kind != "a plain file":
        return f"is {kind}"
    content = path.read_bytes()
    return "" if not content or CALIBRATED.encode() in content[:200] else f"was not {CALIBRATED}"


def names_in(text: str) -> list[str]:
    """Return names that people write with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_devices(text: str) -> int | list[str]:
    """Return what `--devices` says: a number, or names.

    >>> parse_devices("GPU:0,GPU:1")
    ['GPU:0', 'GPU:1']
    """
    return int(text) if text.strip().isdecimal() else names_in(text)


def parse_counts(text: str, option: str = "--devices") -> list[int]:
    """Return what an option says: numbers.

    >>> parse_counts("1,2, 4")
    [1, 2, 4]
    """
    parts = names_in(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(f"{option} {text!r} is not understood; write numbers of at least 1, with commas: 1,2,4,8.")
    return [int(part) for part in parts]


def parse_split(text: str) -> int | dict[str, int | None] | None:
    """Return what `--split` says: an axis, None, or a mapping from names to those.

    >>> parse_split("x=0,mask=none")
    {'x': 0, 'mask': None}
    """
    pairs = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if len(pairs) == 1 and not pairs[0][1]:
        return _axis(text)
    if not pairs or not all(equals and name.strip() for name, equals, _ in pairs):
        raise ArgumentError(f"--split {text!r} is not understood; write an axis, none, or name=axis,name=none.")
    result: dict[str, int | None] = {}
    for name, _, axis in pairs:
        if name.strip() in result:
            raise ArgumentError(f"--split {text!r} names {name.strip()!r} more than once; give one axis for each name.")
        result[name.strip()] = _axis(axis)
    return result


def _axis(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(f"--split: {text!r} is no axis; write a number or none.") from error
