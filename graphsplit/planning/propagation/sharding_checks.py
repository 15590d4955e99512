"""Whether a step fits its operation, in any plan; and which lists of tensors cannot be where a plan has them.

Lists are opaque to other operations, and neither cut nor joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, EvenCut, Layout, Shard, is_whole
from graphsplit.core.sizes import Shape, is_same
from graphsplit.errors import CheckError
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.steps import Move, Step
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.undefined_outputs import undefined_outputs
from graphsplit.rules import Sharded
from graphsplit.rules.factors import DROPPED, LEFT_OUT, SKIPPED, ZEROS

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})  # of copies that are alike


def check_step(program: Program, op: Op, step: Step, mesh: Mesh) -> list[tuple[Tensor, Layout]]:
    """Return what the shards read for an operation.

    Raises:
      CheckError: if the operation must not run on every shard, or layouts do not fit its shapes.
    """
    for body in step.bodies.values():
        body.check()
    shards = step.shards
    if shards is None:
        return []
    handles = [i for i, t in enumerate(op.inputs) if program.ops[t.op].out_dtypes[t.index] == tf.resource]
    of_parts = handles and (mesh.axis or all(isinstance(shards.wants[i], Shard) for i in handles))
    repeated = op.stateful and not shards.draw and not shards.together and op.type not in _READS
    if repeated and not of_parts:  # each device has its own part
        raise CheckError(f"{op.name!r} has side effects and would run {mesh.shards} times.")
    if len(shards.wants) != len(op.inputs) or len(shards.gives) != len(op.out_shapes):
        raise CheckError(f"{op.name!r} wants {shards.wants} and gives {shards.gives}.")
    for body in shards.bodies.values():
        body.check()
        moves = () if shards.together else exchanges(body.program, body.moves)
        if moves:
            name = body.program.ops[moves[0].tensor.op].name
            raise CheckError(f"Each shard runs {op.name!r} by itself, and in its body {name!r} moves: {moves[0].kind}.")
    _check_numbers(op, shards)
    undefined = undefined_outputs(op.node)
    for k, layout in enumerate(shards.gives):
        check_size(program, Tensor(op.index, k), layout, mesh)
        if k in undefined and not is_whole(layout):
            raise CheckError(
                f"{op.name!r} gives {layout} as output {k}, which TensorFlow leaves undefined: "
                "nothing may travel for it."
            )
    wanted = enumerate(zip(op.inputs, shards.wants, strict=True))
    return [pair for i, pair in wanted if i not in shards.makes]


def exchanges(program: Program, moves: Sequence[Move]) -> Sequence[Move]:
    """Return the moves for which shards need each other: all but of what is whole, and of constants, which each has."""
    cutting = [move for move in moves if not (is_whole(move.source) and is_whole(move.target))]
    return [move for move in cutting if program.ops[move.tensor.op].type != "Const"]


def _check_numbers(op: Op, shards: Sharded) -> None:
    """Raise `CheckError` if numbers of entries of an axis that is cut are read as if a shard had them all."""
    cut = {
        "GatherV2": lambda: _lies(shards.wants[0], op.constants.get(2), op.in_shapes[0]),
        "OneHot": lambda: _lies(shards.gives[0], op.attr("axis").i, op.out_shapes[0]),
        "UnsortedSegment": lambda: _lies(shards.gives[0], 0, op.out_shapes[0]),
        "TensorScatter": lambda: _lies(shards.gives[0], 0, op.out_shapes[0]),
    }.get(next(filter(op.type.startswith, ("UnsortedSegment", "TensorScatter")), op.type), lambda: None)()
    writes_rows = op.type.startswith("ResourceScatter") and isinstance(shards.wants[0], Shard)
    if writes_rows and shards.wants[0].axis == 0:  # type: ignore[union-attr]
        cut = shards.wants[0]  # type: ignore[assignment]
    if cut is None:
        return
    shift_by_type = {"GatherV2": (1, ZEROS), "OneHot": (0, SKIPPED)}
    operand, of_others = (1, LEFT_OUT) if writes_rows else shift_by_type.get(op.type, (1, DROPPED))
    shift = shards.shift.get(operand)
    fits = shift is not None and shift.layout.along(cut.axis) == cut
    if not fits or (shift and isinstance(cut.partition, EvenCut) and shift.others != of_others):
        raise CheckError(f"{op.name!r} numbers entries of {cut}, and is given {shift} for those of others.")
    if op.type == "GatherV2" and shards.gives[0] != PARTIAL_SUM:
        raise CheckError(f"{op.name!r} has zeros for entries of others, and gives {shards.gives[0]}.")


def _lies(layout: Layout, axis: Any, shape: Any) -> Shard | None:
    """Return how an axis is cut, counted from either end; None if it is not, or unknown."""
    if not isinstance(layout, Shard) or axis is None or shape is None:
        return None
    return layout if layout.axis == int(axis) % len(shape) else None


def check_size(program: Program, tensor: Tensor, layout: Layout, mesh: Mesh) -> None:
    """Raise `CheckError` unless a tensor can be cut as a layout says."""
    if not isinstance(layout, Shard) or program.ops[tensor.op].out_dtypes[tensor.index] in (tf.variant, tf.resource):
        return  # (the axes of a list are those of its elements, and those of a handle the variable's)
    shape = program.shape(tensor)
    if shape is None or layout.axis >= len(shape) or not is_same(shape[layout.axis], layout.size(mesh.batch)):
        name = program.ops[tensor.op].name
        raise CheckError(f"{name!r} of shape {shape} cannot be {layout} over {mesh.batch} rows.")


def misplaced_lists(program: Program, steps: Sequence[Step], moves: Sequence[Move], batch: int) -> dict[int, str]:
    """Return the ops that must run once for lists' sake, with the reason."""
    return {**_unmovable(program, steps, moves), **_ill_fitting(program, steps, batch)}


def _unmovable(program: Program, steps: Sequence[Step], moves: Sequence[Move]) -> dict[int, str]:
    """Return the ops that must run once because lists cannot be gathered or cut: they are opaque to other ops."""
    why_by_op = {}
    for move in moves:
        tensor = move.tensor
        both_whole = is_whole(move.source) and is_whole(move.target)
        if both_whole or program.dtype(tensor) != tf.variant:
            continue
        if not is_whole(move.source):
            why_by_op[tensor.op] = "its list is read whole" + _by_whom(program, steps, move)
            continue
        for op, step in zip(program.ops, steps, strict=True):
            if step.shards and (tensor, move.target) in zip(op.inputs, step.shards.wants, strict=True):
                why_by_op[op.index] = "its list is made whole"
    return why_by_op


def _ill_fitting(program: Program, steps: Sequence[Step], batch: int) -> dict[int, str]:
    """Return the ops that write to a list, or read of it, what has other rows than the list's other elements."""
    why_by_op = {}
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
                why_by_op[op.index] = f"the list is read whole: not all of its elements are {layout}"
    return why_by_op


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
        if step.once and step.reason and move.tensor in op.inputs:
            return f" by {op.type}: {step.reason}"
    return ""
