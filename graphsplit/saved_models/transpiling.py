"""`transpile_saved_model`: load, plan and emit every signature, save, check, put in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from graphsplit.devices import names_of_devices
from graphsplit.errors import ArgumentError, CheckError, UnsupportedError, bullet_list
from graphsplit.functions import Options
from graphsplit.saved_models import files
from graphsplit.saved_models.graphs import V1_CONTROL_FLOW
from graphsplit.saved_models.reports import SignatureReport, TranspileReport
from graphsplit.saved_models.signatures import build_signature, plan_signature
from graphsplit.saved_models.weights import Mirrors
from graphsplit.splitting import Split

_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")


def transpile_saved_model(
    in_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    devices: int | str | Sequence[str] | None = None,
    *,
    signatures: Sequence[str] | None = None,
    split: Split = 0,
    strict: bool = False,
    overwrite: bool = False,
    replicate_weights: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> TranspileReport:
    """Write a SavedModel whose signatures run on several devices and return what those of `in_dir` return.

    The result has the same signatures, with the same names, dtypes and shapes, for any number of rows. It needs no
    graphsplit: `tf.saved_model.load`, TensorFlow Serving and `saved_model_cli run` load it. Devices that do not exist
    where it is loaded are replaced by those that do. Variables, tables and assets are stored once. Functions of the
    object that are not signatures stay as they are.

    Args:
      in_dir: the SavedModel. It is only read.
      out_dir: where to write.
      devices: how many, or their names. They need not exist here. The first is home.
      signatures: which ones to transpile; the others are kept as they are. All if None.
      split: as for `parallelize`, by the names of the signatures' arguments.
      strict: raise `StrictError` if an operation that carries rows of the batch would have to run at home.
      overwrite: replace `out_dir` if it exists. Until the new one is whole, the old one stays.
      replicate_weights: keep a copy of every weight on every device, made when the model is loaded, so that none
        travels per request. Costs the memory of the weights once for each device.
      progress: called with what is being done.

    Returns:
      A `TranspileReport`; `print` it.

    Raises:
      ArgumentError: if `in_dir` is not a SavedModel, a signature does not exist, `out_dir` exists, or options clash.
      UnsupportedError: for operation types that are not registered, and for `replicate_weights` of what is written to.
      StorageError: if writing fails; `out_dir` is then what it was.
      StrictError: see `strict`.

    >>> import tempfile, tensorflow as tf, graphsplit as gs
    >>> model = tf.Module()
    >>> model.double = tf.function(lambda x: 2.0 * x, input_signature=[tf.TensorSpec([6, 2], name="x")])
    >>> folder = tempfile.mkdtemp()
    >>> tf.saved_model.save(model, f"{folder}/one", signatures=model.double)
    >>> report = gs.transpile_saved_model(f"{folder}/one", f"{folder}/two", 2)
    >>> report.plans["serving_default"].rows
    (3, 3)
    """
    source, target = os.fspath(in_dir), os.fspath(out_dir)
    names = names_of_devices(devices)
    before = files.read_saved_model(source)
    files.check_target(source, target, overwrite)
    definition = before.meta_graphs[0]
    files.check_registered(definition.graph_def, repr(source))
    keys = [key for key in definition.signature_def if key not in _INTERNAL_SIGNATURES]
    chosen = _chosen(source, keys, signatures)
    _check_arguments(definition, chosen, split)
    progress(f"loading {source}")
    loaded = _load(source)
    mirrors = Mirrors() if replicate_weights else None
    functions, reports = {}, []
    for key in keys:
        progress(f"planning {key}")
        function, report = _transpile(key, loaded.signatures[key], key in chosen, split, strict, names, mirrors)
        functions[key] = function
        reports.append(report)
    progress(f"writing {target}")
    with files.replacing(target) as made:
        if mirrors is not None:
            loaded.graphsplit_weights = mirrors.made
        tf.saved_model.save(loaded, made, signatures=functions)
        after = _like_before(made, definition)
        if (extra := Path(source) / "assets.extra").is_dir():
            shutil.copytree(extra, Path(made) / "assets.extra")
    return TranspileReport(
        devices=names,
        signatures=tuple(reports),
        bytes_before=files.size_of(source),
        bytes_after=files.size_of(target),
        graph_bytes_before=before.ByteSize(),
        graph_bytes_after=after.ByteSize(),
        mirrored_bytes=mirrors.bytes if mirrors is not None else 0,
    )


def strip_devices(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write a copy of a SavedModel, or of a graph's `.pb` or `.pbtxt`, in which nothing asks for a device.

    Args:
      in_path: what to copy.
      out_path: where to write.
      overwrite: replace `out_path` if it exists.

    Returns:
      How many requests for a device were removed.

    Raises:
      ArgumentError: if `in_path` is neither, or `out_path` exists.
      StorageError: if writing fails.

    >>> import tempfile, tensorflow as tf, graphsplit as gs
    >>> graph = tf.compat.v1.GraphDef()
    >>> _ = graph.node.add(name="x", op="Placeholder", device="/device:GPU:3")
    >>> folder = tempfile.mkdtemp()
    >>> tf.io.write_graph(graph, folder, "graph.pb", as_text=False).endswith("graph.pb")
    True
    >>> gs.strip_devices(f"{folder}/graph.pb", f"{folder}/anywhere.pb")
    1
    """
    source, target = os.fspath(in_path), os.fspath(out_path)
    if source.endswith((".pb", ".pbtxt")) and not os.path.isdir(source):
        graph = files.read_graph_def(source)
        files.check_target(source, target, overwrite)
        count = _strip(graph)
        with files.replacing(target) as made:
            Path(made).write_bytes(files.graph_def_bytes(graph, target))
        return count
    model = files.read_saved_model(source)
    files.check_target(source, target, overwrite)
    count = 0
    for meta_graph in model.meta_graphs:
        count += _strip(meta_graph.graph_def)
        for node in meta_graph.object_graph_def.nodes:
            kind = node.WhichOneof("kind")
            if kind in ("variable", "resource") and getattr(node, kind).device:
                getattr(node, kind).device = ""
                count += 1
    with files.replacing(target) as made:
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


