"""Groups: what runs once, and does so on each of several devices, because a variable has a copy on each of them.

What reads or writes such a variable runs beside each copy. So does the arithmetic that leads to what is written, as far
back as that takes no more bytes than to compute it on one device and to send it to all: a gradient is added up for all
of them, and nothing of an optimizer's update travels. Products and sums are computed once: they are work. But where
devices wait for what others send, each computes the norm of what all of them have, and none waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphsplit.core.layouts import PARTIAL_SUM, Replicate
from graphsplit.planning.costs.work import may_repeat
from graphsplit.planning.propagation.shared_numbers import behind_shards
from graphsplit.planning.state import State
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor

_NUMBER = 16  # bytes: so few are computed once, and sent
_NORMS = frozenset({"EuclideanNorm", "L2Loss", "Max", "Sum"})


def find_groups(program: Program, steps: Sequence[Step], state: State, waits: bool = False) -> dict[int, Replicate]:
    """Return the operations that run once on each device of a group, by position, and how their results lie.

    Args:
      program, steps: what runs once.
      state: where lives what the program does not compute.
      waits: whether a way between devices counts more than what each of them computes meanwhile.
    """
    return _GroupFinder(program, steps, state, waits).find() if program.copied else {}


@dataclass
class _GroupFinder:
    program: Program
    steps: Sequence[Step]
    state: State
    waits: bool
    groups: dict[int, Replicate] = field(default_factory=dict)
    wanted: dict[Tensor, Replicate] = field(default_factory=dict)
    sent: dict[tuple[Tensor, Replicate], frozenset[Tensor]] = field(default_factory=dict)

    def find(self) -> dict[int, Replicate]:
        self.groups = {op.index: group for op in self.program.ops if (group := self._beside(op)) is not None}
        group_count = -1
        while group_count < len(self.groups):  # what is wanted for one reader costs nothing for another one
            group_count = len(self.groups)
            self.sent.clear()
            for op in reversed(self.program.ops):
                group = self.groups.get(op.index) or self._chosen(op)
                if group is not None:
                    self.groups[op.index] = group
                    self.wanted.update(dict.fromkeys(op.inputs, group))
        return self.groups

    @functools.cached_property
    def _behind(self) -> Sequence[bool]:
        return behind_shards(self.program, self.steps)

    def _beside(self, op: Op) -> Replicate | None:
        """Return the group of a variable with copies that an operation reads or writes."""
        is_one = op.device or not self.steps[op.index].once
        return None if is_one else self.program.copies_beside(op)

    def _chosen(self, op: Op) -> Replicate | None:
        """Return the group for which an operation runs on each device, as that moves no more bytes."""
        results = [Tensor(op.index, k) for k in range(len(op.out_shapes))]
        group = next((self.wanted[tensor] for tensor in results if tensor in self.wanted), None)
        if group is None or not self._may_repeat(op):
            return None
        if group.readers and op.divides:
            return None  # (of several parts each goes to a group of its own)
        size, inputs = sum(op.out_bytes), dict.fromkeys(op.inputs)
        if size <= _NUMBER:
            most = size if self.waits and self._behind[op.index] else size - 1  # (nobody waits for a learning rate)
            return group if self._cost(inputs, group) <= most else None
        large = [tensor for tensor in inputs if self.program.bytes(tensor) > _NUMBER]
        return group if self._cost(large, group) <= size + sum(map(self._added_up, inputs)) else None

    def _may_repeat(self, op: Op) -> bool:
        if not self.steps[op.index].once:
            return False
        bytes_read = sum(map(self.program.bytes, op.inputs)) if self.waits and op.type in _NORMS else 0
        return may_repeat(self.program, op, sum(op.out_bytes) + bytes_read)

    def _cost(self, tensors: Iterable[Tensor], group: Replicate) -> int:
        """Return the bytes that each device of a group is sent of some values."""
        return sum(map(self.program.bytes, {sent for tensor in tensors for sent in self._sent(tensor, group)}))

    def _sent(self, tensor: Tensor, group: Replicate, depth: int = 0) -> frozenset[Tensor]:
        """Return what each device of a group is sent of a value: that, or what it follows from, if it is no more."""
        key, op = (tensor, group), self.program.ops[tensor.op]
        if self.state.is_everywhere(op) or self.groups.get(tensor.op) == group or self.wanted.get(tensor) == group:
            return frozenset()
        if key not in self.sent:
            self.sent[key] = frozenset([tensor])
            if self._may_repeat(op) and depth < _DEEPEST:
                sent_instead = frozenset([sent for t in op.inputs for sent in self._sent(t, group, depth + 1)])
                if sum(map(self.program.bytes, sent_instead)) <= self.program.bytes(tensor):
                    self.sent[key] = sent_instead
        return self.sent[key]

    def _added_up(self, tensor: Tensor) -> int:
        """Return the bytes of a sum over the shards, which are sent in any case."""
        shards = self.steps[tensor.op].shards
        is_sum = shards is not None and shards.gives[tensor.index] == PARTIAL_SUM
        return self.program.bytes(tensor) if is_sum else 0


_DEEPEST = 24
