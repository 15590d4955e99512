"""The forward pass of planning: rows flow from the sharded arguments through the rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Shard
from graphsplit.planning.home_rows import rows_at_home
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Answer, Declined, Sharded, answer, rule_of, stays_partial

_MOST_ENDS = 16  # of one tensor that are looked at

ControlFlowRule = Callable[[Op, Sequence[Layout]], Answer]
"""How loops and branches are answered: they need plans of their bodies, which rules know nothing of."""


class Forward:
    """The natural form of every op, and the layout in which its readers meet each of its outputs.

    Args:
      program: what is planned.
      input_layouts: the layouts of its arguments.
      control_flow: answers for ops that have bodies.
      whole_outputs: the outputs that are wanted whole.
      kept_home: ops that must run at home, with the reason.
      local: whether this is a body that every shard runs by itself.
      batch: the number of rows.

    Attributes:
      answers: for each op how it runs on the shards, or None if its natural place is home.
      reasons: why an op that carries rows is at home.
      seen: for each op, the layouts of its outputs.
    """

    def __init__(
        self,
        program: Program,
        input_layouts: Sequence[Layout],
        control_flow: ControlFlowRule,
        whole_outputs: Collection[Tensor],
        kept_home: Mapping[int, str],
        local: bool = False,
        batch: int = 0,
    ):
        self.program = program
        self.answers: list[Sharded | None] = []
        self.reasons: list[str] = []
        self.seen: list[tuple[Layout, ...]] = []
        self._control_flow = control_flow
        self._kept_home = kept_home
        self._local = local
        self._batch = batch
        self._wanted_whole = _tensors_wanted_whole(program, whole_outputs, local)
        if not local:
            self._wanted_whole |= _forks(program, self._wanted_whole)
        arguments = dict(zip(program.inputs, input_layouts, strict=True))
        for op in program.ops:
            if op.index in arguments:
                self._append(None, "", (arguments[op.index],))
            else:
                self._visit(op)

    def layout(self, tensor: Tensor) -> Layout:
        """Return the layout in which readers meet a tensor."""
        return self.seen[tensor.op][tensor.index]

    def _append(self, given: Sharded | None, reason: str, seen: tuple[Layout, ...]) -> None:
        self.answers.append(given)
        self.reasons.append(reason)
        self.seen.append(seen)

    def _visit(self, op: Op) -> None:
        layouts = [self.layout(tensor) for tensor in op.inputs]
        if all(layout is REPLICATE for layout in layouts):
            self._append_home(op, "")
            return
        given = self._answer(op, layouts)
        if isinstance(given, Declined):
            carries_rows = any(isinstance(layout, Shard) for layout in layouts)
            self._append_home(op, given.reason if carries_rows else "")
        else:
            self._append(given, "", tuple([self._as_seen(op, k, layout) for k, layout in enumerate(given.gives)]))

    def _append_home(self, op: Op, reason: str) -> None:
        rows = rows_at_home(self.program, op, self.layout, 0 if self._local else self._batch)
        if rows is None:
            self._append(None, reason, (REPLICATE,) * len(op.out_shapes))
        else:
            layout, why = rows
            self._append(None, reason or why, (layout,))

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        if op.index in self._kept_home:
            return Declined(self._kept_home[op.index])
        if op.type == "LookupTableFindV2":
            return Declined("its table lives on one device")
        if op.stateful:
            return Declined("it has side effects, which happen once")
        if op.bodies:
            return self._control_flow(op, layouts)
        rule = rule_of(op.type)
        if rule is None:
            return Declined(f"no rule for {op.type}")
        return answer(rule, op, layouts, [self.program.bytes(t) for t in op.inputs], self._local)

    def _as_seen(self, op: Op, output: int, layout: Layout) -> Layout:
        """A partial sum stays partial only while every reader is linear in it: it is reduced once, not twice."""
        if isinstance(layout, Partial) and (layout != PARTIAL_SUM or Tensor(op.index, output) in self._wanted_whole):
            return REPLICATE
        return layout


def _tensors_wanted_whole(program: Program, outputs: Collection[Tensor], local: bool) -> set[Tensor]:
    wanted = set(outputs)
    for op in program.ops:
        if not op.bodies:
            wanted.update(tensor for i, tensor in enumerate(op.inputs) if not stays_partial(op, i, local))
    return wanted


def _forks(program: Program, wanted: Collection[Tensor]) -> set[Tensor]:
    """Return the tensors that are reduced for no more than what linear readers make of them.

    A partial sum stays partial through linear ops and is reduced behind them. Behind a fork that is more than once (a
    BatchNormalization reads its mean in three shapes); behind ops that only reshape it, once at home is less than once
    on every shard.
    """
    forks: set[Tensor] = set()
    ends: dict[Tensor, dict[Tensor, bool]] = {}  # where it would be reduced if it were partial; added to others before?
    for op in reversed(program.ops):
        behind: dict[Tensor, bool] = {}
        for k, dtype in enumerate(op.out_dtypes):
            tensor = Tensor(op.index, k)
            reached, size = ends.pop(tensor, {}), program.bytes(tensor)
            is_fork = len(reached) > 1 and 0 < size <= sum(map(program.bytes, reached))
            if is_fork or _is_only_moved(program, size, dtype, reached):
                forks.add(tensor)
            behind.update({tensor: False} if tensor in wanted or tensor in forks else reached)
        joins = len(op.inputs) - len(op.constants) > 1
        for tensor in op.inputs:
            reached = ends.setdefault(tensor, {})
            if len(reached) < _MOST_ENDS:
                reached.update(dict.fromkeys(behind, True) if joins else behind)
    return forks


def _is_only_moved(program: Program, size: int, dtype: tf.DType, reached: Mapping[Tensor, bool]) -> bool:
    """Return whether linear ops, none of which adds anything, make one tensor of the same size and dtype.

    (Another dtype may be there for its precision: gradients in float16 are added up in float32.)
    """
    if len(reached) != 1:
        return False
    [(end, joined)] = reached.items()
    same = program.ops[end.op].out_dtypes[end.index] == dtype
    return not joined and same and 0 < size <= program.bytes(end)
