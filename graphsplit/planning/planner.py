"""Planning: Program + mesh -> Plan. No TensorFlow op is made.

`PASSES` is the table of contents: each takes the plan as those before it have left it, and returns it with what it
decides. What is decided before and after them, `docs/architecture.md` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.layouts import SINGLE_DEVICE, Cut, Layout, Nested, Shard
from graphsplit.planning import passes
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.device_bytes import live_bytes
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Owners
from graphsplit.planning.plan import Plan
from graphsplit.planning.planning_options import PlanningOptions
from graphsplit.planning.schedule.automatic_stages import StagesAsked, StageStarts
from graphsplit.planning.state import State
from graphsplit.planning.steps import Step
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program, Tensor


@collection_paused()
def plan_program(
    program: Program,
    *,
    mesh: Mesh,
    default_device: str,
    input_layouts: Sequence[Layout],
    state: State = State(),  # noqa: B008  # frozen
    asked: PlanningOptions = PlanningOptions(),  # noqa: B008  # frozen
    stages: StagesAsked | None = None,
    notes: Sequence[str] = (),
    input_devices: Sequence[str] = (),
    output_layouts: Sequence[Layout] = (),
    default_devices: Sequence[str] = (),
    decisions: Sequence[Callable[[Plan], Plan]] | None = None,
) -> Plan:
    """Decide where every operation runs.

    Args:
      program: the function, in the columns and parts in which its variables lie.
      mesh: the shards.
      default_device: the device of whole values that belong to nobody.
      input_layouts: `Shard` or `SingleDevice` for each argument.
      state: where variables, tables and large constants live.
      asked: what the user asks of the plan.
      stages: the devices of the stages into which the program is to be cut, if any.
      notes: for the plan.
      input_devices: where each argument lies; by default on the default device. What a function's gradients are given
        besides, and what a loop hands to its body, is on the default device.
      output_layouts: of what it returns; by default each on one device.
      default_devices: the devices for which the function is planned, if the default device is to be where its variables
        are.
      decisions: those of `PASSES` that are taken; by default all.

    Raises:
      StrictError: see `strict` of `parallelize`.
      ArgumentError: for a schedule without the stages that it needs, or stages into which it cannot be cut.
    """
    plan = Plan(
        program=program,
        mesh=mesh,
        default_device=default_device,
        input_layouts=tuple(input_layouts),
        steps=(),
        owners=Owners(),
        moves=(),
        notes=tuple(notes),
        asked=asked,
        state=state,
        stage_starts=None if stages is None else StageStarts(stages),
        input_devices=tuple(input_devices),
        output_layouts=tuple(output_layouts),
        default_devices=tuple(default_devices),
    )
    return _decided(replace(plan, start=plan), PASSES if decisions is None else decisions)


def text_after(plan: Plan, last: str) -> str:
    """Return what the passes of a plan had decided when the one of this name was done, to be printed."""
    names = [decide.__name__ for decide in PASSES]
    assert isinstance(plan.start, Plan)
    return steps_text(_decided(plan.start, PASSES[: names.index(last) + 1]))


def steps_text(plan: Plan) -> str:
    """Return where each operation of a plan runs and in which layouts, and what moves, as far as it is decided."""
    first, *lines = str(plan.program).splitlines()
    devices = [", ".join(plan.places.once(op)) for op in plan.program.ops] if plan.steps else []
    where = list(map(_where, plan.steps, devices)) or ["not decided"] * len(lines)
    moves = [f"  {move.kind} of %{move.tensor.op}: {move.source} -> {move.target}" for move in plan.moves]
    return "\n".join([first, *[f"{line}: {place}" for line, place in zip(lines, where, strict=True)], *moves])


def _where(step: Step, devices: str) -> str:
    once, sharded = f"once, on {devices}", step.shards
    if sharded is None:
        return once if step.once else "not run by itself"
    text = f"shards: ({', '.join(map(str, sharded.wants))}) -> {', '.join(map(str, sharded.gives))}"
    return f"{text}; {once}" if step.once else text


def _decided(plan: Plan, decisions: Sequence[Callable[[Plan], Plan]]) -> Plan:
    for decide in decisions:
        plan = decide(plan)
    return plan


def cut_first(
    program: Program, mesh: Mesh, input_layouts: Sequence[Layout], asked: PlanningOptions, stages: StagesAsked | None
) -> tuple[Program, PlanningOptions, Sequence[str]]:
    """Return a program for one device with the stages that a mesh has; see `StagesAsked.on_mesh`.

    What is recomputed is decided before, as its stage is that of the backward pass. Returned are also what is still
    asked of the plan then, and what to say in it.
    """
    if stages is None or not stages.on_mesh:
        return program, asked, ()
    decisions = (passes.recompute, propagate, passes.start_stages)
    default_device, alone = stages.devices[0][0], replace(mesh, columns=())
    plan = plan_program(
        program,
        mesh=alone,
        default_device=default_device,
        input_layouts=input_layouts,
        asked=asked,
        stages=stages,
        decisions=decisions,
    )
    return plan.program, replace(asked, recompute=None), plan.notes


def propagate(plan: Plan) -> Plan:
    """See `passes.propagate_with`; what a loop that runs once does in each iteration is planned by all passes."""
    return passes.propagate_with(plan, lambda op, layouts: _plan_bodies(plan, op, layouts))


def gathered_again_or_kept(mesh: Mesh, planned: Callable[[bool], Plan]) -> Plan:
    """Return the better of two plans: shards that take turns keep what is gathered for them, or gather it again.

    What is dropped is put together again for all shards at a time (`variables/gathering`), so all turns meet there, and
    what they have computed so far is held. Kept through all turns it is put together once, but then all of it is alive,
    and so are the sums of its gradients. Few rows and large weights want the one, many and small ones the other.

    Args:
      mesh: the shards.
      planned: returns the plan in which sharded variables are gathered again for each use, or kept in between.
    """
    if not mesh.has_turns:
        return planned(True)
    keeping = planned(False)
    return _with_less_alive(keeping, planned(True)) if _may_drop(keeping) else keeping


_SAID = "sharded variables are gathered"


def _may_drop(plan: Plan) -> bool:
    """Return whether anything is kept that could be dropped, and what is alive is known when planning."""
    divisions = plan.state.divisions.values()
    in_stages = plan.asked.in_stages or plan.asked.schedule
    is_there = any(isinstance(division, (Cut, Nested)) and division.reshard for division in divisions)
    return is_there and not in_stages and not plan.program.symbols


def _with_less_alive(keeping: Plan, regathering: Plan) -> Plan:
    """Return the plan of the two that has fewer bytes alive on its fullest device; it says what the other one has."""
    most_kept, most_again = _most_alive(keeping), _most_alive(regathering)
    if most_again < most_kept:
        how = "again for each use, for which all micro-batches wait"
        return _with_note(regathering, how, most_again, most_kept)
    if most_kept < most_again:
        return _with_note(keeping, "once, and kept for all micro-batches", most_kept, most_again)
    return keeping


def _most_alive(plan: Plan) -> int:
    return max(live_bytes(plan).values(), default=0)


def _with_note(plan: Plan, how: str, most: int, otherwise: int) -> Plan:
    note = f"{_SAID} {how}: {format_bytes(most)} alive at most, {format_bytes(otherwise)} the other way"
    other_notes = [
        other for other in plan.notes if not other.startswith(_SAID)
    ]  # (a function's, on the plan of its gradient)
    return replace(plan, notes=(*other_notes, note))


PASSES: tuple[Callable[[Plan], Plan], ...] = (
    passes.choose_default_device,  # the device of what is whole and belongs to nobody, if none is given
    passes.recompute,  # the program with what it makes again for the backward pass, if that is asked for
    passes.merge_moments,  # variances around each shard's own mean, which are sent together with that
    propagate,  # rows flow forward through the rules, and back from what is read: steps, owners, moves
    passes.read_rows,  # lookups whose variable is where they are read no more of it than their rows
    passes.start_stages,  # the program with its stages, if any are asked for
    passes.wait_for_readers,  # what would be held long before it is read
    passes.put_in_order,  # what other devices wait for goes first
    passes.carry_out_moves,  # each by values on devices: collectives
    passes.fill_buckets,  # what is small goes together
    passes.add_in_turns,  # what shards of one device give to a sum is added as it comes
    passes.divide_into_phases,  # what shards that take turns on a device do before each wait
    passes.take_turns,  # by a schedule, where they go through stages
    passes.go_through_gateways,  # from host to host each value passes once
    passes.note_stages,  # those that cannot have their devices
    passes.check,  # what the user is strict about
)


def _plan_bodies(plan: Plan, op: Op, layouts: Sequence[Layout]) -> dict[str, Plan]:
    """Plan what a loop or branch that runs once does in each iteration, as if its functions were whole programs."""
    flow, program, inside = CONTROL_FLOW[op.type], plan.program, plan.places.within(op)
    if flow.compiled:
        return {}  # by XLA, for one device
    passed = range(flow.chooses, len(op.inputs))
    argument_layouts = [
        layout if isinstance(layout, Shard) and _fits_every_body(plan, op, number, layout) else SINGLE_DEVICE
        for number, layout in enumerate(layouts[flow.chooses :])
    ]
    makers = [program.ops[op.inputs[i].op] for i in passed]
    captures = {*program.captures}  # (what is done for a part has a device, too)
    handles = [(maker.index in captures and maker.device) or plan.state.devices.get(maker.name) for maker in makers]
    body_options = replace(
        plan.asked, strict=False, schedule=None, in_stages=False, recompute=None
    )  # (which the whole plan keeps, or has none of)
    plans = {}
    for name, body in op.bodies.items():
        names = [body.ops[i].name for i in body.inputs]
        devices = {name: device for name, device in zip(names, handles, strict=True) if device}
        body_state = State(devices, largest_constant=plan.state.largest_constant)
        plans[name] = plan_program(
            body,
            mesh=inside.mesh,
            default_device=inside.default_device,
            input_layouts=argument_layouts,
            state=body_state,
            asked=body_options,
        )
    return plans


def _fits_every_body(plan: Plan, op: Op, number: int, layout: Layout) -> bool:
    """Return whether what a loop or branch is given as an argument has the same rows in each iteration.

    (A branch that does not fit what it is given was read for arguments of any shape.)
    """
    return all(plan.mesh.fits(body, Tensor(body.inputs[number], 0), layout) for body in op.bodies.values())