def _chosen(source: str, keys: Sequence[str], asked: Sequence[str] | None) -> Sequence[str]:
    there = bullet_list(sorted(keys)) or "  (none)"
    if not keys:
        raise ArgumentError(f"The SavedModel {source!r} has no signatures; save it with signatures=... .")
    if asked is None:
        return keys
    asked = [asked] if isinstance(asked, str) else asked
    missing = [key for key in asked if key not in keys]
    if missing:
        names = ", ".join(map(repr, missing))
        raise ArgumentError(f"The SavedModel {source!r} has no signature {names}. It has:\n{there}")
    return asked


def _check_arguments(definition: Any, chosen: Sequence[str], split: Split) -> None:
    arguments = {key: set(definition.signature_def[key].inputs) for key in chosen}
    composite = [
        f"{name} of {key}"
        for key in definition.signature_def
        for name, info in definition.signature_def[key].inputs.items()
        if info.WhichOneof("encoding") in ("coo_sparse", "composite_tensor")
    ]
    if composite:
        raise UnsupportedError(
            f"These arguments are sparse or composite, whose names saving would change:\n{bullet_list(composite)}"
        )
    if not isinstance(split, Mapping):
        if split is not None and (isinstance(split, bool) or not isinstance(split, int)):
            raise ArgumentError(f"split takes an axis, None, or a mapping from argument names to those, got {split!r}.")
        return
    unknown = [name for name in split if not any(name in names for names in arguments.values())]
    if unknown:
        lines = [f"{key}: {', '.join(sorted(names)) or 'nothing'}" for key, names in arguments.items()]
        raise ArgumentError(
            f"split names {', '.join(map(repr, unknown))}, which no signature takes. They take:\n{bullet_list(lines)}"
        )


def _load(source: str) -> Any:
    try:
        return tf.saved_model.load(source)
    except (OSError, tf.errors.OpError) as error:
        raise ArgumentError(f"The SavedModel {source!r} cannot be loaded: {error}") from error


def _transpile(
    key: str, function: Any, wanted: bool, split: Split, strict: bool, devices: Sequence[str], mirrors: Mirrors | None
) -> tuple[Any, SignatureReport]:
    """Return the signature to save and what became of it."""
    old = sorted({op.type for op in function.graph.get_operations()} & V1_CONTROL_FLOW)
    if not wanted or old:
        why = "not asked for" if not wanted else f"it has TensorFlow 1 control flow ({', '.join(old)}), kept whole"
        if wanted and strict:
            raise UnsupportedError(f"strict=True, but the signature {key!r} cannot be split: {why}.")
        return function, SignatureReport(key, None, why)
    names = set(function.structured_input_signature[1])
    own = {name: axis for name, axis in split.items() if name in names} if isinstance(split, Mapping) else split
    planned = plan_signature(key, function, Options(split=own, strict=strict), devices)
    if not any(step.shards for step in planned.plan.steps):
        return function, SignatureReport(key, planned.plan, "; ".join(planned.plan.notes) or "nothing in it can be split")
    built = build_signature(planned, mirrors)
    return built, SignatureReport(key, planned.plan)


def _like_before(made: str, definition: Any) -> Any:
    """Give the written SavedModel the tags and methods of the original, and check that it says the same of itself."""
    model = files.read_saved_model(made)
    written = model.meta_graphs[0]
    tags = list(definition.meta_info_def.tags)
    changed = list(written.meta_info_def.tags) != tags
    written.meta_info_def.ClearField("tags")
    written.meta_info_def.tags.extend(tags)
    for key, signature in definition.signature_def.items():
        if key in _INTERNAL_SIGNATURES:
            continue
        own = written.signature_def[key]
        changed |= own.method_name != signature.method_name
        own.method_name = signature.method_name
        for kind in ("inputs", "outputs"):
            _check_same(key, kind, getattr(signature, kind), getattr(own, kind))
    if changed:
        files.write_saved_model(made, model)
    return model


def _check_same(key: str, kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise `CheckError` unless the arguments or results have the names, dtypes and shapes that they had."""
    lines = [
        f"{name}: {_described(before, name)} before, {_described(after, name)} after"
        for name in sorted({*before, *after})
        if _described(before, name) != _described(after, name)
    ]
    if lines:
        raise CheckError(f"The {kind} of the signature {key!r} are not what they were:\n{bullet_list(lines)}")


def _described(infos: Mapping[str, Any], name: str) -> str:
    if name not in infos:
        return "none"
    shape = tf.TensorShape(infos[name].tensor_shape)
    return f"{tf.as_dtype(infos[name].dtype).name} {shape}"
