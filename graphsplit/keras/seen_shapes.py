"""Which sizes of a batch a model's code knows while it is traced: those that it knows in Keras' own functions.

Keras asks for sizes in Python (`losses.reduce_values` returns a loss of no rows as it is, if it knows that there are
none), and so may layers, losses and steps of users. All that they are to know is what they know on one device. A plan
is for the sizes of the batch at hand all the same: see `TracedFunction.read`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.structures import CompositeLeaf, Leaf, StaticLeaf, TensorLeaf, Tree


class SeenShapes:
    """The tensors of a batch as a model's code sees them; an argument of its step, and part of its signature.

    Args:
      tree: the structure of the batch, with None for sizes that the code does not know.
    """

    def __init__(self, tree: Tree):
        self._leaves = tuple([leaf for _, leaf in structures.walk(tree) if not isinstance(leaf, StaticLeaf)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenShapes) and self._leaves == other._leaves

    def __hash__(self) -> int:
        return hash(self._leaves)

    def __repr__(self) -> str:
        specs = [leaf.spec if isinstance(leaf, CompositeLeaf) else structures.spec_text(leaf) for leaf in self._leaves]
        return f"seen as {', '.join(map(str, specs))}"

    def in_place_of(self, tree: Tree) -> Tree:
        """Return a structure of the same tensors as the code sees it."""
        leaves = iter(self._leaves)
        return structures.map_leaves(lambda leaf: leaf if isinstance(leaf, StaticLeaf) else next(leaves), tree)

    def of(self, data: Any) -> Any:
        """Return a batch as the code sees it: in a graph whose sizes are known, too."""
        tensors, tree = structures.flatten(data)
        seen = self.in_place_of(tree)
        if tf.executing_eagerly() or seen == tree:
            return data
        pairs = zip(tensors, structures.leaves(seen), strict=True)
        return structures.unflatten(seen, [tf.compat.v1.placeholder_with_default(t, leaf.shape) for t, leaf in pairs])


class Retracing:
    """What code sees in a `tf.function` with `reduce_retracing`, as all of Keras are.

    The first shapes that such a function is called with are known to it. Of others, some sizes are open, and calls that
    fit what was traced before are not traced. TensorFlow itself says which, by a function that does nothing.
    """

    def __init__(self) -> None:
        self._functions: dict[Tree, Any] = {}
        self._found: dict[Tree, Tree] = {}

    def seen(self, tree: Tree) -> Tree:
        """Return the structure of an argument as the function sees it."""
        if tree not in self._found:
            specs = [_spec(leaf) for _, leaf in structures.walk(tree) if not isinstance(leaf, StaticLeaf)]
            kind = structures.map_leaves(lambda leaf: leaf if isinstance(leaf, StaticLeaf) else StaticLeaf(None), tree)
            if kind not in self._functions:
                self._functions[kind] = tf.function(_nothing, autograph=False, reduce_retracing=True)
            traced = self._functions[kind].get_concrete_function(*specs)
            seen = structures.flatten(list(traced.structured_input_signature[0]), specs=True)[1]
            self._found[tree] = SeenShapes(seen).in_place_of(tree)
        return self._found[tree]


def _nothing(*tensors: Any) -> None:
    """Stand for a function of some tensors."""


def tree_of_elements(spec: Any) -> Tree:
    """Return the structure of the elements of a `tf.data` iterator, as the graph that reads it sees them."""
    return structures.flatten(tf.nest.map_structure(_of_tensors, spec), specs=True)[1]


def with_open_rows(tree: Tree) -> Tree:
    """Return the structure of a batch of which the number of rows is not known."""
    return structures.map_leaves(_without_rows, tree)


def _without_rows(leaf: Leaf) -> Leaf:
    return replace(leaf, shape=(None, *leaf.shape[1:])) if isinstance(leaf, TensorLeaf) and leaf.shape else leaf


def is_open(tree: Tree) -> bool:
    """Return whether some size of a structure's tensors is not known."""
    return any(leaf.shape is None or None in leaf.shape for leaf in structures.leaves(tree))


def _spec(leaf: TensorLeaf | CompositeLeaf) -> Any:
    return leaf.spec if isinstance(leaf, CompositeLeaf) else tf.TensorSpec(leaf.shape, leaf.dtype)


def _of_tensors(spec: Any) -> Any:
    """Return a specification of tensors; None for what is no tensor, as the optional values that stand for nothing."""
    if isinstance(spec, tf.TensorSpec):
        return spec
    parts = tf.nest.flatten(spec, expand_composites=True)
    return None if not parts or any(part.dtype in (tf.resource, tf.variant) for part in parts) else spec
