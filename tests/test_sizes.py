"""The arithmetic of sizes that are not known: exact for all of them, and undecided where an answer would depend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphsplit.core.polynomials import Polynomial, UndecidedError, coefficients, values_at
from graphsplit.core.sizes import ROWS, STAND_IN, Size, joined_shapes, length, witnesses
from graphsplit.core.sizes import rows as rows_

pytestmark = pytest.mark.sampled(quick="all")


def test_witnesses() -> None:
    one = (ROWS,)
    assert [point[ROWS] for point in witnesses(one)] == [1, STAND_IN]
    assert joined_shapes([(1, 4), (STAND_IN, 4)], one) == (rows_(1), 4)
    assert joined_shapes([(3, 1), (3 * STAND_IN, STAND_IN)], one) == (rows_(3), rows_(1))
    cut, shifted, halved = (1, 10), (0, STAND_IN - 1), (1, STAND_IN // 2)
    assert joined_shapes(list(zip(cut, shifted, halved, strict=True)), one) == (None, None, None)
    assert joined_shapes([(1, 4), (STAND_IN,)], one) is None


def test_witnesses_of_lengths() -> None:
    t, u = length(0, "t"), length(1, "u")
    symbols = (ROWS, t, u)
    points = witnesses(symbols)
    expected = {
        "rows": lambda p: p[ROWS],
        "t": lambda p: p[t],
        "3*rows*t": lambda p: 3 * p[ROWS] * p[t],
        "t*u": lambda p: p[t] * p[u],
        "rows*t*t": lambda p: p[ROWS] * p[t] ** 2,
        "2*t+1": lambda p: 2 * p[t] + 1,
        "t-1": lambda p: p[t] - 1,
        "None": lambda p: min(p[t], 512),
        "7": lambda p: 7,
    }
    for text, size in expected.items():
        (found,) = joined_shapes([(size(point),) for point in points], symbols)
        assert str(found) == text
    for sometimes in (lambda p: p[t] // 2, lambda p: min(p[t], 2 * p[u]), lambda p: min(p[t], p[u] ** 2)):
        assert joined_shapes([(sometimes(point),) for point in points], symbols) == (None,)


def test_sizes_remember_where_they_come_from() -> None:
    t = Size(Polynomial.of(length(0, "t")))
    merged = rows_(1) * t * 4
    assert str(merged) == "4*rows*t"
    assert str(merged // t) == "4*rows"
    assert str(merged // rows_(2)) == "2*t"
    assert str(sum([t, 1, t])) == "2*t+1"
    assert int(merged) == STAND_IN * 1009 * 4 != merged
    assert merged == 4 * t * rows_(1)
    assert len({merged, 4 * t * rows_(1), int(merged)}) == 2
    with pytest.raises(UndecidedError, match=r"^whether 4\*rows\*t is a multiple of 5$"):
        merged // 5
    assert not isinstance(t - t, Size)


def test_sizes_are_ordered_where_that_is_so_for_all() -> None:
    t = Size(Polynomial.of(length(0, "t")))
    assert rows_(2) > rows_(1) >= 1
    assert rows_(1) + 1 > 1 >= 0 < t
    assert max(t, t + 2) == t + 2
    assert not rows_(1) < 1
    for question in (lambda: rows_(1) < 2, lambda: t <= 10, lambda: rows_(1) > t, lambda: sorted([t, rows_(1)])):
        with pytest.raises(UndecidedError, match=r"^whether .* is less than "):
            question()


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_polynomials_are_arithmetic(rows: int, steps: int) -> None:
    t = length(0, "t")
    point = {ROWS: rows, t: steps}
    x, y = Polynomial.of(ROWS), Polynomial.of(t)
    a, b = 2 * x + 3, 4 - x * y
    for made, expected in [
        (a + b, a.at(point) + b.at(point)),
        (a - b, a.at(point) - b.at(point)),
        (5 - a, 5 - a.at(point)),
        (a * b, a.at(point) * b.at(point)),
        (-a, -a.at(point)),
        ((4 * a) // 2, 2 * a.at(point)),
        ((4 * a) % 2, 0),
        (a - a, 0),
    ]:
        assert (made.at(point) if isinstance(made, Polynomial) else made) == expected
    array = np.array([a, 7, b], object)
    assert values_at(array, point).tolist() == [a.at(point), 7, b.at(point)]
    products = {m: np.prod([point[symbol] for symbol in m], dtype=int) for m in coefficients(array)}
    total = sum(products[monomial] * counts for monomial, counts in coefficients(array).items())
    assert total.tolist() == values_at(array, point).tolist()


@pytest.mark.parametrize(
    "question",
    [
        lambda rows: rows == 1,
        lambda rows: rows > 10,
        lambda rows: bool(rows),
        lambda rows: int(rows),
        lambda rows: rows // 2,
        lambda rows: rows // rows,
        lambda rows: rows % 2,
        lambda rows: 8 // rows,
        lambda rows: np.maximum(np.array(rows, object), 1),
    ],
)
def test_what_depends_on_sizes_is_not_decided(question: Callable[[Any], Any]) -> None:
    with pytest.raises(UndecidedError):
        question(Polynomial.of(ROWS))


def test_what_does_not_depend_on_sizes_is_decided() -> None:
    rows = Polynomial.of(ROWS)
    assert 2 * rows + 1 == rows + rows + 1
    assert 2 * rows + 1 > 2 * rows
    assert 2 * rows + 1 != 2 * rows
