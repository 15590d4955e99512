"""Structures: whatever `tf.nest` takes apart, as arguments and as results; compared with `tf.nest` and the function."""

from __future__ import annotations

import array
import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core import structures
from graphsplit.core.structures import StaticLeaf, flatten, unflatten

try:
    import attrs
except ImportError:  # only the tests that need it are skipped
    attrs = None  # type: ignore[assignment]


class Field(NamedTuple):
    name: str


class AttrsLike:
    """What `attr.s` makes of a class, as far as `tf.nest` looks."""

    __attrs_attrs__ = (Field("x"), Field("scale"))

    def __init__(self, x: Any, scale: Any):
        self.x = x
        self.scale = scale

    def __repr__(self) -> str:
        return f"AttrsLike({self.x!r}, {self.scale!r})"


@dataclasses.dataclass
class Plain:
    x: Any
    scale: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    scale: Any


@dataclasses.dataclass(kw_only=True)
class Derived:
    x: Any
    scale: Any

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


@dataclasses.dataclass
class Custom:
    x: Any
    scale: Any
    mode: str = "same"

    def __tf_flatten__(self) -> Any:
        return (self.mode,), (self.x, self.scale)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Custom:
        return cls(*components, *metadata)


class Extension(tf.experimental.ExtensionType):
    x: tf.Tensor
    scale: tf.Tensor


class Pair(NamedTuple):
    x: Any
    scale: Any


class CheckedPair(Pair):
    def __new__(cls, x: Any, scale: Any) -> CheckedPair:
        return super().__new__(cls, x, scale)


class MyList(list):  # type: ignore[type-arg]
    pass


class MyTuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class MyDict(dict):  # type: ignore[type-arg]
    pass


def proxied(x: Any, scale: Any) -> Any:
    module = tf.Module()
    module.value = {"x": x, "scale": scale}
    return module.value


MAPPINGS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, s: {"x": x, "scale": s},
    "dict subclass": lambda x, s: MyDict(x=x, scale=s),
    "OrderedDict": lambda x, s: collections.OrderedDict(x=x, scale=s),
    "defaultdict": lambda x, s: collections.defaultdict(list, x=x, scale=s),
    "Counter": lambda x, s: collections.Counter({"x": x, "scale": s}),
    "ChainMap": lambda x, s: collections.ChainMap({"x": x}, {"scale": s}),
    "UserDict": lambda x, s: collections.UserDict(x=x, scale=s),
    "MappingProxyType": lambda x, s: types.MappingProxyType({"x": x, "scale": s}),
    "dict of a module": proxied,
}
SEQUENCES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda x, s: [x, s],
    "tuple": lambda x, s: (x, s),
    "list subclass": lambda x, s: MyList([x, s]),
    "tuple subclass": lambda x, s: MyTuple([x, s]),
    "deque": lambda x, s: collections.deque([x, s]),
    "UserList": lambda x, s: collections.UserList([x, s]),
}
OBJECTS: dict[str, Callable[[Any, Any], Any]] = {
    "named tuple": Pair,
    "named tuple subclass": CheckedPair,
    "attrs protocol": AttrsLike,
    "custom nest": Custom,
    "dataclass": Plain,
    "slots dataclass": Slots,
    "derived state": lambda x, s: Derived(x=x, scale=s),
    "extension type": Extension,
}
MAKERS = {**MAPPINGS, **SEQUENCES, **OBJECTS}
OWN = ("dataclass", "slots dataclass", "derived state")  # atoms to tf.nest
COMPOSITE = ("extension type",)  # holds only tensors


def read(value: Any, key: str) -> Any:
    """Return `x` or `scale` of what any of the makers made."""
    if hasattr(value, key):
        return getattr(value, key)
    return value[key] if isinstance(value, collections.abc.Mapping) else value[["x", "scale"].index(key)]


def numbers(count: int, start: int = 0) -> tf.Tensor:
    return tf.range(start, start + count, dtype=tf.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MAKERS)
