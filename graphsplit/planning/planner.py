"""Planning: Program + mesh -> Plan. One pass forward, one pass back, no TensorFlow op is made.

Forward, every op gets its natural layout: rows flow from the sharded arguments through the rules. Backward, from what
the function returns and changes, every op learns in which layouts it is read. What nobody reads is dropped; what is
whole and is read in pieces is made in pieces where that moves fewer bytes. Then whole values get the device that they
belong to, and every other change of layout becomes one move.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.errors import CheckError
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, Shard, is_whole
from graphsplit.core.symbolic_sizes import Shape, is_same
from graphsplit.graph.function_calls import CONTROL_FLOW
from graphsplit.planning.asked import Asked
from graphsplit.planning.automatic_stages import cut_into_stages
from graphsplit.planning.backward_propagation import WholeBackwardPropagation
from graphsplit.planning.bucketing import find_buckets, leading_to_shards
from graphsplit.planning.control_flow import ControlFlowAnswers
from graphsplit.planning.cuts import with_cuts
from graphsplit.planning.flow import Flow
from graphsplit.planning.forward_propagation import ForwardPropagation
from graphsplit.planning.gateways import find_gateways
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.moves import exchanging, find_moves
from graphsplit.planning.owners import find_owners
from graphsplit.planning.phases import find_phases
from graphsplit.planning.pipelines import make_schedules
from graphsplit.planning.plan import Plan
from graphsplit.planning.scheduling import find_order
from graphsplit.planning.state import State
from graphsplit.planning.steps import Move, Step
from graphsplit.planning.strictness import check_strict
from graphsplit.planning.turns import find_turns
from graphsplit.program.program import Op, Program


@collection_paused()
def plan_program(
    program: Program,
    *,
    mesh: Mesh,
    home: str,
    input_layouts: Sequence[Layout],
    state: State = State(),  # noqa: B008  # frozen
    asked: Asked = Asked(),  # noqa: B008  # frozen
    notes: Sequence[str] = (),
) -> Plan:
    """Decide where every operation runs.

    Args:
      program: the traced function.
      mesh: the shards.
      home: the device of whole values that belong to nobody.
      input_layouts: `Shard` or `SingleDevice` for each argument.
      state: where variables, tables and large constants live.
      asked: what the user asks of the plan.
      notes: for the plan.

    Raises:
      StrictError: see `Asked.strict`.
      ArgumentError: for a schedule without the stages that it needs, or stages into which it cannot be cut.
    """
    random, stages, schedule = asked.random, asked.stages, asked.schedule

    def plan_bodies(op: Op, layouts: Sequence[Layout]) -> dict[str, Plan]:
        return _plan_bodies(program, op, layouts, mesh=mesh, home=home, state=state, random=random)

    answers = ControlFlowAnswers(mesh, random)
    kept_home: dict[int, str] = {}
    while True:
        given = (input_layouts, answers.answer, program.outputs, kept_home, mesh.batch)
        natural = with_cuts(
            program,
            mesh,
            random == "independent",
            functools.partial(_propagate, program, given, exchanging=exchanging(mesh)),
        )
        backward = WholeBackwardPropagation(
            program, natural, plan_bodies, independent=random == "independent", state=state
        )
        steps = tuple(backward.steps)
        owners = find_owners(program, steps, home, state)
        moves = find_moves(program, mesh, steps, owners, state)
        impossible = {**_impossible(program, steps, moves), **_ill_fitting(program, steps, mesh.batch)}
        if not impossible:
            break
        if impossible.keys() <= kept_home.keys():
            raise CheckError(f"Lists cannot be placed: {sorted(program.ops[i].name for i in impossible)}.")
        kept_home.update(impossible)
    stage_cuts = None
    if stages is not None:
        program, stage_cuts = cut_into_stages(program, steps, mesh, stages, schedule)
        owners = find_owners(program, steps, home, state)
        moves = find_moves(program, mesh, steps, owners, state)
        schedule = schedule if len(stage_cuts.stages) == len(stages.devices) else ""
    split = mesh.shards > 1
    leading = leading_to_shards(program, steps) if split else set()
    order = find_order(program, steps, leading) if split else {}
    buckets = find_buckets(program, steps, moves, leading, {home, *mesh.devices}, asked.bucket_bytes) if split else ()
    flow = Flow(program, steps, state, order)
    phases = find_phases(flow, moves, buckets, schedule) if mesh.has_turns else ()
    schedules = make_schedules(schedule, program, mesh) if schedule else {}
    plan = Plan(
        program=program,
        mesh=mesh,
        home=home,
        input_layouts=tuple(input_layouts),
        state=state,
        steps=steps,
        owners=owners,
        moves=moves,
        buckets=buckets,
        gateways=find_gateways(program, mesh, home, moves, buckets),
        order=order,
        phases=phases,
        turns=find_turns(program, phases, mesh, schedules),
        schedules=schedules,
        notes=(*notes, *_notes_on_stages(program, steps)),
        asked=asked,
        stage_cuts=stage_cuts,
    )
    check_strict(plan, asked.strict)
    if program.symbols and mesh.has_turns:
        plan.check()  # where shards without rows take turns, a mistake could wait for ever (a twentieth of planning)
    return plan


def _propagate(
    program: Program, given: tuple[Any, ...], kind: type[ForwardPropagation], **others: Any
) -> ForwardPropagation:
    return kind(program, *given, **others)


def _plan_bodies(
    program: Program, op: Op, layouts: Sequence[Layout], *, mesh: Mesh, home: str, state: State, random: str
) -> dict[str, Plan]:
    """Plan what a loop or branch at home does in each turn, as if its functions were whole programs."""
    flow = CONTROL_FLOW[op.type]
    if flow.compiled:
        return {}  # by XLA, for one device
    passed = range(flow.chooses, len(op.inputs))
    arguments = [[body.ops[i].out_shapes[0] for i in body.inputs] for body in op.bodies.values()]
    # (a branch that does not fit what it is given was read for arguments of any shape)
    known = [all(shape is not None for shape in shapes) for shapes in zip(*arguments, strict=True)]
    given = [
        layouts[i] if isinstance(layouts[i], Shard) and is_known else SINGLE_DEVICE
        for i, is_known in zip(passed, known, strict=True)
    ]
    handles = [state.devices.get(program.ops[op.inputs[i].op].name) for i in passed]
    stage = program.stages.of(op.name)
    if stage:
        mesh = Mesh(tuple([stage.device(p) for p in mesh.positions]), mesh.weights, mesh.rows, mesh.positions)
        home = stage.home
    plans = {}
    for name, body in op.bodies.items():
        names = [body.ops[i].name for i in body.inputs]
        devices = {name: device for name, device in zip(names, handles, strict=True) if device}
        own = State(devices, largest_constant=state.largest_constant)
        asked = Asked(random=random)
        plans[name] = plan_program(body, mesh=mesh, home=home, input_layouts=given, state=own, asked=asked)
    return plans


def _notes_on_stages(program: Program, steps: Sequence[Step]) -> list[str]:
    """Say which stages cannot have their devices: those inside loops and branches that every shard runs by itself."""
    notes = []
    for op, step in zip(program.ops, steps, strict=True):
        bodies = step.shards.bodies if step.shards else {}
        for stage in dict.fromkeys(stage for body in bodies.values() for stage in body.program.all_stages()):
            notes.append(f"{stage} is called inside {op.type} {op.name!r}, which every shard runs on its own device")
    return notes


def _impossible(program: Program, steps: Sequence[Step], moves: Sequence[Move]) -> dict[int, str]:
    """Return the ops that must stay at home because lists cannot be gathered or cut: they are opaque to other ops."""
    found = {}
    for move in moves:
        tensor = move.tensor
        both_whole = is_whole(move.source) and is_whole(move.target)
        if both_whole or program.ops[tensor.op].out_dtypes[tensor.index] != tf.variant:
            continue
        if not is_whole(move.source):
            found[tensor.op] = "its list is read whole" + _by_whom(program, steps, move)
            continue
        for op, step in zip(program.ops, steps, strict=True):
            if step.shards and (tensor, move.target) in zip(op.inputs, step.shards.wants, strict=True):
                found[op.index] = "its list is made whole"
    return found


def _ill_fitting(program: Program, steps: Sequence[Step], batch: int) -> dict[int, str]:
    """Return the ops that write to a list, or read of it, what has other rows than the list's other elements."""
    found = {}
    for op, step in zip(program.ops, steps, strict=True):
        types = [program.ops[tensor.op].out_dtypes[tensor.index] for tensor in op.inputs]
        if not step.shards or not batch or tf.variant not in (*types, *op.out_dtypes):
            continue
        are_cut = [_gives(steps[t.op], t.index) != want for t, want in zip(op.inputs, step.shards.wants, strict=True)]
        layouts, shapes = (*step.shards.wants, *step.shards.gives), (*op.in_shapes, *op.out_shapes)
        all_types, all_cut = (*types, *op.out_dtypes), (*are_cut, *[False] * len(op.out_dtypes))
        for layout, shape, dtype, is_cut in zip(layouts, shapes, all_types, all_cut, strict=True):
            if isinstance(layout, Shard) and dtype != tf.variant and not _fits(shape, layout, batch, is_cut):
                found[op.index] = f"the list is read whole: not all of its elements are {layout}"
    return found


def _gives(step: Step, output: int) -> Layout | None:
    return step.shards.gives[output] if step.shards else None


def _fits(shape: Shape | None, layout: Shard, batch: int, is_cut: bool) -> bool:
    """Return whether a tensor has the rows that a layout says, as far as its shape is known; if not, it is not cut."""
    if shape is not None and layout.axis >= len(shape):
        return False
    size = None if shape is None else shape[layout.axis]
    return not is_cut if size is None else is_same(size, layout.size(batch))


def _by_whom(program: Program, steps: Sequence[Step], move: Move) -> str:
    for op, step in zip(program.ops, steps, strict=True):
        if step.home and step.reason and move.tensor in op.inputs:
            return f" by {op.type}: {step.reason}"
    return ""
