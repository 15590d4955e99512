"""Shape patterns: how a template says which shapes its operands have.

One character an axis: a digit is a size, a letter is the same size wherever it stands in a template, and a `*` in
front is any number of leading axes, the same wherever it stands. `*ab` times `*bc` is a product of matrices. A `~` is
what broadcasts with the operand before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.fuzzing.program import ROWS, Dim

Dims = tuple[Dim, ...]
Bound = Mapping[str, Any]  # a letter's size, and the leading axes of "*"
SIZES: list[Dim] = [ROWS, ROWS, ROWS, 1, 2, 2, 3, 3, 4, 5]
_LEADS: list[Dims] = [(), (ROWS,), (ROWS,), (ROWS,), (2, ROWS), (ROWS, 3), (1, ROWS), (ROWS, 1), (ROWS, ROWS)]


def match(pattern: str, dims: Sequence[Dim], bound: Bound) -> Bound | None:
    """Return the sizes bound so far and those that this shape binds; None if it does not fit the pattern."""
    found, rest = dict(bound), tuple(dims)
    if pattern == "~":
        return bound if broadcasts(rest, bound["first"]) else None
    if pattern.startswith("*"):
        pattern = pattern[1:]
        count = len(rest) - len(pattern)
        if count < 0 or found.setdefault("*", rest[:count]) != rest[:count]:
            return None
        rest = rest[count:]
    if len(rest) != len(pattern):
        return None
    for letter, size in zip(pattern, rest, strict=True):
        if (int(letter) if letter.isdigit() else found.setdefault(letter, size)) != size:
            return None
    return found


def make(pattern: str, bound: Bound, rng: np.random.Generator, sizes: Sequence[Dim] = SIZES) -> tuple[Dims, Bound]:
    """Return a shape that fits a pattern, and the sizes bound then."""
    found = dict(bound)
    if pattern == "~":
        dims = list(bound["first"])
        dims = [1 if rng.random() < 0.3 else dim for dim in dims][int(rng.integers(len(dims) + 1)) :]
        return tuple(dims), bound
    dims = []
    if pattern.startswith("*"):
        pattern = pattern[1:]
        dims += found.setdefault("*", _LEADS[rng.integers(len(_LEADS))])
    for letter in pattern:
        size = 0 if rng.random() < 0.01 else sizes[rng.integers(len(sizes))]
        dims.append(int(letter) if letter.isdigit() else found.setdefault(letter, size))
    return tuple(dims), found


def broadcasts(one: Sequence[Dim], other: Sequence[Dim]) -> bool:
    """Return whether two shapes broadcast together."""
    return all(a == b or 1 in (a, b) for a, b in zip(one[::-1], other[::-1], strict=False))
