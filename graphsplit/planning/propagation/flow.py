"""Flow: what depends on what, once it is decided what runs on the shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.core.layouts import Layout, Shard, is_whole
from graphsplit.planning.state import State
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor


class Source(NamedTuple):
    """What an operation depends on.

    Attributes:
      op: its position.
      on_shards: whether it is the shards' copies, or what runs once.
      of_all: whether those of all shards, put together; not only the shard's own.
    """

    op: int
    on_shards: bool
    of_all: bool


@dataclass(frozen=True)
class Flow:
    """What depends on what, once it is decided what runs on the shards.

    Attributes:
      program, steps: what runs where.
      state: where lives what the program does not compute.
      order: operations on the shards that wait, each for another one.
    """

    program: Program
    steps: Sequence[Step]
    state: State
    order: Mapping[int, int] = field(default_factory=dict)

    def of_shard(self, position: int) -> Iterator[Source]:
        """Return what a shard's copy of an operation depends on."""
        op, shards = self.program.ops[position], self.steps[position].shards
        assert shards is not None
        for i, (tensor, want) in enumerate(zip(op.inputs, shards.wants, strict=True)):
            if i not in shards.makes:
                yield from self._read(tensor, want)
        for control in op.controls:
            yield from self._ended(control)
        if position in self.order:
            yield Source(self.order[position], True, False)

    def of_whole(self, position: int) -> Iterator[Source]:
        """Return what an operation that runs once depends on."""
        op = self.program.ops[position]
        for i in op.sources:
            step = self.steps[i]
            if step.once or step.shards:
                yield Source(i, not step.once, not step.once)

    def _read(self, tensor: Tensor, layout: Layout) -> Iterator[Source]:
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        if step.shards and step.shards.gives[tensor.index] == layout:
            yield Source(tensor.op, True, False)
        elif (op.type == "Const" and isinstance(layout, Shard)) or (is_whole(layout) and self.state.is_everywhere(op)):
            return
        elif step.once:
            yield Source(tensor.op, False, False)
        elif step.shards:
            yield Source(tensor.op, True, True)

    def _ended(self, position: int) -> Iterator[Source]:
        step = self.steps[position]
        if step.once:
            yield Source(position, False, False)
        elif step.shards:
            yield Source(position, True, False)


def meeting_points(flow: Flow) -> list[Op]:
    """Return the operations on the shards for which, on all of them, something on the shards waits."""
    leading: set[int] = set()  # what runs once, and is read by the shards in the end
    meeting: set[int] = set()
    for op in reversed(flow.program.ops):
        step = flow.steps[op.index]
        sources = list(flow.of_shard(op.index)) if step.shards else []
        sources += flow.of_whole(op.index) if step.once and op.index in leading else ()
        for source in sources:
            meets = source.of_all and source.on_shards
            meeting.update([source.op] if meets else ())
            leading.update([source.op] if not source.on_shards else ())
    return [flow.program.ops[i] for i in sorted(meeting)]
