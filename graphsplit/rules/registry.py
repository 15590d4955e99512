"""Op rules: what a rule says, how it is registered, and how the planner asks it.

A rule names the *factors* of an op, as einsum letters name the axes of a contraction, or as Shardy's
`op_sharding_rule` does. `MatMul` is `mk, kn -> mn`: shard `m` or `n` and the output is sharded, shard `k`, which the
output lacks, and every device holds an addend of the sum. Nothing in a rule depends on which axis is the batch, on how
many devices there are or how many rows each has; all of that follows here, in one place, for every op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from graphsplit.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Shard
from graphsplit.polynomials import Polynomial
from graphsplit.programs import Op
from graphsplit.sizes import ROWS, Shape, Size


class Part(NamedTuple):
    """A factor inside a merged axis: `outer * factor * inner` entries, the factor being number `factor`."""

    factor: int
    outer: int
    inner: int


Dim = int | None | tuple[Part, ...]
"""What one axis of an operand is: a factor, None (it must be whole), or several factors merged (`Reshape`)."""

Dims = tuple[Dim, ...] | None
"""The axes of one operand; None if every shard reads the whole value, or yields the whole value as all others do."""


ELEMENTS: Dims = tuple(range(16))
"""The axes of a TensorList: those of its elements, whose rank nobody needs to know."""


class Resize(NamedTuple):
    """A shape operand holds the size of the output's sharded axis: element `position` becomes each device's own.

    `value` is the operand as the single device has it; with no position, it is what every device gets instead.
    A `per_row` says that the element is so many entries for each row of the batch, and not the size of that axis.
    """

    operand: int
    position: int | tuple[int, int] | None
    value: np.ndarray
    per_row: int | None = None


class Draw(NamedTuple):
    """The op draws random numbers: `group` numbers from each counter, `skip` counters from one group to the next.

    A shard draws the numbers of its rows. With `skip` 0 there is no counter to set, only a seed.
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
      rescale: whether a contracted result is an average: each part is weighted with its share of the rows.
      draw: for random ops, how to draw the numbers of some rows.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    contracted: Mapping[int, str] = field(default_factory=dict)
    resize: Mapping[int, tuple[Resize, ...]] = field(default_factory=dict)
    rescale: bool = False
    draw: Draw | None = None


@dataclass(frozen=True)
class Sharded:
    """How an op runs on the shards.

    Attributes:
      wants: the layout in which each input is read. `Replicate` means each device reads the whole value.
      gives: the layout of each output.
      resize: the shape operands in which each device has the size of its own shard of the first output.
      rescale: whether each copy's result is multiplied by its device's share of the rows.
      divisor: of a mean that is reduced at once: each copy is a sum, and what they add up to is divided by this.
      bodies: for loops and branches, the plans of the functions that they call, by name.
      draw: for random ops, how each shard draws the numbers of its rows.
    """

    wants: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    resize: tuple[Resize, ...] = ()
    rescale: bool = False
    divisor: int = 0
    bodies: Mapping[str, Any] = field(default_factory=dict)
    draw: Draw | None = None

    @property
    def makes(self) -> frozenset[int]:
        """Return the operands that each shard makes for itself instead of reading them."""
        return frozenset(resize.operand for resize in self.resize)


@dataclass(frozen=True)
class Declined:
    """The op cannot run on the shards with these layouts; `reason` completes "runs at home because ..."."""

    reason: str


Answer = Sharded | Declined
FactorRule = Callable[[Op], Factors | Declined]
LayoutRule = Callable[[Op, Sequence[Layout]], Answer | None]


@dataclass(frozen=True)
class Rule:
    """What is known of an op type.

    Attributes:
      factors: its factors, independent of layouts.
      layouts: an answer that factors cannot give (joining blocks, passing anything through), asked first; may pass.
      linear: operands in each of which the op is linear while the others are whole.
      joint: whether the op is linear in all its data operands together (sums, concatenation).
    """

    factors: FactorRule
    layouts: LayoutRule | None = None
    linear: tuple[int, ...] = ()
    joint: bool = False

    @property
    def keeps_partial(self) -> bool:
        """Return whether a partial sum can stay partial through this op."""
        return bool(self.linear) or self.joint or self.layouts is pass_through


