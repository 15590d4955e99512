"""Files of graphs, and changed graphs of SavedModels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.unknown_fields import UnknownFieldSet

from graphsplit.core.errors import ArgumentError
from graphsplit.core.protos.graphdefs import GraphDef
from graphsplit.core.storage.model_files import check_graph_file, model_file
from graphsplit.core.storage.stored_models import parse


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
