"""Reshape: factoring two shapes into common factors, so that a layout travels through merged and split axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from graphsplit.core.symbolic_sizes import Shape
from graphsplit.program.program import Op
from graphsplit.rules.contractions import shape_operand
from graphsplit.rules.factors import Declined, Dim, Dims, Factors, Part, Resize
from graphsplit.rules.registry import register


@register("Reshape", linear=(0,))
def reshape(op: Op) -> Factors | Declined:
    """`[b, h, w, c] -> [b, h * w * c]`, `[t, b, c] -> [t * b, c]` and back: see `factor_shapes`."""
    before, after, target = op.in_shapes[0], op.out_shapes[0], shape_operand(op, 1)
    if before is None or after is None or target is None:
        return Declined("its target shape is not known when planning")
    dims_before, dims_after = factor_shapes(before, after)
    resize: dict[int, tuple[Resize, ...]] = {}
    for position, dim in enumerate(dims_after or ()):
        for factor in _factors_in(dim):
            if int(target[position]) != -1:
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
        spans_before, spans_after = _spans(before, group_before), _spans(after, group_after)
        for first, last in _candidates(spans_before, spans_after):
            there, here = _find(spans_before, first, last), _find(spans_after, first, last)
            for k in range(max(len(there), len(here)) if there and here else 0):
                factor = next(factors)
                for parts, found in ((parts_before, there), (parts_after, here)):
                    axis, outer, inner = found[min(k, len(found) - 1)]
                    parts[axis].append(Part(factor, outer, inner))
    return _dims(parts_before), _dims(parts_after)


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
            p, q = before[i] or 0, after[j] or 0
            while p != q:
                side, shape, k = (left, before, i + 1) if p < q else (right, after, j + 1)
                if k >= len(shape) or shape[k] is None:
                    return groups
                side.append(k)
                if p < q:
                    p, i = p * (shape[k] or 0), k
                else:
                    q, j = q * (shape[k] or 0), k
        groups.append((left, right))
        i, j = i + 1, j + 1
    if groups and None not in (before[i - 1], after[j - 1]):  # axes of size 1 at the end
        groups[-1][0].extend(range(i, len(before)))
        groups[-1][1].extend(range(j, len(after)))
    return groups


_Span = tuple[int, int, int]  # an axis, and the running products of the group's sizes before and after it


def _spans(shape: Shape, group: Sequence[int]) -> list[_Span]:
    spans, product = [], 1
    for axis in group:
        first, product = product, product * (shape[axis] or 0)
        spans.append((axis, first, product))
    return spans


def _candidates(before: Sequence[_Span], after: Sequence[_Span]) -> list[tuple[int, int]]:
    """Return neighbouring positions; and, for axes of size 1 (one row is a batch too), a position twice."""
    ones = {(first, last) for _, first, last in (*before, *after) if first == last}
    positions = sorted({1} | {last for _, _, last in (*before, *after)})
    return sorted({*ones, *itertools.pairwise(positions)})


def _find(spans: Sequence[_Span], first: int, last: int) -> list[tuple[int, int, int]]:
    """Return the axis that contains what lies between two positions, and how many entries are outside and inside.

    There are several if they have size 1, and none if the positions do not divide the axis.
    """
    if not first or not last or last % first:
        return []
    within = [s for s in spans if s[1] <= first and last <= s[2] and not first % s[1] and not s[2] % last]
    shortest = min((end - start for _, start, end in within), default=0)
    return [(axis, first // start, end // last) for axis, start, end in within if end - start == shortest]


def _dims(parts: Sequence[Sequence[Part]]) -> tuple[Dim, ...]:
    return tuple([None if not p else p[0].factor if len(p) == 1 and p[0][1:] == (1, 1) else tuple(p) for p in parts])
