"""Ordering: of two operations that could run now, first the one that other devices wait for.

Backward, a convolution's input and its filter get their gradients from the same tensor. The input's leads on, to sums
over the whole batch for which all devices wait (a BatchNormalization's); the filter's is added up at home, some time.
TensorFlow may run either first. With the filter's first, every device in turn is late and the others idle: a training
step of MiniGoogLeNet with BatchNormalization on 2 logical devices of 2 cores takes 0.95 of the time in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from graphsplit.core.layouts import Partial
from graphsplit.errors import CheckError
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.steps import Step
from graphsplit.program.graph.walks import reached
from graphsplit.program.program import Program, Tensor

COSTLY = ("matmul", "filter gradient", "input gradient", "depthwise")
"""Families of products for which others had better not wait."""


def find_order(program: Program, steps: Sequence[Step], leading: Collection[Tensor]) -> Mapping[int, int]:
    """Return for operations that can wait another one that goes first, on the same shard.

    Args:
      program, steps: what runs where.
      leading: see `bucketing.leading_to_shards`.
    """
    awaited = _awaited(program, steps, leading)
    read_on_shards = {t for op in program.ops if steps[op.index].shards for t in op.inputs}
    costly = [op for op in program.ops if family_of(op.type) in COSTLY and steps[op.index].shards]
    readers: dict[Tensor, list[int]] = {}
    for op in costly:
        if op.index in awaited:
            for tensor in op.inputs:
                readers.setdefault(tensor, []).append(op.index)
    seeds, order = seeds_of(program), {}
    for op in costly:
        result = Tensor(op.index, 0)
        beside = {i for tensor in op.inputs for i in readers.get(tensor, ()) if seeds[i] == seeds[op.index]}
        beside = {i for i in beside if not _follows(program, i, op.index)}
        if beside and result not in leading and result not in read_on_shards:
            order[op.index] = min(beside, key=lambda i: (abs(i - op.index), i))
    return order


def _follows(program: Program, later: int, first: int) -> bool:
    """Return whether an operation depends on another one, through what it waits for as well."""
    return first in reached([later], lambda i: [source for source in program.ops[i].sources if source >= first])


def seeds_of(program: Program) -> list[frozenset[int]]:
    """Return for each operation the gradients of outputs that it depends on: what comes later cannot be waited for."""
    given = set(program.inputs[len(program.inputs) - program.seeds :])
    found: list[frozenset[int]] = []
    for op in program.ops:
        own = frozenset([op.index]) if op.index in given else frozenset()
        found.append(own.union(*[found[i] for i in op.sources] if given else ()))
    return found


def _awaited(program: Program, steps: Sequence[Step], leading: Collection[Tensor]) -> set[int]:
    """Return the operations on the shards from which a sum follows that the shards wait for."""
    awaited: set[int] = set()
    for op in reversed(program.ops):
        shards = steps[op.index].shards
        if shards:
            gives = [k for k, layout in enumerate(shards.gives) if isinstance(layout, Partial)]
            if op.index in awaited or any(Tensor(op.index, k) in leading for k in gives):
                awaited.add(op.index)
                awaited.update(tensor.op for tensor in op.inputs)
    return awaited


def check_order(program: Program, steps: Sequence[Step], order: Mapping[int, int]) -> None:
    """Raise `CheckError` if an operation would wait for what follows from it, or for what is not on the shards."""
    for later, first in order.items():
        names = f"{program.ops[later].name!r} waits for {program.ops[first].name!r}"
        if not (steps[later].shards and steps[first].shards):
            raise CheckError(f"{names} on the shards.")
        after = {later}
        for op in program.ops[later + 1 : first + 1]:
            if not after.isdisjoint(op.sources):
                after.add(op.index)
        if first in after:
            raise CheckError(f"{names}, which follows from it.")
