"""Files of SavedModels and graphs: reading, sizes, and writing so that an interruption leaves the old or the new."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from graphsplit.core.errors import ArgumentError, StorageError, UnsupportedError, bullet_list
from graphsplit.core.graphdefs import GraphDef
from graphsplit.core.tensorflow_internals import new_saved_model, op_definition

_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h


def read_saved_model(directory: str) -> Any:
    """Return the `SavedModel` proto in a directory.

    Raises:
      ArgumentError: if the directory holds none.
      UnsupportedError: if it holds more than one graph, or one in pieces (over 2 GB).
    """
    path = _model_file(directory)
    if path.suffix == ".cpb":
        raise UnsupportedError(f"{directory!r} holds a graph of more than 2 GB in pieces; those cannot be read yet.")
    model = parse(path, new_saved_model())
    if len(model.meta_graphs) != 1:
        tags = [", ".join(graph.meta_info_def.tags) or "no tags" for graph in model.meta_graphs]
        raise UnsupportedError(
            f"{directory!r} holds {len(tags)} graphs, one for each set of tags:\n{bullet_list(tags)}\n"
            "SavedModels with one graph can be transpiled; save the one to be served by itself."
        )
    return model


def write_saved_model(directory: str, model: Any) -> None:
    """Write a changed proto over the one in `directory`, of which a stored fingerprint would be wrong."""
    path = _model_file(directory)
    text = path.suffix == ".pbtxt"
    path.write_bytes(text_format.MessageToString(model).encode() if text else model.SerializeToString())
    (Path(directory) / "fingerprint.pb").unlink(missing_ok=True)


def _model_file(directory: str) -> Path:
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


def read_graph_def(path: str) -> Any:
    """Return the `GraphDef` in a `.pb` or `.pbtxt` file."""
    if not Path(path).is_file():
        raise ArgumentError(f"{path!r} does not exist; give a GraphDef as .pb or .pbtxt.")
    return parse(Path(path), GraphDef())


def graph_def_bytes(graph_def: Any, path: str) -> bytes:
    """Return what to write to a file of this name: text for `.pbtxt`, else the wire format."""
    text = path.endswith(".pbtxt")
    return text_format.MessageToString(graph_def).encode() if text else bytes(graph_def.SerializeToString())


def parse(path: Path, proto: Any) -> Any:
    """Fill `proto` with the content of a file."""
    try:
        if path.suffix == ".pbtxt":
            text_format.Parse(path.read_text(), proto)
        else:
            proto.ParseFromString(path.read_bytes())
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{str(path)!r} cannot be read as a {type(proto).__name__}: {error}") from error
    return proto


def check_registered(graph_def: Any, where: str) -> None:
    """Raise `UnsupportedError` if a graph has op types that this process does not know."""
    functions = {function.signature.name for function in graph_def.library.function}
    bodies = [("", graph_def.node), *((f.signature.name, f.node_def) for f in graph_def.library.function)]
    unknown: dict[str, str] = {}
    for body, nodes in bodies:
        for node in nodes:
            if node.op not in functions and node.op not in unknown and op_definition(node.op) is None:
                unknown[node.op] = f"{node.op} (node {node.name!r}{f' of function {body!r}' if body else ''})"
    if unknown:
        raise UnsupportedError(
            f"{where} has operations of types that are not registered in this process:\n"
            f"{bullet_list(list(unknown.values()))}\n"
            "Import the package that defines them, or call tf.load_op_library(...), before transpiling."
        )


def size_of(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    root = Path(path)
    return sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) if root.is_dir() else root.stat().st_size


def check_target(source: str, target: str, overwrite: bool) -> None:
    """Raise `ArgumentError` unless `target` may be written."""
    here, there = Path(source).resolve(), Path(target).resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ArgumentError(f"{target!r} is, holds or lies inside of the input {source!r}, which is left untouched.")
    if there.exists() and not overwrite:
        raise ArgumentError(
            f"{target!r} exists; name another place, or allow overwriting it (overwrite=True, --overwrite)."
        )


@contextlib.contextmanager
def replacing(target: str) -> Iterator[str]:
    """Yield the path of a file or directory to write, and put it in the place of `target` when the block ends.

    Until then, and whenever the block fails, `target` is what it was. What was there is exchanged in one step where
    the system can do that. (A process that is killed leaves a hidden `.partial` directory beside it.)

    Raises:
      StorageError: if writing fails: the disk is full, or the place may not be written.
    """
    final = Path(target).resolve()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        workshop = tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent)
    except OSError as error:
        raise StorageError(f"Cannot write to {str(final.parent)!r}: {error}.") from error
    try:
        made = os.path.join(workshop, final.name)
        yield made
        _put_in_place(made, str(final))
    except (OSError, tf.errors.OpError) as error:
        raise StorageError(f"Writing {target!r} failed, and it was left as it was: {error}") from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _put_in_place(made: str, final: str) -> None:
    if not os.path.lexists(final):
        os.rename(made, final)
    elif os.path.isfile(final) and os.path.isfile(made):
        os.replace(made, final)
    elif not _exchange(made, final):  # two steps, where one is not to be had; the old one keeps a name all the time
        old = f"{final}.replaced"
        os.rename(final, old)
        try:
            os.rename(made, final)
        except OSError:
            os.rename(old, final)
            raise
        shutil.rmtree(old) if os.path.isdir(old) else os.remove(old)


def _exchange(one: str, other: str) -> bool:
    """Let two paths change places in one step; return whether the system did. See renameat2(2)."""
    if sys.platform != "linux":
        return False
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here = _AT_WORKING_DIRECTORY
    return rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0
