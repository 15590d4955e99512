"""Shared numbers: what follows from numbers of several owners, and serves several, is computed on each of these.

Of a norm of all gradients each owner has a part, and each scales its own gradients by it. If one device computed it,
all others would wait twice: for what they send, and for what they are sent. So each sends what it has to all of them,
and each computes the same, in the same order: the bits are equal. Only what follows from the shards is computed so, as
nobody waits for a learning rate; and only what is small, by the rule of sums that all shards read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from graphsplit.core.layouts import Replicate
from graphsplit.planning.costs.work import may_repeat
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor


def shared_numbers(
    program: Program,
    steps: Sequence[Step],
    places: Mapping[Tensor, str],
    served: Sequence[Collection[str]],
    exchange_bytes: int,
) -> dict[int, Replicate]:
    """Return the operations that each of several owners runs, by position, and how their results lie.

    Args:
      program, steps: what runs once.
      places: where is whole what such an operation may read.
      served: for each operation the devices of what it leads to.
      exchange_bytes: see `Mesh`.
    """
    behind = behind_shards(program, steps)
    shared: set[int] = set()
    for op in program.ops:
        if (
            behind[op.index]
            and steps[op.index].once
            and len(served[op.index]) > 1
            and _is_small(program, op, len(served[op.index]), exchange_bytes)
        ):
            operand_places = {"" if tensor.op in shared else places.get(tensor) for tensor in op.inputs} - {None}
            if "" in operand_places or len(operand_places) > 1:
                shared.add(op.index)
    group = Replicate(tuple(sorted({device for i in shared for device in served[i]})))
    return dict.fromkeys(sorted(shared), group)


def behind_shards(program: Program, steps: Sequence[Step]) -> list[bool]:
    """Return of each operation whether it follows from what ran on the shards."""
    behind = [False] * len(program.ops)
    for op in program.ops:
        behind[op.index] = any(behind[i] or steps[i].shards is not None for i in op.sources)
    return behind


def _is_small(program: Program, op: Op, devices: int, exchange_bytes: int) -> bool:
    """Return whether an operation may run on each device that it serves: that takes a single way, and no work."""
    tensors = [*op.inputs, *[Tensor(op.index, k) for k in range(len(op.out_shapes))]]
    sizes = [program.bytes(tensor) for tensor in tensors]
    return max(sizes) * (devices - 1) <= exchange_bytes and may_repeat(program, op, sum(sizes))
