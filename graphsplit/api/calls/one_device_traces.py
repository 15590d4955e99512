"""Which sizes a function knows while one device traces it: what is traced, and counted, once there is so here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.structures import CompositeLeaf, Container, StaticLeaf, TensorLeaf, Tree, with_leaves

MOST_SEEN = 1000
"""Of so many sizes it is remembered how they were seen: there may be any number of them."""


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
            if len(self._found) >= MOST_SEEN:
                self._found.pop(next(iter(self._found)), None)
            specs = [_spec(leaf) for _, leaf in structures.walk(tree) if not isinstance(leaf, StaticLeaf)]
            kind = structures.map_leaves(lambda leaf: leaf if isinstance(leaf, StaticLeaf) else StaticLeaf(None), tree)
            if kind not in self._functions:
                self._functions[kind] = tf.function(_nothing, autograph=False, reduce_retracing=True)
            traced = self._functions[kind].get_concrete_function(*specs)
            seen_tree = structures.flatten(list(traced.structured_input_signature[0]), specs=True)[1]
            self._found[tree] = with_leaves(tree, [leaf for _, leaf in structures.walk(seen_tree)])
        return self._found[tree]


def _nothing(*tensors: Any) -> None:
    """Stand for a function of some tensors."""


def _spec(leaf: TensorLeaf | CompositeLeaf) -> Any:
    return leaf.spec if isinstance(leaf, CompositeLeaf) else tf.TensorSpec(leaf.shape, leaf.dtype)


def as_specified(arguments: Tree, specs: Any) -> Tree:
    """Return a call's structure as `tf.TypeSpec`s, nested alike, have it, wherever there are some."""
    if isinstance(arguments, TensorLeaf):
        has_rank = isinstance(specs, tf.TensorSpec) and specs.shape.rank is not None
        return TensorLeaf(arguments.dtype, tuple(specs.shape.as_list())) if has_rank else arguments
    if isinstance(arguments, CompositeLeaf):
        fits = isinstance(specs, tf.TypeSpec) and specs.is_compatible_with(arguments.spec)
        tree = structures.flatten(specs, specs=True)[1] if fits else arguments
        return tree if isinstance(tree, CompositeLeaf) and len(tree.parts) == len(arguments.parts) else arguments
    if not isinstance(arguments, Container):
        return arguments
    if isinstance(specs, Mapping):
        chosen = [specs.get(key) for key in arguments.keys]
    elif isinstance(specs, Sequence):
        chosen = [specs[i] if i < len(specs) else None for i in range(len(arguments.keys))]
    else:
        return arguments
    entries = [as_specified(entry, spec) for entry, spec in zip(arguments.entries, chosen, strict=True)]
    return dataclasses.replace(arguments, entries=tuple(entries))


def is_open(tree: Tree) -> bool:
    """Return whether some size of a structure's tensors is not known."""
    return any(leaf.shape is None or None in leaf.shape for leaf in structures.leaves(tree))
