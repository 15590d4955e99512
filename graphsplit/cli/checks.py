"""What people type, understood without TensorFlow, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path

from graphsplit.core.requirements import needed
from graphsplit.core.storage import files
from graphsplit.errors import ArgumentError

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
