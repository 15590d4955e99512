"""The table of rules, and what a rule answers: how an op runs on the shards, or why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphsplit.core.layouts import Layout, Shard
from graphsplit.core.polynomials import Polynomial, as_entries
from graphsplit.core.sizes import as_exact
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Draw, Factors, Place, Resize, Shift
from graphsplit.rules.known import NotKnownError

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sharded:
    """How an op runs on the shards.

    Attributes:
      wants: the layout in which each input is read. `Replicate` means each device reads the whole value.
      gives: the layout of each output.
      resize: the shape operands in which each device has the size of its own shard of the first output.
      weighted: whether each copy's result, a mean over its own rows, is multiplied by its share of all rows.
      bodies: for loops and branches, the plans of the functions that they call, by name.
      together: whether those are plans of all shards, which run it as one: it is given, and makes, what each has.
      draw: for random ops, how each shard draws the numbers of its rows.
      shift: operands that number rows.
      turned: whether it runs on columns, and what reads it meets rows again, as it does in its first operand.
    """

    wants: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    resize: tuple[Resize, ...] = ()
    weighted: bool = False
    bodies: Mapping[str, Any] = field(default_factory=dict)
    draw: Draw | None = None
    shift: Mapping[int, Shift] = field(default_factory=dict)
    turned: bool = False
    together: bool = False

    @property
    def makes(self) -> frozenset[int]:
        """Return the operands that each shard makes for itself instead of reading them."""
        return frozenset([resize.operand for resize in self.resize]) if self.resize else _NONE


def resized(op: Op, sharded: Sharded, size_of: Callable[[Shard | Place], Polynomial | int]) -> dict[int, np.ndarray]:
    """Return the operands that hold the size of a sharded axis, or a place on it, as polynomials of sizes.

    Each shard, or each part of a variable, makes them for itself.

    Args:
      op, sharded: the operation, and how it runs on shards.
      size_of: returns how many entries the shard has of an axis that lies so, or where they are.
    """
    values: dict[int, np.ndarray] = {}
    for operand, position, value, extent in sharded.resize:
        operand_value = values.setdefault(operand, _exact(op, operand, value))
        if position is not None:
            layout = sharded.gives[0] if extent is None else extent
            assert isinstance(layout, (Shard, Place))
            operand_value[position] = size_of(layout)
    return values


def _exact(op: Op, operand: int, value: np.ndarray) -> np.ndarray:
    """Return a shape operand with what it has of unknown sizes."""
    if operand in op.symbols:
        return np.array(op.symbols[operand], object)
    sizes = op.out_shapes[0] or ()
    if operand in op.constants or value.shape != (len(sizes),):
        return value.astype(object)
    return as_entries([*map(as_exact, sizes)])  # from which its value was taken


Answer = Sharded | Declined
FactorRule = Callable[[Op], Factors | Declined]
LayoutRule = Callable[[Op, Sequence[Layout]], Answer | None]


@dataclass(frozen=True)
class Rule:
    """What is known of an op type.

    Attributes:
      function: returns its factors, independent of layouts; see `factors`.
      layouts: an answer that factors cannot give (joining blocks, passing anything through), asked first; may pass.
      linear: operands in each of which the op is linear while the others are whole.
      joint: whether the op is linear in all its data operands together (sums, concatenation).
      why_whole: why it runs whole where no factor of it is cut.
    """

    function: FactorRule
    layouts: LayoutRule | None = None
    linear: tuple[int, ...] = ()
    joint: bool = False
    why_whole: str = "it needs all rows at once"

    def factors(self, op: Op) -> Factors | Declined:
        """Return the factors of an op; it is declined where the rule asks what is not known."""
        try:
            return self.function(op)
        except NotKnownError as reason:
            return Declined(str(reason))

    @property
    def keeps_partial(self) -> bool:
        """Return whether a partial sum can stay partial through this op."""
        return bool(self.linear) or self.joint or self.layouts is pass_through


_RULES: dict[str, Rule] = {}


def register(
    *op_types: str,
    linear: tuple[int, ...] = (),
    joint: bool = False,
    layouts: LayoutRule | None = None,
    why_whole: str = Rule.why_whole,
) -> Callable[[FactorRule], FactorRule]:
    """Register the decorated function as the factor rule of `op_types`."""

    def decorate(function: FactorRule) -> FactorRule:
        for op_type in op_types:
            if op_type in _RULES:
                raise ValueError(f"{op_type} has two rules.")
            _RULES[op_type] = Rule(function, layouts, linear, joint, why_whole)
        return function

    return decorate


def rule_of(op_type: str) -> Rule | None:
    """Return the rule of an op type, or None: such ops run once."""
    return _RULES.get(op_type)


def ruled_types() -> frozenset[str]:
    """Return all op types that have a rule."""
    return frozenset(_RULES)


def pass_through(op: Op, layouts: Sequence[Layout]) -> Answer:
    """Answer for ops that return their inputs: every output has the layout of its input, whatever that is."""
    return Sharded(tuple(layouts), tuple(layouts[: len(op.out_shapes)]))
