"""Files of graphs and of changed SavedModels, and what they may replace: those of another one, and nothing else."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.unknown_fields import UnknownFieldSet

from graphsplit.core.protos import GraphDef
from graphsplit.core.storage.files import (
    Recognizer,
    check_apart,
    check_free,
    check_graph_file,
    check_writable,
    kind_of,
    model_file,
    why_other_kind,
)
from graphsplit.core.storage.stored_models import asset_names, parse, read_saved_model
from graphsplit.errors import ArgumentError, UnsupportedError

# What TensorFlow writes into the directory of a SavedModel, besides assets, which the graph names.
_OWN = re.compile(
    r"saved_model\.(pb|pbtxt)|fingerprint\.pb|keras_metadata\.pb|variables/variables\.(index|data-\d{5}-of-\d{5})"
    r"|debug/saved_model_debug_info\.pb"
)
_SHOWN = 6


def write_saved_model(directory: str, model: Any) -> None:
    """Write a changed proto over the one in `directory`, of which a stored fingerprint would be wrong."""
    path = model_file(directory)
    text = path.suffix == ".pbtxt"
    path.write_bytes(text_format.MessageToString(model).encode() if text else model.SerializeToString())
    (Path(directory) / "fingerprint.pb").unlink(missing_ok=True)


def read_graph_def(path: str) -> Any:
    """Return the `GraphDef` in a `.pb` or `.pbtxt` file.

    Raises:
      ArgumentError: if there is no such file, or it holds something else.
    """
    check_graph_file(path)
    graph = parse(Path(path), GraphDef())
    if foreign := why_no_graph(graph):
        raise ArgumentError(f"{path!r} is no graph: {foreign}.")
    return graph


def why_no_graph(graph_def: Any) -> str:
    """Return why something that could be parsed as a `GraphDef` is none, "" if it is one.

    Many short texts and other protos happen to parse; fields that a `GraphDef` does not have give them away.
    """
    if len(UnknownFieldSet(graph_def)):
        return "it has fields that a GraphDef does not have"
    if not graph_def.node:
        return "it has no nodes"
    return "" if all(node.name and node.op for node in graph_def.node) else "it has nodes without a name or a type"


def graph_def_bytes(graph_def: Any, path: str) -> bytes:
    """Return what to write to a file of this name: text for `.pbtxt`, else the wire format."""
    text = path.endswith(".pbtxt")
    return text_format.MessageToString(graph_def).encode() if text else bytes(graph_def.SerializeToString())


def size_of(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    root = Path(path)
    return sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) if root.is_dir() else root.stat().st_size


def check_target(source: str, target: str, overwrite: bool) -> Recognizer:
    """Return what `core.files.replacing` is to recognize at `target`.

    Raises:
      ArgumentError: if `target` is no path, exists, or touches the source.
      StorageError: if it exists and is not what may be replaced.
    """
    check_apart(source, target)
    check_free(target, overwrite)

    def recognize(path: Path) -> str:
        if not overwrite:
            return "exists by now"
        if why := why_other_kind(path, source):
            return why
        return why_no_saved_model(path, Path(source)) if path.is_dir() else why_no_graph_file(path)

    check_writable(target, recognize)
    return recognize


def why_no_graph_file(path: Path) -> str:
    """Return why a plain file is no graph's, "" if it is one or is empty."""
    if not path.stat().st_size:
        return ""
    try:
        read_graph_def(str(path))
    except ArgumentError:
        return "is no graph's file"
    return ""


def why_no_saved_model(path: Path, source: Path) -> str:
    """Return why a directory is not only a SavedModel, "" if nothing but one would be lost.

    Args:
      path: the directory.
      source: the input; files that are copies of its own are not lost.
    """
    if not any(path.iterdir()):
        return ""
    try:
        [graph] = read_saved_model(str(path)).meta_graphs
        assets = {f"assets/{name}" for name in asset_names(graph)}
    except (ArgumentError, UnsupportedError):
        return "is a directory, not a SavedModel's"
    foreign = [
        name
        for name in _files(path)
        if not (name in assets or _OWN.fullmatch(name)) and not _is_copy(path / name, source / name)
    ]
    if not foreign:
        return ""
    more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
    return f"holds what is no part of a SavedModel ({', '.join(sorted(foreign)[:_SHOWN])}{more})"


def _files(folder: Path) -> Iterator[str]:
    """Yield whatever lies in a folder and is no folder itself, or an empty one, by its path inside."""
    for path in folder.rglob("*"):
        if kind_of(path) != "a directory" or (not any(path.iterdir()) and path.name not in ("variables", "assets")):
            yield path.relative_to(folder).as_posix()


def _is_copy(path: Path, original: Path) -> bool:
    plain = kind_of(path) == kind_of(original) == "a plain file"
    return plain and filecmp.cmp(path, original, shallow=False)
