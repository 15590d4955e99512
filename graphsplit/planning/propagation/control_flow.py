"""Loops, branches and compiled calls that run on every shard by themselves: their bodies, planned as programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Shard, is_whole
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.backward_propagation import LocalBackwardPropagation
from graphsplit.planning.propagation.forward_propagation import LocalForwardPropagation, NaturalForms
from graphsplit.planning.propagation.local_plan import LocalPlan
from graphsplit.planning.propagation.row_loops import ADDS, answer_row_loop, is_row_list
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import origin
from graphsplit.rules import Answer, Declined, Sharded


@dataclass(frozen=True)
class ControlFlowAnswers:
    """How loops and branches run on the shards of a mesh, each by itself.

    An answer takes two passes or more over each body, each of which asks for the loops and branches in it: of nested
    ones each is found once, or the time doubles with every level.

    Attributes:
      mesh: the shards.
      random: `"exact"` or `"independent"`.
    """

    mesh: Mesh
    random: str = "exact"
    _known: dict[tuple[Op, tuple[Layout, ...]], Answer] = field(default_factory=dict, init=False)

    def answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Return how a loop or branch runs on the shards, each by itself, or why it cannot.

        What its bodies only read in pieces is handed to it in pieces, even if it is whole.
        """
        key = op, tuple(layouts)
        if key not in self._known:
            self._known[key] = self._found(op, layouts)
        return self._known[key]

    def _found(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        if any(map(is_row_list, layouts)) and CONTROL_FLOW[op.type].loops:
            return answer_row_loop(op, layouts, self.mesh, self.random)
        given, chooses = list(layouts), int(CONTROL_FLOW[op.type].chooses)
        while True:
            wishes: dict[int, Shard] = {}
            if CONTROL_FLOW[op.type].loops:
                found = self._answer_loop(op, given, wishes)
            else:
                found = self._answer_branch(op, given, wishes)
            if not isinstance(found, Declined) or not wishes:
                return found
            for number, layout in wishes.items():
                given[chooses + number] = layout

    def _forward(self, program: Program, layouts: Sequence[Layout], outputs: Sequence[Layout] = ()) -> NaturalForms:
        whole = {t for t, layout in zip(program.outputs, outputs, strict=False) if is_whole(layout)}
        return LocalForwardPropagation(program, layouts, self.answer, whole).run()

    def _plan(
        self, program: Program, inputs: Sequence[Layout], outputs: Sequence[Layout], wishes: dict[int, Shard]
    ) -> LocalPlan | Declined:
        natural = self._forward(program, inputs, outputs)
        backward = LocalBackwardPropagation(program, natural, outputs, self.random == "independent")
        steps = backward.run()
        if backward.obstacles:
            wishes.update(backward.wishes)
            return Declined(backward.obstacles[0])
        return LocalPlan(program, self.mesh, tuple(inputs), tuple(outputs), steps, self.random)

    def _answer_loop(self, op: Op, layouts: Sequence[Layout], wishes: dict[int, Shard]) -> Answer:
        condition_name, body_name = function_names(op.node)
        body = op.bodies[body_name]
        carried: list[Layout] = [REPLICATE if layout == PARTIAL_SUM else layout for layout in layouts]
        for _ in range(len(carried) + 2):
            forward = self._forward(body, carried)
            after = [_joined(self.mesh, carried[i], forward, body, i) for i in range(len(carried))]
            clash = next((i for i, layout in enumerate(after) if layout is None), None)
            if clash is not None:
                return Declined(f"its loop variable {body.input_names[clash]!r} changes its layout from turn to turn")
            if after == carried:
                break
            carried = [layout for layout in after if layout is not None]
        plans: dict[str, LocalPlan] = {}
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
        given: list[Layout] = [REPLICATE if layout == PARTIAL_SUM else layout for layout in layouts[flow.chooses :]]
        names = function_names(op.node)
        forwards = [self._forward(op.bodies[name], given) for name in names]
        outputs: list[Layout] = []
        for k in range(len(op.out_shapes)):
            made = [(op.bodies[name], op.bodies[name].outputs[k]) for name in names]
            found = {f.layout(tensor) for f, (_, tensor) in zip(forwards, made, strict=True)}
            shards = [layout for layout in found if isinstance(layout, Shard)]
            if len(shards) > 1:
                return Declined("its branches give different layouts")
            whole = [own for f, own in zip(forwards, made, strict=True) if is_whole(f.layout(own[1]))]
            if shards and not all(self.mesh.fits(*own, shards[0]) for own in whole):
                return Declined("its branches are not known to give the same shapes")
            outputs.append(shards[0] if shards else PARTIAL_SUM if found == {PARTIAL_SUM} else REPLICATE)
        plans = {}
        for name in names:
            plan = self._plan(op.bodies[name], given, outputs, wishes)
            if isinstance(plan, Declined):
                return plan
            if flow.compiled and any(step.shards and step.shards.draw for step in plan.steps):
                return Declined("it draws random numbers, which XLA does in its own way")
            plans[name] = plan
        return _sharded(op, [*[REPLICATE] * flow.chooses, *given], outputs, plans)


def fits(op: Op, body: Program) -> bool:
    """Return whether a branch was read for what it is given, and not for arguments of any shape."""
    passed = op.in_shapes[CONTROL_FLOW[op.type].chooses :]
    pairs = zip(passed, [body.ops[i].out_shapes[0] for i in body.inputs], strict=True)
    return all(shape is None or inside is not None for shape, inside in pairs)


def _sharded(op: Op, wants: Sequence[Layout], gives: Sequence[Layout], plans: Mapping[str, LocalPlan]) -> Answer:
    if tf.resource.as_datatype_enum in op.attr(CONTROL_FLOW[op.type].types).list.type:
        return Declined("it captures a table or another resource, which lives on one device")
    return Sharded(tuple(wants), tuple(gives), bodies=plans)


def _joined(mesh: Mesh, carried: Layout, forward: NaturalForms, body: Program, i: int) -> Layout | None:
    """Return the layout of a carried tensor after a turn, joined with that before; None if they cannot be joined."""
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
    own = Tensor(body.inputs[i], 0)
    others = [t for t in origins if t != own]
    return len(others) < len(origins) and bool(others) and all(forward.layout(t) == PARTIAL_SUM for t in others)
