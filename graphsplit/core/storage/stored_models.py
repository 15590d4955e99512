"""SavedModels on disk: reading and loading them, with whatever is wrong said in one message."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from graphsplit.core.protos import MetaGraphDef, functions_named, source_of
from graphsplit.core.storage.files import model_file
from graphsplit.core.tensorflow_internals import new_saved_model, op_definition
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list

_ASSETS = "saved_model_assets"
_TURNS_BACK = ("NextIteration", "RefNextIteration")  # of TensorFlow 1's loops


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
    loaded_signatures = getattr(loaded, "signatures", None)
    signatures = dict(loaded_signatures) if isinstance(loaded_signatures, Mapping) else {}
    wrong = [
        key for key in sorted(listed) if not isinstance(signatures.get(key), tf.types.experimental.ConcreteFunction)
    ]
    if wrong:
        raise ArgumentError(
            f"The SavedModel {directory!r} is damaged: its graph lists the signatures {', '.join(map(repr, wrong))}, "
            "and its objects have no such functions. Save it again."
        )
    return signatures


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


def check_graph(graph_def: Any, where: str) -> None:
    """Check what TensorFlow, when it imports a graph, does not say, or does not survive.

    Raises:
      ArgumentError: if two nodes have one name, or something is read, called or returned that is not there; if nodes
        wait for each other; if a function calls itself, by way of others perhaps.
      UnsupportedError: if there are op types that this process does not know.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    bodies = [(f" of function {name!r}", f.node_def, f.signature.input_arg) for name, f in library.items()]
    unknown: dict[str, str] = {}
    damage: list[str] = []
    for inside, nodes, arguments in [("", graph_def.node, ()), *bodies]:
        names = Counter([node.name for node in (*arguments, *nodes)])
        damage += [f"several nodes{inside} have the name {name!r}" for name, count in names.items() if count > 1]
        makers = {node.name: node for node in nodes} if inside else {}
        for node in nodes:
            if node.op not in library and node.op not in unknown and op_definition(node.op) is None:
                unknown[node.op] = f"{node.op} (node {node.name!r}{inside})"
            lost = [r for r in node.input if source_of(r) not in names or not _makes(makers, r, library)]
            phrases = [f"reads {reference!r}" for reference in lost]
            called = [f.name for value in node.attr.values() for f in (value.func, *value.list.func) if f.name]
            phrases += [f"calls {f!r}" for f in called if f not in library and op_definition(f) is None]
            damage += [f"{node.name!r}{inside} {what}, which is not there" for what in phrases]
        if circle := _circle({n.name: [source_of(r) for r in n.input] for n in nodes if n.op not in _TURNS_BACK}):
            damage.append(f"nodes{inside} wait for each other: {circle}")
    for name, function in library.items():
        damage += _lost_results(name, function, library)
    if unknown:
        raise UnsupportedError(
            f"{where} has operations of types that are not registered in this process:\n"
            f"{bullet_list(list(unknown.values()))}\n"
            "Import the package that defines them, or call tf.load_op_library(...), first."
        )
    if damage:
        raise ArgumentError(f"{where} is damaged:\n{bullet_list(damage, 8)}")
    if circle := _circle({name: functions_named(f.node_def, library) for name, f in library.items()}):
        raise ArgumentError(
            f"{where} has functions that call themselves, which TensorFlow cannot run: {circle}. Write the recursion "
            "as a tf.while_loop."
        )


def _makes(nodes: Mapping[str, Any], reference: str, library: Mapping[str, Any]) -> bool:
    """Return whether the nodes of a function have the output that a reference names, if it is one of theirs."""
    node = nodes.get(source_of(reference))
    if node is None or reference[0] == "^":
        return True
    definition = library[node.op].signature if node.op in library else op_definition(node.op)
    if definition is None:  # (its type is not known: that is said)
        return True
    _, name, index = f"{reference}::0".split(":")[:3]
    for output in definition.output_arg:
        if output.name == name:
            count = output.number_attr or output.type_list_attr
            value = node.attr.get(count, None)
            return int(index or 0) < (max(value.i, len(value.list.type)) if value else math.inf if count else 1)
    return False


def _lost_results(name: str, function: Any, library: Mapping[str, Any]) -> list[str]:
    """Say which results and effects a function has that nothing in it makes."""
    nodes = {node.name: node for node in function.node_def}
    known_names = {*nodes, *[argument.name for argument in function.signature.input_arg]}
    results = [argument.name for argument in function.signature.output_arg]
    references = [*function.ret.values(), *[f"^{effect}" for effect in function.control_ret.values()]]
    lost = [r for r in references if source_of(r) not in known_names or not _makes(nodes, r, library)]
    return [
        f"function {name!r} returns nothing as {argument_name!r}"
        for argument_name in results
        if argument_name not in function.ret
    ] + [f"function {name!r} returns {reference!r}, which is not there" for reference in lost]


def _circle(reads: Mapping[str, Sequence[str]]) -> str:
    """Return the names that read each other in a circle; "" if none do."""
    try:
        TopologicalSorter(reads).prepare()
    except CycleError as error:
        return " -> ".join(map(repr, reversed(error.args[1])))
    return ""
