"""Which operations that run once bring rows of the batch into variables, and do nothing else with them.

A table that a sparse gradient updates, a queue of negatives and a replay buffer keep rows. Each is written once, where
it is, and the rows go there: no form of the program would send less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from graphsplit.core.layouts import is_whole
from graphsplit.planning.steps import Move, Step
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program

_WRITES_ROWS = ("ResourceScatter", "ResourceStridedSliceAssign", "ResourceSparseApply", "AssignVariableOp")
_MOVES_ROWS = frozenset(
    {"Cast", "Concat", "ConcatV2", "ExpandDims", "Identity", "Pack", "PadV2", "Pad", "Reshape", "Roll", "Slice"}
    | {"Split", "SplitV", "StridedSlice", "Squeeze", "TensorScatterUpdate", "Transpose", "Unpack"}
)


def rows_kept(program: Program, steps: Sequence[Step], moves: Sequence[Move], returned: bool = True) -> Iterator[Op]:
    """Yield such operations that run once: they write rows, or move them on to what does.

    Nothing that the function returns follows from them. (In a branch for that, which Keras' optimizers have around
    gradients that may have no rows, others gather nothing: their work counts as all work that runs once does.)

    Args:
      program, steps, moves: of a plan, or of the plan of an iteration or branch.
      returned: whether the function returns what follows from the results.
    """
    results = behind_results(program)
    gathered = {move.tensor for move in moves if is_whole(move.target) and not is_whole(move.source)}
    readers: dict[int, list[int]] = {}
    for op in program.ops:
        for tensor in op.inputs:
            readers.setdefault(tensor.op, []).append(op.index)
    for op, step in zip(program.ops, steps, strict=True):
        is_result = op.index in results
        if not step.once or (returned and is_result):
            continue
        for body in step.bodies.values():
            yield from rows_kept(body.program, body.steps, body.moves, returned=False)
        if step.reason and not step.bodies:
            following = [program.ops[k] for k in reached([op.index], lambda k: readers.get(k, ()))]
            not_writing = [op_behind for op_behind in following if not op_behind.type.startswith(_WRITES_ROWS)]
            goes_in = not is_result and all(op_behind.type in _MOVES_ROWS for op_behind in not_writing)
            gathers = not gathered.isdisjoint(op.inputs)
            if goes_in or not (returned or gathers or any(op_behind.stateful for op_behind in not_writing)):
                yield op


def behind_results(program: Program) -> Set[int]:
    """Return the operations from which something flows to what the function returns."""
    made_from = [[tensor.op for tensor in op.inputs] for op in program.ops]
    return reached([tensor.op for tensor in program.outputs], made_from.__getitem__)
