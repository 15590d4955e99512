"""Open sizes: those that one device's trace leaves open, as symbols, by what is the same in all calls.

A plan for all sizes has a symbol for each open size of an argument. Sizes that were the same in every call so far share
one, as those of a batch's inputs and targets, or of what each edge of a graph has. A call in which they differ is
planned once more, with symbols of their own.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.polynomials import Polynomial
from graphsplit.core.sizes import MOST_LENGTHS, Shape, Size, length
from graphsplit.core.structures import CompositeLeaf, Container, TensorLeaf
from graphsplit.core.user_code import user_stack_level
from graphsplit.errors import RetracingWarning


class _Open(NamedTuple):
    """An open size.

    Attributes:
      tensor: the number of the flat argument.
      axis: of it; or of the sparse tensor whose shape this argument says.
      name: how users call it.
      size: what it is in a call, less what it always has more than others: a ragged tensor's row splits, one.
      more: that.
      is_axis: whether it is the size of an axis, so that it can be measured.
    """

    tensor: int
    axis: int
    name: str
    size: int
    more: int = 0
    is_axis: bool = True


@dataclass(eq=False)
class OpenSizes:
    """Which open sizes of a function's arguments were the same in all calls.

    Attributes:
      classes: by what one device traces, and by which of the sizes are 0, the number of each size's class.
      wide: structures with symbols, by the same and the classes: calls that only differ in sizes have the same.
    """

    classes: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    wide: dict[Hashable, Container] = field(default_factory=dict)

    def covering(self, name: str, seen_tree: Container, call: Container) -> Container | None:
        """Return a call's structure with symbols for open sizes; None if some are not known in the call either.

        A size that is 0 stays 0: what follows from symbols holds from one on.

        Args:
          name: of the function, for the warning.
          seen_tree: as one device traces it.
          call: with the sizes of the call.
        """
        open_sizes = list(_open_sizes(seen_tree, call))
        if any(leaf.shape is None or None in leaf.shape for leaf in structures.leaves(call)):
            return None
        not_empty = [open_size for open_size in open_sizes if open_size.size]
        key = seen_tree, tuple([open_size.size == 0 for open_size in open_sizes])
        sizes = tuple([open_size.size for open_size in not_empty])
        classes_before = self.classes.get(key)
        classes = _numbered(sizes if classes_before is None else list(zip(classes_before, sizes, strict=True)))
        if classes_before is not None and classes != classes_before:
            _warn(name, not_empty, classes_before)
        self.classes[key] = classes
        if (key, classes) not in self.wide:
            self.wide[key, classes] = _with_symbols(seen_tree, call, open_sizes, _symbols(not_empty, classes))
        return self.wide[key, classes]


def _open_sizes(seen_tree: Container, call: Container) -> Iterator[_Open]:
    leaves, composites = structures.leaves(call), structures.composites(seen_tree)
    ragged = [(first, leaf) for first, leaf in composites if isinstance(leaf.spec, tf.RaggedTensorSpec)]
    splits = {first + k for first, leaf in ragged for k in range(1, len(leaf.parts))}
    for i, (path, leaf) in enumerate(structures.paths(seen_tree)):
        for axis, size in enumerate(leaf.shape or ()):
            if size is None and leaves[i].shape is not None:
                actual, extra = (leaves[i].shape or ())[axis] or 0, int(i in splits)
                yield _Open(i, axis, f"{path}.shape[{axis}]", actual - extra, extra)
    shapes = structures.known_sparse_shapes(call)
    for i, shape in shapes.items():
        for axis, size in enumerate(shape if i not in structures.known_sparse_shapes(seen_tree) else ()):
            yield _Open(i, axis, "", size, is_axis=False)


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return a number for each key, equal ones for equal keys, in the order in which they come first."""
    numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    return tuple([numbers[key] for key in keys])


def _warn(name: str, sizes: Sequence[_Open], classes_before: Sequence[int]) -> None:
    pairs = itertools.combinations(
        [(number, open_size) for number, open_size in zip(classes_before, sizes, strict=True) if open_size.name], 2
    )
    apart = [(a, b) for (m, a), (n, b) in pairs if m == n and a.size != b.size]
    for a, b in apart[:1]:
        warnings.warn(
            f"{name} was planned for calls in which {a.name} and {b.name} are the same size; in this call they are "
            f"{a.size + a.more} and {b.size + b.more}. It is planned once more, for sizes that differ. "
            "split={...: None} keeps an argument whole whose sizes only happen to be the batch's.",
            RetracingWarning,
            stacklevel=user_stack_level(),
        )


def _symbols(sizes: Sequence[_Open], classes: Sequence[int]) -> dict[tuple[int, int, bool], Size]:
    """Return what is said of each open size: of as many as there are symbols for, and that can be measured."""
    measured = {
        number: open_size.name
        for number, open_size in zip(classes, sizes, strict=True)
        if open_size.is_axis and not open_size.more
    }
    alone = {number: open_size.name for number, open_size in zip(classes, sizes, strict=True) if open_size.is_axis}
    names = list({**alone, **measured}.items())[:MOST_LENGTHS]
    symbols = {number: length(k, name) for k, (number, name) in enumerate(sorted(names))}
    size_by_place = {}
    for number, open_size in zip(classes, sizes, strict=True):
        if number in symbols and (number in measured or open_size.is_axis):
            polynomial = Polynomial.of(symbols[number])
            extra = open_size.more if number in measured else 0
            size_by_place[open_size.tensor, open_size.axis, open_size.is_axis] = Size(Polynomial.of(polynomial + extra))
    return size_by_place


def _with_symbols(
    seen_tree: Container, call: Container, sizes: Sequence[_Open], symbols: dict[tuple[int, int, bool], Size]
) -> Container:
    """Return the structure that one device traces with symbols for open sizes, and zeros where they are 0."""
    size_at = {
        (open_size.tensor, open_size.axis, open_size.is_axis): open_size.size + open_size.more
        for open_size in sizes
        if not open_size.size
    } | symbols

    def of_tensor(i: int, leaf: TensorLeaf) -> TensorLeaf:
        shape = [size_at.get((i, axis, True)) if size is None else size for axis, size in enumerate(leaf.shape or ())]
        return leaf if leaf.shape is None else replace(leaf, shape=tuple(shape))

    dense: dict[int, Shape] = {}
    for i, shape in structures.known_sparse_shapes(call).items():
        sparse_shape = tuple([size_at.get((i, axis, False)) for axis in range(len(shape))])
        if None not in sparse_shape and i not in structures.known_sparse_shapes(seen_tree):
            dense[i] = sparse_shape
    numbers = itertools.count()

    def of_leaf(leaf: structures.Leaf) -> structures.Leaf:
        if isinstance(leaf, TensorLeaf):
            return of_tensor(next(numbers), leaf)
        if not isinstance(leaf, CompositeLeaf):
            return leaf
        places = [next(numbers) for _ in leaf.parts]
        parts = tuple([of_tensor(i, part) for i, part in zip(places, leaf.parts, strict=True)])
        return replace(leaf, parts=parts, dense=next((dense[i] for i in places if i in dense), None))

    wide = structures.map_leaves(of_leaf, seen_tree)
    assert isinstance(wide, Container)
    return wide
