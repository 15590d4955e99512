"""Late operations: what could run long before it is read waits, so that its result is not held meanwhile.

TensorFlow runs whatever is ready. A BatchNormalization's backward pass has `x - mean`, which is ready in the forward
pass; an optimizer with momentum begins with `momentum * 0.9`, which is ready at once. So TensorFlow holds all of these
from then on, and the program makes each shortly before it reads it: a step of ResNet50 with momentum holds 0.5 of the
bytes besides its state if they wait, one of MiniGoogLeNet with BatchNormalization 0.75.

Such an operation waits for the last of what its reader depends on, too, and what stands before it in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.planning.buffers import NO_BUFFER, SAME_BUFFER
from graphsplit.planning.schedule.scheduling import seeds_of
from graphsplit.planning.steps import Step
from graphsplit.program.graph.walks import reached
from graphsplit.program.program import Op, Program, Tensor

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

    def fits(op: Op, i: int) -> bool:
        is_before = i < op.index and seeds[i] == seeds[op.index]
        return is_before and _may_follow(op, steps[op.index], program.ops[i], steps[i])

    for op in reversed(program.ops):
        soon = ready[op.index] + _SOON
        if place[op.index] <= soon or op.index not in readers:
            continue
        freed = [t for t in op.inputs if all(i == op.index or place[i] <= soon for i in reads[t])]
        if not _holds_more(program, op, freed):
            continue

        def sources(i: int, op: Op = op, soon: int = soon) -> list[int]:
            own = [*program.ops[i].sources, *([waits[i]] if i in waits else [])]
            return [] if fits(op, i) else [k for k in own if runs[k] > soon and k != op.index]

        found = [i for i in reached([readers[op.index]], sources) if fits(op, i)]
        if found:
            waits[op.index] = max(found)
    ops = [replace(op, controls=(*op.controls, waits[op.index])) if op.index in waits else op for op in program.ops]
    return replace(program, ops=tuple(ops)) if waits else program


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
    found: dict[int, int] = {}
    for op in reversed(program.ops):
        if steps[op.index].home or steps[op.index].shards:
            reader = found.get(op.index) if op.type in SAME_BUFFER else op.index
            found.update(dict.fromkeys([tensor.op for tensor in op.inputs], reader) if reader is not None else {})
    return found


def _reads(program: Program) -> dict[Tensor, list[int]]:
    """Return which operations read each tensor, in order."""
    found: dict[Tensor, list[int]] = {}
    for op in program.ops:
        for tensor in dict.fromkeys(op.inputs):
            found.setdefault(tensor, []).append(op.index)
    return found


def _holds_more(program: Program, op: Op, freed: Iterable[Tensor]) -> bool:
    """Return whether more is held when an operation has run, and enough to matter.

    Args:
      program: of the operation.
      op: which.
      freed: what nobody reads any more by then.
    """
    if op.type in SAME_BUFFER or op.type in NO_BUFFER or op.stateful or op.writes or op.bodies:
        return False
    held = {tensor for tensor in freed if program.ops[tensor.op].type not in NO_BUFFER}
    return tf.variant not in op.out_dtypes and sum(op.out_bytes) >= max(_LEAST_BYTES, 1 + sum(map(program.bytes, held)))


def _may_follow(op: Op, step: Step, first: Op, before: Step) -> bool:
    """Return whether an operation may wait for another one: on the same column and stage, its shard for its shard."""
    same = first.provenance.column in (None, op.provenance.column) and first.stage == op.stage
    return same and (bool(before.shards) or before.home) and (not step.shards or not before.home)
