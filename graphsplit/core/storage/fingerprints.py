"""TensorFlow's fingerprint of a SavedModel, computed as TensorFlow does when it saves one.

TensorFlow offers the stored fingerprint and not the computation, and its own computation in C++ ends the process on
some damaged graphs (seen with 2.21). So the proto is written here as C++ writes it deterministically, and hashed. Of
Python's deterministic form two things differ: it has maps with whole numbers as keys backwards, and keys that begin
with other keys before those.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


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
        each = [value] if isinstance(value, Message) else value
        return b"".join(_with_length(field.number, canonical_bytes(one)) for one in each)
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
            inside = [one for one in value.values() if isinstance(one, Message)]
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
