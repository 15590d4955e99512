"""Sizes that follow from data: between which numbers they are, as far as the operations say that they come from."""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphsplit.core.errors import ArgumentError
from graphsplit.core.sizes.symbolic_sizes import Shape
from graphsplit.program.program import Op, Program

UnknownSize = int | tuple[int, int] | None
"""What sizes count as that follow from data: one number, or the least and the most; None for what can be known."""

_NO_MORE_THAN_READ = frozenset(
    {
        *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "DynamicPartition", "ListDiff"),
        *("SetDiff1D", "Reshape", "Slice", "StridedSlice", "NonMaxSuppressionV3", "NonMaxSuppressionV4"),
        *("NonMaxSuppressionV5",),
    }
)
"""Operations that make no more entries than their first operand has, wherever their sizes follow from."""
_TOLD = frozenset({"Placeholder", "Const", "NoOp"})


def most_unknown_size(program: Program) -> int | None:
    """Return the most that any size can be that follows from data; None if there is none, or nothing says how large.

    It is as many entries as there are in the largest tensor that is read where such sizes come from.
    """
    found: list[int] = []
    for op in _sources(program):
        shape = op.in_shapes[0] if op.in_shapes else None
        if op.type not in _NO_MORE_THAN_READ or shape is None:
            return None
        found.append(math.prod([int(size or 0) for size in shape]))
    return max(found, default=None)


def _sources(program: Program) -> Iterator[Op]:
    """Yield the operations that make what has unknown sizes of what has none."""
    for op in program.ops:
        for body in op.bodies.values():
            yield from _sources(body)
        if not op.bodies and op.type not in _TOLD and _is_open(op.out_shapes) and not _is_open(op.in_shapes):
            yield op


def _is_open(shapes: tuple[Shape | None, ...] | list[Shape | None]) -> bool:
    return any(shape is None or None in shape for shape in shapes)


def checked_unknown_size(size: object) -> UnknownSize:
    """Return what `unknown_size` says.

    Raises:
      ArgumentError: unless it is a number of at least 0, or two that grow.

    >>> checked_unknown_size((1, 128))
    (1, 128)
    """
    if size is None:
        return None
    if _is_size(size):
        return size  # type: ignore[return-value]
    if isinstance(size, tuple) and len(size) == 2 and all(map(_is_size, size)) and size[0] <= size[1]:
        return size
    raise ArgumentError(
        f"unknown_size={size!r}: it is what a size counts as that follows from data: a number, 128, or the least and "
        "the most, (1, 128)."
    )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0
