"""What rules ask of an op: shapes, axes, sizes. An op of which that is not known when planning is declined."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np

from graphsplit.core.polynomials import as_entries
from graphsplit.core.sizes import Shape
from graphsplit.program.program import Op
from graphsplit.rules.factors import Dims, Resize

Fact = TypeVar("Fact")


class NotKnownError(Exception):
    """A rule asks what is not known when planning; the message is why the op is declined."""


def known(fact: Fact | None, what: str) -> Fact:
    """Return something if it is known; `what`, with its verb, is what an op is declined for: "its axis is"."""
    if fact is None:
        raise NotKnownError(f"{what} not known when planning")
    return fact


def ranked(*shapes: Shape | None) -> tuple[Shape, ...]:
    """Return shapes that all have a known rank."""
    if None in shapes:
        raise NotKnownError("the rank of an operand is not known")
    return tuple([shape for shape in shapes if shape is not None])


def axes_in(op: Op, operand: int, rank: int, what: str = "its axes are") -> set[int]:
    """Return the axes that an operand names, one or several, counted from the front."""
    axes = np.reshape(known(op.constants.get(operand), what), -1)
    return {int(axis) % rank for axis in axes} if rank else set()


def but(axes: Collection[int], rank: int) -> Dims:
    """Return the dims of a tensor each of whose axes is a factor, but for some, which must be whole."""
    return tuple([None if i in axes else i for i in range(rank)])


def shape_operand(op: Op, operand: int, what: str = "its shape is") -> np.ndarray:
    """Return the value of a shape operand: the constant itself, or what the static output shape says it must be."""
    return known(shape_if_known(op, operand), what)


def shape_if_known(op: Op, operand: int) -> np.ndarray | None:
    """Return the value of a shape operand, None if it is not known."""
    value, shape = op.constants.get(operand), op.out_shapes[0]
    if value is None and shape is not None and None not in shape:
        return as_entries([*shape])
    return value


def resized_axes(operand: int, sizes: np.ndarray, axes: Collection[int]) -> dict[int, tuple[Resize, ...]]:
    """Return what to resize in a shape operand that holds the sizes of axes, each a factor of its number."""
    return {i: (Resize(operand, i, sizes),) for i in axes}
