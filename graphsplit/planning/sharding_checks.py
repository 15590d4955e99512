"""Whether a step fits its operation, in any plan."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import Layout, Shard, is_whole
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.undefined_outputs import undefined_outputs


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
    if op.stateful and not shards.draw and op.type != "ReadVariableOp":
        raise CheckError(f"{op.name!r} has side effects and would run {mesh.shards} times.")
    if len(shards.wants) != len(op.inputs) or len(shards.gives) != len(op.out_shapes):
        raise CheckError(f"{op.name!r} wants {shards.wants} and gives {shards.gives}.")
    for body in shards.bodies.values():
        body.check()
    undefined = undefined_outputs(op.node)
    for k, layout in enumerate(shards.gives):
        check_size(program, Tensor(op.index, k), layout, mesh)
        if k in undefined and not is_whole(layout):
            raise CheckError(
                f"{op.name!r} gives {layout} as output {k}, which TensorFlow leaves undefined: "
                "nothing may travel for it."
            )
    wanted = enumerate(zip(op.inputs, shards.wants, strict=True))
    return [read for i, read in wanted if i not in shards.makes]


def check_size(program: Program, tensor: Tensor, layout: Layout, mesh: Mesh) -> None:
    """Raise `CheckError` unless a tensor can be cut as a layout says."""
    if not isinstance(layout, Shard) or program.ops[tensor.op].out_dtypes[tensor.index] == tf.variant:
        return  # (the axes of a list are those of its elements)
    shape = program.shape(tensor)
    if shape is None or layout.axis >= len(shape) or shape[layout.axis] != layout.size(mesh.batch):
        name = program.ops[tensor.op].name
        raise CheckError(f"{name!r} of shape {shape} cannot be {layout} over {mesh.batch} rows.")
