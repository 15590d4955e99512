"""Sides of branches that stand in the program itself: what runs only if a `Switch` passes something on.

A `Switch` has two results, and one of them is there: the first if its predicate is false, the second if it is true. Of
what reads the other one no kernel runs, TensorFlow calls it dead, and dead is what reads or waits for that, on any
device, up to a `Merge`, which returns the one of its operands that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.errors import CheckError
from graphsplit.program.program import Program, Tensor

SWITCH, MERGE = "Switch", "Merge"
Side = frozenset[tuple[Tensor, int]]
"""The predicates on which it depends whether something runs, each with the value (1 for true) for which it does."""

EVERYWHERE: Side = frozenset()


@dataclass(frozen=True)
class Sides:
    """On which sides the operations of a program are.

    Attributes:
      of_ops: of each operation; empty for a program without a `Switch`.
      predicates: of each `Switch`, by position.
    """

    of_ops: Sequence[Side]
    predicates: Mapping[int, Tensor]

    def of_op(self, position: int) -> Side:
        """Return on which sides an operation is."""
        return self.of_ops[position] if self.of_ops else EVERYWHERE

    def of(self, tensor: Tensor) -> Side:
        """Return on which sides a tensor is."""
        return self.of_op(tensor.op) | choice(self.predicates, tensor)


def choice(predicates: Mapping[int, Tensor], tensor: Tensor) -> Side:
    """Return what a result of a `Switch` adds to the sides of what it reads."""
    return frozenset([(predicates[tensor.op], tensor.index)]) if tensor.op in predicates else EVERYWHERE


def sides_of(program: Program) -> Sides:
    """Return on which sides the operations of a program are."""
    predicates = {op.index: op.inputs[1] for op in program.ops if op.type == SWITCH}
    sides: list[Side] = []
    for op in program.ops if predicates else ():
        sides_read = [sides[tensor.op] | choice(predicates, tensor) for tensor in op.inputs]
        sides.append(merged_side(op.name, sides_read) if op.type == MERGE else EVERYWHERE.union(*sides_read))
    return Sides(sides, predicates)


def merged_side(name: str, ends: Sequence[Side]) -> Side:
    """Return on which sides a `Merge` is: on all on which both of its operands are.

    Raises:
      CheckError: if its operands are not the two sides of one branch; then both may be there, or none.
    """
    common = frozenset.intersection(*ends)
    differences = [sorted(end - common) for end in ends]
    if [len(choices) for choices in differences] != [1, 1] or differences[0][0][0] != differences[1][0][0]:
        raise CheckError(f"{name!r} joins what is not the two sides of one branch.")
    return common
