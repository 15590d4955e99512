"""The forms of files that people look at (pages, pictures, tables), and the mark by which graphsplit knows its own.

Every such file says "written by graphsplit" somewhere that its form has for remarks. Only a plain file that says so,
or is empty, is replaced by another one: a user's own `notes.json` is never lost. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphsplit.core.storage import files
from graphsplit.errors import ArgumentError

MARK = "written by graphsplit"
PLACEMENT_SUFFIXES = (".html", ".svg", ".json", ".pb", ".tfevents", ".csv")
_EDGE_BYTES = 1 << 16  # the mark stands within so many bytes of the begin or the end
_REMARKS = {".html": "<!-- {} -->", ".svg": "<!-- {} -->", ".md": "<!-- {} -->"}
_PNG_HEADER_BYTES = 8 + 25  # signature, and the IHDR chunk, which comes first


def suffix_of(path: str) -> str:
    """Return the suffix that chooses the form."""
    return os.path.splitext(path)[1].lower()


def check_placement_suffix(path: str) -> None:
    """Raise `ArgumentError` unless a placement can be written to a file of this name, or to a directory."""
    suffix = suffix_of(path)
    if suffix and suffix not in PLACEMENT_SUFFIXES and not os.path.isdir(path):
        raise ArgumentError(
            f"{path!r}: a placement is not written as {suffix!r}. There are {', '.join(PLACEMENT_SUFFIXES)}, and a "
            "directory for TensorBoard; networkx writes placement.graph in other forms."
        )


def check_suffix(path: str, what: str, suffixes: Sequence[str]) -> None:
    """Raise `ArgumentError` unless a file's name has one of these suffixes; `what` is written to it."""
    if suffix_of(path) not in suffixes:
        raise ArgumentError(f"{path!r}: {what} is written as {', '.join(suffixes[:-1])} or {suffixes[-1]}.")


def check_trace_suffix(path: str, what: str) -> None:
    """Raise `ArgumentError` unless a step in time can be written to a file of this name."""
    if suffix_of(path) != ".json":
        raise ArgumentError(f"{path!r}: {what} is written as .json, which ui.perfetto.dev opens.")


def check_table_suffix(path: str, what: str) -> None:
    """Raise `ArgumentError` unless a table can be written to a file of this name."""
    if suffix_of(path) != ".csv":
        raise ArgumentError(f"{path!r}: {what} are written as .csv.")


def write(path: str, content: bytes) -> None:
    """Write a file that says of itself who wrote it. See `core.files.replacing`.

    Text gets a remark at its end, a picture a chunk; other forms carry the mark in `content` already.
    """
    suffix = suffix_of(path)
    if suffix in _REMARKS:
        content = content.rstrip() + f"\n{_REMARKS[suffix].format(MARK)}\n".encode()
    elif suffix == ".png":
        content = marked_png(content)
    files.write(path, content, recognize)


def write_json(path: str, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON object, which says who wrote it. See `write`."""
    write(path, (json.dumps({"about": MARK, **content}, indent=indent) + "\n").encode())


def write_figure(path: str, figure: Any, dots_per_inch: float = 100) -> None:
    """Write a matplotlib figure as the picture that the suffix says. See `write`."""
    content = io.BytesIO()
    figure.savefig(content, format=suffix_of(path)[1:], dpi=dots_per_inch)
    write(path, content.getvalue())


def check(path: str) -> None:
    """Raise an error unless `path` can be written; see `write`. A directory is for TensorBoard."""
    files.check_writable(events_file(path) if not suffix_of(path) or os.path.isdir(path) else path, recognize)


def events_file(path: str) -> str:
    """Return the file that TensorBoard finds in a directory."""
    return os.path.join(path, "events.out.tfevents.placement")


def recognize(path: Path) -> str:
    """Return why a file is none of ours, "" if it may be replaced."""
    kind = files.kind_of(path)
    if kind != "a plain file":
        return f"is {kind}"
    size = path.stat().st_size
    with path.open("rb") as file:
        edges = file.read(_EDGE_BYTES)
        file.seek(max(0, size - _EDGE_BYTES))
        edges += file.read()
    return "" if not size or MARK.encode() in edges else "was not written by graphsplit"


def marked_png(content: bytes) -> bytes:
    """Return a PNG with a text chunk more: https://www.w3.org/TR/png-3/#11tEXt."""
    chunk = b"tEXtSoftware\0" + MARK.encode("latin-1")
    whole = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:_PNG_HEADER_BYTES] + whole + content[_PNG_HEADER_BYTES:]
