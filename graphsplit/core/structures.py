"""Nested arguments and results: taken apart into leaves with paths, and put together again. Plain Python but leaves.

A leaf is a tensor (or array), a TensorFlow composite (ragged, sparse, an `ExtensionType`), or anything else that is no
container, which is part of the structure: a Python number, a string, a model, a variable (which is captured then, as if
it came from outside).

Containers are what `tf.nest` takes apart (lists, tuples, mappings, their subclasses and views, attrs objects, whatever
has `__tf_flatten__`), and dataclasses besides. Putting together makes equal objects where `tf.nest` does, and some that
it cannot make.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MappingView, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import name_for_runtime
from graphsplit.core.hosts import host_device
from graphsplit.errors import UnsupportedError


@dataclass(frozen=True)
class TensorLeaf:
    """The place of one tensor. `shape` is a tuple with None for unknown sizes, or None for an unknown rank."""

    dtype: tf.DType
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class CompositeLeaf:
    """The place of a ragged, sparse or other composite tensor: its parts are tensors, its type is structure.

    `dense` is the shape of a sparse tensor where its specification leaves sizes open, if more is known of these.
    """

    spec: tf.TypeSpec
    parts: tuple[TensorLeaf, ...]
    dense: tuple[int | None, ...] | None = None


class StaticLeaf:
    """A value that is part of the structure. Compared by type and content where it has one, else by identity."""

    def __init__(self, value: Any):
        self.value = value
        self._key = (type(value), _content(value))
        try:
            self._hash = hash(self._key)
        except TypeError:
            self._key = (type(value), id(value))
            self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticLeaf) and self._hash == other._hash and self._key == other._key


def _content(value: Any) -> Any:
    """Return what tells a value from others of its type, as it is now.

    Zeros have signs and a nan is itself, though `==` says otherwise.
    """
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, complex):
        return _content(value.real), _content(value.imag)
    if isinstance(value, (set, frozenset)):
        return frozenset((type(entry), _content(entry)) for entry in value)
    if isinstance(value, (bytearray, memoryview, array.array)):
        return bytes(value), getattr(value, "typecode", None) or getattr(value, "format", None)
    return value


@dataclass(frozen=True)
class Container:
    """A container: its type, the keys of its entries, its entries, and what else it takes to make it again."""

    kind: type
    keys: tuple[Any, ...]
    entries: tuple[Tree, ...]
    rest: StaticLeaf | None = None


Leaf = TensorLeaf | CompositeLeaf | StaticLeaf
Tree = Leaf | Container


def flatten(value: Any, specs: bool = False) -> tuple[list[tf.Tensor], Tree]:
    """Return the tensors in `value`, and its structure, which is hashable and so serves as a signature.

    Args:
      value: anything.
      specs: whether a `tf.TypeSpec` stands for a tensor; else it is part of the structure, as any other object.
    """
    tensors: list[tf.Tensor] = []
    return tensors, _flatten(value, tensors, specs)


def _flatten(value: Any, tensors: list[tf.Tensor], specs: bool) -> Tree:
    if specs and isinstance(value, tf.TypeSpec):
        return _flatten_spec(value, tensors)
    if isinstance(value, (tf.Tensor, np.ndarray, np.generic)):
        tensor = value if isinstance(value, tf.Tensor) else _in_host_memory(value)
        tensors.append(tensor)
        return _tensor_leaf(tensor)
    kind = value.__class__  # not type(): TensorFlow's modules wrap dicts that are assigned to them into proxies
    parts = _parts(value)
    if parts and parts[0] is value:  # no composite: a Keras variable, of which `tf.function` sees what it is worth
        return _flatten(tf.convert_to_tensor(value), tensors, specs)
    if parts is not None:
        tensors.extend(parts)
        return CompositeLeaf(tf.type_spec_from_value(value), tuple([_tensor_leaf(part) for part in parts]))
    container = container_of(kind)
    if container is None or isinstance(value, type):
        return StaticLeaf(value)
    keys, entries, rest = container.take_apart(value)
    trees = tuple([_flatten(entry, tensors, specs) for entry in entries])
    return Container(kind, keys, trees, None if rest is None else StaticLeaf(rest))


def _in_host_memory(value: Any) -> tf.Tensor:
    """Return an array as a tensor where it is: TensorFlow by itself would bring all of it to the first GPU."""
    if not tf.executing_eagerly():
        return tf.convert_to_tensor(value)
    with tf.device(name_for_runtime(host_device(""))):
        return tf.convert_to_tensor(value)


def _flatten_spec(spec: tf.TypeSpec, tensors: list[Any]) -> Tree:
    """Return the place of a tensor that is only described; what describes it stands among the tensors."""
    if isinstance(spec, tf.TensorSpec):
        tensors.append(spec)
        return _tensor_leaf(spec)
    parts = tf.nest.flatten(spec, expand_composites=True)
    tensors.extend(parts)
    return CompositeLeaf(spec, tuple([_tensor_leaf(part) for part in parts]))


_PLAIN = frozenset({bool, dict, float, int, list, str, tuple, type(None)})  # asking TensorFlow takes 10 microseconds


def _parts(value: Any) -> list[tf.Tensor] | None:
    """Return the tensors that a composite tensor consists of, or None for everything else.

    Variables, datasets and iterators are composites to TensorFlow, but their parts are handles, which are captured.
    """
    if value.__class__ in _PLAIN or isinstance(value, tf.Variable):
        return None
    if not (isinstance(value, tf.experimental.ExtensionType) or tf.is_tensor(value)):
        return None
    parts = tf.nest.flatten(value, expand_composites=True)
    handles = [part for part in parts if not tf.is_tensor(part) or part.dtype in (tf.resource, tf.variant)]
    return None if handles else parts


def _tensor_leaf(tensor: tf.Tensor | tf.TensorSpec) -> TensorLeaf:
    shape = tensor.shape  # (as numbers: after tf.disable_v2_behavior() its entries are objects)
    return TensorLeaf(tensor.dtype, None if shape.rank is None else tuple(shape.as_list()))


def spec_text(tensor: Any) -> str:
    """Return dtype and shape of a tensor, or of what describes one, for people.

    >>> spec_text(tf.TensorSpec([None, 784]))
    'float32[?,784]'
    """
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
    if shape.rank is None:
        return f"{dtype.name}[...]"
    return f"{dtype.name}[{','.join('?' if size is None else str(size) for size in shape.as_list())}]"


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
    container = container_of(tree.kind)
    assert container is not None
    entries = [_unflatten(entry, tensors) for entry in tree.entries]
    return container.put_together(tree.kind, tree.keys, entries, tree.rest and tree.rest.value)


def walk(tree: Tree, prefix: str | None = None) -> Iterator[tuple[str, Leaf]]:
    """Yield every leaf with the expression by which a user would reach it: `batch['image']`, `pair[0]`.

    Args:
      tree: the structure.
      prefix: what the user calls the whole; None for arguments, whose names are its keys.
    """
    if not isinstance(tree, Container):
        yield prefix or "", tree
        return
    for key, entry in zip(tree.keys, tree.entries, strict=True):
        yield from walk(entry, str(key) if prefix is None else step_path(tree.kind, prefix, key))


def paths(tree: Tree, prefix: str | None = None) -> list[tuple[str, TensorLeaf]]:
    """Return every tensor with its path, parts of composite tensors as well; see `walk`."""
    leaf_by_path: list[tuple[str, TensorLeaf]] = []
    for path, leaf in walk(tree, prefix):
        if isinstance(leaf, TensorLeaf):
            leaf_by_path.append((path, leaf))
        elif isinstance(leaf, CompositeLeaf):
            leaf_by_path += [(f"{path} (part {i})", part) for i, part in enumerate(leaf.parts)]
    return leaf_by_path


def leaves(tree: Tree) -> list[TensorLeaf]:
    """Return the tensor leaves of a structure in the order of the tensors."""
    return [leaf for _, leaf in paths(tree)]


def composites(tree: Tree) -> list[tuple[int, CompositeLeaf]]:
    """Return the composite tensors of a structure, each with the number of its first part among the tensors."""
    leaves_with_first, first = [], 0
    for _, leaf in walk(tree):
        if isinstance(leaf, CompositeLeaf):
            leaves_with_first.append((first, leaf))
        first += len(leaves(leaf))
    return leaves_with_first


def known_sparse_shapes(tree: Tree) -> dict[int, tuple[int, ...]]:
    """Return the shapes of sparse tensors, if all sizes are known, by the numbers of the tensors that say them."""
    sparse = [(first, leaf) for first, leaf in composites(tree) if isinstance(leaf.spec, tf.SparseTensorSpec)]
    defined = [(first, leaf) for first, leaf in sparse if leaf.dense or leaf.spec.shape.is_fully_defined()]
    # (after indices and values)
    return {first + 2: leaf.dense or tuple(leaf.spec.shape.as_list()) for first, leaf in defined}  # type: ignore[misc]


def static_leaves(tree: Tree, prefix: str | None = None) -> list[tuple[str, Any]]:
    """Return every value that is part of the structure, with its path; see `walk`."""
    return [(path, leaf.value) for path, leaf in walk(tree, prefix) if isinstance(leaf, StaticLeaf)]


def step_path(kind: type, prefix: str, key: Any) -> str:
    """Return the path of the entry `key` of a container of type `kind` found at `prefix`."""
    container = container_of(kind)
    return f"{prefix}[{key!r}]" if container is None or container.is_indexed else f"{prefix}.{key}"


def map_static(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to every leaf that is not a tensor."""
    tensors, tree = flatten(value)
    mapped = map_leaves(lambda leaf: StaticLeaf(function(leaf.value)) if isinstance(leaf, StaticLeaf) else leaf, tree)
    return unflatten(mapped, tensors)


