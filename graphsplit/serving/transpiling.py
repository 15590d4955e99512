"""`transpile_saved_model`: load, plan and emit every signature, save, check, put in place.

`strip_devices` is the way back: a copy of a SavedModel or graph in which nothing asks for a device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from graphsplit.api.options import Split
from graphsplit.core.progress import phases
from graphsplit.core.storage.files import Recognizer, is_graph_file, replacing, write, writing_failed
from graphsplit.core.storage.integrity import check_whole
from graphsplit.core.storage.stored_models import load_saved_model, read_saved_model, signatures_of
from graphsplit.errors import ArgumentError, CheckError, UnsupportedError, bullet_list
from graphsplit.planning.plan import check_strict
from graphsplit.serving import files
from graphsplit.serving.options import TranspileOptions, path_in
from graphsplit.serving.parts import CannotBeSplitError, check_can_be_split
from graphsplit.serving.reports import SignatureReport, TranspileReport, why_whole
from graphsplit.serving.signatures import Mirrors, build_signature, plan_signature
from graphsplit.serving.v1_models import composites, has_old_variables, is_v1, transpile_in_place

_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
_COPIES = "graphsplit_weights"


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
    progress: Callable[[str], None] | None = None,
) -> TranspileReport:
    """Write a SavedModel whose signatures run on several devices and return what those of `in_dir` return.

    The result has the same signatures, with the same names, dtypes and shapes, for any number of rows. It needs no
    graphsplit: `tf.saved_model.load`, TensorFlow Serving and `saved_model_cli run` load it. Devices that do not exist
    where it is loaded are replaced by those that do. Variables, tables and assets are stored once. Functions of the
    object that are not signatures stay as they are.

    Args:
      in_dir: the SavedModel. It is only read.
      out_dir: where to write.
      devices: how many, or their names. They need not exist here. The first is the default device.
      signatures: which ones to transpile; the others are kept as they are. All if None.
      split: as for `parallelize`, by the names of the signatures' arguments.
      strict: raise `StrictError` if an operation on rows of the batch would run on one device, or if more than a
        hundredth of the floating-point operations would be computed from whole rows. A number is the largest share of
        the operations that may work on the batch on one device.
      overwrite: replace `out_dir` if it is a SavedModel and contains nothing else. The old one stays until the new one
        is complete.
      replicate_weights: keep a copy of every weight on every device, made when the model is loaded, so that requests
        send no weights. Every device needs memory for all weights.
      progress: called with what is being done. None: what takes long is shown.

    Returns:
      A `TranspileReport`; `print` it.

    Raises:
      ArgumentError: if `in_dir` is not a SavedModel, or a damaged one; a signature does not exist, `out_dir` exists,
        or options clash.
      UnsupportedError: for operation types that are not registered, and for `replicate_weights` of what is written to.
      StorageError: if writing fails, or `out_dir` holds anything but a SavedModel; it is then what it was.
      StrictError: see `strict`.

    >>> import tempfile, tensorflow as tf, graphsplit as gs
    >>> model = tf.Module()
    >>> model.double = tf.function(lambda x: 2.0 * x, input_signature=[tf.TensorSpec([6, 2], name="x")])
    >>> folder = tempfile.mkdtemp()
    >>> tf.saved_model.save(model, f"{folder}/one", signatures=model.double)
    >>> report = gs.serving.transpile_saved_model(f"{folder}/one", f"{folder}/two", 2)
    >>> report.plans["serving_default"].rows
    (3, 3)
    """
    with phases(f"transpiling {in_dir}") as begin:
        options = TranspileOptions(
            devices=devices,
            split=split,
            strict=strict,
            signatures=signatures,
            overwrite=overwrite,
            replicate_weights=replicate_weights,
            progress=begin if progress is None else progress,
        )
        return transpile_directory(path_in(in_dir, "in_dir"), path_in(out_dir, "out_dir"), options)


def transpile_directory(source: str, target: str, options: TranspileOptions) -> TranspileReport:
    """Do what `transpile_saved_model` does."""
    model_before = read_saved_model(source)
    recognize = files.check_target(source, target, options.overwrite)
    check_whole(source, model_before)
    definition, graph_bytes_before = model_before.meta_graphs[0], model_before.ByteSize()
    # (a map of a proto has another order in each process)
    keys = sorted(key for key in definition.signature_def if key not in _INTERNAL_SIGNATURES)
    chosen = _chosen(source, keys, options.signatures)
    _check_split(definition, chosen, options.split)
    job = _Job(source, target, keys, chosen, recognize, options)
    mirrors = Mirrors() if options.replicate_weights else None
    if is_v1(definition) and mirrors is None:
        reports, after = _write_v1(job, model_before)
    else:
        reports, after = _load_and_save(job, definition, mirrors)
    return TranspileReport(
        devices=options.names,
        signatures=tuple(reports),
        bytes_before=files.size_of(source),
        bytes_after=files.size_of(target),
        graph_bytes_before=graph_bytes_before,
        graph_bytes_after=after.ByteSize(),
        mirrored_bytes=mirrors.bytes if mirrors is not None else 0,
    )


def _chosen(source: str, keys: Sequence[str], wanted_keys: Sequence[str] | None) -> Sequence[str]:
    known_keys = bullet_list(sorted(keys)) or "  (none)"
    if not keys:
        raise ArgumentError(f"The SavedModel {source!r} has no signatures; save it with signatures=... .")
    if wanted_keys is None:
        return keys
    missing = [key for key in wanted_keys if key not in keys]
    if missing:
        names = ", ".join(map(repr, missing))
        raise ArgumentError(f"The SavedModel {source!r} has no signature {names}. It has:\n{known_keys}")
    return wanted_keys


def _check_composites(definition: Any) -> None:
    composite = [f"{name} of {key}" for key, info in definition.signature_def.items() for name in composites(info)]
    if composite:
        raise UnsupportedError(
            f"These arguments are sparse or composite, whose names saving would change:\n{bullet_list(composite)}"
        )


def _check_split(definition: Any, chosen: Sequence[str], split: Split) -> None:
    arguments = {key: set(definition.signature_def[key].inputs) for key in chosen}
    if not isinstance(split, Mapping):
        return
    unknown = [name for name in split if not any(name in names for names in arguments.values())]
    if unknown:
        lines = [f"{key}: {', '.join(sorted(names)) or 'nothing'}" for key, names in arguments.items()]
        raise ArgumentError(
            f"split names {', '.join(map(repr, unknown))}, which no signature takes. They take:\n{bullet_list(lines)}"
        )


def _write_v1(job: _Job, model: Any) -> tuple[list[SignatureReport], Any]:
    """Change the graph of a TensorFlow 1 model on disk, see `v1_models`; return what became of it, and the model."""
    meta_graph = model.meta_graphs[0]

    def transpile(key: str) -> SignatureReport:
        options = job.options.for_arguments(meta_graph.signature_def[key].inputs)
        return transpile_in_place(meta_graph, key, options, job.options.names)

    reports = job.for_each_signature(transpile)
    with job.replacing() as new_directory:
        shutil.copytree(job.source, new_directory)
        files.write_saved_model(new_directory, model)
    return reports, model


def _load_and_save(job: _Job, definition: Any, mirrors: Mirrors | None) -> tuple[list[SignatureReport], Any]:
    """Load a model, and save it with other signatures; return what became of them, and the model as written."""
    if is_v1(definition) and has_old_variables(definition):
        raise UnsupportedError(
            f"replicate_weights=True, but {job.source!r} has TensorFlow 1 variables of the old kind "
            "(use_resource=False), which cannot be copied when a model is loaded. Leave replicate_weights out."
        )
    _check_composites(definition)
    loaded, functions, reports = _build(job, mirrors)
    with job.replacing() as new_directory:
        try:
            tf.saved_model.save(loaded, new_directory, signatures=functions)
        except tf.errors.OpError as error:  # not an OSError, though a full disk is what it says
            raise writing_failed(job.target, error) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # damaged objects
            raise ArgumentError(
                f"TensorFlow cannot save again what it loaded from {job.source!r}: {type(error).__name__}: {error}"
            ) from error
        after = _like_before(new_directory, definition)
        if mirrors is not None:
            _let_signatures_keep_copies(after.meta_graphs[0])
            files.write_saved_model(new_directory, after)
        if (extra := Path(job.source) / "assets.extra").is_dir():
            shutil.copytree(extra, Path(new_directory) / "assets.extra")
    return reports, after


def _build(job: _Job, mirrors: Mirrors | None) -> tuple[Any, dict[str, Any], list[SignatureReport]]:
    """Return the loaded model, what to save as its signatures, and what became of each."""
    job.options.progress(f"loading {job.source}")
    loaded = load_saved_model(job.source)
    functions = signatures_of(loaded, job.source, job.keys)

    def transpile(key: str) -> SignatureReport:
        graph = functions[key].graph.as_graph_def()
        check_can_be_split(graph.node, graph.library)
        options = job.options.for_arguments(functions[key].structured_input_signature[1])
        replicate = job.options.replicate_weights
        planned = plan_signature(key, functions[key], options, job.options.names, replicate_weights=replicate)
        if not any(step.shards for step in planned.plan.steps):
            return SignatureReport(key, planned.plan, why_whole(planned.plan))
        functions[key], sent = build_signature(planned, mirrors)
        return SignatureReport(key, planned.plan, "", sent)

    reports = job.for_each_signature(transpile)
    if mirrors is not None:
        setattr(loaded, _COPIES, mirrors.made)
    return loaded, {key: functions[key] for key in job.keys}, reports


@dataclass(frozen=True)
class _Job:
    """What is made of what.

    Attributes:
      keys, chosen: the signatures that there are, and those to transpile.
      recognize: what may be replaced at `target`.
    """

    source: str
    target: str
    keys: Sequence[str]
    chosen: Sequence[str]
    recognize: Recognizer
    options: TranspileOptions

    def replacing(self) -> AbstractContextManager[str]:
        """Return the context in which the directory is written."""
        self.options.progress(f"writing {self.target}")
        return replacing(self.target, self.recognize)

    def for_each_signature(self, transpile: Callable[[str], SignatureReport]) -> list[SignatureReport]:
        """Return what became of each signature; those of which no plan can be made are kept, unless `strict`."""
        reports = []
        for key in self.keys:
            report = SignatureReport(key, None, "not asked for")
            if key in self.chosen:
                self.options.progress(f"planning {key}")
                try:
                    report = transpile(key)
                    if report.plan is not None:
                        check_strict(report.plan, self.options.strict, finished=True)
                except CannotBeSplitError as error:
                    if self.options.strict:
                        raise
                    report = SignatureReport(key, None, str(error).splitlines()[0].rstrip(":."))
            reports.append(report)
        return reports


def _like_before(directory: str, definition: Any) -> Any:
    """Give the written SavedModel the tags and methods of the original, and check that it says the same of itself."""
    model = read_saved_model(directory)
    written = model.meta_graphs[0]
    tags = list(definition.meta_info_def.tags)
    changed = list(written.meta_info_def.tags) != tags
    written.meta_info_def.ClearField("tags")
    written.meta_info_def.tags.extend(tags)
    for key, signature in definition.signature_def.items():
        if key in _INTERNAL_SIGNATURES:
            continue
        written_signature = written.signature_def[key]
        changed |= written_signature.method_name != signature.method_name
        written_signature.method_name = signature.method_name
        for kind in ("inputs", "outputs"):
            _check_kept(key, kind, getattr(signature, kind), getattr(written_signature, kind))
    if changed:
        files.write_saved_model(directory, model)
    return model


def _let_signatures_keep_copies(meta_graph: Any) -> None:
    """Let each signature refer to the copies of weights, so that they live as long as it, without the model, too.

    When TensorFlow loads a model, it makes a child of a function an attribute of it. (It writes no children of one.)
    """
    nodes = meta_graph.object_graph_def.nodes
    children = {child.local_name: child.node_id for child in nodes[0].children}
    for signature in nodes[children["signatures"]].children:
        nodes[signature.node_id].children.add(node_id=children[_COPIES], local_name=_COPIES)


def _check_kept(key: str, kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise `CheckError` unless the inputs or outputs of a signature (`kind`) kept their keys, dtypes and shapes."""
    lines = [
        f"{name}: {_described(before, name)} before, {_described(after, name)} after"
        for name in sorted({*before, *after})
        if _described(before, name) != _described(after, name)
    ]
    if lines:
        raise CheckError(f"The {kind} of the signature {key!r} changed:\n{bullet_list(lines)}")


def _described(infos: Mapping[str, Any], name: str) -> str:
    if name not in infos:
        return "absent"
    shape = tf.TensorShape(infos[name].tensor_shape)
    return f"{tf.as_dtype(infos[name].dtype).name} {shape}"


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
    with replacing(target, recognize) as new_directory:
        shutil.copytree(source, new_directory)
        files.write_saved_model(new_directory, model)
    return count


def _strip(graph: Any) -> int:
    count = 0
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            count += bool(node.device)
            node.device = ""
    return count
