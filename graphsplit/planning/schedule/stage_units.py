"""Units of stages: a forward operation on the shards, and the backward ones that differentiate it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from graphsplit.planning.costs.seconds import seconds_of
from graphsplit.planning.schedule.chains import Chain, Sent
from graphsplit.planning.schedule.gradient_pairs import backward_ops, pair
from graphsplit.planning.schedule.scheduling import COSTLY
from graphsplit.planning.steps import Step
from graphsplit.planning.work import data_in
from graphsplit.program.program import Program, Tensor


@dataclass(frozen=True, eq=False)
class StageUnits:
    """The units of a program.

    Attributes:
      program: see there.
      work: positions of what takes time forward and depends on data, on the shards or not.
      forward, backward: positions of the operations on the shards.
      of: the number of the unit of each of them.
      seconds: of each unit.
    """

    program: Program
    work: Sequence[int]
    forward: Sequence[int]
    backward: Set[int]
    of: Mapping[int, int]
    seconds: Sequence[float]

    @property
    def most_stages(self) -> int:
        """Into how many stages they can be cut."""
        return sum(second > 0 for second in self.seconds)

    def tensors(self) -> dict[Tensor, list[int]]:
        """Return the operations that have to do with each tensor that is made on the shards: its maker, its readers."""
        found: dict[Tensor, list[int]] = {}
        for i in sorted(self.of):
            for tensor in dict.fromkeys(self.program.ops[i].inputs):
                if tensor.op in self.of:
                    found.setdefault(tensor, [tensor.op]).append(i)
        return found

    def chain(self) -> Chain:
        """Return the units as a chain."""
        size, sent, kept, weights = len(self.forward), [], [0] * len(self.forward), [0] * len(self.forward)
        for tensor, concerned in self.tensors().items():
            units, count = [self.of[i] for i in concerned], self.program.bytes(tensor)
            sent.append(Sent(min(units), max(units), count))
            if tensor.op not in self.backward and not self.backward.isdisjoint(concerned):
                kept[self.of[tensor.op]] += count
        seen: set[Tensor] = set()
        for k, i in enumerate(self.forward):
            new = {t for t in self.program.ops[i].inputs if t.op not in self.of} - seen
            weights[k] = sum(map(self.program.bytes, new))
            seen |= new
        seams = tuple([self._seam(k) for k in range(size)])
        return Chain(tuple(self.seconds), tuple(sent), tuple(weights), tuple(kept), seams)

    def _seam(self, k: int) -> int:
        """Return how little a unit is the beginning of something: of a layer, of a product with weights."""
        op, before = self.program.ops[self.forward[k]], self.program.ops[self.forward[k - 1]]
        same = op.name.rpartition("/")[0] == before.name.rpartition("/")[0]
        return same + (op.type not in COSTLY)


def stage_units(program: Program, steps: Sequence[Step], batch: int) -> StageUnits:
    """Return the units of a program.

    Args:
      program, steps: what runs where.
      batch: the number of rows.
    """
    sharded = [op.index for op in program.ops if steps[op.index].shards]
    found = backward_ops(program, set(sharded))
    backward = {i for i in sharded if i in found}
    live = [op for op, step in zip(program.ops, steps, strict=True) if step.shards or step.home]
    data = data_in(program, batch)
    work = [op.index for op in live if data[op.index] and op.index not in found and seconds_of(program, op) > 0]
    forward = [i for i in sharded if i not in found]
    of = {i: k for k, i in enumerate(forward)} | dict(pair(program, forward, backward) if forward else {})
    seconds = [0.0] * len(forward)
    for i, k in of.items():
        seconds[k] += seconds_of(program, program.ops[i])
    return StageUnits(program, work, forward, backward, of, seconds)
