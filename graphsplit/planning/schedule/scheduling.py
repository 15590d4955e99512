"""Ordering: of two operations that could run now, first the one that other devices wait for; and what waits itself.

Backward, a convolution's input and its filter get their gradients from the same tensor. The input's leads on, to sums
over the whole batch for which all devices wait (a BatchNormalization's); the filter's is added up on the default
device, some time. TensorFlow may run either first. With the filter's first, every device in turn is late and the others
idle: a training step of MiniGoogLeNet with BatchNormalization on 2 logical devices of 2 cores takes 0.95 of the time in
this order.

What could run long before it is read waits, so that its result is not held meanwhile. A BatchNormalization's backward
pass has `x - mean`, which is ready in the forward pass; an optimizer with momentum begins with `momentum * 0.9`, which
is ready at once. TensorFlow holds all of these from then on, and the program makes each shortly before it reads it: a
step of ResNet50 with momentum holds 0.5 of the bytes besides its state if they wait, one of MiniGoogLeNet with
BatchNormalization 0.75. Such an operation waits for the last of what its reader depends on, too, and what stands before
it in the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.layouts import Partial
from graphsplit.errors import CheckError
from graphsplit.planning.costs.buffers import NO_BUFFER, SAME_BUFFER
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.steps import Step
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import sides_of

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
    seeds, sides, order = seeds_of(program), sides_of(program), dict[int, int]()

    def is_there(i: int, op: Op) -> bool:
        return seeds[i] == seeds[op.index] and sides.of_op(i) <= sides.of_op(op.index)

    for op in costly:
        result = Tensor(op.index, 0)
        beside = {i for tensor in op.inputs for i in readers.get(tensor, ()) if is_there(i, op)}
        beside = {i for i in beside if not _follows(program, i, op.index)}
        if beside and result not in leading and result not in read_on_shards:
            order[op.index] = min(beside, key=lambda i: (abs(i - op.index), i))
    return order


def _follows(program: Program, later: int, first: int) -> bool:
    """Return whether an operation depends on another one, through what it waits for as well."""
    return first in reached([later], lambda i: [source for source in program.ops[i].sources if source >= first])


def seeds_of(program: Program) -> list[frozenset[int]]:
    """Return for each operation the gradients of outputs that it depends on: what comes later cannot be waited for."""
    seeds = set(program.inputs[len(program.inputs) - program.seeds :])
    seeds_by_op: list[frozenset[int]] = []
    for op in program.ops:
        itself = frozenset([op.index]) if op.index in seeds else frozenset()
        seeds_by_op.append(itself.union(*[seeds_by_op[i] for i in op.sources] if seeds else ()))
    return seeds_by_op


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


_LEAST_BYTES = 2**16  # what is smaller is not worth a wait
_SOON = 8  # large operations later: branches of a network may run beside each other


def with_late_operations(program: Program, steps: Sequence[Step]) -> Program:
    """Return the program in which such operations wait.

    Args:
      program, steps: what runs where.
    """
    waits: dict[int, int] = {}
    readers, reads, seeds = _first_readers(program, steps), _reads(program), seeds_of(program)
    place, ready, runs = _places(program)
    sent = _sent_to_shards(program, steps)  # (a wait for a shard, and the way back to it, would be two ways more)
    sides = sides_of(program)

    def fits(op: Op, i: int) -> bool:
        is_before = i < op.index and seeds[i] == seeds[op.index] and sides.of_op(i) <= sides.of_op(op.index)
        return is_before and _may_follow(op, steps[op.index], program.ops[i], steps[i])

    for op in reversed(program.ops):
        soon = ready[op.index] + _SOON
        if place[op.index] <= soon or op.index not in readers or op.index in sent:
            continue
        freed = [t for t in op.inputs if all(i == op.index or place[i] <= soon for i in reads[t])]
        if not _holds_more(program, op, freed):
            continue

        def sources(i: int, op: Op = op, soon: int = soon) -> list[int]:
            op_sources = [*program.ops[i].sources, *([waits[i]] if i in waits else [])]
            return [] if fits(op, i) else [k for k in op_sources if runs[k] > soon and k != op.index]

        may_follow = [i for i in reached([readers[op.index]], sources) if fits(op, i)]
        if may_follow:
            waits[op.index] = max(may_follow)
    ops = [replace(op, controls=(*op.controls, waits[op.index])) if op.index in waits else op for op in program.ops]
    return replace(program, ops=tuple(ops)) if waits else program


def _sent_to_shards(program: Program, steps: Sequence[Step]) -> set[int]:
    """Return what runs once, not behind anything on the shards, and is read by them: weights in another precision."""
    behind, sent = set[int](), set[int]()
    for op in program.ops:
        if steps[op.index].shards or not behind.isdisjoint(op.sources):
            behind.add(op.index)
    for op in reversed(program.ops):
        if steps[op.index].shards or op.index in sent:
            sent.update([t.op for t in op.inputs if steps[t.op].once and t.op not in behind])
    return sent


def _places(program: Program) -> tuple[list[int], list[int], list[int]]:
    """Return where operations stand, behind what they are ready, and when they run; counted are large ones.

    One runs where it stands, or as soon as it is ready, if that is long before.
    """
    place, ready, runs, large = list[int](), list[int](), list[int](), 0
    for op in program.ops:
        place.append(large)
        ready.append(max([runs[i] for i in op.sources], default=-1))
        is_early = op.type in NO_BUFFER or large - ready[-1] > _SOON
        runs.append(ready[-1] if is_early else large)
        large += op.type not in NO_BUFFER and sum(op.out_bytes) >= _LEAST_BYTES
    return place, ready, runs


def _first_readers(program: Program, steps: Sequence[Step]) -> dict[int, int]:
    """Return the first operation that reads what each one makes, or hands it on to one that does."""
    reader_by_op: dict[int, int] = {}
    for op in reversed(program.ops):
        if steps[op.index].once or steps[op.index].shards:
            reader = reader_by_op.get(op.index) if op.type in SAME_BUFFER else op.index
            reader_by_op.update(
                dict.fromkeys([tensor.op for tensor in op.inputs], reader) if reader is not None else {}
            )
    return reader_by_op


def _reads(program: Program) -> dict[Tensor, list[int]]:
    """Return which operations read each tensor, in order."""
    readers_by_tensor: dict[Tensor, list[int]] = {}
    for op in program.ops:
        for tensor in dict.fromkeys(op.inputs):
            readers_by_tensor.setdefault(tensor, []).append(op.index)
    return readers_by_tensor


def _holds_more(program: Program, op: Op, freed: Iterable[Tensor]) -> bool:
    """Return whether more is held when an operation has run, and enough to matter.

    Args:
      program: of the operation.
      op: which.
      freed: what nobody reads any more by then.
    """
    if op.type in SAME_BUFFER or op.type in NO_BUFFER or op.stateful or op.writes or op.bodies:
        return False
    freed_bytes = sum(map(program.bytes, {t for t in freed if program.ops[t.op].type not in NO_BUFFER}))
    return tf.variant not in op.out_dtypes and sum(op.out_bytes) >= max(_LEAST_BYTES, 1 + freed_bytes)


def _may_follow(op: Op, step: Step, first: Op, first_step: Step) -> bool:
    """Return whether an operation may wait for another one: on the same column and stage, its shard for its shard."""
    same = first.provenance.column in (None, op.provenance.column) and first.stage == op.stage
    return same and (bool(first_step.shards) or first_step.once) and (not step.shards or not first_step.once)
