"""Moves: every change of a tensor's layout, derived once from what is made and what is read.

What is read in a layout in which it is not made moves to it, through one device if need be: gathered or reduced, then
cut or sent. Emission executes these moves, and derives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout, Shard, SingleDevice, is_whole
from graphsplit.planning.owners import Owners
from graphsplit.planning.state import State
from graphsplit.planning.steps import Move, Step
from graphsplit.program.program import Op, Program, Tensor


def find_moves(program: Program, steps: Sequence[Step], owners: Owners, state: State) -> tuple[Move, ...]:
    """Return every move, each after those it follows from.

    Args:
      program: what is planned.
      steps: what becomes of each op.
      owners: where whole values are made.
      state: where lives what the program does not compute.
    """
    finder = _Finder(program, steps, owners, state)
    for op, step in zip(program.ops, steps, strict=True):
        for tensor, layout in reads_of(op, step, owners):
            finder.read(tensor, layout)
    for tensor in program.outputs:
        finder.read(tensor, SINGLE_DEVICE)
    return tuple(finder.moves)


def reads_of(op: Op, step: Step, owners: Owners) -> Iterable[tuple[Tensor, Layout]]:
    """Return what an op reads, in which layouts: once, where it runs once, and on the shards."""
    if step.home:
        own = SingleDevice(owners.of_ops[op.index])
        yield from ((tensor, own) for tensor in op.inputs)
    if step.shards:
        for i, (tensor, want) in enumerate(zip(op.inputs, step.shards.wants, strict=True)):
            if i not in step.shards.makes:
                yield tensor, want


def made_in(op: Op, step: Step, output: int, owners: Owners) -> list[Layout]:
    """Return the layouts in which an output is made."""
    found: list[Layout] = [SingleDevice(owners.of_ops[op.index])] if step.home else []
    if step.shards:
        found.append(step.shards.gives[output])
    return found


@dataclass
class _Finder:
    program: Program
    steps: Sequence[Step]
    owners: Owners
    state: State
    moves: dict[Move, None] = field(default_factory=dict)

    def read(self, tensor: Tensor, layout: Layout) -> None:
        """Add what it takes to read a tensor in a layout. (No device: wherever it is made whole.)"""
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        made = made_in(op, step, tensor.index, self.owners)
        if layout in made or (is_whole(layout) and self.state.is_everywhere(op)):
            return
        if op.type == "Const" and isinstance(layout, Shard):
            self._move(tensor, REPLICATE, layout)
            return
        source = next((given for given in made if is_whole(given)), None)
        if source is None and made:
            source = SingleDevice(self.owners.of(tensor))
            self._move(tensor, made[0], source)
        if source is not None and layout not in (source, SINGLE_DEVICE):
            self._move(tensor, source, layout)

    def _move(self, tensor: Tensor, source: Layout, target: Layout) -> None:
        if source != target:
            self.moves[Move(tensor, source, target)] = None
