"""LocalPlan: what a shard does by itself in the body of a loop or branch, or in a function that XLA compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphsplit.core.layouts import REPLICATE, Layout, Shard
from graphsplit.errors import CheckError
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.sharding_checks import check_step
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """A body that every shard runs by itself. Nothing moves: what is whole, every shard has for itself.

    Attributes:
      program: the body.
      mesh: the shards.
      input_layouts, output_layouts: the layouts of its arguments and of what it returns.
      steps: one per operation; `home` ones run on whole values, on every shard.
      random: `"exact"`: shards draw the numbers of one device; `"independent"`: numbers of their own.
    """

    program: Program = field(repr=False)
    mesh: Mesh
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    steps: tuple[Step, ...] = field(repr=False)
    random: str = "exact"

    @property
    def sharded_ops(self) -> tuple[Op, ...]:
        """Return the operations that work on rows of their own."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.shards)

    def check(self) -> None:
        """Raise `CheckError` unless every tensor that is read exists in the layout in which it is read."""
        for op, step in zip(self.program.ops, self.steps, strict=True):
            reads: list[tuple[Tensor, Layout]] = [(t, REPLICATE) for t in op.inputs] if step.home else []
            reads += check_step(self.program, op, step, self.mesh)
            self._check_exist(reads, op.name)
        self._check_exist(list(zip(self.program.outputs, self.output_layouts, strict=True)), "the result")

    def _check_exist(self, reads: Sequence[tuple[Tensor, Layout]], reader: str) -> None:
        for tensor, layout in reads:
            if not self._exists(tensor, layout):
                name = self.program.ops[tensor.op].name
                raise CheckError(f"{reader!r} reads {name!r} as {layout}, which is not made.")

    def _exists(self, tensor: Tensor, layout: Layout) -> bool:
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        if tensor.op in self.program.inputs:
            return self.input_layouts[self.program.inputs.index(tensor.op)] == layout
        if op.type == "Const" and isinstance(layout, Shard):
            return True
        made = step.shards is not None and step.shards.gives[tensor.index] == layout
        return made or (layout == REPLICATE and (step.home or op.is_constant))