_RULES: dict[str, Rule] = {}


def register(
    *op_types: str, linear: tuple[int, ...] = (), joint: bool = False, layouts: LayoutRule | None = None
) -> Callable[[FactorRule], FactorRule]:
    """Register the decorated function as the factor rule of `op_types`."""

    def decorate(function: FactorRule) -> FactorRule:
        for op_type in op_types:
            if op_type in _RULES:
                raise ValueError(f"{op_type} has two rules.")
            _RULES[op_type] = Rule(function, layouts, linear, joint)
        return function

    return decorate


def rule_of(op_type: str) -> Rule | None:
    """Return the rule of an op type, or None: such ops run at home."""
    return _RULES.get(op_type)


def ruled_types() -> frozenset[str]:
    """Return all op types that have a rule."""
    return frozenset(_RULES)


def answer(rule: Rule, op: Op, layouts: Sequence[Layout], sizes: Sequence[int], may_grow: bool = False) -> Answer:
    """Return how `op` runs on the shards, given the layouts (and sizes in bytes) of its inputs.

    Partial sums stay partial where the op is linear in them and that pays (in a loop, where nothing can be reduced, it
    always does: `may_grow`); elsewhere they are wanted whole.
    Among sharded inputs the factor that keeps most bytes where they are wins; the others are resharded to fit.
    """
    if rule.layouts is not None:
        special = rule.layouts(op, layouts)
        if special is not None:
            return special
    partial = [i for i, layout in enumerate(layouts) if layout == PARTIAL_SUM]
    others_whole = not any(isinstance(layout, Shard) for layout in layouts)
    if partial and others_whole and _is_linear_in(rule, op, partial) and (may_grow or _pays(op, partial)):
        wants = tuple(PARTIAL_SUM if i in partial else REPLICATE for i in range(len(layouts)))
        return Sharded(wants, (PARTIAL_SUM,) * len(op.out_shapes))
    factors = rule.factors(op)
    if isinstance(factors, Declined):
        return factors
    votes: dict[tuple[int, tuple[int, ...]], int] = {}
    for layout, dims, size in zip(layouts, factors.inputs, sizes, strict=True):
        if isinstance(layout, Shard) and dims is not None:
            found = _factor_at(dims[layout.axis], layout.blocks)
            if found is not None:
                votes[found] = votes.get(found, 0) + size + 1
    for factor, blocks in sorted(votes, key=lambda key: -votes[key]):
        sharded = _along(factors, factor, blocks)
        if sharded is not None and not _cuts_unknown(op, sharded):
            return sharded
    return Declined("it needs all rows at once")


def _cuts_unknown(op: Op, sharded: Sharded) -> bool:
    """Return whether an operand would be cut along an axis of unknown size that is no batch: it has other rows."""
    return any(
        isinstance(layout, Shard) and shape is not None and layout.axis < len(shape) and not _has_rows(shape, layout)
        for layout, shape in zip(sharded.wants, op.in_shapes, strict=True)
    )


def _has_rows(shape: Shape, layout: Shard) -> bool:
    size = shape[layout.axis]
    count = size // sum(layout.blocks) if isinstance(size, Size) else size
    return count is not None and (not isinstance(count, Size) or count.polynomial.terms == Polynomial.of(ROWS).terms)


def answer_for_output(rule: Rule, op: Op, output: int, layout: Shard) -> Sharded | None:
    """Return how `op` can yield `output` in `layout`, or None: the demand that runs against the dataflow.

    This is how what would be computed whole and then cut (a gradient tiled over the batch, a mask from a constant) is
    made in pieces from the start.
    """
    factors = rule.factors(op)
    if isinstance(factors, Declined):
        return None
    dims = factors.outputs[output]
    found = _factor_at(dims[layout.axis], layout.blocks) if dims is not None else None
    if found is None:
        return None
    sharded = _along(factors, *found)
    if sharded is None or sharded.gives[output] != layout:
        return None
    if sharded.draw and len(layout.blocks) > 1:
        return None  # rows of joined batches do not follow each other
    return sharded


