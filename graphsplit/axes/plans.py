"""Plans of one axis of a mesh, and of the loops and branches in them that all its devices run as one.

A loop or branch whose devices have to send each other something stays one: it carries what each device has, and each of
its functions is planned by what plans the program around it. Carried values settle as in Shardy: what is whole is cut
as an iteration leaves it, and what another iteration would cut otherwise is whole.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import tensorflow as tf

from graphsplit.axes.classes import with_cut_classes
from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout, Shard, is_whole
from graphsplit.planning import passes
from graphsplit.planning.control_flow import ControlFlowAnswers, fits
from graphsplit.planning.costs.work import COPY_BYTES
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import plan_program
from graphsplit.planning.propagation.axis_propagation import AxisBackward, AxisForward
from graphsplit.planning.propagation.forward_propagation import NaturalForms
from graphsplit.planning.settling import settled
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import origin
from graphsplit.rules import Answer, Declined, Sharded

_DEVICE = "/device:COLUMN:{}"  # of the axis, whichever row of the mesh it is in


def planned_along(program: Program, axis: str, columns: int, laid: Mapping[str, Layout]) -> Plan:
    """Return the plan of an axis, whose program has some operations taken apart.

    Args:
      program: the function, for one device.
      axis: what the axis is called.
      columns: how many devices it has.
      laid: how captured variables lie along it, by the names of their placeholders: `Shard` or `Replicate`.
    """
    return AxisPlanner(axis, columns).plan(program, laid)


@dataclass(eq=False)
class AxisPlanner:
    """Plans programs, and functions in them, along one axis. How a loop or branch runs, it finds once.

    Args:
      axis: what the axis is called.
      columns: how many devices it has.
    """

    axis: str
    columns: int
    _answers: dict[tuple[Op, tuple[Layout, ...]], Answer] = field(default_factory=dict, init=False)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices of the axis."""
        devices, ones = tuple([_DEVICE.format(m) for m in range(self.columns)]), (1,) * self.columns
        return Mesh(devices, ones, ones, tuple(range(self.columns)), axis=self.axis)

    def plan(
        self, program: Program, laid: Mapping[str, Layout], outputs: Sequence[Layout] = (), is_function: bool = False
    ) -> Plan:
        """Return the plan of a program.

        Args:
          program: see there.
          laid: how captured handles and arguments lie along the axis, by the names of their placeholders.
          outputs: in which layouts it returns what it returns; by default each on one device.
          is_function: whether a loop or branch calls it, which may run it as it is.
        """
        drawing = 0 if is_function or program.symbols else self.mesh.shards
        program, first = with_cut_classes(program, lambda program: self.forward(program, laid, outputs))
        wanted = tuple(outputs) or (SINGLE_DEVICE,) * len(program.outputs)
        laid_inputs = [i for i in program.inputs if program.ops[i].name in laid]

        def propagate(plan: Plan) -> Plan:
            return passes.with_lists_in_place(functools.partial(decide, plan), laid_inputs)

        def decide(plan: Plan, kept_once: Mapping[int, str]) -> Plan:
            forward = functools.partial(self.forward, program, laid, outputs)
            natural, cuts = forward(kept_once) if kept_once else first, dict[Tensor, Shard]()
            best, wishes = backward(plan, natural)
            while new_cuts := {tensor: layout for tensor, layout in wishes.items() if tensor not in cuts}:
                cuts |= new_cuts  # (a gradient of which a norm is taken is written in parts, and has never to be whole)
                other, wishes = backward(plan, forward(kept_once, cuts))
                if _sent(other) > _sent(best) + COPY_BYTES * len(cuts):
                    break
                best = other
            return best

        def backward(plan: Plan, natural: NaturalForms) -> tuple[Plan, Mapping[Tensor, Shard]]:
            propagation = AxisBackward(
                program, natural, wanted, state=plan.state, plan_bodies=lambda *_: {}, drawing=drawing
            )
            return passes.owned_and_moved(plan, propagation.run()), propagation.wishes

        return plan_program(
            program,
            mesh=self.mesh,
            default_device=self.mesh.devices[0],
            input_layouts=[laid.get(program.ops[i].name, SINGLE_DEVICE) for i in program.inputs],
            output_layouts=outputs,
            decisions=(propagate, passes.carry_out_moves),
        )

    def forward(
        self,
        program: Program,
        laid: Mapping[str, Layout],
        outputs: Sequence[Layout] = (),
        kept_once: Mapping[int, str] = MappingProxyType({}),
        cuts: Mapping[Tensor, Shard] = MappingProxyType({}),
    ) -> NaturalForms:
        """Return the natural forms of a program; see `plan`, and `ForwardPropagation`."""
        positions = (*program.inputs, *program.captures)
        in_parts = [isinstance(layout, Shard) for layout in outputs] or [False] * len(program.outputs)
        return AxisForward(
            program,
            laid={i: laid[name] for i in positions if (name := program.ops[i].name) in laid},
            axis=self.axis,
            input_layouts=(SINGLE_DEVICE,) * len(program.inputs),
            control_flow=self._answer,
            whole_outputs=[t for t, is_cut in zip(program.outputs, in_parts, strict=True) if not is_cut],
            kept_once=kept_once,
            cuts=cuts,
            exchanging=self.mesh.exchanging,
        ).run()

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Return how the devices run a loop or branch: each by itself, or all as one, or why not."""
        if any(body.symbols for body in op.bodies.values()):
            return Declined("the number of rows is only known when it runs")  # of which a column's body has others
        key = op, tuple(layouts)
        if key not in self._answers:
            self._answers[key] = self._found(op, layouts)
        return self._answers[key]

    def _found(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        flow, apart = CONTROL_FLOW[op.type], Declined("it has side effects, which happen once")
        handles = tf.resource.as_datatype_enum in op.attr(flow.types).list.type
        alone: Answer = apart if op.stateful or handles else ControlFlowAnswers(self.mesh).answer(op, layouts)
        if isinstance(alone, Sharded) or flow.compiled or not any(isinstance(layout, Shard) for layout in layouts):
            return alone
        together = self._loop(op, layouts) if flow.loops else self._branch(op, layouts)
        return alone if isinstance(together, Declined) else together

    def _loop(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        condition_name, body_name = function_names(op.node)
        body, condition = op.bodies[body_name], op.bodies[condition_name]

        def attempt(reasons: dict[int, str]) -> tuple[Answer, dict[int, str]]:
            whole = {*reasons}
            carried = self._settled(body, layouts, whole)
            if not any(isinstance(layout, Shard) for layout in carried):
                return Declined("none of its loop variables stays cut"), {}
            plans = {
                condition_name: self._plan_function(condition, carried, [SINGLE_DEVICE]),
                body_name: self._plan_function(body, carried, carried),
            }
            return _together(plans, carried, carried), _wanted_whole(plans, body, whole)

        return settled(attempt)

    def _branch(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        names = function_names(op.node)
        if any(not fits(op, op.bodies[name]) for name in names):
            return Declined("one of its branches needs other layouts than its arguments have")
        lists = [i for i, dtype in enumerate(op.out_dtypes) if dtype == tf.variant]

        def attempt(whole: dict[int, str]) -> tuple[Answer, dict[int, str]]:
            argument_layouts = [_given(op.bodies[names[0]], i, layout, whole) for i, layout in enumerate(layouts[1:])]
            if not any(isinstance(layout, Shard) for layout in argument_layouts):
                return Declined("none of its arguments stays cut"), {}
            outputs = self._agreed(op, names, argument_layouts, lists)
            plans = {name: self._plan_function(op.bodies[name], argument_layouts, outputs) for name in names}
            return _together(plans, [SINGLE_DEVICE, *argument_layouts], outputs), _wanted_whole(plans, None, whole)

        return settled(attempt)

    def _agreed(
        self, op: Op, names: Sequence[str], argument_layouts: Sequence[Layout], lists: Collection[int]
    ) -> list[Layout]:
        """Return the layouts of what branches make: cut where all that do not make it whole cut it so."""
        naturals = [
            (op.bodies[name], self.forward(op.bodies[name], _laid(op.bodies[name], argument_layouts))) for name in names
        ]
        outputs: list[Layout] = []
        for k in range(len(op.out_shapes)):
            layouts = {natural.layout(body.outputs[k]) for body, natural in naturals}
            cut = {layout for layout in layouts if isinstance(layout, Shard)}
            layout = cut.pop() if len(cut) == 1 and (k not in lists or len(layouts) == 1) else REPLICATE
            whole = [body for body, natural in naturals if natural.layout(body.outputs[k]) != layout]
            fit = all(self.mesh.fits(body, body.outputs[k], layout) for body in whole)
            outputs.append(layout if fit else REPLICATE)
        return outputs

    def _settled(self, body: Program, layouts: Sequence[Layout], whole: set[int]) -> list[Layout]:
        """Return in which layouts a loop carries its values; those that do not settle are added to what is `whole`."""
        carried = [_given(body, i, layout, whole) for i, layout in enumerate(layouts)]
        while True:
            natural, carried_before = self.forward(body, _laid(body, carried)), list(carried)
            for i, layout in enumerate(carried_before):
                after, is_list = natural.layout(body.outputs[i]), _dtype(body, i) == tf.variant
                if _dtype(body, i) == tf.resource or i in whole or after == layout:
                    continue
                fits = self.mesh.fits(body, body.outputs[i], layout)
                if isinstance(layout, Shard) and (is_list or isinstance(after, Shard) or not fits):
                    whole.add(i)
                elif isinstance(after, Shard) and self.mesh.fits(body, Tensor(body.inputs[i], 0), after):
                    carried[i] = after
            carried = [_given(body, i, layout, whole) for i, layout in enumerate(carried)]
            if carried == carried_before:
                return carried

    def _plan_function(self, program: Program, argument_layouts: Sequence[Layout], outputs: Sequence[Layout]) -> Plan:
        return self.plan(program, _laid(program, argument_layouts), outputs, is_function=True)


def _dtype(body: Program, i: int) -> tf.DType:
    return body.ops[body.inputs[i]].out_dtypes[0]


def _given(body: Program, i: int, layout: Layout, whole: Collection[int]) -> Layout:
    """Return in which layout a function is given an argument: each device has one, and handles stay where they are."""
    if _dtype(body, i) == tf.resource:
        return layout
    return layout if isinstance(layout, Shard) and i not in whole else REPLICATE


def _laid(program: Program, argument_layouts: Sequence[Layout]) -> dict[str, Layout]:
    pairs = zip(program.inputs, argument_layouts, strict=True)
    return {program.ops[i].name: layout for i, layout in pairs if layout != SINGLE_DEVICE}


def _together(plans: Mapping[str, Plan], wants: Sequence[Layout], gives: Sequence[Layout]) -> Answer:
    moved = [
        plan.program.ops[move.tensor.op].out_dtypes[move.tensor.index] for plan in plans.values() for move in plan.moves
    ]
    if tf.resource in moved:
        return Declined("an operation in it takes a variable whole")
    return Sharded(tuple(wants), tuple(gives), bodies=plans, together=True)


def _wanted_whole(plans: Mapping[str, Plan], loop: Program | None, whole: Collection[int]) -> dict[int, str]:
    """Return which arguments have to be given whole besides those that are, and for which function; see `_wanted`."""
    return {i: name for name, plan in plans.items() for i in _wanted(plan, loop) if i not in whole}


def _wanted(plan: Plan, loop: Program | None) -> Iterator[int]:
    """Yield the arguments that are given in parts and have to be given whole.

    Those are lists, which are never put together, and what each iteration of a loop would put together anew.

    Args:
      plan: of a function.
      loop: the body of the loop that calls it, if one does.
    """
    program = plan.program
    for move in plan.moves:
        if is_whole(move.source) == is_whole(move.target):
            continue
        op = program.ops[move.tensor.op]
        is_list = op.out_dtypes[move.tensor.index] == tf.variant
        while op.type in ("Identity", "Cast"):
            op = program.ops[op.inputs[0].op]
        number = program.inputs.index(op.index) if op.index in program.inputs else None
        if is_list:
            yield from [k for k, tensor in enumerate(program.outputs) if tensor == move.tensor] if loop else []
        if number is not None and (is_list or (loop and is_whole(move.target) and _is_kept(loop, number))):
            yield number


def _is_kept(body: Program, i: int) -> bool:
    """Return whether what a loop carries is the same in each iteration."""
    return bool(origin(body, body.outputs[i]) == Tensor(body.inputs[i], 0))


def _sent(plan: Plan) -> int:
    """Return the bytes that devices of the axis send each other."""
    return sum(
        size for collective in passes.carry_out_moves(plan).collectives for _, (*_, size) in collective.transfers()
    )
