"""Sizes that are not known when planning: of batches, of sequences, and integers that follow from them; shares of rows.

A serving signature, or a function traced with `None`, has a batch of unknown size, and perhaps sentences of unknown
length. It is planned with stand-ins, by which costs are estimated; a size that follows is a `Size`, an integer that
remembers how. Arithmetic on shapes is followed exactly, by polynomials, which is how rules meet sizes, and where an
answer would depend on how large something is (is it 1? is it larger than 10?) nothing is concluded: such an op runs at
the default device, when it is known.

Rows are shared out whole (`apportion`), for shares of devices that are not.

Plain Python and numpy, no TensorFlow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from graphsplit.core.polynomials import Monomial, Polynomial, SizesAt, Symbol, UndecidedError, at_stand_ins

STAND_IN = 27720
ROWS = Symbol("rows", STAND_IN, 1, STAND_IN)
"""The rows of a batch. Their stand-in is divisible by every small number, so that shapes can be inferred for programs
that count rows in groups, and it is unlikely as a size of anything else."""
OWN = Symbol("own rows", STAND_IN, 1, STAND_IN)
"""The rows of one shard. They occur in what a shard makes for itself, in no shape."""

_STAND_INS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
_LARGE = (4099, 4111, 4127, 4129, 4133, 4139, 4153, 4157)
_LENGTHS = [(stand_in, 1, large) for stand_in, large in zip(_STAND_INS, _LARGE, strict=True)]
"""Primes: products tell their factors. Those of two large ones, of few rows and channels, are small integers."""
MOST_LENGTHS = len(_LENGTHS)
_DIVISIBLE = 840  # by all numbers up to 8

Shape = tuple[int | None, ...]


def length(number: int, name: str) -> Symbol:
    """Return the symbol of the size of an axis that is no batch: one of `MOST_LENGTHS`."""
    return Symbol(name, *_LENGTHS[number])


class Size(int):
    """A size that follows from unknown ones; as an integer, what it is for their stand-ins.

    Products, sums and whole quotients of sizes are sizes again; others are not known. A size equals what is the same
    whatever the unknown ones are, never a number. Which of two is smaller is answered where it is so for all sizes, and
    raises `UndecidedError` elsewhere; what things cost is compared by `int(size)`.

    >>> int(rows(3)) == 3 * STAND_IN, rows(3) == 3 * STAND_IN, str(rows(6) // 2), rows(3) > rows(2)
    (True, False, '3*rows', True)
    """

    polynomial: Polynomial

    def __new__(cls, polynomial: Polynomial) -> Size:
        """Return the size."""
        size = super().__new__(cls, at_stand_ins(polynomial))
        size.polynomial = polynomial
        return size

    def __add__(self, other: int) -> int:
        return as_size(self.polynomial + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return as_size(self.polynomial - other)

    def __mul__(self, other: Any) -> Any:
        return as_size(self.polynomial * other) if isinstance(other, int) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        count = quotient(self, other)
        if count is None:
            raise UndecidedError(f"whether {self} is a multiple of {other}")
        return as_size(count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, np.integer, Polynomial)) and is_same(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return _is_less(self, other)

    def __gt__(self, other: int) -> bool:
        return _is_less(other, self)

    def __le__(self, other: int) -> bool:
        return not _is_less(other, self)

    def __ge__(self, other: int) -> bool:
        return not _is_less(self, other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(self.polynomial)

    __str__ = __repr__


def rows(count: int) -> Size:
    """Return the size of so many entries for each row of a batch of unknown size."""
    return Size(Polynomial({(ROWS,): count}))


def as_rows(size: Any, symbol: Symbol) -> Any:
    """Return a size with the rows of the batch in the place of a symbol.

    >>> one = length(0, "x.shape[0]")
    >>> as_rows(Size(Polynomial({(one,): 2, (): 1})), one), as_rows(5, one)
    (2*rows+1, 5)
    """
    if not isinstance(size, Size):
        return size
    terms = {
        tuple([ROWS if s == symbol else s for s in monomial]): count
        for monomial, count in size.polynomial.terms.items()
    }
    return Size(Polynomial({tuple(sorted(monomial)): count for monomial, count in terms.items()}))


def as_size(value: Any) -> int:
    """Return what exact arithmetic gives as a size."""
    if type(value) is int:
        return value
    if isinstance(value, Size):
        return value
    return Size(value) if isinstance(value, Polynomial) else int(value)


def as_exact(size: int | None) -> Polynomial | int | None:
    """Return a size for arithmetic that must hold for all sizes."""
    return size.polynomial if isinstance(size, Size) else size


# Questions about sizes, exact or not known (`Size`, `Polynomial`), whose answers hold whatever the unknown ones are.


def is_same(a: Any, b: Any) -> bool:
    """Return whether two sizes, or None, are the same for all sizes. (`rows` and 1 are not, though they may be equal.)

    >>> is_same(rows(2), rows(1) + rows(1)), is_same(rows(1), STAND_IN), is_same(None, 1)
    (True, False, False)
    """
    if type(a) is int and type(b) is int:  # nearly always: polynomials of numbers made planning twice as slow
        return a == b
    if a is None or b is None:
        return a is b
    return Polynomial.of(a).terms == Polynomial.of(b).terms


def are_same(before: Sequence[Any] | None, after: Sequence[Any] | None) -> bool:
    """Return whether two shapes are the same for all sizes."""
    if before is None or after is None:
        return before is after
    return len(before) == len(after) and all(map(is_same, before, after))


def is_one(size: Any) -> bool:
    """Return whether a size is the number 1. (That a batch may have one row does not count: see `witnesses`.)"""
    return is_same(size, 1)


def quotient(size: Any, by: Any) -> Any:
    """Return how often a size has another one in it, or None where that is not a whole number for all sizes.

    >>> quotient(rows(6), 2), quotient(rows(6), rows(2)), quotient(rows(1), 2), quotient(6, 3)
    (3*rows, 3, None, 2)
    """
    if type(size) is int and type(by) is int and by > 0:
        return None if size % by else size // by
    if is_same(by, 0):
        return None
    if is_same(size, by):
        return 1
    divisor = Polynomial.of(by)
    if len(divisor.terms) != 1:
        return None
    try:
        return Polynomial.of(size).divided(divisor)
    except UndecidedError:
        return None


def is_at_least(a: Any, b: Any) -> bool:
    """Return whether a size is another one or more for all sizes, if there is one at least of everything.

    >>> is_at_least(rows(2), rows(1)), is_at_least(rows(1), 1), is_at_least(rows(1), 2), is_at_least(10, rows(1))
    (True, True, False, False)
    """
    if type(a) is int and type(b) is int:
        return a >= b
    counts = Polynomial.of(Polynomial.of(a) - Polynomial.of(b)).terms
    return all(count > 0 for monomial, count in counts.items() if monomial) and sum(counts.values()) >= 0


def _is_less(a: Any, b: Any) -> bool:
    """Return whether a size is smaller than another one, if that is so, or is not so, for all sizes."""
    if is_at_least(a, b):
        return False
    if is_at_least(b, Polynomial.of(a) + 1):
        return True
    raise UndecidedError(f"whether {a} is less than {b}")


def shape_at(shape: Shape | None, point: SizesAt) -> Shape | None:
    """Return a shape for these sizes.

    >>> shape_at((rows(1), 4, None), {ROWS: 3})
    (3, 4, None)
    """
    return shape and tuple([size.polynomial.at(point) if isinstance(size, Size) else size for size in shape])


def point_of(shapes: Mapping[str, Shape | None], sizes: Mapping[str, Shape | None]) -> SizesAt | None:
    """Return what the unknown sizes in shapes are, given some of the same names that are known; None if none are these.

    >>> point_of({"x": (rows(1), 4), "y": (rows(1),)}, {"x": (3, 4), "y": (3,)})
    {Symbol(name='rows', stand_in=27720, small=1, large=27720): 3}
    """
    point = {}
    for name, shape in shapes.items():
        for size, known_size in zip(shape or (), sizes[name] or (), strict=False):
            if isinstance(size, Size) and known_size is not None and len(symbols := symbols_in([(size,)])) == 1:
                [symbol], polynomial = symbols, size.polynomial
                least = polynomial.at({symbol: 0})
                point[symbol] = (known_size - least) // (polynomial.at({symbol: 1}) - least)
    try:
        fits = all(shape_at(shape, point) == sizes[name] for name, shape in shapes.items())
    except KeyError:
        return None
    return point if fits else None


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


def witnesses(symbols: Sequence[Symbol], largest: int = 0) -> list[SizesAt]:
    """Return sizes for which shapes are inferred: one of each, each of them alone large, long sequences of two rows.

    What is the same for all of them is constant, and `x[:10]`, which has 1 row and 10, follows from nothing. (That
    there is one at least is taken for granted.) Rows and lengths that would be broadcast to each other fit for none.

    Lengths are primes where all are large, and have many divisors where they alone are: so neither the longer one of
    two, nor what is the first only where it is less than twice the second, nor one that is padded to an even number, is
    taken for a length, or one and a few.

    Args:
      symbols: the sizes that are not known.
      largest: of the numbers with which they may be compared: some of the sizes are larger.
    """
    small = {symbol: symbol.small for symbol in symbols}
    lengths = [symbol for symbol in symbols if symbol != ROWS]
    points: list[SizesAt] = [small]
    if ROWS in small:
        points.append({**small, ROWS: ROWS.large})
        if largest >= ROWS.large:
            points.append({**small, ROWS: ROWS.large * (largest // ROWS.large + 1)})
    if lengths:
        points += [{**small, symbol: _DIVISIBLE * (largest // _DIVISIBLE + 2)} for symbol in lengths]
        points.append({symbol: 2 if symbol == ROWS else symbol.large for symbol in symbols})
    return points


def joined_shapes(shapes: Sequence[Shape | None], symbols: tuple[Symbol, ...], largest: int = 0) -> Shape | None:
    """Return the one shape of which these are the cases for each of the `witnesses`.

    >>> joined_shapes([(1, 4, 3), (27720, 4, 5)], (ROWS,))
    (rows, 4, None)
    """
    if len(shapes) == 1:
        return shapes[0]
    if any(shape is None for shape in shapes) or len({len(shape or ()) for shape in shapes}) > 1:
        return None
    columns = zip(*[shape or () for shape in shapes], strict=True)
    return tuple([_joined_sizes(sizes, symbols, largest) for sizes in columns])


@functools.lru_cache(maxsize=4096)
def _joined_sizes(sizes: tuple[int | None, ...], symbols: tuple[Symbol, ...], largest: int) -> int | None:
    """Return the size that is these for the witnesses: constant, a product of symbols, or a length and a few more."""
    if None in sizes or len(set(sizes)) == 1:
        return sizes[0] if None not in sizes else None
    points = witnesses(symbols, largest)
    lengths = _lengths_in(sizes[-1] or 0, symbols)
    for power in range(3):
        monomial = tuple(sorted((*lengths, *(ROWS,) * power)))
        values = [math.prod([point.get(symbol, 0) for symbol in monomial]) for point in points]
        count, remainder = divmod(sizes[0] or 0, values[0] or 1)
        if monomial and count and not remainder and all(s == count * v for s, v in zip(sizes, values, strict=True)):
            return Size(Polynomial({monomial: count}))
    for symbol in symbols:
        size = _affine(sizes, symbol, points) if symbol != ROWS else None
        if size is not None:
            return size
    return None


def _lengths_in(size: int, symbols: Sequence[Symbol]) -> Monomial:
    """Return the lengths of which a size is a product where all are large, each at most twice."""
    lengths: list[Symbol] = []
    for symbol in symbols:
        while symbol != ROWS and size and size % symbol.large == 0 and lengths.count(symbol) < 2:
            size //= symbol.large
            lengths.append(symbol)
    return tuple(lengths)


def _affine(sizes: tuple[int | None, ...], symbol: Symbol, points: Sequence[SizesAt]) -> Size | None:
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


def merged(shape: Shape | None, hint: Shape | None) -> Shape | None:
    """Return a shape with the sizes that only a hint knows.

    >>> merged((None, 4, None), (3, 5, None))
    (3, 4, None)
    """
    if shape is None or hint is None:
        return hint if shape is None else shape
    return tuple([hint_size if size is None else size for size, hint_size in zip(shape, hint, strict=True)])


def confirmed(claimed: Shape | None, inferred: Shape | None, hint: Shape | None = None) -> Shape | None:
    """Return what is true of a shape that is claimed: what was also found, or what a hint knows.

    >>> confirmed((6, 4, None), (None, 4, rows(1)))
    (None, 4, rows)
    >>> confirmed((6, 4), (None, 4), hint=(6, None))
    (6, 4)
    """
    if claimed is None or inferred is None or len(claimed) != len(inferred):
        return hint
    hints = hint if hint is not None and len(hint) == len(claimed) else (None,) * len(claimed)
    sizes = zip(claimed, inferred, hints, strict=True)
    return tuple([f if c is None or is_same(c, f) else k for c, f, k in sizes])


def agreed(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the sizes in which shapes agree.

    >>> agreed([(rows(1), 4), (rows(1), 5)])
    (rows, None)
    """
    first = shapes[0]
    if any(shape is None or first is None or len(shape) != len(first) for shape in shapes):
        return None
    columns = zip(*[shape or () for shape in shapes], strict=True)
    return tuple([sizes[0] if all(is_same(size, sizes[0]) for size in sizes) else None for sizes in columns])


_FINEST_SHARE = 1000  # weights are rounded to fractions with at most this denominator


def apportion(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Share `rows` among devices in proportion to `weights`, whole rows, largest remainders first.

    The result sums to `rows` and differs from the exact shares by less than one row each
    (Hamilton's method). Equal weights give the first devices one row more.

    >>> apportion(10, [1, 1, 1])
    (4, 3, 3)
    >>> apportion(9, [3, 1])
    (7, 2)
    """
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda d: (shares[d] - exact[d], d))
    positive = [d for d in by_remainder if weights[d] > 0]
    for d in positive[: rows - sum(shares)]:
        shares[d] += 1
    return tuple(shares)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers in the same proportion.

    >>> whole_weights([1, 0.5])
    [2, 1]
    """
    shares = [Fraction(weight / max(weights)).limit_denominator(_FINEST_SHARE) for weight in weights]
    common = math.lcm(*[share.denominator for share in shares])
    counts = [int(share * common) for share in shares]
    return [count // math.gcd(*counts) for count in counts]
