"""SavedModels on disk: reading and loading them, with whatever is wrong said in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from graphsplit.core.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.core.protos.graphdefs import MetaGraphDef
from graphsplit.core.storage.model_files import model_file
from graphsplit.core.tensorflow_internals import new_saved_model, op_definition

_ASSETS = "saved_model_assets"


def read_saved_model(directory: str) -> Any:
    """Return the `SavedModel` proto in a directory.

    Raises:
      ArgumentError: if the directory holds none.
      UnsupportedError: if it holds more than one graph, or one in pieces (over 2 GB).
    """
    path = model_file(directory)
    if path.suffix == ".cpb":
        raise UnsupportedError(f"{directory!r} holds a graph of more than 2 GB in pieces; those cannot be read yet.")
    model = parse(path, new_saved_model())
    if not model.meta_graphs:
        raise ArgumentError(f"{directory!r} holds no graph: {str(path)!r} is empty, or no SavedModel.")
    if len(model.meta_graphs) != 1:
        tags = [", ".join(graph.meta_info_def.tags) or "no tags" for graph in model.meta_graphs]
        raise UnsupportedError(
            f"{directory!r} holds {len(tags)} graphs, one for each set of tags:\n{bullet_list(tags)}\n"
            "Only SavedModels with one graph are read; save the one to be served by itself."
        )
    return model


def load_saved_model(directory: str) -> Any:
    """Return what `tf.saved_model.load` returns.

    Raises:
      ArgumentError: if TensorFlow cannot load it.
    """
    try:
        return tf.saved_model.load(directory)
    except Exception as error:  # a damaged graph raises KeyError, ValueError, AttributeError and more
        raise ArgumentError(
            f"TensorFlow cannot load the SavedModel {directory!r}: {type(error).__name__}: {error}"
        ) from error


def signatures_of(loaded: Any, directory: str, listed: Sequence[str]) -> dict[str, Any]:
    """Return the signatures of a model that was loaded, by name.

    Args:
      loaded: see `load_saved_model`.
      directory: where from.
      listed: the names of those that its graph lists; its objects, which are stored beside, have to have them.

    Raises:
      ArgumentError: if they have not.
    """
    there = getattr(loaded, "signatures", None)
    found = dict(there) if isinstance(there, Mapping) else {}
    wrong = [key for key in sorted(listed) if not isinstance(found.get(key), tf.types.experimental.ConcreteFunction)]
    if wrong:
        raise ArgumentError(
            f"The SavedModel {directory!r} is damaged: its graph lists the signatures {', '.join(map(repr, wrong))}, "
            "and its objects have no such functions. Save it again."
        )
    return found


def parse(path: Path, proto: Any) -> Any:
    """Fill `proto` with the content of a file."""
    try:
        if path.suffix == ".pbtxt":
            text_format.Parse(path.read_text(), proto)
        else:
            proto.ParseFromString(path.read_bytes())
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{str(path)!r} cannot be read as a {type(proto).__name__}: {error}") from error
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    return proto


def asset_names(meta_graph: Any) -> list[str]:
    """Return the names of the files in `assets/` that a SavedModel's graph reads; TensorFlow 1 lists them elsewhere."""
    names = [asset.filename for asset in meta_graph.asset_file_def]
    collections = meta_graph.collection_def
    for packed in collections[_ASSETS].any_list.value if _ASSETS in collections else ():
        asset = MetaGraphDef().asset_file_def.add()
        try:
            if not packed.Unpack(asset):
                raise DecodeError(f"{packed.type_url!r} is no AssetFileDef")
        except DecodeError as error:
            raise ArgumentError(f"The collection {_ASSETS!r} of the graph cannot be read: {error}.") from error
        names.append(asset.filename)
    return names


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
            "Import the package that defines them, or call tf.load_op_library(...), first."
        )