def test_changed_contents_are_seen_and_traced_once(kind: str):
    traces = []

    def f(value):
        traces.append(type(value))
        return MAKERS[kind](read(value, "x") * read(value, "scale"), read(value, "scale") + 1)

    parallel = gs.parallelize(f, devices=2)
    for start in range(3):
        x, scale = numbers(5, start), tf.constant(2.0 + start, tf.float64)
        result = parallel(MAKERS[kind](x, scale))
        assert result.__class__ is MAKERS[kind](x, scale).__class__
        np.testing.assert_array_equal(read(result, "x"), x * scale)
        np.testing.assert_array_equal(read(result, "scale"), scale + 1)
    assert len(traces) == 1
    assert "Mul" in {op.type for op in parallel.plan(MAKERS[kind](x, scale)).sharded_ops}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MAKERS)
def test_gradients_reach_the_contents(kind: str):
    parallel = gs.parallelize(lambda value: tf.reduce_sum(read(value, "x") ** 2 * read(value, "scale")), devices=2)
    x, scale = numbers(5), tf.constant(3.0, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch([x, scale])
        result = parallel(MAKERS[kind](x, scale))
    np.testing.assert_array_equal(tape.gradient(result, x), 6 * x)


def test_state_beyond_the_fields_is_taken_along():
    parallel = gs.parallelize(lambda value: value.doubled + value.scale, devices=2)
    for start in (1, 5):
        value = Derived(x=numbers(4, start), scale=numbers(4))
        np.testing.assert_array_equal(parallel(value), value.doubled + value.scale)


@pytest.mark.skipif(attrs is None, reason="attrs is not installed")
@pytest.mark.parametrize("options", [{}, {"slots": False}, {"frozen": True}, {"kw_only": True}], ids=str)
def test_attrs_classes(options: dict[str, bool]):
    made = attrs.make_class("Made", ["x", "_scale"], **options)
    parallel = gs.parallelize(lambda value: made(x=value.x * value._scale, scale=value._scale), devices=2)
    for start in range(2):
        result = parallel(made(x=numbers(5, start), scale=numbers(5, start + 1)))
        assert isinstance(result, made)
        np.testing.assert_array_equal(result.x, numbers(5, start) * numbers(5, start + 1))


def test_views_of_mappings_are_lists_as_for_tf_nest():
    parallel = gs.parallelize(lambda values, items: {"a": values[0] * items[0][1], "names": [items[0][0]]}, devices=2)
    for start in range(2):
        mapping = {"k": numbers(4, start)}
        result = parallel(mapping.values(), mapping.items())
        np.testing.assert_array_equal(result["a"], numbers(4, start) ** 2)
        assert result["names"] == ["k"]
    returned = gs.parallelize(lambda x: {"k": x + 1}.values(), devices=2)(numbers(4))
    assert isinstance(returned, list)
    np.testing.assert_array_equal(returned[0], numbers(4) + 1)


def test_a_mapping_that_cannot_be_made_again_is_named():
    class Sized(dict):  # type: ignore[type-arg]
        def __init__(self, size: int, **entries: Any):
            super().__init__(**entries)

    with pytest.raises(gs.errors.UnsupportedError) as error:
        gs.parallelize(lambda mapping: mapping["x"], devices=2)(Sized(1, x=numbers(4)))
    name = f"{__name__}.{Sized.__qualname__}"
    assert (
        str(error.value)
        .strip()
        .endswith(
            f"A {name} holds tensors. Like tf.nest, graphsplit makes a mapping of the same type for other tensors by "
            f"calling it without arguments, which failed: {Sized.__init__.__qualname__}() missing 1 required "
            "positional argument: 'size'. Pass a dict."
        )
    )


def test_an_extension_type_is_split_by_an_axis_only():
    parallel = gs.parallelize(lambda value: value.x, devices=2, split={"value": {"x": 0}})
    with pytest.raises(gs.errors.ArgumentError) as error:
        parallel(Extension(numbers(4), numbers(4)))
    assert str(error.value) == (
        "split gives {'x': 0} for value, a Extension, whose tensors are split alike; give an axis or None."
    )


def test_a_deque_keeps_its_length():
    result = gs.parallelize(lambda queue: queue, devices=2)(collections.deque([numbers(4)], 3))
    assert result.maxlen == 3


# Properties


def sample(generator: random.Random, depth: int) -> Any:
    """Return a random structure of everything that `tf.nest` can make again."""
    if depth == 0 or generator.random() < 0.3:
        number = generator.randrange(100)
        leaves = [numbers(number % 5), np.arange(number), float(number), "text", None, True, number]
        return generator.choice(leaves)
    known = [kind for kind in MAKERS if kind not in (*OWN, *COMPOSITE, "MappingProxyType")]
    kind = generator.choice(known)
    return MAKERS[kind](sample(generator, depth - 1), sample(generator, depth - 1))


def assert_same(one: Any, other: Any) -> None:
    """Compare two structures and their leaves, by types as well."""
    tf.nest.assert_same_structure(one, other, check_types=True)
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(40))
def test_like_tf_nest(seed: int):
    value = sample(random.Random(seed), 4)
    tensors, tree = flatten(value)
    mine = sorted(map(repr, tensors))
    flat = [leaf for leaf in tf.nest.flatten(value) if isinstance(leaf, (tf.Tensor, np.ndarray))]
    assert mine == sorted(repr(tf.convert_to_tensor(leaf)) for leaf in flat)
    static = [leaf for _, leaf in structures.static_leaves(tree, "")]
    rest = [leaf for leaf in tf.nest.flatten(value) if not isinstance(leaf, (tf.Tensor, np.ndarray))]
    assert sorted(map(repr, static)) == sorted(map(repr, rest))
    again = unflatten(tree, tensors)
    as_tensors = lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf  # noqa: E731
    assert_same(again, tf.nest.map_structure(as_tensors, value))
    assert flatten(again)[1] == tree
    assert hash(flatten(again)[1]) == hash(tree)


