"""Which forward operation each backward one differentiates, so that a layer's forward and backward stay together.

TensorFlow keeps no such record of a tape's gradients. It follows from the data: a gradient reads what the operation
that it differentiates read or made, and gradients follow each other in the opposite order. Positions are those of
forward operations. From both sides each backward operation is between two: not behind what it follows from, not before
what follows from it. Of the operations that have to do with all that it reads, it belongs to the first one between
these. If some of them are like it these count alone: by type (the gradient of a `Tanh` is a `TanhGrad`, both of a
product are products), or else by the number of floating-point operations; and by the shape of an operand, which a
gradient has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Container, Mapping, Sequence

import tensorflow as tf

from graphsplit.planning.costs.work import flops_of
from graphsplit.planning.schedule.scheduling import seeds_of
from graphsplit.program.graph.graph import readers_of
from graphsplit.program.program import Op, Program, Tensor


def sources_of(op: Op, sharded: Container[int]) -> list[int]:
    """Return what an operation follows from on its own shard.

    What waits for effects, as all that a function returns does, follows from nobody's gradient for that.
    """
    return [*[tensor.op for tensor in op.inputs], *[i for i in op.controls if i in sharded]]


def backward_ops(program: Program, sharded: Collection[int]) -> set[int]:
    """Return the positions of what runs backward: gradients, what follows from them, and what only they read.

    Args:
      program: what is planned.
      sharded: the positions of what runs on the shards.
    """
    seeds, sources = seeds_of(program), [sources_of(op, sharded) for op in program.ops]
    readers, backward = readers_of(sources), set[int]()
    for op, op_sources in zip(program.ops, sources, strict=True):
        named = op.provenance.is_gradient and not op.is_constant
        if named or seeds[op.index] or not backward.isdisjoint(op_sources):
            backward.add(op.index)
    first = min(backward, default=len(program.ops))
    for op in reversed(program.ops[first:]):  # a custom gradient's have no such names
        if readers[op.index] and backward.issuperset(readers[op.index]) and not op.is_constant:
            backward.add(op.index)
    return backward


def _without_version(kind: str) -> str:
    return re.sub(r"V\d+$", "", kind)


def pair(program: Program, forward: Sequence[int], backward: set[int]) -> Mapping[int, int]:
    """Return for each backward operation the position of its forward one in the order of forward operations.

    None follows from one with a smaller position.

    Args:
      program: what is planned.
      forward: the positions in the program of the forward operations that count, in order.
      backward: those of the backward operations that count.
    """
    return _Pairing(program, forward, backward).find()


class _Pairing:
    def __init__(self, program: Program, forward: Sequence[int], backward: set[int]):
        self._program = program
        self._number = {i: k for k, i in enumerate(forward)}
        self._forward = [program.ops[i] for i in forward]
        self._backward = backward
        self._sources = [sources_of(op, backward.union(forward)) for op in program.ops]
        self._flops = [flops_of(op) for op in self._forward]

    def find(self) -> dict[int, int]:
        number_of_pair: dict[int, int] = {}
        most: dict[int, int] = {}  # of all operations: what a follower cannot be behind
        for op in self._program.ops:
            limits = [most[i] for i in self._sources[op.index] if i in most]
            behind = min(limits, default=len(self._forward) - 1)
            if op.index in self._backward:
                number_of_pair[op.index] = behind = self._choose(op, behind)
            if op.index in self._backward or limits:
                most[op.index] = behind
        return self._with_readers(number_of_pair)

    @functools.cached_property
    def _readers(self) -> list[list[int]]:
        return readers_of(self._sources)

    @functools.cached_property
    def _concerned(self) -> dict[Tensor, set[int]]:
        """Return for each tensor that is not made backward which forward operations made it or read it."""
        forward_by_tensor: dict[Tensor, set[int]] = {}
        for k, op in enumerate(self._forward):
            for tensor in [*op.inputs, *[Tensor(op.index, i) for i in range(len(op.out_shapes))]]:
                if not self._program.ops[tensor.op].is_constant:  # anybody may read the same
                    forward_by_tensor.setdefault(tensor, set()).add(k)
        return forward_by_tensor

    @functools.cached_property
    def _candidates(self) -> dict[int, list[int]]:
        return {i: self._find_candidates(self._program.ops[i]) for i in self._backward}

    def _find_candidates(self, op: Op) -> list[int]:
        """Return the forward operations that have to do with all that a backward one reads of forward, in order."""
        ops_by_operand = [self._concerned[tensor] for tensor in op.inputs if tensor in self._concerned]
        if not ops_by_operand:
            return []
        common = set.intersection(*ops_by_operand)
        if not common:
            return [max(map(min, ops_by_operand))]
        flops, forward_type = flops_of(op), _without_version(op.type)
        alike = [k for k in common if forward_type.startswith(_without_version(self._forward[k].type))]
        alike = alike or [k for k in common if flops and self._flops[k] == flops] or list(common)
        of_operands = [k for k in alike if op.out_shapes[0] in self._forward[k].in_shapes]
        return sorted(of_operands or alike)

    @functools.cached_property
    def _least(self) -> dict[int, int]:
        """Return for operations the position that they cannot be before: that of what follows from them."""
        least: dict[int, int] = {}
        updated = self._updated_variables()
        for op in reversed(self._program.ops):
            lower_bounds = [least[op.index]] if op.index in least else []
            if op.index in self._backward:
                lower_bounds += self._candidates[op.index][:1]
                if len(updated[op.index]) == 1:  # it is the gradient of that variable, or leads to no other one
                    lower_bounds += updated[op.index]
            if lower_bounds:
                least[op.index] = max(lower_bounds)
                for i in self._sources[op.index]:
                    least[i] = max(least.get(i, 0), least[op.index])
        return least

    def _updated_variables(self) -> dict[int, frozenset[int]]:
        """Return for operations which variables change by them, as the last forward operation that reads each.

        Of several, two.
        """
        ops, read_by = self._program.ops, {}
        for k, op in enumerate(self._forward):
            read_by.update({handle: k for tensor in op.inputs if (handle := self._handle(tensor)) is not None})
        variables_by_op: dict[int, frozenset[int]] = {}
        for op in reversed(ops):
            changed = [read_by[tensor.op] for tensor in op.inputs if op.writes and tensor.op in read_by]
            variables = variables_by_op.get(op.index, frozenset()).union(changed)
            for i in self._sources[op.index] if variables else ():
                both = variables | variables_by_op.get(i, frozenset())
                variables_by_op[i] = frozenset(sorted(both)[:2])
            variables_by_op[op.index] = variables
        return variables_by_op

    def _handle(self, tensor: Tensor) -> int | None:
        """Return the variable of which a tensor is the value, or a cast of it."""
        op = self._program.ops[tensor.op]
        while op.inputs and len(op.inputs) == 1 and op.index not in self._number:
            op = self._program.ops[op.inputs[0].op]
        return op.index if op.out_dtypes[:1] == (tf.resource,) and not op.inputs else None

    def _choose(self, op: Op, behind: int) -> int:
        """Return the position of a backward operation, given that which it cannot be behind."""
        least = min(self._least.get(op.index, behind), behind)
        if self._candidates[op.index]:
            return next((k for k in self._candidates[op.index] if least <= k <= behind), least)
        leads_on = any(i in self._backward for i in self._readers[op.index])
        return behind if leads_on else least  # a sum is sent rather than its addends

    def _with_readers(self, number_of_pair: Mapping[int, int]) -> dict[int, int]:
        """Return the positions with what only reads a tensor that others read, and reads nothing else, beside those.

        The tensor is sent there anyway.
        """
        result = dict(number_of_pair)
        for op in self._program.ops:
            sources = [i for i in self._sources[op.index] if i in self._backward]
            if op.index not in number_of_pair or self._candidates[op.index] or len(sources) != 1:
                continue
            numbers_of_readers = [result[i] for i in self._readers[op.index] if i in number_of_pair]
            numbers_beside = [
                result[i] for i in self._readers[sources[0]] if i in number_of_pair and result[i] < result[op.index]
            ]
            if numbers_of_readers and numbers_beside:
                result[op.index] = min(result[op.index], max(*numbers_of_readers, *numbers_beside))
        return result
