"""Reshape: factoring two shapes into common factors, so that a layout travels through merged and split axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from graphsplit.programs import Op, Shape
from graphsplit.rules.contractions import shape_operand
from graphsplit.rules.registry import Declined, Dim, Dims, Factors, Part, Resize, register


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

    Both shapes are cut where their running products agree; between two such cuts the axes are merged or split, and
    each side is refined at the other's cuts where they divide one another. What does not divide carries no factor.

    >>> factor_shapes((32, 4, 4), (32, 16))
    ((0, 1, 2), (0, (Part(factor=1, outer=1, inner=4), Part(factor=2, outer=4, inner=1))))
    """
    dims_before: list[Dim] = [None] * len(before)
    dims_after: list[Dim] = [None] * len(after)
    factor = 0
    for group_before, group_after in _groups(before, after):
        if len(group_before) == len(group_after) == 1:
            dims_before[group_before[0]] = dims_after[group_after[0]] = factor
            factor += 1
            continue
        sizes = _common_factors([before[i] for i in group_before], [after[i] for i in group_after])
        if sizes is None:
            continue
        numbered = list(enumerate(sizes, factor))
        _assign(dims_before, before, group_before, numbered)
        _assign(dims_after, after, group_after, numbered)
        factor += len(sizes)
    return tuple(dims_before), tuple(dims_after)


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of axes with equal products, from the left. An unknown size matches only itself."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        left, right = [i], [j]
        if before[i] is None or after[j] is None:
            if before[i] is not after[j] or before[i + 1 :].count(None) != after[j + 1 :].count(None):
                break
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
    return groups


def _common_factors(before: Sequence[int | None], after: Sequence[int | None]) -> list[int] | None:
    cuts = sorted(_running_products(before) | _running_products(after))
    if any(later % earlier for earlier, later in itertools.pairwise(cuts)):
        return None
    return [later // earlier for earlier, later in itertools.pairwise([1, *cuts])]


def _running_products(sizes: Sequence[int | None]) -> set[int]:
    products, product = set(), 1
    for size in sizes:
        product *= size or 0
        products.add(product)
    return products - {0} or {1}


def _assign(dims: list[Dim], shape: Shape, group: Sequence[int], numbered: Sequence[tuple[int, int]]) -> None:
    """Give each axis of the group the factors whose product it is."""
    remaining = list(numbered)
    for axis in group:
        size, parts = 1, []
        while remaining and size < (shape[axis] or 0):
            factor, factor_size = remaining.pop(0)
            parts.append((factor, size, factor_size))
            size *= factor_size
        if len(parts) == 1:
            dims[axis] = parts[0][0]
        elif parts:
            dims[axis] = tuple(Part(f, outer, size // (outer * own)) for f, outer, own in parts)
