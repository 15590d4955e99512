"""Factors: what a rule says of an op.

A rule names the *factors* of an op, as einsum letters name the axes of a contraction, or as Shardy's
`op_sharding_rule` does. `MatMul` is `mk, kn -> mn`: shard `m` or `n` and the output is sharded, shard `k`, which the
output lacks, and every device holds an addend of the sum. Nothing in a rule depends on which axis is the batch, on how
many devices there are or how many rows each has; all of that follows in `answer`, in one place, for every op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphsplit.core.layouts import Shard
from graphsplit.core.polynomials import Polynomial


class Part(NamedTuple):
    """A factor inside a merged axis: `outer * factor * inner` entries, the factor being number `factor`."""

    factor: int
    outer: int | Polynomial
    inner: int | Polynomial


Dim = int | None | tuple[Part, ...]
"""What one axis of an operand is: a factor, None (it must be whole), or several factors merged (`Reshape`)."""

Dims = tuple[Dim, ...] | None
"""The axes of one operand; None if every shard reads the whole value, or yields the whole value as all others do."""


LIST = 16
"""The axis of a TensorList along which its elements are stacked, after all that an element may have; and its factor."""

ELEMENTS: Dims = tuple(range(LIST + 1))
"""The axes of a TensorList: those of its elements, whose rank nobody needs to know, and the list's own."""


class Place(NamedTuple):
    """Where a shard's entries of an axis that lies so begin, or end, in the whole."""

    layout: Shard
    end: bool = False


class Resize(NamedTuple):
    """A shape operand holds the size of the output's sharded axis: element `position` becomes each device's own.

    `value` is the operand as the single device has it; with no position, it is what every device gets instead. (The
    position of a scalar is `()`.)
    An `extent` says that the element is not the size of that axis, but what each device has of one that lies so, or
    where that is.
    """

    operand: int
    position: int | tuple[int, ...] | None
    value: np.ndarray
    extent: Shard | Place | None = None


SKIPPED, DROPPED, ZEROS, LEFT_OUT = "skipped", "dropped", "zeros", "left out"
"""What becomes of numbers of entries that other shards have: the operation passes over whatever is none of its own; it
passes over -1, which they become; it reads the first entry for them, and gives zeros there; they are taken out."""


class Shift(NamedTuple):
    """An operand numbers what lies so in the whole: a shard takes off how much there is before its own.

    With `columns`, it consists of vectors of so many indices, of which the first is that number.
    A number of no shard is the first one's, whose operation says what it says of such.
    """

    layout: Shard
    columns: int = 0
    others: str = ""


class Numbered(NamedTuple):
    """An operand numbers the entries of a factor: which, and what becomes of numbers of others' entries."""

    operand: int
    others: str


class Draw(NamedTuple):
    """The op draws random numbers: `group` numbers from each counter, `skip` counters from one group to the next.

    A shard draws the numbers of its rows.
    """

    group: int
    skip: int


@dataclass(frozen=True)
class Factors:
    """The factors of one op: of each input axis, of each output axis, and of what the shape operands hold.

    Attributes:
      inputs, outputs: one `Dims` per operand and result.
      contracted: factors that the outputs lack, and the reduction that joins the devices' parts (`sum`, `max`, ...).
      resize: per factor, the elements of shape operands that hold its size.
      draw: for random ops, how to draw the numbers of some rows.
      numbered: per factor, the operand that numbers its entries.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    contracted: Mapping[int, str] = field(default_factory=dict)
    resize: Mapping[int, tuple[Resize, ...]] = field(default_factory=dict)
    draw: Draw | None = None
    numbered: Mapping[int, Numbered] = field(default_factory=dict)


@dataclass(frozen=True)
class Declined:
    """The op cannot run on the shards with these layouts; `reason` completes "runs once because ..."."""

    reason: str
