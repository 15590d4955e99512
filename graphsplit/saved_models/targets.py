"""What a transpilation may replace: a SavedModel's directory, or a graph's file. Nothing else, whatever was allowed."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator
from pathlib import Path

from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.core.storage.files import Recognizer, check_apart, check_free, check_writable, kind_of
from graphsplit.core.storage.model_files import why_other_kind
from graphsplit.core.storage.stored_models import asset_names, read_saved_model
from graphsplit.saved_models.files import read_graph_def

# What TensorFlow writes into the directory of a SavedModel, besides assets, which the graph names.
_OWN = re.compile(
    r"saved_model\.(pb|pbtxt)|fingerprint\.pb|keras_metadata\.pb|variables/variables\.(index|data-\d{5}-of-\d{5})"
    r"|debug/saved_model_debug_info\.pb"
)
_SHOWN = 6


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
