"""Containers: every kind of Python object that is taken apart into entries, and how it is put together again.

What `tf.nest` takes apart is taken apart here (lists, tuples, mappings, their subclasses and views, attrs objects,
whatever has `__tf_flatten__`), and dataclasses besides. Putting together makes equal objects where `tf.nest` does, and
some that it cannot make.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import types
from collections.abc import Callable, Mapping, MappingView, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphsplit.errors import UnsupportedError

# sequences without room for a tensor
_CONTENT = (str, bytes, bytearray, memoryview, array.array, range, collections.UserString)


@dataclass(frozen=True)
class ContainerKind:
    """How containers of one kind are taken apart and put together.

    Attributes:
      take_apart: container -> its keys, the entries under them, and what else it takes to make it again.
      put_together: type, keys, entries, that -> a container of this type.
      is_indexed: whether an entry is reached by `[key]`, else by `.key`.
    """

    take_apart: Callable[[Any], tuple[tuple[Any, ...], list[Any], Any]]
    put_together: Callable[[type, Sequence[Any], list[Any], Any], Any]
    is_indexed: bool = True


def container_of(kind: type) -> ContainerKind | None:
    """Return how objects of a type are taken apart, or None if they are leaves."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if issubclass(kind, _CONTENT):
        return None
    for applies, container in _KINDS:
        if applies(kind):
            return container
    return None


def _items(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    entries = list(value)
    return tuple(range(len(entries))), entries, getattr(value, "maxlen", None)


def _sequence(kind: type, _: Sequence[Any], entries: list[Any], length: Any) -> Any:
    return kind(entries) if length is None else kind(entries, length)


def _fields(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    return tuple(value._fields), list(value), None


def _mapping_items(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    keys = tuple(value)
    return keys, [value[key] for key in keys], getattr(value, "default_factory", None)


def _mapping(kind: Any, keys: Sequence[Any], entries: list[Any], factory: Any) -> Any:
    pairs = dict(zip(keys, entries, strict=True))
    if kind is dict:
        return pairs
    if not issubclass(kind, MutableMapping):
        return kind(pairs if kind is types.MappingProxyType else tuple(pairs.items()))
    try:
        made = kind(factory) if issubclass(kind, collections.defaultdict) else kind()
    except TypeError as error:
        raise UnsupportedError(
            f"A {kind.__module__}.{kind.__qualname__} holds tensors. Like tf.nest, graphsplit makes a mapping of the "
            f"same type for other tensors by calling it without arguments, which failed: {error}. Pass a dict."
        ) from error
    for key, entry in pairs.items():
        made[key] = entry
    return made


def _attributes(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    """Take an object's state apart: its declared fields that are set, and what else was stored on it."""
    kind = value.__class__
    declared = kind.__attrs_attrs__ if hasattr(kind, "__attrs_attrs__") else dataclasses.fields(kind)
    names = [field.name for field in declared if hasattr(value, field.name)]
    keys = tuple(dict.fromkeys([*names, *getattr(value, "__dict__", ())]))
    return keys, [getattr(value, key) for key in keys], None


def _object(kind: Any, keys: Sequence[Any], entries: list[Any], _: Any) -> Any:
    """Make an object without its constructor, which may convert, check, or not take every field."""
    made = kind.__new__(kind)
    for name, entry in zip(keys, entries, strict=True):
        object.__setattr__(made, name, entry)
    return made


def _custom_parts(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    metadata, components = value.__tf_flatten__()
    return tuple(range(len(components))), list(components), metadata


_SEQUENCE, _MAPPING = ContainerKind(_items, _sequence), ContainerKind(_mapping_items, _mapping)
_PLAIN: dict[type, ContainerKind] = {dict: _MAPPING, list: _SEQUENCE, tuple: _SEQUENCE}  # as below, but fast
_KINDS: list[tuple[Callable[[Any], bool], ContainerKind]] = [
    (
        lambda kind: hasattr(kind, "__tf_flatten__") and hasattr(kind, "__tf_unflatten__"),
        ContainerKind(_custom_parts, lambda kind, _, entries, data: kind.__tf_unflatten__(data, tuple(entries))),  # type: ignore[attr-defined]
    ),
    (
        lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"),
        ContainerKind(_fields, lambda kind, _, entries, __: kind._make(entries), is_indexed=False),  # type: ignore[attr-defined]
    ),
    (lambda kind: issubclass(kind, Mapping), _MAPPING),
    (lambda kind: issubclass(kind, Sequence), _SEQUENCE),
    # a view belongs to its mapping; tf.nest makes a list, too
    (lambda kind: issubclass(kind, MappingView), ContainerKind(_items, lambda _, __, entries, ___: entries)),
    (
        lambda kind: hasattr(kind, "__attrs_attrs__") or dataclasses.is_dataclass(kind),
        ContainerKind(_attributes, _object, is_indexed=False),
    ),
]
