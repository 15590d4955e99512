"""Holes of templates that are no operands: axes, slices, permutations, functions, with odd values now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tests.fuzzing.scope import UnfitError, int_of

if TYPE_CHECKING:
    from tests.fuzzing.templates import Filling

Filler = Callable[["Filling", str, str], str]
FILLERS: dict[str, Filler] = {}


def filler(function: Filler) -> Filler:
    """Register a function as the filler of the holes of its name."""
    FILLERS[function.__name__.rstrip("_")] = function
    return function


def _some(rng: np.random.Generator, rank: int) -> list[int]:
    """Return some axes, counted from either end."""
    chosen = rng.permutation(rank)[: rng.integers(rank + 1)]
    return [int(axis) - (rank if rng.random() < 0.3 else 0) for axis in chosen]


@filler
def axis(filling: Filling, extra: str, _: str) -> str:
    """Return an axis of the first operand (`new`: or behind its last), negative or not."""
    rank = len(filling.first) + (extra == "new")
    if rank == 0:
        raise UnfitError("a scalar has no axis")
    return str(filling.rng.integers(-rank, rank))


@filler
def axes(filling: Filling, _: str, __: str) -> str:
    return str(_some(filling.rng, len(filling.first)))


@filler
def flag(filling: Filling, _: str, __: str) -> str:
    return str(filling.rng.random() < 0.5)


@filler
def int_(filling: Filling, low: str, high: str) -> str:
    """Return a number from `low` up to and including `high`."""
    return str(filling.rng.integers(int(low), int(high) + 1))


@filler
def pick(filling: Filling, choices: str, _: str) -> str:
    """Return one of several texts, written `a|b|c`."""
    texts = choices.split("|")
    return texts[filling.rng.integers(len(texts))]


@filler
def size(filling: Filling, letter: str, more: str) -> str:
    """Return the size of a letter of the patterns, and so many more."""
    dim = filling.bound[letter]
    if dim == "rows" and filling.scope.rng.random() < 0.5:
        position = filling.first.index("rows") if "rows" in filling.first else None
        if position is not None:
            return f"tf.shape({filling.first_expression})[{position}]" + (f" + {more}" if more else "")
    return str(int_of(dim, filling.scope.rows) + int(more or 0))


@filler
def length(filling: Filling, _: str, __: str) -> str:
    """Return an integer that follows from sizes of what is in scope, by a polynomial or not."""
    rng = filling.rng
    axes = [f"tf.shape({e.expression})[{k}]" for e in filling.scope.pool for k in range(len(e.dims))]
    if not axes:
        raise UnfitError("nothing has an axis")
    found = axes[rng.integers(len(axes))]
    for _ in range(int(rng.integers(3))):
        a, b = found, axes[rng.integers(len(axes))]
        ways = _LENGTHS[rng.integers(len(_LENGTHS))]
        found = ways.format(a=a, b=b, k=int(rng.integers(1, 6)))
    return found


_LENGTHS = [
    "tf.maximum({a}, {b})",
    "tf.minimum({a}, {b})",
    "tf.minimum({a}, {k})",
    "({a} + {b})",
    "({a} * {b})",
    "({a} + {k})",
    "({k} * {a})",
    "({a} // {k})",
    "(({a} + {k}) // {k} * {k})",
    "({a} % {k})",
    "tf.abs({a} - {b})",
    "tf.where({a} > {k}, {a}, {b})",
    "tf.where({a} < {b}, {a}, {k})",
    "tf.cond({a} > {k}, lambda: {a}, lambda: {b})",
    "tf.cast({a} > {k}, tf.int32)",
    "tf.cast(tf.math.ceil({a} / {k}), tf.int32)",
    "tf.sort([{a}, {b}])[0]",
    "tf.while_loop(lambda i: i < {a}, lambda i: i + {k}, [0])[0]",
]


@filler
def shape(filling: Filling, _: str, __: str) -> str:
    """Return the shape of the first operand, as it runs."""
    return f"tf.shape({filling.first_expression})"


@filler
def dims(filling: Filling, _: str, __: str) -> str:
    """Return the sizes of the first operand as numbers, some perhaps -1."""
    sizes = [int_of(dim, filling.scope.rows) for dim in filling.first]
    return str(sizes)


@filler
def perm(filling: Filling, _: str, __: str) -> str:
    rank = len(filling.first)
    order = [int(i) for i in filling.rng.permutation(rank)]
    from_end = 0.0 if tf.__version__.startswith("2.16.") else 0.15  # there they end the process
    return str([i - rank if filling.rng.random() < from_end else i for i in order])


@filler
def pads(filling: Filling, most: str, __: str) -> str:
    high = int(most or 2) + 1
    return str(
        [[int(n) for n in filling.rng.integers(0, high, 2) * (filling.rng.random() < 0.6)] for _ in filling.first]
    )


@filler
def multiples(filling: Filling, _: str, __: str) -> str:
    choices = [1, 1, 1, 2, 3, 0] if filling.rng.random() < 0.2 else [1, 1, 2, 3]
    return str([int(filling.rng.choice(choices)) for _ in filling.first])


@filler
def shifts(filling: Filling, _: str, __: str) -> str:
    """Return arguments `shift=[...], axis=[...]` of a roll."""
    chosen = _some(filling.rng, len(filling.first))
    return f"{[int(filling.rng.integers(-3, 4)) for _ in chosen]}, {chosen}"


@filler
def newshape(filling: Filling, _: str, __: str) -> str:
    """Return a shape of as many entries: axes merged, cut in two, ones put in and taken away, one size left open."""
    rng, sizes = filling.rng, [int_of(dim, filling.scope.rows) for dim in filling.first]
    several = len(filling.scope.rows) > 1
    open_axis = next((i for i, dim in enumerate(filling.first) if dim == "rows"), None)
    sizes = [-1 if several and i == open_axis else size for i, size in enumerate(sizes)]
    for _ in range(rng.integers(1, 4)):
        position = int(rng.integers(len(sizes) + 1))
        action = rng.integers(4)
        if action == 0:
            sizes.insert(position, 1)
        elif action == 1 and position + 1 < len(sizes) and min(sizes[position : position + 2]) > 0:
            sizes[position : position + 2] = [sizes[position] * sizes[position + 1]]
        elif action == 1 and position + 1 < len(sizes) and -1 in sizes[position : position + 2]:
            sizes[position : position + 2] = [-1]
        elif action == 2 and position < len(sizes) and sizes[position] > 1:
            factors = [d for d in range(1, sizes[position] + 1) if sizes[position] % d == 0]
            outer = int(rng.choice(factors))
            sizes[position : position + 1] = [outer, sizes[position] // outer]
        elif action == 3 and position < len(sizes) and sizes[position] == 1:
            del sizes[position]
    if -1 not in sizes and sizes and 0 not in sizes and rng.random() < 0.4:
        sizes[rng.integers(len(sizes))] = -1
    return str(sizes)


@filler
def slices(filling: Filling, _: str, __: str) -> str:
    """Return what stands in the brackets of a slice: numbers, spans, steps, an ellipsis, new axes."""
    rng, parts = filling.rng, []
    for dim in filling.first:
        parts.append(_slice(rng, int_of(dim, filling.scope.rows)))
    if rng.random() < 0.3:
        parts.insert(int(rng.integers(len(parts) + 1)), "None")
    if parts and rng.random() < 0.3:
        start = int(rng.integers(len(parts)))
        parts[start : int(rng.integers(start, len(parts) + 1))] = ["..."]
    elif rng.random() < 0.3:
        del parts[rng.integers(len(parts) + 1) :]
    if not parts:
        raise UnfitError("nothing to slice")
    return ", ".join(parts)


def _slice(rng: np.random.Generator, size: int) -> str:
    def bound() -> int:
        return int(rng.integers(-size - 1, size + 2))

    choices = [":", ":", ":", "::-1", "::2", f"{bound()}:", f":{bound()}", f"{bound()}:{bound()}"]
    choices += [f"{bound()}:{bound()}:{rng.choice([-2, -1, 2, 3])}", f"{bound()}::-1"]
    choices += [str(rng.integers(-size, size))] if size else []
    return choices[rng.integers(len(choices))]


@filler
def pieces(filling: Filling, _: str, __: str) -> str:
    """Return arguments `sizes, axis` of a split of the first operand; some pieces are empty."""
    rng = filling.rng
    if not filling.first:
        raise UnfitError("a scalar has no axis")
    position = int(rng.integers(len(filling.first)))
    dim = filling.first[position]
    written = position - len(filling.first) if rng.random() < 0.3 else position
    total = int_of(dim, filling.scope.rows)
    if rng.random() < 0.3 and dim != "rows":
        counts = [d for d in range(1, total + 1) if total % d == 0]
        return f"{rng.choice(counts or [1])}, {written}"
    cuts = sorted(int(cut) for cut in rng.integers(0, total + 1, rng.integers(1, 4)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    if dim == "rows" or rng.random() < 0.2:
        sizes[rng.integers(len(sizes))] = -1
    return f"{sizes}, {written}"


@filler
def fun(filling: Filling, argument: str, of: str) -> str:
    """Return a function of an operand (`row`: of one of its rows; `same`: back to the same shape and dtype)."""
    return filling.function(argument, row="row" in of, same="same" in of)


@filler
def newdims(filling: Filling, _: str, __: str) -> str:
    """Return a larger shape to which the first operand broadcasts, as text that runs."""
    rng, operand = filling.rng, filling.first_expression
    sizes = [f"tf.shape({operand})[{i}]" if dim == "rows" else str(dim) for i, dim in enumerate(filling.first)]
    sizes = [str(rng.integers(1, 5)) if size == "1" else size for size in sizes]
    return f"[{', '.join([str(rng.integers(1, 4))] * int(rng.integers(2)) + sizes)}]"
