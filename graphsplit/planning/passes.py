"""The passes of planning, in order: a plan -> the plan with what the pass decides. `planner` lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import SINGLE_DEVICE, Shard
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.communication import collectives
from graphsplit.planning.communication.bucketing import find_buckets, leading_to_shards
from graphsplit.planning.communication.gateways import through_gateways
from graphsplit.planning.communication.moves import find_moves
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.control_flow import ControlFlowAnswers
from graphsplit.planning.moments import with_moments
from graphsplit.planning.plan import Plan, check_strict
from graphsplit.planning.propagation.backward_propagation import BodyPlanner, WholeBackwardPropagation
from graphsplit.planning.propagation.cuts import with_cuts
from graphsplit.planning.propagation.forward_propagation import ForwardPropagation
from graphsplit.planning.propagation.lookups import rows_moved
from graphsplit.planning.propagation.owners import find_owners
from graphsplit.planning.propagation.sharding_checks import misplaced_lists
from graphsplit.planning.row_reading import with_rows_read
from graphsplit.planning.schedule import automatic_stages, recomputation
from graphsplit.planning.schedule.phases import as_taken, find_phases, find_turns, levels_on_shards
from graphsplit.planning.schedule.pipelines import make_schedules
from graphsplit.planning.schedule.scheduling import find_order, with_late_operations
from graphsplit.planning.settling import settled
from graphsplit.planning.state import State, state_bytes
from graphsplit.planning.steps import Step
from graphsplit.planning.weighted_moments import with_weighted_moments
from graphsplit.program.program import Program


def choose_default_device(plan: Plan) -> Plan:
    """Decide on which device is what is whole and belongs to nobody, if nobody said so."""
    if not plan.default_devices:
        return plan
    default_device, notes = best_default_device(plan.program, plan.state, plan.default_devices)
    return replace(plan, default_device=default_device, notes=(*plan.notes, *notes))


def best_default_device(program: Program, state: State, devices: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the device of whole values that belong to nobody, and what a plan says of it.

    On one host it is the first of the devices. On several it is the one, be it none of these, that has most bytes of
    the captured variables; unless the first has half as many: slices of variables are not all of one size.
    """
    first = devices[0]
    bytes_held = state_bytes(program, state, first)
    most = max([first, *bytes_held], key=lambda device: bytes_held.get(device, 0))
    is_one_host = len({host_name(device) for device in (*devices, *bytes_held)}) == 1
    if is_one_host or 2 * bytes_held.get(first, 0) >= bytes_held.get(most, 0):
        return first, ()
    return most, (f"default device: {short_name(most)}, where the variables are ({format_bytes(bytes_held[most])})",)


def recompute(plan: Plan) -> Plan:
    """Decide what the backward pass makes again instead of finding it kept; see `recomputed`."""
    if plan.asked.recompute is None:
        return plan
    program, notes = recomputation.recomputed(plan.program, plan.asked.recompute, plan.mesh.batch)
    return replace(plan, program=program, notes=(*plan.notes, *notes))


def merge_moments(plan: Plan) -> Plan:
    """Decide which variances are merged from those of each shard's own rows."""
    if not plan.mesh.few_bytes or plan.stage_starts is not None or plan.program.stages:
        return plan
    cut = {layout.axis for layout in plan.input_layouts if isinstance(layout, Shard)}
    program = with_weighted_moments(plan.program, cut, plan.mesh.few_bytes)
    return replace(plan, program=with_moments(program, plan.mesh.few_bytes))


