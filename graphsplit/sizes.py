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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Symbol(NamedTuple):
    """Something of unknown size.

    Attributes:
      name: how it is printed.
      stand_in: what it counts as while planning.
      small, large: what it is while shapes are inferred, once each.
    """

    name: str
    stand_in: int
    small: int
    large: int


STAND_IN = 27720
ROWS = Symbol("rows", STAND_IN, 1, STAND_IN)
"""The rows of a batch. Their stand-in is divisible by every small number, so that shapes can be inferred for programs
that count rows in groups, and it is unlikely as a size of anything else."""
OWN = Symbol("own rows", STAND_IN, 1, STAND_IN)
"""The rows of one shard. They occur in what a shard makes for itself, in no shape."""

_LENGTHS = ((1009, 1, 100_003), (1013, 1, 100_019), (1019, 1, 100_043))  # primes: products tell their factors
MOST_LENGTHS = len(_LENGTHS)

Shape = tuple[int | None, ...]
Point = Mapping[Symbol, int]


def length(number: int, name: str) -> Symbol:
    """Return the symbol of the size of an axis that is no batch: one of `MOST_LENGTHS`."""
    return Symbol(name, *_LENGTHS[number])


class UndecidedError(Exception):
    """An answer depends on a size that is not known yet."""


Monomial = tuple[Symbol, ...]


class Polynomial:
    """An integer that follows from unknown sizes, under the arithmetic that shapes need.

    Comparisons and divisions are answered if the answer is the same for all sizes.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms = {monomial: count for monomial, count in sorted(terms.items()) if count}

    @classmethod
    def of(cls, value: Any) -> Polynomial:
        """Return a number, a `Size` or a symbol as a polynomial."""
        if isinstance(value, Polynomial):
            return value
        if isinstance(value, Size):
            return value.polynomial
        return cls({(value,): 1}) if isinstance(value, Symbol) else cls({(): int(value)})

    def substituted(self, point: Point) -> Polynomial:
        """Return what follows if some sizes are known."""
        terms: dict[Monomial, int] = {}
        for monomial, count in self.terms.items():
            rest = tuple([symbol for symbol in monomial if symbol not in point])
            known = math.prod([point[symbol] for symbol in monomial if symbol in point])
            terms[rest] = terms.get(rest, 0) + count * known
        return Polynomial(terms)

    @property
    def number(self) -> int | None:
        """The integer that this is for all sizes, or None."""
        return self.terms.get((), 0) if not any(self.terms) else None

    def at(self, point: Point) -> int:
        """Return the integer for these sizes."""
        return sum(count * math.prod([point[symbol] for symbol in monomial]) for monomial, count in self.terms.items())

    def __add__(self, other: Any) -> Any:
        terms = dict(self.terms)
        for monomial, count in Polynomial.of(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + count
        return _plain(Polynomial(terms))

    __radd__ = __add__

    def __neg__(self) -> Any:
        return _plain(Polynomial({monomial: -count for monomial, count in self.terms.items()}))

    def __sub__(self, other: Any) -> Any:
        return self + -Polynomial.of(other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        terms: dict[Monomial, int] = {}
        pairs = itertools.product(self.terms.items(), Polynomial.of(other).terms.items())
        for (a, m), (b, n) in pairs:
            monomial = tuple(sorted(a + b))
            terms[monomial] = terms.get(monomial, 0) + m * n
        return _plain(Polynomial(terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        divisor = Polynomial.of(other)
        if len(divisor.terms) != 1 or any(divisor.terms):  # by a size that may be 0, or by nothing at all
            raise UndecidedError
        return self.divided(divisor)

    def __rfloordiv__(self, other: Any) -> Any:
        raise UndecidedError

    def __mod__(self, other: Any) -> Any:
        self // other
        return 0

    def divided(self, divisor: Polynomial) -> Any:
        """Return the quotient by a single term.

        Raises:
          UndecidedError: if it is not whole.
        """
        ((below, by),) = divisor.terms.items()
        terms = {}
        for monomial, count in self.terms.items():
            rest = list(monomial)
            for symbol in below:
                if symbol not in rest:
                    raise UndecidedError
                rest.remove(symbol)
            if count % by:
                raise UndecidedError
            terms[tuple(rest)] = count // by
        return _plain(Polynomial(terms))

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
        parts = [
            "*".join([*([str(count)] if count != 1 or not monomial else []), *[symbol.name for symbol in monomial]])
            for monomial, count in reversed(self.terms.items())
        ]
        return "+".join(parts).replace("+-", "-") or "0"

    def _difference(self, other: object) -> int:
        difference = self - other
        if isinstance(difference, Polynomial):
            raise UndecidedError
        return int(difference)


def _plain(polynomial: Polynomial) -> Polynomial | int:
    number = polynomial.number
    return polynomial if number is None else number


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


def at_stand_ins(polynomial: Polynomial) -> int:
    """Return what a polynomial is while planning."""
    symbols = {symbol for monomial in polynomial.terms for symbol in monomial}
    return polynomial.at({symbol: symbol.stand_in for symbol in symbols})


def as_exact(size: int | None) -> Polynomial | int | None:
    """Return a size for arithmetic that must hold for all sizes."""
    return size.polynomial if isinstance(size, Size) else size


def is_symbolic(value: np.ndarray) -> bool:
    """Return whether an array (of dtype object) has entries that depend on unknown sizes."""
    return value.dtype == object and any(isinstance(entry, Polynomial) for entry in value.flat)


def _mapped(function: Callable[[Any], Any], value: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array of the same shape with `function` of each entry. (A None keeps numpy from looking inside.)"""
    return np.array([*map(function, value.flat), None], object)[:-1].reshape(value.shape).astype(dtype)


def values_at(value: np.ndarray, point: Point) -> np.ndarray:
    """Return an array of polynomials and plain entries for these sizes, as 64-bit integers.

    >>> values_at(np.array([Polynomial.of(ROWS) * 2 + 1, 5], object), {ROWS: 10}).tolist()
    [21, 5]
    """
    return _mapped(lambda entry: entry.at(point) if isinstance(entry, Polynomial) else int(entry), value, np.int64)


def values_planned(value: np.ndarray) -> np.ndarray:
    """Return an array of polynomials and plain entries for the stand-ins."""
    return _mapped(lambda e: at_stand_ins(e) if isinstance(e, Polynomial) else int(e), value, np.int64)


def substituted(value: np.ndarray, point: Point) -> np.ndarray:
    """Return an array of polynomials and plain entries with some sizes known."""
    return _mapped(
        lambda entry: _plain(entry.substituted(point)) if isinstance(entry, Polynomial) else entry, value, object
    )


def coefficients(value: np.ndarray) -> dict[Monomial, np.ndarray]:
    """Return an array of polynomials as one array of numbers for each of their monomials."""
    polynomials = [Polynomial.of(entry) for entry in value.flat]
    found = sorted({monomial for polynomial in polynomials for monomial in polynomial.terms})
    return {
        monomial: np.array([p.terms.get(monomial, 0) for p in polynomials], np.int64).reshape(value.shape)
        for monomial in found
    }


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
    """Return sizes for which shapes are inferred: one of each, many rows, long sequences.

    What is the same for all of them is constant, and `x[:10]`, which has 1 row and 10, follows from nothing. (That
    there is one at least is taken for granted.)
    """
    small = {symbol: symbol.small for symbol in symbols}
    points: list[Point] = [small]
    if ROWS in small:
        points.append({**small, ROWS: ROWS.large})
    if len(small) > (ROWS in small):
        points.append({s: s.small if s == ROWS else s.large for s in symbols})
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
