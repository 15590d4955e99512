"""`strip_devices`: a copy of a SavedModel or graph in which nothing asks for a device."""

from __future__ import annotations

import os
import shutil
from typing import Any

from graphsplit.core.storage.files import replacing, write
from graphsplit.core.storage.integrity import check_whole
from graphsplit.core.storage.model_files import is_graph_file
from graphsplit.core.storage.stored_models import read_saved_model
from graphsplit.serving import files
from graphsplit.serving.options import TranspileOptions, path_in


def strip_devices(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write a copy of a SavedModel, or of a graph's `.pb` or `.pbtxt`, without requests for devices.

    Args:
      in_path: what to copy.
      out_path: where to write.
      overwrite: replace `out_path` if it is a SavedModel or a graph's file, as `in_path` is, and nothing else.

    Returns:
      How many requests for a device were removed.

    Raises:
      ArgumentError: if `in_path` is neither, or damaged, or `out_path` exists.
      StorageError: if writing fails, or `out_path` holds anything else.

    >>> import tempfile, tensorflow as tf, graphsplit as gs
    >>> graph = tf.compat.v1.GraphDef()
    >>> _ = graph.node.add(name="x", op="Placeholder", device="/device:GPU:3")
    >>> folder = tempfile.mkdtemp()
    >>> tf.io.write_graph(graph, folder, "graph.pb", as_text=False).endswith("graph.pb")
    True
    >>> gs.serving.strip_devices(f"{folder}/graph.pb", f"{folder}/anywhere.pb")
    1
    """
    source, target = path_in(in_path, "in_path"), path_in(out_path, "out_path")
    overwrite = TranspileOptions(overwrite=overwrite).overwrite
    if is_graph_file(source):
        graph = files.read_graph_def(source)
        recognize = files.check_target(source, target, overwrite)
        count = _strip(graph)
        write(target, files.graph_def_bytes(graph, target), recognize)
        return count
    model = read_saved_model(source)
    recognize = files.check_target(source, target, overwrite)
    check_whole(source, model)
    count = 0
    for meta_graph in model.meta_graphs:
        count += _strip(meta_graph.graph_def)
        for node in meta_graph.object_graph_def.nodes:
            kind = node.WhichOneof("kind")
            if kind in ("variable", "resource") and getattr(node, kind).device:
                getattr(node, kind).device = ""
                count += 1
    with replacing(target, recognize) as made:
        shutil.copytree(source, made)
        files.write_saved_model(made, model)
    return count


def _strip(graph: Any) -> int:
    count = 0
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            count += bool(node.device)
            node.device = ""
    return count