def propagate_with(plan: Plan, plan_bodies: BodyPlanner) -> Plan:
    """Decide in which layouts every operation runs and is read, who owns whole values, and what moves.

    Forward, every op gets its natural layout: rows flow from the sharded arguments through the rules. Backward, from
    what the function returns and changes, every op learns in which layouts it is read. What nobody reads is dropped;
    what is whole and is read in pieces is made in pieces where that moves fewer bytes; what looks up rows runs where
    its table is, likewise. Then whole values get the device that they belong to, and every other change of layout
    becomes one move. Lists cannot move: those that would have to stay where they are, and all is decided again.

    Args:
      plan: nothing is decided yet.
      plan_bodies: plans what a loop or branch that runs once does in each iteration.
    """
    program, mesh = plan.program, plan.mesh
    answers = ControlFlowAnswers(mesh)
    outputs = (SINGLE_DEVICE,) * len(program.outputs)

    def decide(kept_once: Mapping[int, str]) -> Plan:
        def make(kind: type[ForwardPropagation], **options: Any) -> ForwardPropagation:
            arguments = (plan.input_layouts, answers.answer, program.outputs, kept_once, mesh.batch)
            return kind(program, *arguments, exchanging=mesh.exchanging, **options)

        natural = with_cuts(program, mesh, make)
        once = rows_moved(program, natural, plan.places, plan.state)
        backward = WholeBackwardPropagation(
            program, natural, outputs, plan.state, mesh.few_bytes, plan_bodies=plan_bodies, once=once
        )
        return owned_and_moved(plan, backward.run())

    return with_lists_in_place(decide)


def with_lists_in_place(decide: Callable[[Mapping[int, str]], Plan], in_pieces: Collection[int] = ()) -> Plan:
    """Return the plan in which no list would have to be cut or put together.

    Args:
      decide: makes a plan in which some operations run once: position -> why.
      in_pieces: positions of arguments that are given in pieces; such a list may have to be put together all the same.

    Raises:
      CheckError: if lists that stay would still have to move.
    """

    def attempt(kept_once: dict[int, str]) -> tuple[Plan, dict[int, str]]:
        plan = decide(kept_once)
        misplaced = misplaced_lists(plan.program, plan.steps, plan.moves, plan.mesh.batch)
        return plan, {position: why for position, why in misplaced.items() if position not in in_pieces}

    return settled(attempt)


def owned_and_moved(plan: Plan, steps: Sequence[Step]) -> Plan:
    """Return the plan with what becomes of each operation, who owns whole values, and what moves."""
    owners = find_owners(plan.program, steps, plan.places, plan.state, plan.input_devices)
    moves = find_moves(plan.program, steps, replace(plan.places, owners=owners), plan.state, plan.output_layouts)
    return replace(plan, steps=tuple(steps), owners=owners, moves=moves)


def read_rows(plan: Plan) -> Plan:
    """Decide which lookups read their rows from a variable itself, and not from its value; see `row_reading`."""
    program_and_steps = with_rows_read(plan)
    return (
        plan if program_and_steps is None else replace(plan, program=program_and_steps[0], steps=program_and_steps[1])
    )


def start_stages(plan: Plan) -> Plan:
    """Decide where the stages begin that are asked for, unless a mesh has them, whose stages are cut before all else.

    What belongs to a stage then belongs to its devices.
    """
    if plan.stage_starts is None:
        return plan
    program, steps, stages_asked = plan.program, plan.steps, plan.stage_starts.asked
    if program.stages:
        program = automatic_stages.with_all_in_stages(program, steps)
    else:
        program = automatic_stages.start_stages(program, steps, plan.mesh, stages_asked, plan.asked.schedule or "")
    cuts = automatic_stages.cuts_of(program, steps, stages_asked)
    return owned_and_moved(replace(plan, program=program, stage_starts=cuts), steps)


def wait_for_readers(plan: Plan) -> Plan:
    """Decide what waits that could run long before it is read; stages have a schedule of their own."""
    if plan.asked.schedule or plan.program.stages:
        return plan
    return replace(plan, program=with_late_operations(plan.program, plan.steps))


def put_in_order(plan: Plan) -> Plan:
    """Decide what runs before what it need not wait for."""
    if plan.mesh.shards < 2:
        return plan
    leading = leading_to_shards(plan.program, plan.steps)
    return replace(plan, order=find_order(plan.program, plan.steps, leading))


