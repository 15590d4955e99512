"""Partners: the variables that had better be cut where one is, so that what each device makes stays where it is.

Behind a product whose columns are cut comes one whose rows fit these, and beside it one that is multiplied with it:
column then row, as in Megatron-LM (Shoeybi et al. 2019), and all kernels of the same heads. Nobody names these schemes
here: an operation that reads something whole and would have it in parts, says its rule, asks for that, and who made it
is asked in turn, back to variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.core.layouts import Layout, Shard, evenly, is_whole
from graphsplit.emission.axes.plans import AxisPlanner
from graphsplit.emission.axes.units import UnitSearch
from graphsplit.planning.variables.laid_variables import READS
from graphsplit.program.program import Program, Tensor
from graphsplit.rules import answer_for_output, rule_of


@dataclass(frozen=True)
class Partners:
    """Finds the partners of a variable; `of` does.

    Args:
      program: the function, for one device.
      planner: of the axis.
      shapes: of the captured variables that may be cut, by position.
      alike: for each of them all captures that lie as it does: the same variable once more, and slots of its shape.
    """

    program: Program
    planner: AxisPlanner
    shapes: Mapping[int, Sequence[int]]
    alike: Mapping[int, Sequence[int]]

    def alone(self, position: int, dimension: int) -> dict[int, Shard]:
        """Return a variable, and what lies as it does, cut along a dimension."""
        cut = evenly(dimension, self.shapes[position][dimension], self.planner.columns)
        return self._in_units(dict.fromkeys(self.alike[position], cut))

    def of(self, cuts: Mapping[int, Shard]) -> dict[int, Shard]:
        """Return how variables are cut, and with them their partners."""
        found = dict(cuts)
        while more := {i: cut for i, cut in self._wishes(found).items() if i not in found}:
            found |= self._in_units({k: cut for i, cut in more.items() for k in self.alike[i]})
        return found

    def laid(self, cuts: Mapping[int, Shard]) -> dict[str, Layout]:
        """Return how variables lie, by the names of their placeholders."""
        return {self.program.ops[i].name: cut for i, cut in cuts.items()}

    def _in_units(self, cuts: dict[int, Shard]) -> dict[int, Shard]:
        """Return how variables are cut where the program tells of which units they consist."""
        alike = {i: [k for k in self.alike[i] if k in cuts] for i in cuts}
        search = UnitSearch(self.program, self.planner, self.laid(cuts), alike)
        found = {i: search.layout_of(cut) for i, cut in search.run().items()}
        return cuts | {i: own for i, own in found.items() if isinstance(own, Shard)}

    def _wishes(self, cuts: Mapping[int, Shard]) -> dict[int, Shard]:
        """Return how variables would be cut that lie whole, for what is read of them to be in parts."""
        natural = self.planner.forward(self.program, self.laid(cuts))
        found, left = dict[int, Shard](), list[tuple[Tensor, Shard]]()
        for op, given in zip(self.program.ops, natural.answers, strict=True):
            pairs = zip(op.inputs, given.wants if given is not None else (), strict=False)
            left += [(t, want) for t, want in pairs if isinstance(want, Shard) and is_whole(natural.layout(t))]
        seen = set(left)
        while left:
            tensor, way = left.pop()
            op = self.program.ops[tensor.op]
            if op.type in READS and (cut := self._of_variable(op.inputs[0].op, way)) is not None:
                found.setdefault(op.inputs[0].op, cut)
            rule = rule_of(op.type)
            if op.type in READS or natural.answers[op.index] is not None or rule is None or op.stateful or op.bodies:
                continue
            given = answer_for_output(rule, op, tensor.index, way)
            pairs = zip(op.inputs, given.wants if given is not None else (), strict=False)
            more = [(t, want) for t, want in pairs if isinstance(want, Shard) and (t, want) not in seen]
            seen.update(more)
            left += more
        return found

    def _of_variable(self, position: int, way: Shard) -> Shard | None:
        """Return how a variable is cut for what is read of it to be cut so; None if it may not be."""
        own = self.shapes.get(position)
        is_it = own is not None and way.axis < len(own) and way.size(0) == own[way.axis] >= self.planner.columns
        return way if is_it else None