@pytest.mark.parametrize("seed", range(40))
def test_other_tensors_take_the_places(seed: int):
    value = sample(random.Random(seed), 4)
    tensors, tree = flatten(value)
    replaced = unflatten(tree, [tensor + 1 for tensor in tensors])
    is_tensor = lambda leaf: isinstance(leaf, (tf.Tensor, np.ndarray))  # noqa: E731
    assert_same(replaced, tf.nest.map_structure(lambda leaf: tf.add(leaf, 1) if is_tensor(leaf) else leaf, value))


# Values that are part of the structure


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (1, True),
        (1, 1.0),
        ({1}, {2}),
        ({0.0}, {-0.0}),
        (bytearray(b"a"), bytearray(b"b")),
        (array.array("i", [1]), array.array("i", [2])),
        (array.array("i", [1]), array.array("I", [1])),
    ],
    ids=repr,
)
def test_static_values_that_differ(one: Any, other: Any):
    assert StaticLeaf(one) != StaticLeaf(other)


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: {1, "a"}, lambda: bytearray(b"a"), lambda: range(3)])
def test_static_values_that_are_equal(make: Callable[[], Any]):
    assert StaticLeaf(make()) == StaticLeaf(make())
    assert hash(StaticLeaf(make())) == hash(StaticLeaf(make()))


def test_a_changed_set_is_another_value():
    traces = []

    def f(x, names):
        traces.append(set(names))
        return x * len(names)

    parallel, names = gs.parallelize(f, devices=2), {"a"}
    np.testing.assert_array_equal(parallel(numbers(4), names), numbers(4))
    names.add("b")
    np.testing.assert_array_equal(parallel(numbers(4), names), numbers(4) * 2)
    assert traces == [{"a"}, {"a", "b"}]


def test_signed_zeros():
    parallel = gs.parallelize(lambda x, zero: x / zero, devices=2)
    ones = tf.ones(4)
    assert parallel(ones, 0.0).numpy().tolist() == [np.inf] * 4
    assert parallel(ones, -0.0).numpy().tolist() == [-np.inf] * 4
