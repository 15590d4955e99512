"""Whether a SavedModel on disk is whole: its graph the one that was saved, its variables and assets all there.

TensorFlow checks the variables when it loads them (each has a checksum), and never the graph: a flipped bit in a
constant would be another model. Its fingerprint tells, where there is one. Assets have no checksum anywhere.

The fingerprint is computed as TensorFlow does when it saves a model: TensorFlow offers the stored one, and its own
computation in C++ ends the process on some damaged graphs (seen with 2.21). So the proto is written here as C++ writes
it deterministically, and hashed. Of Python's deterministic form two things differ: it has maps with whole numbers as
keys backwards, and keys that begin with other keys before those.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from graphsplit.core.storage.files import model_file
from graphsplit.core.storage.stored_models import asset_names, check_graph
from graphsplit.errors import ArgumentError, bullet_list


def checksum(model: Any) -> int:
    """Return the fingerprint of a `SavedModel` proto: see fingerprinting.cc in tensorflow/cc/saved_model."""
    return int.from_bytes(tf.fingerprint([canonical_bytes(model)]).numpy().tobytes(), "little")


def canonical_bytes(message: Any) -> bytes:
    """Return a proto in C++'s deterministic form: fields by number, maps by key."""
    if not _has_maps(message.DESCRIPTOR) or (message.DESCRIPTOR.name == "NodeDef" and _is_in_order(message)):
        return bytes(message.SerializeToString(deterministic=True))  # a hundred times quicker, and nearly always so
    return b"".join(_field_bytes(message, field, value) for field, value in message.ListFields())


def _field_bytes(message: Any, field: FieldDescriptor, value: Any) -> bytes:
    """Return one field with its tag, or with one for each entry."""
    if _is_map(field):
        return b"".join(_entry_bytes(message, field, key, value[key]) for key in _sorted(value))
    if field.message_type is not None:
        messages = [value] if isinstance(value, Message) else value
        return b"".join(_with_length(field.number, canonical_bytes(entry)) for entry in messages)
    alone = type(message)()
    if isinstance(value, (str, bytes, int, float)):
        setattr(alone, field.name, value)
    else:
        getattr(alone, field.name).extend(value)
    return bytes(alone.SerializeToString(deterministic=True))


def _entry_bytes(message: Any, field: FieldDescriptor, key: str | int, value: Any) -> bytes:
    """Return an entry of a map: a message of a key, field 1, and a value, field 2."""
    if field.message_type.fields_by_name["value"].message_type is not None:
        written = _with_length(1, key.encode()) if isinstance(key, str) else b"\x08" + _varint(key)
        return _with_length(field.number, written + _with_length(2, canonical_bytes(value)))
    alone = type(message)()
    getattr(alone, field.name)[key] = value
    return bytes(alone.SerializeToString(deterministic=True))


def _is_in_order(message: Any) -> bool:
    """Return whether Python writes all maps in a message in C++'s order."""
    for field, value in message.ListFields():
        inside: Iterable[Any] = ()
        if _is_map(field):
            keys = _sorted(value)
            if any(not isinstance(b, str) or b.startswith(str(a)) for a, b in itertools.pairwise(keys)):
                return False
            inside = [entry for entry in value.values() if isinstance(entry, Message)]
        elif field.message_type is not None and _has_maps(field.message_type):
            inside = [value] if isinstance(value, Message) else value
        if not all(map(_is_in_order, inside)):
            return False
    return True


def _sorted(keys: Iterable[Any]) -> list[Any]:
    return sorted(keys, key=lambda key: key.encode() if isinstance(key, str) else key)


@functools.cache
def _has_maps(kind: Descriptor, above: tuple[Descriptor, ...] = ()) -> bool:
    """Return whether messages of a type may have maps in them."""
    inside = [field for field in kind.fields if field.message_type is not None and field.message_type not in above]
    return any(_is_map(field) or _has_maps(field.message_type, (*above, kind)) for field in inside)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _with_length(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits in a byte, the lowest first."""
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*result, number])


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
    is_comparable = fingerprint.version.producer == _PRODUCER and not _is_newer(model.meta_graphs[0])
    if is_comparable and fingerprint.saved_model_checksum != checksum(model):
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
    paths = [path for kind in ("assets", "assets.extra") for path in sorted((Path(directory) / kind).rglob("*"))]
    files |= {str(path.relative_to(directory)): path for path in paths}
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
    written, running = (
        version.split(".")[:2] for version in (meta_graph.meta_info_def.tensorflow_version, tf.__version__)
    )
    return not all(part.isdigit() for part in written) or [int(p) for p in written] > [int(p) for p in running]
