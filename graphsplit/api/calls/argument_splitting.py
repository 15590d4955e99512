"""Splitting: from `split` and the shapes of a call to a layout for each argument and rows for each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graphsplit.api.options import Split
from graphsplit.core.gpus import can_be_cut
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, Shard
from graphsplit.core.polynomials import Polynomial, Symbol
from graphsplit.core.sizes import MOST_LENGTHS, Shape, Size, as_rows, has_sizes, length, rows, symbols_in
from graphsplit.core.structures import (
    CompositeLeaf,
    Container,
    StaticLeaf,
    TensorLeaf,
    Tree,
    composites,
    known_sparse_shapes,
    leaves,
    paths,
    step_path,
)
from graphsplit.errors import ArgumentError, bullet_list

_ANY_BATCH = "planned for any batch size"


@dataclass(frozen=True)
class Splitting:
    """How one call is split.

    Attributes:
      layouts: the layout of each flat argument.
      shapes: of each flat argument; a `Size` where one is not known.
      batch: the number of rows; a `Size` if it is not known, 0 if nothing is split.
      notes: what a user might not expect.
      row_splits: those of the flat arguments that are one more than the rows of a ragged tensor, if these are `batch`.
      sparse: those that say the shape of a sparse tensor, and that, if it is known.
    """

    layouts: tuple[Layout, ...]
    shapes: tuple[Shape | None, ...]
    batch: int
    notes: tuple[str, ...] = ()
    row_splits: tuple[int, ...] = ()
    sparse: Mapping[int, Shape] = field(default_factory=dict)

    def whole(self) -> Splitting:
        """Return the same with nothing split."""
        notes = tuple(note for note in self.notes if not note.startswith(_ANY_BATCH))
        return replace(self, layouts=(SINGLE_DEVICE,) * len(self.layouts), batch=0, notes=notes)


@dataclass(frozen=True)
class _Argument:
    path: str
    leaf: TensorLeaf
    axis: int | None
    explicit: bool
    composite: str = ""  # the type of the ragged or sparse tensor that it is a part of
    rows: int | None = None  # of that


def check_split(split: Split, parameters: Sequence[str] | None) -> None:
    """Raise `ArgumentError` if `split` cannot be meant for a function with these parameters (None: any)."""
    if isinstance(split, Mapping):
        unknown = [name for name in split if parameters is not None and name not in parameters]
        if unknown:
            raise ArgumentError(
                f"split names {_quoted(unknown)}, which the function does not take. "
                f"It takes {_quoted(parameters or ())}."
            )
    elif isinstance(split, (list, tuple)):
        if parameters is not None and len(split) > len(parameters):
            raise ArgumentError(
                f"split has {len(split)} entries, but the function takes {len(parameters)} arguments: "
                f"{_quoted(parameters)}."
            )
    elif split is not None and (isinstance(split, bool) or not isinstance(split, int)):
        raise ArgumentError(f"split takes an axis, or a mapping from argument names to an axis or None, got {split!r}.")


def resolve_split(split: Split, arguments: Container) -> Splitting:
    """Return how the arguments are split.

    Args:
      split: an axis for every batched argument; or a mapping (or sequence) that is a tree prefix of the arguments
        with an axis or None ("keep whole") at its leaves. Arguments that a mapping does not name follow axis 0.
      arguments: the structure of the call's arguments by name.

    Raises:
      ArgumentError: if `split` does not fit the arguments; names all offenders.
    """
    named = _by_name(split, arguments)
    split_arguments: list[_Argument] = []
    for name, tree in zip(arguments.keys, arguments.entries, strict=True):
        spec, explicit = named.get(name, (split if isinstance(split, int) else 0, False))
        _collect(spec, explicit, tree, name, split_arguments)
    _check_ranks(split_arguments, split)
    batch, deciding = _batch_size(split_arguments)
    layouts: list[Layout] = []
    shapes: list[Shape | None] = []
    for argument in split_arguments:
        axis, shape = _axis(argument), argument.leaf.shape
        fits = axis is not None and shape is not None and shape[axis] == batch and batch != 0
        layouts.append(Shard(axis) if deciding and fits and axis is not None else SINGLE_DEVICE)
        if batch is None and shape is not None and isinstance(layouts[-1], Shard):
            shape = tuple([rows(1) if i == axis else size for i, size in enumerate(shape)])
        shapes.append(shape)
    count = rows(1) if batch is None and deciding else batch or 0
    names = [argument.path for argument in split_arguments]
    is_open = isinstance(batch, Size)
    notes = tuple(_notes(None if is_open else batch, deciding, split_arguments))
    ragged = [(first, c) for first, c in composites(arguments) if isinstance(c.spec, tf.RaggedTensorSpec)]
    row_splits = tuple([first + 1 for first, composite in ragged if batch and _rows_of(composite) == batch])
    sparse: Mapping[int, Shape] = known_sparse_shapes(arguments)
    if any(map(has_sizes, shapes)) and batch is not None:
        [symbol] = symbols_in([(batch,)]) or [None]
        shapes = [shape if symbol is None else _counted(shape, symbol) for shape in shapes]
        sparse = {i: shape if symbol is None else _counted(shape, symbol) or () for i, shape in sparse.items()}
        count = rows(1) if is_open else count
        notes += tuple(_notes_of_others(split_arguments, shapes)) if is_open else ()
        return Splitting(tuple(layouts), tuple(shapes), count, notes, row_splits, sparse)
    return Splitting(tuple(layouts), _with_lengths(shapes, names), count, notes, row_splits, sparse)


def _counted(shape: Shape | None, symbol: Symbol) -> Shape | None:
    """Return a shape in which a symbol is the rows of the batch."""
    return shape and tuple([as_rows(size, symbol) for size in shape])


def open_shapes(splitting: Splitting, leaves: Sequence[TensorLeaf], names: Sequence[str]) -> tuple[Shape | None, ...]:
    """Return the shapes that arguments of a call have for code that does not know all of their sizes.

    Args:
      splitting: of the call.
      leaves: what the code knows of each argument.
      names: of each.
    """
    shapes: list[Shape | None] = []
    for i, (leaf, layout) in enumerate(zip(leaves, splitting.layouts, strict=True)):
        batch = layout.axis if isinstance(layout, Shard) else None
        sizes = enumerate(leaf.shape or ())
        shape = tuple([rows(1) if size is None and axis == batch else size for axis, size in sizes])
        shape = (rows(1) + 1,) if i in splitting.row_splits and shape == (None,) else shape
        shapes.append(None if leaf.shape is None else shape)
    with_lengths = list(_with_lengths(shapes, names))
    for i in splitting.sparse:  # (before its shape a sparse tensor has as many indices as values)
        with_lengths[i - 1] = (with_lengths[i - 2] or (None,))[:1]
    return tuple(with_lengths)


def open_sparse_shapes(splitting: Splitting, call: Tree) -> dict[int, Shape]:
    """Return the shapes of the sparse tensors of a call that code does not know, with open rows.

    Args:
      splitting: of the call.
      call: the arguments as the code knows them.
    """
    unknown = {i: shape for i, shape in splitting.sparse.items() if i not in known_sparse_shapes(call)}
    return {i: (rows(1) if n == splitting.batch else n, *other_sizes) for i, (n, *other_sizes) in unknown.items()}


def _with_lengths(shapes: Sequence[Shape | None], names: Sequence[str]) -> tuple[Shape | None, ...]:
    """Return shapes with symbols for the sizes that are not known, apart from the batch; for the first few of them."""
    numbers = iter(range(MOST_LENGTHS))
    result: list[Shape | None] = []
    for shape, name in zip(shapes, names, strict=True):
        sizes = list(shape or ())
        for axis, size in enumerate(sizes):
            number = next(numbers, None) if size is None else None
            if number is not None:
                sizes[axis] = Size(Polynomial.of(length(number, f"{name}.shape[{axis}]")))
        result.append(None if shape is None else tuple(sizes))
    return tuple(result)


def same_batch(splitting: Splitting, arguments: Container) -> bool:
    """Return whether all arguments of a call that would be split have the same size along their axes.

    Not if a size that is not known is 0: sizes are followed from 1 on, and a batch without rows is traced for itself.
    """
    tensors = leaves(arguments)
    if any(_turns_out_empty(leaf.shape, shape) for leaf, shape in zip(tensors, splitting.shapes, strict=True)):
        return False
    leaf_and_layout = zip(tensors, splitting.layouts, strict=True)
    return len({leaf.shape and leaf.shape[c.axis] for leaf, c in leaf_and_layout if isinstance(c, Shard)}) < 2


def _turns_out_empty(actual: Shape | None, planned: Shape | None) -> bool:
    """Return whether an axis of an argument has no entries and was planned for some."""
    if actual is None or planned is None:
        return 0 in (actual or ())
    return any(a == 0 and (p is None or isinstance(p, Size)) for a, p in zip(actual, planned, strict=True))


def _by_name(split: Split, arguments: Container) -> dict[str, tuple[Split, bool]]:
    if isinstance(split, Mapping):
        return {name: (spec, True) for name, spec in split.items()}
    if isinstance(split, (list, tuple)):
        return {name: (spec, True) for name, spec in zip(arguments.keys, split, strict=False)}
    return dict.fromkeys(arguments.keys, (None, True)) if split is None else {}


def _collect(spec: Split, explicit: bool, tree: Tree, path: str, collected: list[_Argument]) -> None:
    """Walk `spec`, a tree prefix, down the structure."""
    if isinstance(tree, StaticLeaf):
        return
    if isinstance(tree, CompositeLeaf) and issubclass(tree.spec.value_type, tf.experimental.ExtensionType):
        if spec is not None and (isinstance(spec, bool) or not isinstance(spec, int)):
            raise ArgumentError(
                f"split gives {spec!r} for {path}, a {tree.spec.value_type.__name__}, whose tensors are split alike; "
                "give an axis or None."
            )
        collected += [_Argument(p, leaf, spec, False) for p, leaf in paths(tree, path)]
    elif isinstance(tree, CompositeLeaf):
        if explicit and spec is not None:
            raise ArgumentError(
                f"split asks to split {path}, a {tree.spec.value_type.__name__}; composite tensors are kept whole. "
                "Leave it out of split, or pass its parts as ordinary tensors."
            )
        kind, count = tree.spec.value_type.__name__, _rows_of(tree)
        collected += [_Argument(p, leaf, None, False, kind, count) for p, leaf in paths(tree, path)]
    elif isinstance(tree, TensorLeaf):
        if spec is not None and (isinstance(spec, bool) or not isinstance(spec, int)):
            raise ArgumentError(f"split gives {spec!r} for {path}, which is a single tensor; give an axis or None.")
        collected.append(_Argument(path, tree, spec, explicit))
    elif isinstance(spec, (Mapping, list, tuple)):
        entries = dict(zip(tree.keys, tree.entries, strict=True))
        chosen = dict(spec.items() if isinstance(spec, Mapping) else zip(tree.keys, spec, strict=False))
        unknown = [key for key in chosen if key not in entries]
        if unknown or (not isinstance(spec, Mapping) and len(spec) != len(entries)):
            raise ArgumentError(f"split for {path} has entries {_quoted(chosen)}, but {path} has {_quoted(tree.keys)}.")
        for key, entry in entries.items():
            _collect(chosen.get(key, 0), key in chosen, entry, step_path(tree.kind, path, key), collected)
    else:
        for key, entry in zip(tree.keys, tree.entries, strict=True):
            _collect(spec, explicit, entry, step_path(tree.kind, path, key), collected)


def _axis(argument: _Argument) -> int | None:
    """Return the axis counted from the front, or None if the argument has no such axis or cannot be cut."""
    shape, axis = argument.leaf.shape, argument.axis
    dtype = argument.leaf.dtype
    if shape is None or axis is None or dtype in (tf.resource, tf.variant) or not can_be_cut(dtype):
        return None
    return axis % len(shape) if -len(shape) <= axis < len(shape) else None


def _check_ranks(split_arguments: Sequence[_Argument], split: Split) -> None:
    wrong = [
        a
        for a in split_arguments
        if a.explicit and a.axis is not None and a.leaf.shape is not None and _axis(a) is None
    ]
    if wrong:
        lines = [f"{a.path} has shape {list(a.leaf.shape or ())}, which has no axis {a.axis}" for a in wrong]
        raise ArgumentError(f"split names axes that do not exist:\n{bullet_list(lines)}")
    if (
        isinstance(split, int)
        and split not in (0, -1)
        and split_arguments
        and all(_axis(a) is None for a in split_arguments)
    ):
        lines = [f"{a.path} has shape {list(a.leaf.shape or ())}" for a in split_arguments]
        raise ArgumentError(f"split={split}, but no argument has an axis {split}:\n{bullet_list(lines)}")


def _batch_size(split_arguments: Sequence[_Argument]) -> tuple[int | None, str]:
    """Return the size that counts as the batch and the argument that decided it."""
    sized = [(a, a.leaf.shape[axis]) for a in split_arguments if (axis := _axis(a)) is not None and a.leaf.shape]
    explicit = [(a, size) for a, size in sized if a.explicit]
    if len({size for _, size in explicit}) > 1:
        lines = [f"{a.path}: {size} along axis {a.axis} (shape {list(a.leaf.shape or ())})" for a, size in explicit]
        raise ArgumentError(
            "The arguments named in split have different batch sizes:\n"
            f"{bullet_list(lines)}\n"
            "Rows are split alike over the devices; give None to arguments that are not batches."
        )
    opened = [(a, size) for a, size in sized if isinstance(size, Size)]
    for argument, size in explicit or opened or sized:
        return size, argument.path
    for argument in split_arguments:
        if argument.rows is not None:
            return argument.rows, argument.path.split(" (part")[0]
    return None, ""


def _rows_of(tree: CompositeLeaf) -> int | None:
    """Return the number of rows of a ragged or sparse tensor, if it is known."""
    if isinstance(tree.spec, tf.RaggedTensorSpec) and len(tree.parts) > 1:
        splits = tree.parts[1].shape
        return splits[0] - 1 if splits and splits[0] is not None else None
    shape = tree.spec.shape if isinstance(tree.spec, tf.SparseTensorSpec) else None
    return None if shape is None or not shape.rank else shape.as_list()[0]


def _notes(batch: int | None, deciding: str, split_arguments: Sequence[_Argument]) -> Iterator[str]:
    if not deciding:
        yield "no argument has an axis to split; everything runs on one device"
    elif batch is None:
        yield f"{_ANY_BATCH} of {deciding}: each shard takes its share of the rows, whole rows only"
    elif batch == 0:
        yield f"{deciding} has no rows; everything runs on one device"
    whole = {argument.path.split(" (part")[0]: argument.composite for argument in split_arguments if argument.composite}
    for path, kind in whole.items():
        yield f"{path} is a {kind}: it is kept whole, and split where it becomes dense"


def _notes_of_others(split_arguments: Sequence[_Argument], shapes: Sequence[Shape | None]) -> Iterator[str]:
    """Say which arguments have rows of their own, as the edges of a graph beside its nodes."""
    first = [(argument, shape[0]) for argument, shape in zip(split_arguments, shapes, strict=True) if shape]
    with_other_rows = {
        a.path: size for a, size in first if isinstance(size, Size) and size != rows(1) and not a.composite
    }
    if with_other_rows:
        counts = ", ".join(dict.fromkeys([f"{size} as {int(size)}" for size in (rows(1), *with_other_rows.values())]))
        yield (
            f"{', '.join(with_other_rows)}: not as many rows as the batch, so kept whole, and what follows from them "
            f"alone runs on one device; split={{...}} says which are cut. Shares of the work count {counts}"
        )


def _quoted(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
