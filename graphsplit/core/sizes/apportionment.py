"""Apportionment: whole rows for shares that are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

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