def carry_out_moves(plan: Plan) -> Plan:
    """Decide what carries out each move."""
    return _with(plan, collectives.find_collectives(plan.program, plan.places, plan.moves))


def fill_buckets(plan: Plan) -> Plan:
    """Decide which moves of small tensors are made as one."""
    if plan.mesh.shards < 2:
        return plan
    leading, devices = leading_to_shards(plan.program, plan.steps), {plan.default_device, *plan.devices}
    alone = [c.moves[0] for c in plan.collectives if len(c.moves) == 1]  # (what others also get is sent to all at once)
    most, few = plan.asked.bucket_bytes, plan.mesh.few_bytes
    levels = levels_on_shards(plan.flow, plan.mesh.has_turns)
    buckets = find_buckets(plan.program, plan.steps, alone, leading, devices, most, few, levels)
    return _with(plan, collectives.bucketed(plan.program, plan.collectives, buckets))


def add_in_turns(plan: Plan) -> Plan:
    """Let what shards of one device give to a sum be added there, as it comes."""
    return _with(plan, collectives.in_turns(plan.collectives, plan.mesh))


def go_through_gateways(plan: Plan) -> Plan:
    """Decide through which device of a host passes what others of it give or read as well."""
    return _with(plan, through_gateways(plan.collectives, bool(plan.rows)))


def _with(plan: Plan, collectives_now: Sequence[Collective]) -> Plan:
    return replace(plan, collectives=tuple(collectives_now))


def divide_into_phases(plan: Plan) -> Plan:
    """Decide what each shard does in one go, where shards take turns on a device."""
    if not plan.mesh.has_turns:
        return plan
    return replace(plan, phases=find_phases(plan.flow, plan.collectives, _schedule(plan)))


def take_turns(plan: Plan) -> Plan:
    """Decide in which order the shards of a device do what they do in one go."""
    schedule = _schedule(plan)
    schedules = make_schedules(schedule, plan.program, plan.mesh) if schedule else {}
    turns, mesh = find_turns(plan.program, plan.phases, plan.mesh, schedules), plan.mesh
    first = {mesh.positions.count(position): position for position in reversed(mesh.positions)}
    taken = {
        count: as_taken(schedule_of_count, plan.program, plan.phases, mesh, turns, first[count])
        for count, schedule_of_count in schedules.items()
    }
    return replace(plan, schedules=taken, turns=turns)


def _schedule(plan: Plan) -> str:
    """Return the kind of schedule by which shards go through stages; "" for none, or fewer stages than it is for."""
    cuts = plan.stage_starts
    is_fewer = cuts is not None and len(cuts.stages) != len(cuts.asked.devices)
    return "" if is_fewer else plan.asked.schedule or ""


def note_stages(plan: Plan) -> Plan:
    """Say which stages have not their devices, in loops and branches that every shard runs, and if none overlap."""
    notes = []
    if plan.schedule is not None and plan.schedule.shards == 1:
        notes.append(
            f"schedule={plan.schedule.kind!r} has one micro-batch to order, so stages run one after the other; "
            "micro_batches=8 lets them overlap"
        )
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        bodies = step.shards.bodies if step.shards else {}
        for stage in dict.fromkeys(stage for body in bodies.values() for stage in body.program.all_stages()):
            notes.append(f"{stage} is called inside {op.type} {op.name!r}, which every shard runs on its own device")
    return replace(plan, notes=(*plan.notes, *notes))


def check(plan: Plan) -> Plan:
    """Raise `StrictError` if more runs once than the user allows; and check what could wait for ever."""
    check_strict(plan, plan.asked.strict)
    if plan.program.symbols and plan.mesh.has_turns:
        plan.check()  # shards without rows take turns (a twentieth of planning)
    return plan
