"""Integers that follow from unknown sizes: polynomials, and arrays of them.

Plain Python and numpy, no TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
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


SizesAt = Mapping[Symbol, int]


class UndecidedError(Exception):
    """An answer depends on sizes that are not known yet; the message says on what ("how large rows is")."""


Monomial = tuple[Symbol, ...]


@functools.total_ordering
class Polynomial:
    """An integer that follows from unknown sizes, under the arithmetic that shapes need.

    Comparisons and divisions are answered if the answer is the same for all sizes.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms = {monomial: count for monomial, count in sorted(terms.items()) if count}

    @classmethod
    def of(cls, value: Any) -> Polynomial:
        """Return a number, a symbol or a size (`sizes.Size`) as a polynomial."""
        if isinstance(value, Polynomial):
            return value
        if hasattr(value, "polynomial"):
            return cls(value.polynomial.terms)
        return cls({(value,): 1}) if isinstance(value, Symbol) else cls({(): int(value)})

    def substituted(self, point: SizesAt) -> Polynomial:
        """Return what follows if some sizes are known."""
        terms: dict[Monomial, int] = {}
        for monomial, count in self.terms.items():
            other_symbols = tuple([symbol for symbol in monomial if symbol not in point])
            factor = math.prod([point[symbol] for symbol in monomial if symbol in point])
            terms[other_symbols] = terms.get(other_symbols, 0) + count * factor
        return Polynomial(terms)

    @property
    def number(self) -> int | None:
        """The integer that this is for all sizes, or None."""
        return self.terms.get((), 0) if not any(self.terms) else None

    def at(self, point: SizesAt) -> int:
        """Return the integer for these sizes."""
        return sum(count * math.prod([point[symbol] for symbol in monomial]) for monomial, count in self.terms.items())

    def __add__(self, other: Any) -> Any:
        terms = dict(self.terms)
        for monomial, count in Polynomial.of(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + count
        return plain(Polynomial(terms))

    __radd__ = __add__

    def __neg__(self) -> Any:
        return plain(Polynomial({monomial: -count for monomial, count in self.terms.items()}))

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
        return plain(Polynomial(terms))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        divisor = Polynomial.of(other)
        if len(divisor.terms) != 1 or any(divisor.terms):  # by a size that may be 0, or by nothing at all
            raise UndecidedError(f"whether {self} is a multiple of {divisor}")
        return self.divided(divisor)

    def __rfloordiv__(self, other: Any) -> Any:
        raise UndecidedError(f"whether {other} is a multiple of {self}")

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
            symbols = list(monomial)
            for symbol in below:
                if symbol not in symbols:
                    raise UndecidedError(f"whether {self} is a multiple of {divisor}")
                symbols.remove(symbol)
            if count % by:
                raise UndecidedError(f"whether {self} is a multiple of {divisor}")
            terms[tuple(symbols)] = count // by
        return plain(Polynomial(terms))

    def __eq__(self, other: object) -> bool:
        return other is not None and not self._difference(other)

    def __lt__(self, other: Any) -> bool:
        return self._difference(other) < 0

    __hash__ = None  # type: ignore[assignment]  # equality may be undecided

    def __int__(self) -> int:
        raise UndecidedError(f"how large {self} is")

    __index__ = __int__

    def __bool__(self) -> bool:
        raise UndecidedError(f"whether {self} is 0")

    def __repr__(self) -> str:
        parts = [
            "*".join([*([str(count)] if count != 1 or not monomial else []), *[symbol.name for symbol in monomial]])
            for monomial, count in reversed(self.terms.items())
        ]
        return "+".join(parts).replace("+-", "-") or "0"

    def _difference(self, other: object) -> int:
        difference = self - other
        if isinstance(difference, Polynomial):
            raise UndecidedError(f"whether {self} is {other}, or how far from it")
        return int(difference)


def plain(polynomial: Polynomial) -> Polynomial | int:
    """Return a polynomial that is a number as that number."""
    number = polynomial.number
    return polynomial if number is None else number


def at_stand_ins(polynomial: Polynomial) -> int:
    """Return what a polynomial is while planning."""
    symbols = {symbol for monomial in polynomial.terms for symbol in monomial}
    return polynomial.at({symbol: symbol.stand_in for symbol in symbols})


def is_symbolic(value: np.ndarray) -> bool:
    """Return whether an array (of dtype object) has entries that depend on unknown sizes."""
    return value.dtype == object and any(isinstance(entry, Polynomial) for entry in value.flat)


def as_entries(value: Any) -> np.ndarray:
    """Return a number, polynomial or size, or a list of such, as an array of dtype object.

    >>> as_entries([Polynomial({}), 2]).shape, as_entries(2).shape
    ((2,), ())
    """
    return np.array([*value, None], object)[:-1] if isinstance(value, list) else as_entries([value]).reshape(())


def _mapped(function: Callable[[Any], Any], value: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array of the same shape with `function` of each entry. (A None keeps numpy from looking inside.)"""
    return np.array([*map(function, value.flat), None], object)[:-1].reshape(value.shape).astype(dtype)


def values_at(value: np.ndarray, point: SizesAt) -> np.ndarray:
    """Return an array of polynomials and plain entries for these sizes, as 64-bit integers.

    >>> rows = Symbol("rows", 100, 1, 100)
    >>> values_at(np.array([Polynomial.of(rows) * 2 + 1, 5], object), {rows: 10}).tolist()
    [21, 5]
    """
    return _mapped(lambda entry: entry.at(point) if isinstance(entry, Polynomial) else int(entry), value, np.int64)


def values_planned(value: np.ndarray) -> np.ndarray:
    """Return an array of polynomials and plain entries for the stand-ins."""
    return _mapped(lambda e: at_stand_ins(e) if isinstance(e, Polynomial) else int(e), value, np.int64)


def substituted(value: np.ndarray, point: SizesAt) -> np.ndarray:
    """Return an array of polynomials and plain entries with some sizes known."""
    return _mapped(
        lambda entry: plain(entry.substituted(point)) if isinstance(entry, Polynomial) else entry, value, object
    )


def coefficients(value: np.ndarray) -> dict[Monomial, np.ndarray]:
    """Return an array of polynomials as one array of numbers for each of their monomials."""
    polynomials = [Polynomial.of(entry) for entry in value.flat]
    monomials = sorted({monomial for polynomial in polynomials for monomial in polynomial.terms})
    return {
        monomial: np.array([p.terms.get(monomial, 0) for p in polynomials], np.int64).reshape(value.shape)
        for monomial in monomials
    }
