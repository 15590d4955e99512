"""Lists of tensors that cannot be where a plan has them: they are opaque to other ops, and neither cut nor joined."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.layouts import Layout, Shard, is_whole
from graphsplit.core.sizes.symbolic_sizes import Shape, is_same
from graphsplit.planning.steps import Move, Step
from graphsplit.program.program import Program


def misplaced_lists(program: Program, steps: Sequence[Step], moves: Sequence[Move], batch: int) -> dict[int, str]:
    """Return the ops that must stay at home for lists' sake, with the reason."""
    return {**_unmovable(program, steps, moves), **_ill_fitting(program, steps, batch)}


def _unmovable(program: Program, steps: Sequence[Step], moves: Sequence[Move]) -> dict[int, str]:
    """Return the ops that must stay at home because lists cannot be gathered or cut: they are opaque to other ops."""
    found = {}
    for move in moves:
        tensor = move.tensor
        both_whole = is_whole(move.source) and is_whole(move.target)
        if both_whole or program.dtype(tensor) != tf.variant:
            continue
        if not is_whole(move.source):
            found[tensor.op] = "its list is read whole" + _by_whom(program, steps, move)
            continue
        for op, step in zip(program.ops, steps, strict=True):
            if step.shards and (tensor, move.target) in zip(op.inputs, step.shards.wants, strict=True):
                found[op.index] = "its list is made whole"
    return found


def _ill_fitting(program: Program, steps: Sequence[Step], batch: int) -> dict[int, str]:
    """Return the ops that write to a list, or read of it, what has other rows than the list's other elements."""
    found = {}
    for op, step in zip(program.ops, steps, strict=True) if batch else ():
        if not step.shards:
            continue
        types = [*map(program.dtype, op.inputs)]
        if tf.variant not in (*types, *op.out_dtypes):
            continue
        are_cut = [_gives(steps[t.op], t.index) != want for t, want in zip(op.inputs, step.shards.wants, strict=True)]
        layouts, shapes = (*step.shards.wants, *step.shards.gives), (*op.in_shapes, *op.out_shapes)
        all_types, all_cut = (*types, *op.out_dtypes), (*are_cut, *[False] * len(op.out_dtypes))
        for layout, shape, dtype, is_cut in zip(layouts, shapes, all_types, all_cut, strict=True):
            if isinstance(layout, Shard) and dtype != tf.variant and not _fits(shape, layout, batch, is_cut):
                found[op.index] = f"the list is read whole: not all of its elements are {layout}"
    return found


def _gives(step: Step, output: int) -> Layout | None:
    return step.shards.gives[output] if step.shards else None


def _fits(shape: Shape | None, layout: Shard, batch: int, is_cut: bool) -> bool:
    """Return whether a tensor has the rows that a layout says, as far as its shape is known; if not, it is not cut."""
    if shape is not None and layout.axis >= len(shape):
        return False
    size = None if shape is None else shape[layout.axis]
    return not is_cut if size is None else is_same(size, layout.size(batch))


def _by_whom(program: Program, steps: Sequence[Step], move: Move) -> str:
    for op, step in zip(program.ops, steps, strict=True):
        if step.home and step.reason and move.tensor in op.inputs:
            return f" by {op.type}: {step.reason}"
    return ""
