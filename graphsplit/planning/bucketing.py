"""Packing: small tensors that can travel at the same time travel as one.

A copy between devices costs some microseconds whatever it carries, and two nodes in the graph that TensorFlow prepares.
Biases and scales, and their gradients, are many and small. What the shards read whole and is known before any of them
has run is joined at home and sent once; what is reduced and then read at home only is joined on each shard and reduced
as one. Neither waits for the other way round: that is why only the first and the last of a step are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Replicate
from graphsplit.planning.steps import Pack, Reshard, Step
from graphsplit.program.program import Op, Program, Tensor

_SMALL_BYTES = 16_384  # `python -m benchmarks.packing`: a fifth faster on 8 devices; of four times the size, even
_FEWEST = 4  # a pack of fewer takes as many nodes as it saves


def find_packs(program: Program, steps: Sequence[Step], reshards: Iterable[Reshard]) -> tuple[Pack, ...]:
    """Return which tensors travel together. All of a pack have one axis, one dtype, and sizes that are known."""
    if program.symbols or program.seeds or program.stages:
        return ()  # shards may be absent; what comes from outside comes when it likes; stages have their own devices
    whole = _by_dtype(program, _sent_first(program, steps))
    reduced = _by_dtype(program, _reduced_last(program, steps, reshards))
    return (*[Pack("whole values", tensors) for tensors in whole], *[Pack("all-reduce", t) for t in reduced])


def check_packs(program: Program, steps: Sequence[Step], packs: Iterable[Pack]) -> None:
    """Raise `CheckError` if a part of a pack waits for another part, through what runs on the shards."""
    readers: dict[int, list[int]] = {}
    for op in program.ops:
        for source in dict.fromkeys(op.sources):
            readers.setdefault(source, []).append(op.index)
    for pack in packs:
        if pack.kind == "whole values":
            found = _reached([tensor.op for tensor in pack.tensors], lambda i: program.ops[i].sources)
        else:
            reading = [
                i for t in pack.tensors for i in readers.get(t.op, ()) if _reads_whole(program.ops[i], steps[i], t)
            ]
            found = _reached(reading, lambda i: readers.get(i, ()))
        wrong = [program.ops[i].name for i in found if steps[i].shards]
        if wrong:
            raise CheckError(f"Tensors packed as {pack.kind} wait for each other through {wrong[0]!r}.")


def _reached(start: Sequence[int], following: Callable[[int], Iterable[int]]) -> list[int]:
    found = dict.fromkeys(start)
    pending = list(found)
    while pending:
        for i in following(pending.pop()):
            if i not in found:
                found[i] = None
                pending.append(i)
    return list(found)


def _reads_whole(op: Op, step: Step, tensor: Tensor) -> bool:
    wants = step.shards.wants if step.shards else (PARTIAL_SUM,) * len(op.inputs)
    read = [want for t, want in zip(op.inputs, wants, strict=True) if t == tensor]
    return bool(read) and (step.home or any(want != PARTIAL_SUM for want in read))


def _by_dtype(program: Program, tensors: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        dtype, shape = program.ops[tensor.op].out_dtypes[tensor.index], program.shape(tensor)
        is_number = dtype.is_floating or dtype.is_integer
        if is_number and shape is not None and len(shape) == 1 and 0 < program.bytes(tensor) <= _SMALL_BYTES:
            found.setdefault(dtype.name, []).append(tensor)
    return [tuple(tensors) for tensors in found.values() if len(tensors) >= _FEWEST]


def _sent_first(program: Program, steps: Sequence[Step]) -> list[Tensor]:
    """Return the tensors that are read whole on the shards and do not depend on anything that ran there."""
    after: set[int] = set()
    for op in program.ops:
        if steps[op.index].shards or steps[op.index].bodies or any(source in after for source in op.sources):
            after.add(op.index)
    return [tensor for tensor in whole_values(program, steps) if tensor.op not in after]


def _reduced_last(program: Program, steps: Sequence[Step], reshards: Iterable[Reshard]) -> list[Tensor]:
    """Return the tensors that are summed over the shards and read at home, with nothing following on the shards."""
    leading = leading_to_shards(program, steps)
    sums = [r.tensor for r in reshards if r.source == PARTIAL_SUM and isinstance(r.target, Replicate)]
    divided = {t for t in sums if (shards := steps[t.op].shards) and shards.divisor}
    return [t for t in dict.fromkeys(sums) if t not in leading and t not in divided]


def leading_to_shards(program: Program, steps: Sequence[Step]) -> set[Tensor]:
    """Return the tensors from which, once they are reduced if they were sums, something follows on the shards."""
    before: set[int] = set()  # operations from which something follows on the shards
    leading: set[Tensor] = set()
    for op in reversed(program.ops):
        shards = steps[op.index].shards
        if shards:
            leading.update(t for t, want in zip(op.inputs, shards.wants, strict=True) if want != PARTIAL_SUM)
        if steps[op.index].home and op.index in before:
            leading.update(op.inputs)
        if shards or op.index in before or steps[op.index].bodies:
            before.update(op.sources)
    return leading


def whole_values(program: Program, steps: Sequence[Step]) -> list[Tensor]:
    """Return the tensors that are made at home and read whole on every shard. Constants are made again there."""
    read: dict[Tensor, None] = {}
    for op, step in zip(program.ops, steps, strict=True):
        if step.shards:
            for i, (tensor, want) in enumerate(zip(op.inputs, step.shards.wants, strict=True)):
                if want is REPLICATE and i not in step.shards.makes:
                    read[tensor] = None
    return [tensor for tensor in read if _is_made_at_home(program.ops[tensor.op], steps[tensor.op], tensor.index)]


def _is_made_at_home(op: Op, step: Step, output: int) -> bool:
    return not op.is_constant and not (step.shards and step.shards.gives[output] is REPLICATE)
