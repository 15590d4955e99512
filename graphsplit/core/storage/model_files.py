"""Where models lie on disk, by the names of files alone. Nothing here reads them, or imports TensorFlow."""

from __future__ import annotations

from pathlib import Path

from graphsplit.core.storage.files import kind_of
from graphsplit.errors import ArgumentError

GRAPH_SUFFIXES = (".pb", ".pbtxt")


def model_file(directory: str) -> Path:
    """Return the file that holds the graph of the SavedModel in a directory."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArgumentError(f"{directory!r} {what}; give the directory of a SavedModel, or a graph's .pb or .pbtxt.")
    for name in ("saved_model.pb", "saved_model.pbtxt", "saved_model.cpb"):
        if (folder / name).is_file():
            return folder / name
    there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise ArgumentError(
        f"{directory!r} is not a SavedModel: it has no saved_model.pb; it holds {there}. "
        "Keras models are written as one by model.export(directory)."
    )


def is_graph_file(path: str) -> bool:
    """Return whether a path is called like the file of a graph, and not that of a SavedModel's directory."""
    return path.endswith(GRAPH_SUFFIXES) and not Path(path).is_dir()


def why_other_kind(path: Path, source: str) -> str:
    """Return why a path holds another kind of thing than is made of `source`, "" if it does not."""
    kind = kind_of(path)
    if Path(source).is_dir():
        return "" if kind == "a directory" else f"is {kind}, not a SavedModel's directory"
    return "" if kind == "a plain file" else f"is {kind}, not a graph's file"


def check_graph_file(path: str) -> None:
    """Raise `ArgumentError` unless there is a file at `path`."""
    kind = kind_of(Path(path).resolve())
    if kind != "a plain file":
        raise ArgumentError(f"{path!r} {f'is {kind}' if kind else 'does not exist'}; give a GraphDef as .pb or .pbtxt.")
