"""Whether a SavedModel on disk is whole: its graph the one that was saved, its variables and assets all there.

TensorFlow checks the variables when it loads them (each has a checksum), and never the graph: a flipped bit in a
constant would be another model. Its fingerprint tells, where there is one. Assets have no checksum anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from graphsplit.core.storage.fingerprints import checksum
from graphsplit.core.storage.model_files import model_file
from graphsplit.core.storage.stored_models import asset_names, check_graph
from graphsplit.errors import ArgumentError, bullet_list

_PRODUCER = 4  # the only version of fingerprints of which the arithmetic below is known: TensorFlow 2.21's


def check_whole(directory: str, model: Any) -> None:
    """Check that a SavedModel can be loaded here, as far as its files tell.

    Raises:
      ArgumentError: if files are missing or damaged.
      UnsupportedError: if its graph has operations of types that are not registered.
    """
    check_fingerprint(directory, model)
    check_graph(model.meta_graphs[0].graph_def, repr(directory))
    check_assets(directory, model.meta_graphs[0])
    check_variables(directory, model.meta_graphs[0])


def check_fingerprint(directory: str, model: Any) -> None:
    """Raise `ArgumentError` if the graph is not the one of which the fingerprint was taken when it was saved."""
    if not (Path(directory) / "fingerprint.pb").is_file() or model_file(directory).suffix != ".pb":
        return
    try:
        fingerprint = tf.saved_model.experimental.read_fingerprint(directory)
    except Exception as error:  # TensorFlow's bindings raise a type of their own, which is not public
        raise ArgumentError(f"{directory + '/fingerprint.pb'!r} cannot be read as a fingerprint: {error}") from error
    known = fingerprint.version.producer == _PRODUCER and not _is_newer(model.meta_graphs[0])
    if known and fingerprint.saved_model_checksum != checksum(model):
        raise ArgumentError(
            f"{str(model_file(directory))!r} is not the graph that was saved: its fingerprint (fingerprint.pb) is "
            "another. It was damaged, or changed afterwards. Save or copy the model again; if it was changed on "
            "purpose, delete fingerprint.pb."
        )


def check_assets(directory: str, meta_graph: Any) -> None:
    """Raise `ArgumentError` if files that the graph reads are not there, or would be taken from elsewhere.

    Whoever writes the model again copies them, and a name that leads out of it, or a link, would copy any file.
    """
    model, folder = Path(directory).resolve(), Path(directory) / "assets"
    files = {f"assets/{name}": folder / name for name in asset_names(meta_graph)}
    more = [path for kind in ("assets", "assets.extra") for path in sorted((Path(directory) / kind).rglob("*"))]
    files |= {str(path.relative_to(directory)): path for path in more}
    outside = [name for name, path in files.items() if not path.resolve().is_relative_to(model)]
    if outside:
        raise ArgumentError(
            f"The SavedModel {directory!r} has assets that lie outside of it, by their names or as links:\n"
            f"{bullet_list(outside)}\n"
            "Copy what the model needs into it, as files."
        )
    missing = [name for name in asset_names(meta_graph) if not (folder / name).is_file()]
    if missing:
        raise ArgumentError(f"The SavedModel {directory!r} lacks assets that its graph reads:\n{bullet_list(missing)}")


def check_variables(directory: str, meta_graph: Any) -> None:
    """Read every stored variable, which compares checksums; raise `ArgumentError` if that fails."""
    if not meta_graph.saver_def.restore_op_name:
        return  # nothing is restored
    prefix = f"{directory}/variables/variables"
    if not Path(f"{prefix}.index").is_file():
        if any(node.op in ("VarHandleOp", "Variable", "VariableV2") for node in meta_graph.graph_def.node):
            raise ArgumentError(f"The SavedModel {directory!r} lacks its variables: there is no {prefix + '.index'!r}.")
        return
    try:
        reader = tf.train.load_checkpoint(prefix)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # the reader's bindings raise RuntimeError, OpError and others for the same thing
        raise ArgumentError(f"The variables of the SavedModel {directory!r} cannot be read: {error}") from error


def _is_newer(meta_graph: Any) -> bool:
    """Return whether a newer TensorFlow wrote a graph: it may have fields that are not known here."""
    written, here = (
        version.split(".")[:2] for version in (meta_graph.meta_info_def.tensorflow_version, tf.__version__)
    )
    return not all(part.isdigit() for part in written) or [int(p) for p in written] > [int(p) for p in here]