def pass_through(op: Op, layouts: Sequence[Layout]) -> Answer:
    """Answer for ops that return their inputs: every output has the layout of its input, whatever that is."""
    return Sharded(tuple(layouts), tuple(layouts[: len(op.out_shapes)]))


def stays_partial(op: Op, operand: int, may_grow: bool = False) -> bool:
    """Return whether a partial sum may stay partial through `op`, as far as that is known before layouts are.

    Args:
      op: a reader of the sum.
      operand: as which of its inputs.
      may_grow: as in `answer`.
    """
    rule = _RULES.get(op.type)
    if rule is None or op.stateful or not rule.keeps_partial:
        return False
    if rule.layouts is pass_through:
        return True
    partial = [i for i in range(len(op.inputs)) if i not in op.constants] if rule.joint else [operand]
    return operand in partial and _is_linear_in(rule, op, partial) and (may_grow or _pays(op, partial))


def _is_linear_in(rule: Rule, op: Op, partial: list[int]) -> bool:
    if not all(dtype.is_floating or dtype.is_complex for dtype in op.out_dtypes):
        return False
    if rule.joint:
        data = [i for i in range(len(op.inputs)) if i not in op.constants]
        return partial == data
    return len(partial) == 1 and partial[0] in rule.linear


def _pays(op: Op, partial: list[int]) -> bool:
    """Return whether it pays to put off a reduction until after `op`: what is reduced gets smaller, or is only moved.

    Scaling a gradient by a learning rate is linear too, but on the shards it would be done by all of them, and the
    learning rate sent to each. (Unknown sizes count as none.)
    """
    before = sum(_entries(op.in_shapes[i]) for i in partial)
    after = sum(map(_entries, op.out_shapes))
    alone = len(partial) + len(op.constants) == len(op.inputs)
    return after < before or (after == before and alone)


def _entries(shape: Shape | None) -> int:
    return 0 if shape is None else math.prod(size or 0 for size in shape)


def _factor_at(dim: Dim, blocks: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Return the factor that is cut when an axis is cut into `blocks`, and the blocks of the factor itself."""
    if dim is None:
        return None
    if isinstance(dim, int):
        return dim, blocks
    for factor, outer, inner in dim:
        count, rest = divmod(len(blocks), outer)
        unit = blocks[:count]
        if not rest and unit * outer == blocks and all(block % inner == 0 for block in unit):
            return factor, tuple(block // inner for block in unit)
    return None


def _axis_of(dims: Dims, factor: int, blocks: tuple[int, ...]) -> Shard | None:
    for axis, dim in enumerate(dims or ()):
        if dim == factor:
            return Shard(axis, blocks)
        if isinstance(dim, tuple):
            for part in dim:
                if part.factor == factor and not isinstance(part.outer, Size):  # an unknown number of blocks
                    return Shard(axis, tuple(block * part.inner for block in blocks) * part.outer)
    return None


def _along(factors: Factors, factor: int, blocks: tuple[int, ...]) -> Sharded | None:
    wants = tuple([_axis_of(dims, factor, blocks) or REPLICATE for dims in factors.inputs])
    gives: list[Layout] = []
    rescale = False
    for dims in factors.outputs:
        shard = _axis_of(dims, factor, blocks)
        if shard is not None:
            gives.append(shard)
        elif dims is None:
            gives.append(REPLICATE)
        elif factor in factors.contracted:
            rescale = factors.rescale
            gives.append(Partial(factors.contracted[factor]))
        else:
            return None
    return Sharded(wants, tuple(gives), factors.resize.get(factor, ()), rescale, draw=factors.draw)
