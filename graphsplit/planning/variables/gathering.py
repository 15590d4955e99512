"""Gathering: when what lies on several devices is put together for the shards, and for how long.

A device that computes with a weight has the whole of it while it does. That is once in the forward pass and once in the
backward pass, and were it kept in between, every device would have all weights in the end. So it is put together anew
for each of the two (FSDP calls it resharding after forward), and only when there is room: of the values that were put
together before, no more are kept than two of the largest take, those that were read last. What comes next waits until
all shards have read what has to go. In between, one weight computes while the next one travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from graphsplit.core.layouts import Cut, Shard
from graphsplit.planning.variables.part_by_part import PartByPart, part_by_part
from graphsplit.program.graph.walks import reached
from graphsplit.program.program import Op, Program, Tensor

_SMALL = 16_384  # bytes: such are put together once, and kept (biases travel as one, see `bucketing`)
_AT_A_TIME = 2


@dataclass
class Gather:
    """A whole value for some readers.

    Attributes:
      tensor: the value.
      readers: the operations that read it, by position.
      waits: those that must have ended on all shards before it is put together, besides those of earlier gathers.
    """

    tensor: Tensor
    readers: list[int] = field(default_factory=list)
    waits: tuple[int, ...] = ()


def find_gathers(program: Program, handles: Mapping[int, Cut]) -> list[Gather]:
    """Return the gathers of what follows from sharded variables, in order.

    Args:
      program: the function, for variables that are each one.
      handles: how captured variables lie, by position.
    """
    sharded = [(i, cut, cut.devices if cut.parts > 1 else cut.devices * 2) for i, cut in handles.items() if cut.reshard]
    if not sharded:
        return []
    finder = part_by_part(program, {i: replace(cut, devices=devices).layout for i, cut, devices in sharded})
    needed = _needed(program)
    reads = [(op, tensor) for op in program.ops if op.index in needed for tensor in _reads(program, finder, op)]
    by_column: dict[int | None, list[tuple[Op, Tensor]]] = {}
    for op, tensor in reads:
        by_column.setdefault(program.ops[tensor.op].provenance.column, []).append((op, tensor))
    return [gather for own in by_column.values() for gather in _gathers(program, own)]


def _gathers(program: Program, reads: list[tuple[Op, Tensor]]) -> list[Gather]:
    """Return the gathers of what the devices of one column read, in order.

    What is whole at a time is as in a cache that forgets what was read longest ago, over the program's order.
    """
    most = _AT_A_TIME * max([program.bytes(tensor) for _, tensor in reads])
    found: list[Gather] = []
    kept: dict[Tensor, Gather] = {}  # those that were read last come last
    for op, tensor in reads:
        gather = kept.pop(tensor, None)
        if gather is None:
            waits: list[int] = []
            for other in [other for other in kept if other not in op.inputs]:
                if sum(map(program.bytes, kept)) + program.bytes(tensor) > most:
                    waits += kept.pop(other).readers
            gather = Gather(tensor, waits=tuple(dict.fromkeys(waits)))
            found.append(gather)
        gather.readers.append(op.index)
        kept[tensor] = gather
    return found


def _needed(program: Program) -> Set[int]:
    """Return the operations from which a result or an effect follows."""
    ends = [*[tensor.op for tensor in program.outputs], *program.effects]
    return reached(ends, lambda i: program.ops[i].sources)


def _reads(program: Program, finder: PartByPart, op: Op) -> Iterator[Tensor]:
    """Return what an operation needs whole that follows from sharded variables, and is not small."""
    beside = op.index in finder.how or op.index in finder.once
    for tensor in () if beside else dict.fromkeys(op.inputs):
        how = finder.how.get(tensor.op)
        is_cut = how is not None and not how.shift and isinstance(how.gives[tensor.index], Shard)
        if is_cut and program.bytes(tensor) > _SMALL:
            yield tensor
