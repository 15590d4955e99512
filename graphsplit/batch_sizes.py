"""Sizes that depend on a batch size nobody knows yet: whole multiples of its rows, and integers that follow from them.

A serving signature, or a function traced with `None`, has a batch of unknown size. It is planned with a stand-in, so
that every rule meets plain integers; a size that is a multiple of the batch is a `Rows`, an integer that remembers of
how many rows it is a multiple. Arithmetic on shapes is followed exactly, by `Linear`, and where an answer would depend
on how many rows there are (is it 1? is it larger than 10?) nothing is concluded: such an op runs at home, when they are
known.

Plain Python, no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

STAND_IN = 27720
"""The number of rows a program of unknown batch size is planned for. Divisible by every small number, so that shapes
can be inferred for programs that pair rows or count them in groups, and unlikely as a size of anything else."""

WITNESSES = (1, STAND_IN)
"""The numbers of rows for which shapes are inferred. A size that is the same for all of them is constant; one that is
`k` times each of them is `k` rows; any other (`x[:10]` has 1 row and 10) is unknown."""

Shape = tuple[int | None, ...]


class UndecidedError(Exception):
    """An answer depends on the number of rows, which is not known yet."""


class Rows(int):
    """A size of `per_row` entries for each row of a batch of unknown size; as an integer, its size for the stand-in.

    >>> Rows(3) == 3 * STAND_IN, str(Rows(3)), str(Rows(1))
    (True, '3*rows', 'rows')
    """

    per_row: int

    def __new__(cls, per_row: int) -> Rows:
        """Return the size of `per_row` entries a row."""
        size = super().__new__(cls, per_row * STAND_IN)
        size.per_row = per_row
        return size

    def __repr__(self) -> str:
        return "rows" if self.per_row == 1 else f"{self.per_row}*rows"

    __str__ = __repr__


class Linear:
    """The integer `per_row * rows + rest` for an unknown number of rows, under the arithmetic that shapes need.

    Comparisons and divisions are answered if the answer is the same for every number of rows, 0 included.
    """

    __slots__ = ("per_row", "rest")

    def __init__(self, per_row: int, rest: int = 0):
        self.per_row = per_row
        self.rest = rest

    def at(self, rows: int) -> int:
        """Return the integer for so many rows."""
        return self.per_row * rows + self.rest

    def __add__(self, other: Any) -> Linear | int:
        other = _linear(other)
        return _plain(self.per_row + other.per_row, self.rest + other.rest)

    __radd__ = __add__

    def __neg__(self) -> Linear | int:
        return _plain(-self.per_row, -self.rest)

    def __sub__(self, other: Any) -> Linear | int:
        minus = _linear(other)
        return _plain(self.per_row - minus.per_row, self.rest - minus.rest)

    def __rsub__(self, other: Any) -> Linear | int:
        plus = _linear(other)
        return _plain(plus.per_row - self.per_row, plus.rest - self.rest)

    def __mul__(self, other: Any) -> Linear | int:
        if isinstance(other, Linear):
            raise UndecidedError
        return _plain(self.per_row * int(other), self.rest * int(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Linear | int:
        if isinstance(other, Linear) or not other or self.per_row % int(other) or self.rest % int(other):
            raise UndecidedError
        return _plain(self.per_row // int(other), self.rest // int(other))

    def __rfloordiv__(self, other: Any) -> Linear | int:
        raise UndecidedError

    def __mod__(self, other: Any) -> Linear | int:
        self // other
        return 0

    def __eq__(self, other: object) -> bool:
        return not self._difference(other)

    def __ne__(self, other: object) -> bool:
        return bool(self._difference(other))

    def __lt__(self, other: Any) -> bool:
        return self._difference(other) < 0

    def __le__(self, other: Any) -> bool:
        return self._difference(other) <= 0

    def __gt__(self, other: Any) -> bool:
        return self._difference(other) > 0

    def __ge__(self, other: Any) -> bool:
        return self._difference(other) >= 0

    __hash__ = None  # type: ignore[assignment]  # equality may be undecided

    def __int__(self) -> int:
        raise UndecidedError

    __index__ = __int__

    def __bool__(self) -> bool:
        raise UndecidedError

    def __repr__(self) -> str:
        return f"{self.per_row}*rows+{self.rest}"

    def _difference(self, other: object) -> int:
        difference = self - other
        if isinstance(difference, Linear):
            raise UndecidedError
        return difference


def _linear(value: Any) -> Linear:
    return value if isinstance(value, Linear) else Linear(0, int(value))


def _plain(per_row: int, rest: int) -> Linear | int:
    return Linear(per_row, rest) if per_row else rest


def as_linear(size: int | None) -> Linear | int | None:
    """Return a size with its dependence on the rows, for arithmetic."""
    return Linear(size.per_row) if isinstance(size, Rows) else size


def is_symbolic(value: np.ndarray) -> bool:
    """Return whether an array (of dtype object) has entries that depend on the number of rows."""
    return value.dtype == object and any(isinstance(entry, Linear) for entry in value.flat)


def values_at(value: np.ndarray, rows: int) -> np.ndarray:
    """Return an array of `Linear` and plain entries for so many rows, as 64-bit integers.

    >>> values_at(np.array([Linear(2, 1), 5], object), rows=10).tolist()
    [21, 5]
    """
    entries = [entry.at(rows) if isinstance(entry, Linear) else int(entry) for entry in value.flat]
    return np.array(entries, np.int64).reshape(value.shape)


def per_row(value: np.ndarray) -> np.ndarray:
    """Return by how much each entry of an array grows with each row."""
    entries = [entry.per_row if isinstance(entry, Linear) else 0 for entry in value.flat]
    return np.array(entries, np.int64).reshape(value.shape)


def linear(rest: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """Return `rest + growth * rows` as an array of `Linear` entries: the inverse of `values_at` and `per_row`."""
    entries = [Linear(int(k), int(c)) if k else int(c) for c, k in zip(rest.flat, growth.flat, strict=True)]
    return np.array([*entries, None], object)[:-1].reshape(rest.shape)  # (None keeps numpy from looking inside)


def shape_at(shape: Shape | None, rows: int) -> Shape | None:
    """Return a shape for so many rows.

    >>> shape_at((Rows(1), 4, None), rows=3)
    (3, 4, None)
    """
    return shape and tuple([size.per_row * rows if isinstance(size, Rows) else size for size in shape])


def without_rows(shape: Shape | None) -> Shape | None:
    """Return a shape as TensorFlow has it: multiples of the batch are unknown."""
    return shape and tuple([None if isinstance(size, Rows) else size for size in shape])


def has_rows(shape: Shape | None) -> bool:
    """Return whether an axis is a multiple of a batch of unknown size."""
    return any(isinstance(size, Rows) for size in shape or ())


def joined_shapes(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the one shape of which these are the cases for each of `WITNESSES`.

    >>> joined_shapes([(1, 4, 3), (27720, 4, 5)])
    (rows, 4, None)
    """
    if len(shapes) == 1:
        return shapes[0]
    if any(shape is None for shape in shapes) or len({len(shape or ()) for shape in shapes}) > 1:
        return None
    return tuple([_joined_sizes(sizes) for sizes in zip(*[shape or () for shape in shapes], strict=True)])


def _joined_sizes(sizes: Sequence[int | None]) -> int | None:
    first = sizes[0]
    if first is None or all(size == first for size in sizes):
        return first
    multiple = all(size == first * rows for size, rows in zip(sizes, WITNESSES, strict=True))
    return Rows(first) if multiple else None


def with_rows(shape: Shape | None, hint: Shape | None) -> Shape | None:
    """Return a shape whose unknown sizes are those of `hint` where that has multiples of the batch.

    >>> with_rows((None, None), (Rows(2), 7))
    (2*rows, None)
    """
    if shape is None or hint is None or len(shape) != len(hint):
        return shape
    return tuple([h if s is None and isinstance(h, Rows) else s for s, h in zip(shape, hint, strict=True)])


def agreed(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the sizes in which shapes agree.

    >>> agreed([(Rows(1), 4), (Rows(1), 5)])
    (rows, None)
    """
    first = shapes[0]
    if any(shape is None or first is None or len(shape) != len(first) for shape in shapes):
        return None
    return tuple([sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*[s or () for s in shapes], strict=True)])
