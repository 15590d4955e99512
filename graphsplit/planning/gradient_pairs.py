"""Which forward operation each backward one differentiates, so that a layer's forward and backward stay together.

TensorFlow keeps no such record of a tape's gradients. It follows from the data: a gradient reads what the operation
that it differentiates read or made, and gradients follow each other in the opposite order. Positions are those of
forward operations. From both sides each backward operation is between two: not behind what it follows from, not before
what follows from it. Of the operations that have to do with all that it reads, it belongs to the first one between
these; to one of as many floating-point operations if there is one, as of a product both gradients are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphsplit.planning.scheduling import seeds_of
from graphsplit.planning.work import flops_of
from graphsplit.program.program import Op, Program, Tensor

_SCOPES = frozenset({"gradient_tape", "gradients"})  # how TensorFlow's tapes, and `tf.gradients`, name what they make


def backward_ops(program: Program) -> set[int]:
    """Return the positions of what runs backward: gradients, what follows from them, and what only they read."""
    seeds = seeds_of(program)
    found: set[int] = set()
    for op in program.ops:
        named = not _SCOPES.isdisjoint(op.name.split("/")) and not op.is_constant
        if named or seeds[op.index] or not found.isdisjoint(op.sources):
            found.add(op.index)
    first = min(found, default=len(program.ops))
    readers: list[list[int]] = [[] for _ in program.ops]
    for op in program.ops:
        for i in op.sources:
            readers[i].append(op.index)
    for op in reversed(program.ops[first:]):  # a custom gradient's have no such names
        if readers[op.index] and found.issuperset(readers[op.index]) and not op.is_constant:
            found.add(op.index)
    return found


class Pairing:
    """The forward operation of each backward one, by position in the order of forward operations.

    Args:
      program: what is planned.
      forward: the positions in the program of the forward operations that count, in order.
      backward: those of the backward operations that count.

    Attributes:
      of: for each backward operation that counts, the position of its forward operation among `forward`. None follows
        from one with a smaller position.
    """

    def __init__(self, program: Program, forward: Sequence[int], backward: set[int]):
        self._program = program
        self._number = {i: k for k, i in enumerate(forward)}
        self._forward = [program.ops[i] for i in forward]
        self._backward = backward
        self._concerned = self._find_concerned()
        self._flops = [flops_of(op) for op in self._forward]
        self._candidates = {i: self._find_candidates(program.ops[i]) for i in backward}
        self._least = self._find_least()
        self.of: Mapping[int, int] = self._find()

    def _find_concerned(self) -> dict[Tensor, set[int]]:
        """Return for each tensor that is not made backward which forward operations made it or read it."""
        found: dict[Tensor, set[int]] = {}
        for k, op in enumerate(self._forward):
            for tensor in [*op.inputs, *[Tensor(op.index, i) for i in range(len(op.out_shapes))]]:
                if not self._program.ops[tensor.op].is_constant:  # anybody may read the same
                    found.setdefault(tensor, set()).add(k)
        return found

    def _find_candidates(self, op: Op) -> list[int]:
        """Return the forward operations that have to do with all that a backward one reads of forward, in order."""
        read = [self._concerned[tensor] for tensor in op.inputs if tensor in self._concerned]
        if not read:
            return []
        common = set.intersection(*read)
        if not common:
            return [max(map(min, read))]
        flops = flops_of(op)
        alike = [k for k in common if flops and self._flops[k] == flops]
        return sorted(alike or common)

    def _find_least(self) -> dict[int, int]:
        """Return for each backward operation the position that it cannot be before: that of what follows from it."""
        least: dict[int, int] = {}
        for op in reversed(self._program.ops):
            if op.index in self._backward:
                own = self._candidates[op.index]
                least[op.index] = max(least.get(op.index, 0), own[0] if own else 0)
                for i in op.sources:
                    least[i] = max(least.get(i, 0), least[op.index])
        return least

    def _find(self) -> dict[int, int]:
        found: dict[int, int] = {}
        most: dict[int, int] = {}  # of all operations: what a follower cannot be behind
        for op in self._program.ops:
            behind = min([most[i] for i in op.sources if i in most], default=len(self._forward) - 1)
            if op.index in self._backward:
                own, least = self._candidates[op.index], min(self._least[op.index], behind)
                between = [k for k in own if least <= k <= behind]
                found[op.index] = most[op.index] = between[0] if between else least if own else behind
            elif any(i in most for i in op.sources):
                most[op.index] = behind
        return found
