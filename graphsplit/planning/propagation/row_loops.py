"""Loops over rows: `tf.map_fn`, and TensorArrays that a loop reads and writes row by row; each shard turns for its own.

What such a loop reads is a list of rows, and what it makes is one: entry `i` in turn `i`. Its body is the same for one
row as for any other, so it runs on each shard as it is, from the shard's first row to its last. Counters keep the
numbers that they have in the whole; only where they pick from a list, which has the shard's rows, what comes before
these is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Shard
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.local_plan import LocalPlan
from graphsplit.planning.steps import Step
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import Turns, number_at, origin, turns_of
from graphsplit.rules import Answer, Declined, Sharded
from graphsplit.rules.factors import LIST, Place, Resize, Shift

ADDS = frozenset({"Add", "AddN", "AddV2"})
_PICKS = frozenset({"TensorListGetItem", "TensorListSetItem"})


def is_row_list(layout: Layout) -> bool:
    """Return whether a list has an entry for each row, and each shard those of its rows."""
    return isinstance(layout, Shard) and layout.axis == LIST


def answer_row_loop(op: Op, layouts: Sequence[Layout], mesh: Mesh, random: str) -> Answer:
    """Return how a loop that reads lists of rows runs on the shards, or why it cannot."""
    cuts = {layout for layout in layouts if is_row_list(layout)}
    turns = turns_of(op)
    cut = cuts.pop()
    assert isinstance(cut, Shard)
    if cuts or len(cut.blocks) > 1:
        return Declined("its lists do not hold the rows of one batch, in order")
    if turns is None or cut.size(mesh.batch) != turns.number:
        return Declined("it is not known to turn once for each entry of a list of rows")
    return _RowLoop(op, layouts, mesh, random, turns, cut).answer()


class _NotByRowError(Exception):
    """A loop does something else than work on one row after the other; the message says what."""


@dataclass
class _RowLoop:
    op: Op
    layouts: Sequence[Layout]
    mesh: Mesh
    random: str
    turns: Turns
    cut: Shard
    rows: set[int] = field(default_factory=set)  # lists with an entry for each row: carried ones; made in a turn: < 0
    picks: dict[int, int] = field(default_factory=dict)  # operations that take an entry by the row's number; the lists

    def answer(self) -> Answer:
        condition_name, body_name = function_names(self.op.node)
        condition, body = self.op.bodies[condition_name], self.op.bodies[body_name]
        try:
            self._follow_lists(body)
            carried = [self._carry(body, k) for k in range(len(self.op.inputs))]
        except _NotByRowError as reason:
            return Declined(str(reason))
        if tf.resource in [dtype for i in body.inputs for dtype in body.ops[i].out_dtypes]:
            return Declined("it captures a table or another resource, which lives on one device")
        shift = {1: Shift(self.cut)}
        picking = {i: _local(body.ops[i], shift=shift) for i, k in self.picks.items() if k in self.rows}
        for reserve in [body.ops[~k] for k in self.rows if k < 0]:
            count = Resize(1, (), np.asarray(reserve.constants[1]), self.cut)
            picking[reserve.index] = _local(reserve, (count,))
        bounded = {i: self._bounded(condition.ops[i]) for i in self._own_bounds(condition)}
        plans = {body_name: self._plan(body, picking), condition_name: self._plan(condition, bounded)}
        return Sharded(tuple(carried), tuple(carried), tuple(self._counted()), bodies=plans)

    def _follow_lists(self, body: Program) -> None:
        """Find which lists have an entry for each row, from what becomes of each in a turn."""
        lists = {Tensor(i, 0): k for k, i in enumerate(body.inputs) if body.ops[i].out_dtypes[0] == tf.variant}
        own = {Tensor(body.inputs[k], 0) for k in self.turns.counters}
        uses: dict[int, list[str]] = {k: [] for k in lists.values()}
        for op in body.ops:
            if op.type == "TensorListReserve" and number_at(op, 1) == self.turns.number:
                lists[Tensor(op.index, 0)] = ~op.index
                uses[~op.index] = []
            found = [(i, lists[tensor]) for i, tensor in enumerate(op.inputs) if tensor in lists]
            if op.type in ADDS and any(k >= 0 for _, k in found):
                lists[Tensor(op.index, 0)] = self._added(op, [k for _, k in found], uses)
                continue
            for i, k in found:
                self._use(body, op, i, k, uses[k], own)
                if op.out_dtypes[0] == tf.variant:
                    lists[Tensor(op.index, 0)] = k
        for k, how in uses.items():
            if k >= 0:
                self._check_uses(k, how, is_row_list(self.layouts[k]), lists.get(body.outputs[k]) == k)
            elif k in self.rows and {*how} != {"own"}:
                raise _NotByRowError("it adds a list that is not made row by row")
            if k >= 0 and how and "other" not in how:
                self.rows.add(k)

    def _use(self, body: Program, op: Op, operand: int, k: int, uses: list[str], own: set[Tensor]) -> None:
        """Note what an operation does with a list; `own` are the numbers of the row."""
        if op.type in _PICKS and operand == 0:
            is_own = origin(body, op.inputs[1]) in own
            uses.append("own" if is_own else "other")
            if is_own:
                self.picks[op.index] = k
        elif op.type in ("TensorListPushBack", "TensorListPopBack") and operand == 0:
            uses.append(op.type)
            if op.type == "TensorListPopBack" and k in self.op.numbers:
                own.add(Tensor(op.index, 1))
        elif op.type != "Identity":
            if k >= 0:
                raise _NotByRowError(f"{op.type} of a list in it")
            uses.append(op.type)  # (a list that only this turn has may be anything)

    def _added(self, op: Op, found: Sequence[int], uses: dict[int, list[str]]) -> int:
        """Return which list a sum of lists is: one that is carried, to which lists are added that the turn made."""
        carried = [k for k in found if k >= 0]
        if len(carried) != 1 or len(found) != len(op.inputs):
            raise _NotByRowError(f"{op.type} of a list in it")
        self.rows |= {k for k in found if k < 0}
        uses[carried[0]].append("own")
        return carried[0]

    def _check_uses(self, k: int, uses: Sequence[str], is_cut: bool, returned: bool) -> None:
        ends = [use for use in uses if use.startswith("TensorList")]
        if not returned or len(ends) > 1 or (ends and len(uses) > 1) or ("other" in uses and is_cut):
            raise _NotByRowError(f"it does not read the list {self._name(k)!r} row by row")
        if "TensorListPopBack" in ends and not is_cut:
            raise _NotByRowError(f"the list {self._name(k)!r} is no list of rows")
        if not uses and is_cut:
            self.rows.add(k)

    def _carry(self, body: Program, k: int) -> Layout:
        """Return the layout of what is carried, before the loop and after."""
        if k in self.rows:
            return self.cut
        argument, end = Tensor(body.inputs[k], 0), origin(body, body.outputs[k])
        if end == argument:
            if k in self.turns.carried_bounds and self._is_read(body, argument, body.outputs[k]):
                raise _NotByRowError("it also computes with its number of turns")
            return REPLICATE
        if k in self.turns.counters:
            return REPLICATE
        added = body.ops[end.op]
        if added.type in ADDS and added.out_dtypes[0].is_floating:
            own = [t for t in added.inputs if origin(body, t) == argument]
            if len(own) == 1 and not self._is_read(body, argument, own[0], by=added):
                return PARTIAL_SUM
        raise _NotByRowError(f"its loop variable {self._name(k)!r} depends on the rows before")

    def _is_read(self, body: Program, tensor: Tensor, passed: Tensor, by: Op | None = None) -> bool:
        """Return whether anything but identities that lead to `passed`, and operation `by`, reads a tensor."""
        same = {tensor}
        for op in body.ops:
            if op.type == "Identity" and op.inputs[0] in same:
                same.add(Tensor(op.index, 0))
            elif op is not by and any(t in same for t in op.inputs):
                return True
        return passed not in same

    def _name(self, k: int) -> str:
        return self.op.bodies[function_names(self.op.node)[1]].input_names[k]

    def _own_bounds(self, condition: Program) -> list[int]:
        """Return the comparisons with a constant that decide how often the loop turns."""
        found = self.turns.constant_bounds
        return [i for i in found if number_at(condition.ops[i], 1) == self.turns.number]

    def _bounded(self, less: Op) -> Step:
        return _local(less, resize=(Resize(1, (), np.asarray(less.constants[1]), Place(self.cut, end=True)),))

    def _counted(self) -> list[Resize]:
        """Return the operands from which a shard counts, and up to which."""
        constants = self.op.constants
        first = [Resize(k, (), np.asarray(constants[k]), Place(self.cut)) for k in sorted(self.turns.counters)]
        last = [k for k in dict.fromkeys(self.turns.carried_bounds) if number_at(self.op, k) == self.turns.number]
        return [*first, *[Resize(k, (), np.asarray(constants[k]), Place(self.cut, end=True)) for k in last]]

    def _plan(self, program: Program, local: dict[int, Step]) -> LocalPlan:
        steps = tuple([local.get(op.index, Step(home=True)) for op in program.ops])
        inputs, outputs = (REPLICATE,) * len(program.inputs), (REPLICATE,) * len(program.outputs)
        return LocalPlan(program, self.mesh, inputs, outputs, steps, self.random)


def _local(op: Op, resize: tuple[Resize, ...] = (), shift: dict[int, Shift] | None = None) -> Step:
    """Return the step of an operation on what a shard has, with some operands its own."""
    wants, gives = (REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.out_shapes)
    return Step(shards=Sharded(wants, gives, resize, shift=shift or {}))
