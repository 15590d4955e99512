"""Values of variables that are several: taken apart, put together, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.layouts import Cut, MeshDivision, Replicate


def pieces_of(value: tf.Tensor, division: MeshDivision) -> Iterator[tf.Tensor]:
    """Yield what each part has of a value; each is cut off when it is asked for.

    >>> import tensorflow as tf
    >>> from graphsplit.core.layouts import Cut
    >>> [piece.numpy().tolist() for piece in pieces_of(tf.range(5), Cut(0, 5, 2))]
    [[0, 1, 2], [3, 4]]
    """
    if isinstance(division, Replicate):
        yield from [value] * division.parts
    elif isinstance(division, Cut):
        axis = division.axis
        for blocks in division.ranges:
            whole = division.parts == 1
            yield value if whole else _joined([_slice(value, axis, own.start, len(own)) for own in blocks], axis)
    else:
        for own, column in zip(division.rows, pieces_of(value, division.columns), strict=True):
            yield from pieces_of(column, own)


def whole_of(values: Iterable[tf.Tensor | None], division: MeshDivision) -> tf.Tensor | None:
    """Return the value whose parts these are; None if a part is missing of which there is no copy.

    Of copies no more are asked for than the first that is there.
    """
    if isinstance(division, Replicate):
        return next((value for value in values if value is not None), None)
    values = list(values)
    if isinstance(division, Cut):
        there = [value for value in values if value is not None]
        if len(there) < len(values):
            return None
        axis, cut = division.axis, division.ranges
        if division.blocks > 1 and len(there) > 1:
            each = [tf.split(value, list(map(len, own)), axis) for value, own in zip(there, cut, strict=True)]
            there = [pieces[k] for k in range(division.blocks) for pieces in each]
        return _joined(there, axis)
    columns = [whole_of(own, rows) for own, rows in zip(_by_column(values, division), division.rows, strict=True)]
    return whole_of(columns, division.columns)


def gradient_of(values: Sequence[tf.Tensor], gradients: Sequence[Any], division: MeshDivision) -> tf.Tensor | None:
    """Return the gradient by a variable, given those by its parts, some of which may be None."""
    if len(gradients) == 1 or all(gradient is None for gradient in gradients):
        return gradients[0]
    if isinstance(division, Replicate):
        return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None])
    if isinstance(division, Cut):
        pairs = zip(values, gradients, strict=True)
        return whole_of([tf.zeros_like(v) if g is None else tf.convert_to_tensor(g) for v, g in pairs], division)
    grouped = list(zip(_by_column(values, division), _by_column(gradients, division), division.rows, strict=True))
    wholes = [whole_of(own, rows) for own, _, rows in grouped]
    return gradient_of(wholes, [gradient_of(*group) for group in grouped], division.columns)


def _by_column(values: Sequence[Any], division: Any) -> list[Sequence[Any]]:
    pairs = zip(division.firsts, division.rows, strict=True)
    return [values[first : first + own.parts] for first, own in pairs]


def _joined(pieces: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    return tf.concat(pieces, axis) if len(pieces) > 1 else pieces[0]


def _slice(value: tf.Tensor, axis: int, first: int, length: int) -> tf.Tensor:
    begin = [first if k == axis else 0 for k in range(value.shape.rank)]
    size = [length if k == axis else -1 for k in range(value.shape.rank)]
    return tf.slice(value, begin, size)
