"""Reshape: factoring two shapes into common factors, so that a layout travels through merged and split axes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from graphsplit.core.polynomials import UndecidedError
from graphsplit.core.sizes import Shape, is_at_least, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.rules.factors import Dim, Dims, Factors, Part, Resize
from graphsplit.rules.known import ranked, shape_operand
from graphsplit.rules.registry import register


@register("Reshape", linear=(0,))
def reshape(op: Op) -> Factors:
    """`[b, h, w, c] -> [b, h * w * c]`, `[t, b, c] -> [t * b, c]` and back: see `factor_shapes`."""
    target, (before, after) = shape_operand(op, 1, "its target shape is"), ranked(op.in_shapes[0], op.out_shapes[0])
    dims_before, dims_after = factor_shapes(before, after)
    resize: dict[int, tuple[Resize, ...]] = {}
    for position, dim in enumerate(dims_after or ()):
        for factor in _factors_in(dim):
            if not is_same(target[position], -1):
                resize[factor] = (Resize(1, position, target),)
    return Factors((dims_before, None), (dims_after,), resize=resize)


def _factors_in(dim: Dim) -> list[int]:
    if dim is None:
        return []
    return [dim] if isinstance(dim, int) else [part.factor for part in dim]


def factor_shapes(before: Shape, after: Shape) -> tuple[Dims, Dims]:
    """Return the factors that two shapes of the same size have in common.

    Both shapes are cut where their running products agree; between two such cuts the axes are merged or split. There,
    a running product is a position, and an axis the span from one position to the next. What lies between two
    neighbouring positions is a factor if it divides the axis that it lies in, on both sides.

    >>> factor_shapes((32, 4, 4), (32, 16))
    ((0, 1, 2), (0, (Part(factor=1, outer=1, inner=4), Part(factor=2, outer=4, inner=1))))
    """
    parts_before: list[list[Part]] = [[] for _ in before]
    parts_after: list[list[Part]] = [[] for _ in after]
    factors = itertools.count()
    for group_before, group_after in _groups(before, after):
        if len(group_before) == len(group_after) == 1:
            part = Part(next(factors), 1, 1)
            parts_before[group_before[0]].append(part)
            parts_after[group_after[0]].append(part)
            continue
        if None in [*[before[axis] for axis in group_before], *[after[axis] for axis in group_after]]:
            continue  # of no entries, an axis may have any size
        spans_before, spans_after = _spans(before, group_before), _spans(after, group_after)
        for first, last in _candidates(spans_before, spans_after):
            places_before, places_after = _find(spans_before, first, last), _find(spans_after, first, last)
            for k in range(max(len(places_before), len(places_after)) if places_before and places_after else 0):
                factor = next(factors)
                for parts, places in ((parts_before, places_before), (parts_after, places_after)):
                    axis, outer, inner = places[min(k, len(places) - 1)]
                    parts[axis].append(Part(factor, outer, inner))
    return _dims(parts_before), _dims(parts_after)


_AnySize = Any  # a number or a polynomial
_Span = tuple[int, _AnySize, _AnySize]  # an axis, and the running products of the group's sizes before and after it


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of axes with equal products, from the left. An unknown size matches only itself."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        if before[i] is None or after[j] is None:
            if before[i] is not after[j] or before[i + 1 :].count(None) != after[j + 1 :].count(None):
                return groups
        else:
            p: _AnySize = before[i]
            q: _AnySize = after[j]
            while not is_same(p, q):
                shorter = _precedes(p, q)
                side, shape, k = (left, before, i + 1) if shorter else (right, after, j + 1)
                if shorter is None or k >= len(shape) or shape[k] is None:
                    return groups
                side.append(k)
                if shorter:
                    p, i = p * shape[k], k
                else:
                    q, j = q * shape[k], k
        groups.append((left, right))
        i, j = i + 1, j + 1
    if groups and None not in (before[i - 1], after[j - 1]):  # axes of size 1 at the end
        groups[-1][0].extend(range(i, len(before)))
        groups[-1][1].extend(range(j, len(after)))
    return groups


def _precedes(a: _AnySize, b: _AnySize) -> bool | None:
    """Return which of two running products comes first, or None if that depends on sizes."""
    if is_at_least(b, a) or is_at_least(a, b):
        return is_at_least(b, a)
    return True if quotient(b, a) is not None else False if quotient(a, b) is not None else None


def _compare(a: _AnySize, b: _AnySize) -> int:
    first = _precedes(a, b)
    if first is None:
        raise UndecidedError(f"whether {a} is less than {b}")
    return 0 if is_same(a, b) else -1 if first else 1


_IN_ORDER = functools.cmp_to_key(_compare)


def _spans(shape: Shape, group: Sequence[int]) -> list[_Span]:
    spans = []
    product: _AnySize = 1
    for axis in group:
        first, product = product, product * shape[axis]
        spans.append((axis, first, product))
    return spans


def _candidates(before: Sequence[_Span], after: Sequence[_Span]) -> list[tuple[_AnySize, _AnySize]]:
    """Return neighbouring positions; and, for axes of size 1 (one row is a batch too), a position twice."""
    positions: list[_AnySize] = []
    for position in sorted([1, *[last for _, _, last in (*before, *after)]], key=_IN_ORDER):
        if not positions or not is_same(position, positions[-1]):
            positions.append(position)
    candidates: list[tuple[_AnySize, _AnySize]] = []
    for position, following in itertools.zip_longest(positions, positions[1:]):
        if any(is_same(first, last) and is_same(first, position) for _, first, last in (*before, *after)):
            candidates.append((position, position))
        if following is not None:
            candidates.append((position, following))
    return candidates


def _find(spans: Sequence[_Span], first: _AnySize, last: _AnySize) -> list[tuple[int, _AnySize, _AnySize]]:
    """Return the axis that contains what lies between two positions, and how many entries are outside and inside.

    There are several if they have size 1, and none if the positions do not divide the axis.
    """
    if is_same(first, 0) or is_same(last, 0) or quotient(last, first) is None:
        return []
    spans_with_counts = [(axis, quotient(first, start), quotient(end, last), end - start) for axis, start, end in spans]
    within = [span for span in spans_with_counts if span[1] is not None and span[2] is not None]
    shortest = min((length for *_, length in within), key=_IN_ORDER, default=0)
    return [(axis, outer, inner) for axis, outer, inner, length in within if is_same(length, shortest)]


def _dims(parts: Sequence[Sequence[Part]]) -> tuple[Dim, ...]:
    return tuple([None if not p else p[0].factor if len(p) == 1 and p[0][1:] == (1, 1) else tuple(p) for p in parts])
