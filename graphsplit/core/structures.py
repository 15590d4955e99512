"""Nested arguments and results: taken apart into leaves with paths, and put together again. Plain Python but leaves.

Lists, tuples, named tuples, dicts and dataclasses are taken apart. A leaf is a tensor (or array), a TensorFlow
composite (ragged, sparse), or anything else, which is part of the structure: a Python number, a string, a model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class TensorLeaf:
    """The place of one tensor. `shape` is a tuple with None for unknown sizes, or None for an unknown rank."""

    dtype: tf.DType
    shape: tuple[int | None, ...] | None

    def spec(self) -> tf.TensorSpec:
        """Return the leaf as TensorFlow's own specification."""
        return tf.TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class CompositeLeaf:
    """The place of a ragged, sparse or other composite tensor: its parts are tensors, its type is structure."""

    spec: tf.TypeSpec
    parts: tuple[TensorLeaf, ...]


class StaticLeaf:
    """A value that is part of the structure. Compared by value and type where it can be hashed, else by identity."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash: int = hash((type(value), value))
            self._by_value = True
        except TypeError:
            self._hash = id(value)
            self._by_value = False

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return False
        if self.value is other.value:
            return True
        same_kind = self._by_value and other._by_value and type(self.value) is type(other.value)
        return same_kind and bool(self.value == other.value)


@dataclass(frozen=True)
class Branch:
    """A container: its type, the keys of its entries, and its entries."""

    kind: type
    keys: tuple[Any, ...]
    entries: tuple[Tree, ...]
    factory: Any = None


Tree = TensorLeaf | CompositeLeaf | StaticLeaf | Branch


def flatten(value: Any) -> tuple[list[tf.Tensor], Tree]:
    """Return the tensors in `value`, and its structure, which is hashable and so serves as a signature."""
    tensors: list[tf.Tensor] = []
    return tensors, _flatten(value, tensors)


def _flatten(value: Any, tensors: list[tf.Tensor]) -> Tree:
    if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
        tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
        tensors.append(tensor)
        return _tensor_leaf(tensor)
    keys = _keys(value)
    if keys is not None:
        entries = tuple([_flatten(_entry(value, key), tensors) for key in keys])
        return Branch(type(value), keys, entries, getattr(value, "default_factory", None))
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        parts = tf.nest.flatten(value, expand_composites=True)
        tensors.extend(parts)
        spec = tf.type_spec_from_value(value)
        return CompositeLeaf(spec, tuple([_tensor_leaf(part) for part in parts]))
    return StaticLeaf(value)


def _tensor_leaf(tensor: tf.Tensor) -> TensorLeaf:
    shape = tensor.shape
    return TensorLeaf(tensor.dtype, None if shape.rank is None else tuple(shape))


def _keys(value: Any) -> tuple[Any, ...] | None:
    """Return the keys of a container's entries, or None for a leaf."""
    if isinstance(value, (list, tuple)):
        return tuple(getattr(value, "_fields", range(len(value))))
    if isinstance(value, Mapping):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    return None


def _entry(value: Any, key: Any) -> Any:
    if isinstance(value, (Mapping, list)) or (isinstance(value, tuple) and isinstance(key, int)):
        return value[key]
    return getattr(value, key)


def unflatten(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Return the value of which `flatten` gave `tree`, with `tensors` in the places of its tensors."""
    return _unflatten(tree, iter(tensors))


def _unflatten(tree: Tree, tensors: Iterator[Any]) -> Any:
    if isinstance(tree, TensorLeaf):
        return next(tensors)
    if isinstance(tree, StaticLeaf):
        return tree.value
    if isinstance(tree, CompositeLeaf):
        parts = [next(tensors) for _ in tree.parts]
        return tf.nest.pack_sequence_as(tree.spec, parts, expand_composites=True)
    entries = [_unflatten(entry, tensors) for entry in tree.entries]
    return _rebuild(tree, entries)


def _rebuild(tree: Branch, entries: list[Any]) -> Any:
    kind = tree.kind
    if issubclass(kind, list):
        return kind(entries)
    if issubclass(kind, tuple):
        return kind(*entries) if hasattr(kind, "_fields") else kind(entries)
    pairs = zip(tree.keys, entries, strict=True)
    if issubclass(kind, defaultdict):
        return kind(tree.factory, pairs)
    if issubclass(kind, Mapping):
        return kind(pairs)  # type: ignore[call-arg]
    result = copy.copy(kind.__new__(kind))
    for name, entry in pairs:
        object.__setattr__(result, name, entry)
    return result


def leaves(tree: Tree) -> list[TensorLeaf]:
    """Return the tensor leaves of a structure in the order of the tensors."""
    return [leaf for _, leaf in paths(tree, "")]


def paths(tree: Tree, prefix: str) -> list[tuple[str, TensorLeaf]]:
    """Return every tensor leaf with the expression by which a user would reach it: `batch['image']`, `pair[0]`."""
    if isinstance(tree, TensorLeaf):
        return [(prefix, tree)]
    if isinstance(tree, CompositeLeaf):
        return [(f"{prefix} (part {i})", part) for i, part in enumerate(tree.parts)]
    if isinstance(tree, StaticLeaf):
        return []
    return [
        found
        for key, entry in zip(tree.keys, tree.entries, strict=True)
        for found in paths(entry, step_path(tree.kind, prefix, key))
    ]


def composites(tree: Tree, first: int = 0) -> list[tuple[int, CompositeLeaf]]:
    """Return the composite tensors of a structure, each with the number of its first part among the tensors."""
    if isinstance(tree, CompositeLeaf):
        return [(first, tree)]
    found: list[tuple[int, CompositeLeaf]] = []
    for entry in tree.entries if isinstance(tree, Branch) else ():
        found += composites(entry, first)
        first += len(leaves(entry))
    return found


def static_leaves(tree: Tree, prefix: str) -> list[tuple[str, Any]]:
    """Return every value that is part of the structure, with its path."""
    if isinstance(tree, StaticLeaf):
        return [(prefix, tree.value)]
    if not isinstance(tree, Branch):
        return []
    return [
        found
        for key, entry in zip(tree.keys, tree.entries, strict=True)
        for found in static_leaves(entry, step_path(tree.kind, prefix, key))
    ]


def step_path(kind: type, prefix: str, key: Any) -> str:
    """Return the path of the entry `key` of a container of type `kind` found at `prefix`."""
    if issubclass(kind, (Mapping, list)) or isinstance(key, int):
        return f"{prefix}[{key!r}]"
    return f"{prefix}.{key}"


def map_static(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to every leaf that is not a tensor."""
    tensors, tree = flatten(value)
    return unflatten(_map_static(function, tree), tensors)


def _map_static(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, StaticLeaf):
        return StaticLeaf(function(tree.value))
    if isinstance(tree, Branch):
        return dataclasses.replace(tree, entries=tuple(_map_static(function, entry) for entry in tree.entries))
    return tree
