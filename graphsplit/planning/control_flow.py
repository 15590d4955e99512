"""Loops, branches and compiled calls that every shard runs by itself: their bodies, planned as programs.

The plan of such a body exchanges nothing. Its devices are `""`: each shard runs it where it runs the loop, and has for
itself what is whole.

Of loops over rows (`tf.map_fn`, and TensorArrays that a loop reads and writes row by row) each shard iterates over its
own. What such a loop reads is a list of rows, and what it makes is one: entry `i` in iteration `i`. Its body is the
same for one row as for any other, so it runs on each shard as it is, from the shard's first row to its last. Counters
keep the numbers that they have in the whole; only where they pick from a list, which has the shard's rows, what comes
before these is taken off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Shard, is_whole
from graphsplit.planning.communication.collectives import find_collectives
from graphsplit.planning.communication.moves import find_moves
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Owners, Places
from graphsplit.planning.plan import Plan
from graphsplit.planning.propagation.backward_propagation import LocalBackwardPropagation
from graphsplit.planning.propagation.forward_propagation import LocalForwardPropagation, NaturalForms
from graphsplit.planning.propagation.sharding_checks import exchanges
from graphsplit.planning.state import State
from graphsplit.planning.steps import Step
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import Iterations, iterations_of, number_at, origin
from graphsplit.rules import Answer, Declined, Sharded
from graphsplit.rules.factors import LIST, Place, Resize, Shift


@dataclass(frozen=True)
class ControlFlowAnswers:
    """How loops and branches run on the shards of a mesh, each by itself.

    An answer takes two passes or more over each body, each of which asks for the loops and branches in it: of nested
    ones each is found once, or the time doubles with every level.

    Attributes:
      mesh: the shards.
    """

    mesh: Mesh
    _answers: dict[tuple[Op, tuple[Layout, ...]], Answer] = field(default_factory=dict, init=False)

    def answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Return how a loop or branch runs on the shards, each by itself, or why it cannot.

        What its bodies only read in pieces is handed to it in pieces, even if it is whole.
        """
        key = op, tuple(layouts)
        if key not in self._answers:
            self._answers[key] = self._found(op, layouts)
        return self._answers[key]

    def _found(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        if any(map(is_row_list, layouts)) and CONTROL_FLOW[op.type].loops:
            return answer_row_loop(op, layouts, self.mesh)
        operand_layouts, chooses = list(layouts), int(CONTROL_FLOW[op.type].chooses)
        while True:
            wishes: dict[int, Shard] = {}
            if CONTROL_FLOW[op.type].loops:
                answer = self._answer_loop(op, operand_layouts, wishes)
            else:
                answer = self._answer_branch(op, operand_layouts, wishes)
            if not isinstance(answer, Declined) or not wishes:
                return answer
            for number, layout in wishes.items():
                operand_layouts[chooses + number] = layout

    def _forward(self, program: Program, layouts: Sequence[Layout], outputs: Sequence[Layout] = ()) -> NaturalForms:
        whole = {t for t, layout in zip(program.outputs, outputs, strict=False) if is_whole(layout)}
        return LocalForwardPropagation(program, layouts, self.answer, whole).run()

    def _plan(
        self, program: Program, inputs: Sequence[Layout], outputs: Sequence[Layout], wishes: dict[int, Shard]
    ) -> Plan | Declined:
        natural = self._forward(program, inputs, outputs)
        backward = LocalBackwardPropagation(program, natural, outputs)
        steps = backward.run()
        if backward.obstacles:
            wishes.update(backward.wishes)
            return Declined(backward.obstacles[0])
        plan = plan_of_body(program, self.mesh, inputs, outputs, steps)
        if exchanged := [move.tensor.op for move in exchanges(program, plan.moves)]:
            name = program.ops[max(exchanged)].type
            return Declined(f"{name} in it: its rows would be exchanged between devices each time")
        return plan

    def _answer_loop(self, op: Op, layouts: Sequence[Layout], wishes: dict[int, Shard]) -> Answer:
        condition_name, body_name = function_names(op.node)
        body = op.bodies[body_name]
        carried: list[Layout] = [REPLICATE if layout == PARTIAL_SUM else layout for layout in layouts]
        for _ in range(len(carried) + 2):
            forward = self._forward(body, carried)
            after = [_joined(self.mesh, carried[i], forward, body, i) for i in range(len(carried))]
            clash = next((i for i, layout in enumerate(after) if layout is None), None)
            if clash is not None:
                return Declined(
                    f"its loop variable {body.input_names[clash]!r} changes its layout from iteration to iteration"
                )
            if after == carried:
                break
            carried = [layout for layout in after if layout is not None]
        plans: dict[str, Plan] = {}
        for name, program, outputs in (
            (body_name, body, carried),
            (condition_name, op.bodies[condition_name], [REPLICATE]),
        ):
            plan = self._plan(program, carried, outputs, wishes)
            if isinstance(plan, Declined):
                return plan
            plans[name] = plan
        return _sharded(op, carried, carried, plans)

    def _answer_branch(self, op: Op, layouts: Sequence[Layout], wishes: dict[int, Shard]) -> Answer:
        flow = CONTROL_FLOW[op.type]
        if flow.compiled and any(body.symbols for body in op.bodies.values()):
            return Declined("XLA compiles for sizes that are known")
        if any(not fits(op, body) for body in op.bodies.values()):
            return Declined("one of its branches needs other layouts than its arguments have")
        if flow.chooses and not is_whole(layouts[0]):
            return Declined("which branch it takes depends on all rows")
        argument_layouts: list[Layout] = [
            REPLICATE if layout == PARTIAL_SUM else layout for layout in layouts[flow.chooses :]
        ]
        names = function_names(op.node)
        forwards = [self._forward(op.bodies[name], argument_layouts) for name in names]
        outputs: list[Layout] = []
        for k in range(len(op.out_shapes)):
            made_by_branches = [(op.bodies[name], op.bodies[name].outputs[k]) for name in names]
            made_layouts = {f.layout(tensor) for f, (_, tensor) in zip(forwards, made_by_branches, strict=True)}
            shards = [layout for layout in made_layouts if isinstance(layout, Shard)]
            if len(shards) > 1:
                return Declined("its branches give different layouts")
            whole = [
                body_and_output
                for f, body_and_output in zip(forwards, made_by_branches, strict=True)
                if is_whole(f.layout(body_and_output[1]))
            ]
            if shards and not all(self.mesh.fits(*body_and_output, shards[0]) for body_and_output in whole):
                return Declined("its branches are not known to give the same shapes")
            outputs.append(shards[0] if shards else PARTIAL_SUM if made_layouts == {PARTIAL_SUM} else REPLICATE)
        plans = {}
        for name in names:
            plan = self._plan(op.bodies[name], argument_layouts, outputs, wishes)
            if isinstance(plan, Declined):
                return plan
            if flow.compiled and any(step.shards and step.shards.draw for step in plan.steps):
                return Declined("it draws random numbers, which XLA does in its own way")
            plans[name] = plan
        return _sharded(op, [*[REPLICATE] * flow.chooses, *argument_layouts], outputs, plans)


def fits(op: Op, body: Program) -> bool:
    """Return whether a branch was read for what it is given, and not for arguments of any shape."""
    passed = op.in_shapes[CONTROL_FLOW[op.type].chooses :]
    pairs = zip(passed, [body.ops[i].out_shapes[0] for i in body.inputs], strict=True)
    return all(shape is None or inside is not None for shape, inside in pairs)


def _sharded(op: Op, wants: Sequence[Layout], gives: Sequence[Layout], plans: Mapping[str, Plan]) -> Answer:
    if tf.resource.as_datatype_enum in op.attr(CONTROL_FLOW[op.type].types).list.type:
        return Declined("it captures a table or another resource, which lives on one device")
    return Sharded(tuple(wants), tuple(gives), bodies=plans)


def _joined(mesh: Mesh, carried: Layout, forward: NaturalForms, body: Program, i: int) -> Layout | None:
    """Return the layout of a carried tensor after an iteration, joined with that before; None if that cannot be."""
    after = forward.layout(body.outputs[i])
    if isinstance(carried, Shard):
        is_cut = is_whole(after) and mesh.fits(body, body.outputs[i], carried)
        return carried if after == carried or is_cut else None
    if isinstance(after, Shard):
        return after if is_whole(carried) and mesh.fits(body, Tensor(body.inputs[i], 0), after) else None
    if is_whole(carried) and _accumulates_partial(forward, body, i):
        return PARTIAL_SUM
    return carried


def _accumulates_partial(forward: NaturalForms, body: Program, i: int) -> bool:
    """Return whether carried tensor `i` becomes itself plus partial sums: then it may stay partial through the loop.

    So does the weight gradient of a recurrent layer. What it starts from is partial too: on the first device, with
    zeros on the others.
    """
    end = origin(body, body.outputs[i])
    op = body.ops[end.op]
    if op.type not in ADDS or not op.out_dtypes[0].is_floating:
        return False
    origins = [origin(body, tensor) for tensor in op.inputs]
    argument = Tensor(body.inputs[i], 0)
    addends = [t for t in origins if t != argument]
    return len(addends) < len(origins) and bool(addends) and all(forward.layout(t) == PARTIAL_SUM for t in addends)


def plan_of_body(
    program: Program, mesh: Mesh, inputs: Sequence[Layout], outputs: Sequence[Layout], steps: Sequence[Step]
) -> Plan:
    """Return the plan of a body that every shard runs by itself.

    Args:
      program: the body.
      mesh: the shards.
      inputs, outputs: the layouts of its arguments and of what it returns.
      steps: one per operation. What runs once is whole on every shard; what runs on the shards, too, is there twice.
    """
    arguments = {i: Step(shards=Sharded((), (layout,))) for i, layout in zip(program.inputs, inputs, strict=True)}
    on_shards = tuple(
        [
            arguments.get(op.index) or (_local(op) if step.once and not step.shards else step)
            for op, step in zip(program.ops, steps, strict=True)
        ]
    )
    places, state = Places(mesh.apart(), "", Owners(("",) * len(program.ops))), State()
    moves = find_moves(program, on_shards, places, state, outputs)
    return Plan(
        program=program,
        mesh=places.mesh,
        default_device="",
        input_layouts=tuple(inputs),
        steps=on_shards,
        owners=places.owners,
        moves=moves,
        collectives=tuple(find_collectives(program, places, moves)),
        output_layouts=tuple(outputs),
        state=state,
    )


ADDS = frozenset({"Add", "AddN", "AddV2"})
_PICKS = frozenset({"TensorListGetItem", "TensorListSetItem"})


def is_row_list(layout: Layout) -> bool:
    """Return whether a list has an entry for each row, and each shard those of its rows."""
    return isinstance(layout, Shard) and layout.axis == LIST


def answer_row_loop(op: Op, layouts: Sequence[Layout], mesh: Mesh) -> Answer:
    """Return how a loop that reads lists of rows runs on the shards, or why it cannot."""
    cuts = {layout for layout in layouts if is_row_list(layout)}
    iterations = iterations_of(op)
    cut = cuts.pop()
    assert isinstance(cut, Shard)
    if cuts or len(cut.blocks) > 1:
        return Declined("its lists do not hold the rows of one batch, in order")
    if iterations is None or cut.size(mesh.batch) != iterations.number:
        return Declined("it is not known to iterate once for each entry of a list of rows")
    return _RowLoop(op, layouts, mesh, iterations, cut).answer()


class _NotByRowError(Exception):
    """A loop does something else than work on one row after the other; the message says what."""


@dataclass
class _RowLoop:
    op: Op
    layouts: Sequence[Layout]
    mesh: Mesh
    iterations: Iterations
    cut: Shard
    rows: set[int] = field(default_factory=set)  # lists with an entry for each row; below 0, made in an iteration
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
        """Find which lists have an entry for each row, from what becomes of each in an iteration."""
        lists = {Tensor(i, 0): k for k, i in enumerate(body.inputs) if body.ops[i].out_dtypes[0] == tf.variant}
        row_numbers = {Tensor(body.inputs[k], 0) for k in self.iterations.counters}
        uses: dict[int, list[str]] = {k: [] for k in lists.values()}
        for op in body.ops:
            if op.type == "TensorListReserve" and number_at(op, 1) == self.iterations.number:
                lists[Tensor(op.index, 0)] = ~op.index
                uses[~op.index] = []
            lists_read = [(i, lists[tensor]) for i, tensor in enumerate(op.inputs) if tensor in lists]
            if op.type in ADDS and any(k >= 0 for _, k in lists_read):
                lists[Tensor(op.index, 0)] = self._added(op, [k for _, k in lists_read], uses)
                continue
            for i, k in lists_read:
                self._use(body, op, i, k, uses[k], row_numbers)
                if op.out_dtypes[0] == tf.variant:
                    lists[Tensor(op.index, 0)] = k
        for k, how in uses.items():
            if k >= 0:
                self._check_uses(k, how, is_row_list(self.layouts[k]), lists.get(body.outputs[k]) == k)
            elif k in self.rows and {*how} != {"own"}:
                raise _NotByRowError("it adds a list that is not made row by row")
            if k >= 0 and how and "other" not in how:
                self.rows.add(k)

    def _use(self, body: Program, op: Op, operand: int, k: int, uses: list[str], row_numbers: set[Tensor]) -> None:
        """Note what an operation does with a list; `row_numbers` are those of the row."""
        if op.type in _PICKS and operand == 0:
            is_own = origin(body, op.inputs[1]) in row_numbers
            uses.append("own" if is_own else "other")
            if is_own:
                self.picks[op.index] = k
        elif op.type in ("TensorListPushBack", "TensorListPopBack") and operand == 0:
            uses.append(op.type)
            if op.type == "TensorListPopBack" and k in self.op.numbers:
                row_numbers.add(Tensor(op.index, 1))
        elif op.type != "Identity":
            if k >= 0:
                raise _NotByRowError(f"{op.type} of a list in it")
            uses.append(op.type)  # (a list that only this iteration has may be anything)

    def _added(self, op: Op, added_lists: Sequence[int], uses: dict[int, list[str]]) -> int:
        """Return which list a sum of lists is: the carried one, to which lists are added that the iteration made."""
        carried = [k for k in added_lists if k >= 0]
        if len(carried) != 1 or len(added_lists) != len(op.inputs):
            raise _NotByRowError(f"{op.type} of a list in it")
        self.rows |= {k for k in added_lists if k < 0}
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
            if k in self.iterations.carried_bounds and self._is_read(body, argument, body.outputs[k]):
                raise _NotByRowError("it also computes with its number of iterations")
            return REPLICATE
        if k in self.iterations.counters:
            return REPLICATE
        added = body.ops[end.op]
        if added.type in ADDS and added.out_dtypes[0].is_floating:
            carried = [t for t in added.inputs if origin(body, t) == argument]
            if len(carried) == 1 and not self._is_read(body, argument, carried[0], by=added):
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
        """Return the comparisons with a constant that decide how often the loop iterates."""
        comparisons = self.iterations.constant_bounds
        return [i for i in comparisons if number_at(condition.ops[i], 1) == self.iterations.number]

    def _bounded(self, less: Op) -> Step:
        return _local(less, resize=(Resize(1, (), np.asarray(less.constants[1]), Place(self.cut, end=True)),))

    def _counted(self) -> list[Resize]:
        """Return the operands from which a shard counts, and up to which."""
        constants = self.op.constants
        first = [Resize(k, (), np.asarray(constants[k]), Place(self.cut)) for k in sorted(self.iterations.counters)]
        last = [
            k for k in dict.fromkeys(self.iterations.carried_bounds) if number_at(self.op, k) == self.iterations.number
        ]
        return [*first, *[Resize(k, (), np.asarray(constants[k]), Place(self.cut, end=True)) for k in last]]

    def _plan(self, program: Program, local: dict[int, Step]) -> Plan:
        steps = [local.get(op.index, Step(once=True)) for op in program.ops]
        inputs, outputs = (REPLICATE,) * len(program.inputs), (REPLICATE,) * len(program.outputs)
        return plan_of_body(program, self.mesh, inputs, outputs, steps)


def _local(op: Op, resize: tuple[Resize, ...] = (), shift: dict[int, Shift] | None = None) -> Step:
    """Return the step of an operation on what a shard has, with some operands its own."""
    wants, gives = (REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.out_shapes)
    return Step(shards=Sharded(wants, gives, resize, shift=shift or {}))
