"""Sizes that are not known when planning: of batches, of sequences, and integers that follow from them.

A serving signature, or a function traced with `None`, has a batch of unknown size, and perhaps sentences of unknown
length. It is planned with stand-ins, so that every rule meets plain integers; a size that follows is a `Size`,
an integer that remembers how. Arithmetic on shapes is followed exactly, by polynomials, and where an answer would
depend on how large something is (is it 1? is it larger than 10?) nothing is concluded: such an op runs at home, when it
is known.

Plain Python, no TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from graphsplit.core.polynomials import Point, Polynomial, Symbol, UndecidedError, at_stand_ins

STAND_IN = 27720
ROWS = Symbol("rows", STAND_IN, 1, STAND_IN)
"""The rows of a batch. Their stand-in is divisible by every small number, so that shapes can be inferred for programs
that count rows in groups, and it is unlikely as a size of anything else."""
OWN = Symbol("own rows", STAND_IN, 1, STAND_IN)
"""The rows of one shard. They occur in what a shard makes for itself, in no shape."""

_LENGTHS = ((1009, 1, 100_003), (1013, 1, 100_019), (1019, 1, 100_043))  # primes: products tell their factors
MOST_LENGTHS = len(_LENGTHS)

Shape = tuple[int | None, ...]


def length(number: int, name: str) -> Symbol:
    """Return the symbol of the size of an axis that is no batch: one of `MOST_LENGTHS`."""
    return Symbol(name, *_LENGTHS[number])


class Size(int):
    """A size that follows from unknown ones; as an integer, what it is for their stand-ins.

    Products, sums and whole quotients of sizes are sizes again.

    >>> rows(3) == 3 * STAND_IN, str(rows(3)), str(rows(6) // 2)
    (True, '3*rows', '3*rows')
    """

    polynomial: Polynomial

    def __new__(cls, polynomial: Polynomial) -> Size:
        """Return the size."""
        size = super().__new__(cls, at_stand_ins(polynomial))
        size.polynomial = polynomial
        return size

    def __add__(self, other: int) -> int:
        return _as_size(self.polynomial + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return _as_size(self.polynomial - other)

    def __mul__(self, other: Any) -> Any:
        return _as_size(self.polynomial * other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        try:
            return _as_size(self.polynomial.divided(Polynomial.of(other)))
        except (UndecidedError, ValueError):
            return int(self) // int(other)

    def __repr__(self) -> str:
        return repr(self.polynomial)

    __str__ = __repr__


def rows(count: int) -> Size:
    """Return the size of so many entries for each row of a batch of unknown size."""
    return Size(Polynomial({(ROWS,): count}))


def _as_size(value: Polynomial | int) -> int:
    return Size(value) if isinstance(value, Polynomial) else value


def as_exact(size: int | None) -> Polynomial | int | None:
    """Return a size for arithmetic that must hold for all sizes."""
    return size.polynomial if isinstance(size, Size) else size


def shape_at(shape: Shape | None, point: Point) -> Shape | None:
    """Return a shape for these sizes.

    >>> shape_at((rows(1), 4, None), {ROWS: 3})
    (3, 4, None)
    """
    return shape and tuple([size.polynomial.at(point) if isinstance(size, Size) else size for size in shape])


def without_sizes(shape: Shape | None) -> Shape | None:
    """Return a shape as TensorFlow has it: what follows from unknown sizes is unknown."""
    return shape and tuple([None if isinstance(size, Size) else size for size in shape])


def has_sizes(shape: Shape | None) -> bool:
    """Return whether an axis has a size that follows from unknown ones."""
    return any(isinstance(size, Size) for size in shape or ())


def symbols_in(shapes: Sequence[Shape | None]) -> tuple[Symbol, ...]:
    """Return the symbols that sizes in some shapes follow from."""
    sizes = [size for shape in shapes for size in shape or () if isinstance(size, Size)]
    return tuple(sorted({symbol for size in sizes for monomial in size.polynomial.terms for symbol in monomial}))


def witnesses(symbols: Sequence[Symbol]) -> list[Point]:
    """Return sizes for which shapes are inferred: one of each, many rows, long sequences of two rows.

    What is the same for all of them is constant, and `x[:10]`, which has 1 row and 10, follows from nothing. (That
    there is one at least is taken for granted.) Rows and lengths that would be broadcast to each other fit for none.
    """
    small = {symbol: symbol.small for symbol in symbols}
    points: list[Point] = [small]
    if ROWS in small:
        points.append({**small, ROWS: ROWS.large})
    if len(small) > (ROWS in small):
        points.append({symbol: 2 if symbol == ROWS else symbol.large for symbol in symbols})
    return points


def joined_shapes(shapes: Sequence[Shape | None], symbols: tuple[Symbol, ...]) -> Shape | None:
    """Return the one shape of which these are the cases for each of the `witnesses`.

    >>> joined_shapes([(1, 4, 3), (27720, 4, 5)], (ROWS,))
    (rows, 4, None)
    """
    if len(shapes) == 1:
        return shapes[0]
    if any(shape is None for shape in shapes) or len({len(shape or ()) for shape in shapes}) > 1:
        return None
    return tuple([_joined_sizes(sizes, symbols) for sizes in zip(*[shape or () for shape in shapes], strict=True)])


@functools.lru_cache(maxsize=4096)
def _joined_sizes(sizes: tuple[int | None, ...], symbols: tuple[Symbol, ...]) -> int | None:
    """Return the size that is these for the witnesses: constant, a product of symbols, or a length and a few more."""
    if None in sizes or len(set(sizes)) == 1:
        return sizes[0] if None not in sizes else None
    points = witnesses(symbols)
    for powers in itertools.product(*[range(2 if symbol == ROWS else 3) for symbol in symbols]):
        monomial = tuple(itertools.chain(*[(symbol,) * power for symbol, power in zip(symbols, powers, strict=True)]))
        values = [math.prod([point[symbol] for symbol in monomial]) for point in points]
        count, rest = divmod(sizes[0] or 0, values[0])
        if monomial and count and not rest and all(s == count * v for s, v in zip(sizes, values, strict=True)):
            return Size(Polynomial({monomial: count}))
    for symbol in symbols:
        found = _affine(sizes, symbol, points) if symbol != ROWS else None
        if found is not None:
            return found
    return None


def _affine(sizes: tuple[int | None, ...], symbol: Symbol, points: Sequence[Point]) -> Size | None:
    """Return `count * symbol + more`, if that is what the sizes are: a sentence and its end, or all but its start."""
    count, rest = divmod((sizes[-1] or 0) - (sizes[0] or 0), symbol.large - symbol.small)
    more = (sizes[0] or 0) - count * symbol.small
    fits = all(size == count * point[symbol] + more for size, point in zip(sizes, points, strict=True))
    return Size(Polynomial({(symbol,): count, (): more})) if not rest and count > 0 and more >= -1 and fits else None


def with_sizes(shape: Shape | None, hint: Shape | None) -> Shape | None:
    """Return a shape whose unknown sizes are those of `hint` where these follow from unknown ones.

    >>> with_sizes((None, None), (rows(2), 7))
    (2*rows, None)
    """
    if shape is None or hint is None or len(shape) != len(hint):
        return shape
    return tuple([h if s is None and isinstance(h, Size) else s for s, h in zip(shape, hint, strict=True)])


def agreed(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the sizes in which shapes agree.

    >>> agreed([(rows(1), 4), (rows(1), 5)])
    (rows, None)
    """
    first = shapes[0]
    if any(shape is None or first is None or len(shape) != len(first) for shape in shapes):
        return None
    return tuple([sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*[s or () for s in shapes], strict=True)])