def map_leaves(function: Callable[[Leaf], Leaf], tree: Tree) -> Tree:
    """Return a structure with `function` applied to every leaf, in the order of the tensors."""
    if not isinstance(tree, Container):
        return function(tree)
    return dataclasses.replace(tree, entries=tuple([map_leaves(function, entry) for entry in tree.entries]))


def with_leaves(tree: Tree, leaves: Sequence[Leaf]) -> Tree:
    """Return a structure with other leaves for its tensors, composite ones included, in their order."""
    leaf_iterator = iter(leaves)
    return map_leaves(lambda leaf: leaf if isinstance(leaf, StaticLeaf) else next(leaf_iterator), tree)


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
    if kind in _PLAIN_CONTAINERS:
        return _PLAIN_CONTAINERS[kind]
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
        mapping = kind(factory) if issubclass(kind, collections.defaultdict) else kind()
    except TypeError as error:
        raise UnsupportedError(
            f"A {kind.__module__}.{kind.__qualname__} holds tensors. Like tf.nest, graphsplit makes a mapping of the "
            f"same type for other tensors by calling it without arguments, which failed: {error}. Pass a dict."
        ) from error
    for key, entry in pairs.items():
        mapping[key] = entry
    return mapping


def _attributes(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    """Take an object's state apart: its declared fields that are set, and what else was stored on it."""
    kind = value.__class__
    declared = kind.__attrs_attrs__ if hasattr(kind, "__attrs_attrs__") else dataclasses.fields(kind)
    names = [field.name for field in declared if hasattr(value, field.name)]
    keys = tuple(dict.fromkeys([*names, *getattr(value, "__dict__", ())]))
    return keys, [getattr(value, key) for key in keys], None


def _object(kind: Any, keys: Sequence[Any], entries: list[Any], _: Any) -> Any:
    """Make an object without its constructor, which may convert, check, or not take every field."""
    instance = kind.__new__(kind)
    for name, entry in zip(keys, entries, strict=True):
        object.__setattr__(instance, name, entry)
    return instance


def _custom_parts(value: Any) -> tuple[tuple[Any, ...], list[Any], Any]:
    metadata, components = value.__tf_flatten__()
    return tuple(range(len(components))), list(components), metadata


_SEQUENCE, _MAPPING = ContainerKind(_items, _sequence), ContainerKind(_mapping_items, _mapping)
_PLAIN_CONTAINERS: dict[type, ContainerKind] = {dict: _MAPPING, list: _SEQUENCE, tuple: _SEQUENCE}  # as below, but fast
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
