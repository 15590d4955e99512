"""What can be said of a command before TensorFlow is imported, which takes seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from graphsplit.core.errors import ArgumentError
from graphsplit.core.storage import files, forms
from graphsplit.core.storage.model_files import check_graph_file, is_graph_file, model_file, why_other_kind

CALIBRATED = "written by graphsplit calibrate"
"""What a machine file says of itself that may be replaced by another one."""

_SPEC = re.compile(r"^\s*(?P<dtype>[a-z]+[0-9]*)\s*\[(?P<sizes>[^\]]*)\]\s*$")


def check_inspect(target: str, specs: Sequence[str], outputs: Sequence[str], timeline: str | None) -> None:
    """Raise `ArgumentError` or `StorageError` for what can be seen to be wrong with `graphsplit inspect`."""
    for path in outputs:
        forms.check_placement_suffix(path)
    if timeline is not None:
        forms.check_trace_suffix(timeline, "a timeline")
    for path in (*outputs, *([] if timeline is None else [timeline])):
        forms.check(path)
    for text in specs:
        split_spec(text)
    if Path(target).is_dir():
        model_file(target)
    else:
        _check_module(target)


def check_machine_file(path: str) -> None:
    """Raise `ArgumentError` or `StorageError` unless a machine file can be written to `path`."""
    if not path.endswith(".toml"):
        raise ArgumentError(f"-o {path!r}: a machine file ends in .toml.")
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"-o {path!r}: there is no directory {str(Path(path).parent)!r}.")
    files.check_writable(path, why_not_calibrated)


def why_not_calibrated(path: Path) -> str:
    """Return why a file may not be replaced by a machine file, "" if it may."""
    kind = files.kind_of(path)
    if kind != "a plain file":
        return f"is {kind}"
    content = path.read_bytes()
    return "" if not content or CALIBRATED.encode() in content[:200] else f"was not {CALIBRATED}"


def check_transpile(source: str, target: str, devices: str | None, overwrite: bool, strip: bool) -> None:
    """Raise `ArgumentError` or `StorageError` for what can be seen to be wrong with `graphsplit transpile`."""
    if devices is None and not strip:
        raise ArgumentError(
            "Which devices? --devices GPU:0,GPU:1 names them, --devices 4 takes the first four. They need not exist on "
            "this machine; the first is the default device."
        )
    if is_graph_file(source):
        check_graph_file(source)
        if not target.endswith((".pb", ".pbtxt")):
            raise ArgumentError(
                f"{source!r} is a graph, so is what is written; {target!r} ends neither in .pb nor .pbtxt."
            )
    else:
        model_file(source)
    files.check_apart(source, target)
    files.check_free(target, overwrite)
    files.check_writable(target, lambda path: why_other_kind(path, source))


def parse_devices(text: str) -> int | list[str]:
    """Return what `--devices` says: a number, or names.

    >>> parse_devices("GPU:0,GPU:1")
    ['GPU:0', 'GPU:1']
    """
    return int(text) if text.strip().isdecimal() else [name.strip() for name in text.split(",") if name.strip()]


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


def split_spec(text: str) -> tuple[str, list[int | None]]:
    """Return dtype and sizes of what people write as `float32[64,784]`.

    >>> split_spec("int32[?, 3]")
    ('int32', [None, 3])
    """
    match = _SPEC.match(text)
    sizes = [size.strip() for size in match["sizes"].split(",")] if match and match["sizes"].strip() else []
    if match is None or not all(size in ("?", "None") or size.isdecimal() for size in sizes):
        raise ArgumentError(f"--spec {text!r} is not understood; write it like 'float32[64,784]'.")
    return match["dtype"], [None if size in ("?", "None") else int(size) for size in sizes]


def split_target(target: str) -> tuple[str, list[str]]:
    """Return the module and the attributes that `module:function` or `module:object.method` names."""
    module, _, path = target.partition(":")
    names = path.split(".")
    if not module or not all(name.isidentifier() for name in names):
        raise ArgumentError(f"{target!r} is neither the directory of a SavedModel nor of the form module:function.")
    return module.removesuffix(".py"), names


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Let modules in the working directory be found, as `python -m` does: the user's own lie where the command is."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _check_module(target: str) -> None:
    module, _ = split_target(target)
    with working_directory_first():
        try:
            found = importlib.util.find_spec(module.partition(".")[0]) is not None
        except (ImportError, ValueError):  # a name with dots only; a module that has no specification
            found = False
    if not found:
        raise ArgumentError(
            f"{target!r}: there is no module {module!r}. It is looked for in {os.getcwd()!r} and in sys.path."
        )
