"""Gathering: when what lies on several devices is put together for the shards, and for how long.

A device that computes with a weight has the whole of it while it does. That is once in the forward pass and once in the
backward pass, and were it kept in between, every device would have all weights in the end. So it is put together anew
for each of the two (FSDP calls it resharding after forward), and only when there is room: of the values that were put
together before, no more are kept than two of the largest take, those that were read last. What comes next waits until
all shards have read what has to go. In between, one weight computes while the next one travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphsplit.core.layouts import Cut, Shard
from graphsplit.planning.costs.work import SMALL_BYTES
from graphsplit.planning.variables.part_by_part import PartByPart, part_by_part
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program, Tensor

AT_A_TIME = 2
"""How many of the largest values there is room for."""


def read_again(program: Program, cuts: Mapping[int, Cut]) -> dict[int, list[Tensor]]:
    """Return what operations read, by position, that is put together anew where it is no longer kept.

    Args:
      program: the function, for variables that are each one.
      cuts: how captured variables are cut, by position.
    """
    sharded = [(i, cut, cut.devices if cut.parts > 1 else cut.devices * 2) for i, cut in cuts.items() if cut.reshard]
    if not sharded:
        return {}
    finder = part_by_part(program, {i: replace(cut, devices=devices).layout for i, cut, devices in sharded})
    ends = [*[tensor.op for tensor in program.outputs], *program.effects]
    needed = reached(ends, lambda i: program.ops[i].sources)
    read_by_op = {op.index: [*_reads(program, finder, op)] for op in program.ops if op.index in needed}
    return {i: tensors for i, tensors in read_by_op.items() if tensors}


def _reads(program: Program, finder: PartByPart, op: Op) -> Iterator[Tensor]:
    """Yield what an operation needs whole that follows from sharded variables, and is not small."""
    beside = op.index in finder.how or op.index in finder.once
    for tensor in () if beside else dict.fromkeys(op.inputs):
        how = finder.how.get(tensor.op)
        is_cut = how is not None and not how.shift and isinstance(how.gives[tensor.index], Shard)
        if is_cut and program.bytes(tensor) > SMALL_BYTES:
            yield tensor
