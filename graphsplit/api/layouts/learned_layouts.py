"""Layouts that follow from what a traced function does: which variables lie together, in which stage, in which units.

Layouts are set before any function is known, on the devices of the first stage. Then optimizers of Keras say which
slots belong to which variables, and for all others names do. A traced function knows:

* Variables that it updates together lie together, whatever they are called: see `updated_together`.
* If it is cut into stages, a variable belongs to the first stage that reads it, its slots with it; what no stage reads,
  and follows from one stage, belongs to that one (moving averages). What belongs to no stage stays where it is, and
  numbers do.
* Some variables consist of units, of which none is cut.

The first function that uses a variable says where it belongs; others, whose stages may begin elsewhere, leave it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import PLACES, divided
from graphsplit.api.layouts.layout_spellings import VariableLayout
from graphsplit.api.layouts.new_variables import slots_by_name
from graphsplit.api.layouts.variable_layouts import decide, decide_in_stages, stage_known, wanted_layouts
from graphsplit.axes.plans import AxisPlanner
from graphsplit.axes.units import UnitSearch
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.layouts import Cut, MeshDivision, along_axis, axis_of, layout_along_axis
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import bytes_of_variable
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.variables.updates import updated_together, used_beyond_updates
from graphsplit.program.program import is_write
from graphsplit.program.stages import Stage
from graphsplit.tracing.trace import Trace, captured_variables


def slots_in(trace: Trace) -> dict[int, tf.Variable]:
    """Return the variable that each slot of a traced function belongs to, by the slot's id.

    Slots are updated together with their variable. Of what is updated by itself, names tell.
    """
    groups = _groups(trace)
    head_of_slot = {id(slot): group[0] for group in groups for slot in group[1:]}
    grouped = {id(variable) for group in groups for variable in group}
    named = slots_by_name(list(trace.variables)).items()
    return {**head_of_slot, **{slot: head_of_slot.get(id(head), head) for slot, head in named if slot not in grouped}}


def _groups(trace: Trace) -> list[list[tf.Variable]]:
    """Return the variables that are updated together, first the one that is trained.

    Slots that somebody made may be trainable, too, as variables of TensorFlow are; then it is the one that is used.
    """
    captured = captured_variables(trace)
    numbers, variables = (
        {i: id(variable) for i, variable in captured.items()},
        {id(variable): variable for variable in captured.values()},
    )
    groups, used = updated_together(trace.program, numbers), used_beyond_updates(trace.program, numbers)
    return [
        [variables[k] for k in sorted(g, key=lambda k: (not variables[k].trainable, k not in used))] for g in groups
    ]


def lie_together(lies: Arrangement, trace: Trace) -> tuple[str, ...]:
    """Let variables lie where those do with which a traced function updates them; return what a plan says.

    These are divided ones, and slots that no layout was set for: they were made after that of their variables was.
    """
    if not (tf.executing_eagerly() and any(lies.of(variable).has_layout for variable in trace.variables)):
        return ()
    moved, groups = _new_slots(lies, trace), _groups(trace)
    moved += [variable for layout in PLACES for variable in _lie_together(lies, groups, trace.variables, layout)]
    return _said(moved, "the devices of the variables that are updated with them")


def _said(moved: Sequence[tf.Variable], where: str) -> tuple[str, ...]:
    size = format_bytes(sum(map(bytes_of_variable, moved)))
    return (f"{count_text(len(moved), 'variable')} ({size}) lie on {where}",) if moved else ()


def _new_slots(lies: Arrangement, trace: Trace) -> list[tf.Variable]:
    """Give slots without a layout the one that was asked for their variables; return them."""
    heads, together = slots_in(trace), dict[tuple[Any, ...], list[tuple[tf.Variable, Any]]]()
    for slot in [variable for variable in trace.variables if id(variable) in heads and lies.of(variable).wish is None]:
        head = heads[id(slot)]
        layout, *how = lies.of(head).wish or ("home", ())
        is_there = layout != "replicated" or lies.device_of(slot) in how[0]  # (one of the copies is the slot)
        if layout != "home" and is_there and not lies.of(head).automatic and head.shape == slot.shape:
            together.setdefault(tuple(how), []).append((slot, layout))
    for (devices, mesh, reshard), pairs in together.items():
        slots, layouts = zip(*pairs, strict=True)
        decide(lies, slots, layouts, heads, devices, mesh, reshard_after_forward=reshard)
    return [slot for pairs in together.values() for slot, _ in pairs]


def lie_as_asked(
    lies: Arrangement, trace: Trace, layout: Any, devices: Sequence[str], mesh: DeviceMesh | None
) -> tuple[str, ...]:
    """Decide how those variables of a traced function lie that have no layout yet; return what a plan says.

    Args:
      lies: is told.
      trace: the function.
      layout: as for `set_variable_layout`.
      devices, mesh: full names; they as a mesh, if they are one.

    Raises:
      ArgumentError: if a pattern fits no variable, and there are variables to be laid out.
    """
    variables, slots = list(trace.variables), slots_in(trace)
    new, argument = [v for v in variables if not lies.of(v).has_layout], f"variables={layout!r}"
    if new:
        wanted = wanted_layouts(variables, layout, slots, mesh)
        layouts = [
            None if lies.of(v).has_layout else one_layout for v, one_layout in zip(variables, wanted, strict=True)
        ]
        decide_in_stages(lies, variables, layouts, slots, devices if mesh is None else mesh.devices, mesh, True)
        lies.reason = argument
        if layout != "home" and all(lies.of(v).division is None for v in new):
            argument += ": all stay where they are, as each is small, or no number"
    count = len(variables) - len(new)
    return (f"{argument}; {count_text(count, 'variable')} that had a layout keep it" if count else argument,)


def _lie_together(
    lies: Arrangement, groups: Sequence[Sequence[tf.Variable]], variables: Sequence[tf.Variable], layout: str
) -> list[tf.Variable]:
    lying = {id(variable): cut for variable in variables if (cut := lies.cut_of(variable, layout)) is not None}
    apart = [v for group in groups if _are_apart(lies, group, layout) for v in group if id(v) in lying]
    if not apart:
        return []
    over: tuple[tuple[str, ...], ...] = next((cut.groups for cut in lying.values() if cut.groups), ())
    devices = over[0] if over else tuple(dict.fromkeys([device for cut in lying.values() for device in cut.devices]))
    moving = set(map(id, apart))
    owned = lies.owned_bytes([v for v in variables if id(v) in lying and id(v) not in moving], devices)
    slots = {id(slot): group[0] for group in groups for slot in group[1:]}
    moved = []
    for variable, cut in divided(lies, apart, devices, slots, owned, layout, groups=over):
        cut_before = lying[id(variable)]
        if _where(cut) != _where(cut_before):
            moved.append(variable)
            cut = replace(cut, reshard=cut_before.reshard)
            lies.share_out(variable, cut, layout, lies.of(variable).over or devices)
    return moved


def _are_apart(lies: Arrangement, group: Sequence[tf.Variable], layout: str) -> bool:
    """Return whether variables that are updated together are divided in several ways."""
    cuts = [lies.cut_of(variable, layout) for variable in group]
    return len({_where(cut) for cut in cuts if cut is not None}) > 1


def _where(cut: Cut) -> tuple[object, ...]:
    return cut.axis, cut.devices, cut.groups


def lie_in_stages(lies: Arrangement, trace: Trace, mesh: DeviceMesh) -> tuple[str, ...]:
    """Let variables of a traced function lie on the devices of their stages; return what a plan says.

    Args:
      lies: is told.
      trace: the function, with its stages.
      mesh: the mesh of its first stage, which knows the devices of all.
    """
    if not trace.program.stages or not mesh.stages or not tf.executing_eagerly():
        return ()
    places, slots = places_in_stages(lies, trace, mesh), slots_in(trace)
    moved = [v for v in trace.variables if (place := places[id(v)]) and _is_elsewhere(lies, v, place)]
    for devices in mesh.stages:
        variables = [v for v in moved if places[id(v)] == devices]
        lying_before = [lies.of(v) for v in variables]
        for variable in variables:
            lies.decide(variable, stays="")
        reshards = all(lying.reshards for lying in lying_before if lying.division is not None)
        stage_mesh, layouts = mesh.of_stage(devices), [lying.named for lying in lying_before]
        decide(lies, variables, layouts, slots, devices, stage_mesh, reshard_after_forward=reshards)
    for variable in trace.variables:
        lies.decide(variable, stage=places[id(variable)])
    return _said(moved, "the devices of their stages")


def places_in_stages(lies: Arrangement, trace: Trace, mesh: DeviceMesh) -> dict[int, tuple[str, ...]]:
    """Return the devices of the stage to which each variable of a traced function belongs, none for one of no stage."""
    stage_by_variable, slots = stages_of_variables(trace), slots_in(trace)
    devices_of = {
        stage: next((stage_devices for stage_devices in mesh.stages if {*stage_devices} == {*stage.devices}), ())
        for stage in stage_by_variable.values()
    }
    places: dict[int, tuple[str, ...]] = {}
    for variable in trace.variables:
        devices = stage_known(lies, variable, mesh) or stage_known(lies, slots.get(id(variable)), mesh)
        places[id(variable)] = devices or (
            devices_of[stage_by_variable[id(variable)]] if id(variable) in stage_by_variable else ()
        )
    return places


def stages_of_variables(trace: Trace) -> dict[int, Stage]:
    """Return the stages to which variables of a traced function belong, by the variables' ids."""
    captured = captured_variables(trace)
    stage_by_variable: dict[int, Stage] = {}
    ids_by_op: list[set[int]] = []  # beside all stages: the variables that each operation follows from, and the stages
    after: list[set[Stage]] = []
    written: dict[int, set[Stage]] = {}
    for op in trace.program.ops:
        sources = [tensor.op for tensor in op.inputs]
        variables, stages = set().union(*[ids_by_op[i] for i in sources]), set().union(*[after[i] for i in sources])
        if op.index in captured:
            variables = {id(captured[op.index])}
        if op.stage is not None:
            stage_by_variable.update(
                {variable: op.stage for variable in variables if variable not in stage_by_variable}
            )
            variables, stages = set(), {op.stage}
        elif is_write(op.type) and sources and sources[0] in captured:
            written.setdefault(id(captured[sources[0]]), set()).update(stages)
        ids_by_op.append(variables)
        after.append(stages)
    stage_by_variable = {
        **{
            variable: next(iter(stages_of_variable))
            for variable, stages_of_variable in written.items()
            if len(stages_of_variable) == 1
        },
        **stage_by_variable,
    }
    slots = slots_in(trace)
    for slot, head in slots.items():  # (any of those that are updated together may be the one that is read)
        if slot in stage_by_variable:
            stage_by_variable.setdefault(id(head), stage_by_variable[slot])
    return {
        **stage_by_variable,
        **{slot: stage_by_variable[id(head)] for slot, head in slots.items() if id(head) in stage_by_variable},
    }


def _is_elsewhere(lies: Arrangement, variable: tf.Variable, devices: Sequence[str]) -> bool:
    """Return whether a variable is to be moved to devices, or one of which it stays."""
    return not stays(variable, lies.of(variable).named) and not lies.devices_of(variable) <= set(devices)


def stays(variable: tf.Variable, layout: VariableLayout) -> bool:
    """Return whether a variable of a layout is in no stage: numbers, integers that are whole, what is on the host."""
    return bool(
        not variable.shape.rank
        or layout == "host"
        or (layout == "home" and variable.dtype.is_integer)
        or not variable.shape.is_fully_defined()
    )


def lie_in_units(lies: Arrangement, trace: Trace, mesh: DeviceMesh) -> None:
    """Let those variables of a traced function lie otherwise of whose units it tells; see `learn_units`."""
    divisions = lies.divisions(captured_variables(trace))
    learned, slots = _learn_units(lies, trace, divisions, mesh), slots_in(trace)
    for alike in mesh.alike:
        lying_on_mesh = [
            (v, lying)
            for v in learned
            if (lying := lies.of(v)).division and {*lying.division.devices} <= {*alike.devices}
        ]
        variables, layouts = [v for v, _ in lying_on_mesh], [lying.layout for _, lying in lying_on_mesh]
        reshard = all(lying.reshards for _, lying in lying_on_mesh)
        decide(lies, variables, layouts, slots, alike.devices, alike, reshard_after_forward=reshard)


def _learn_units(
    lies: Arrangement, trace: Trace, divisions: Mapping[int, MeshDivision], mesh: DeviceMesh
) -> list[tf.Variable]:
    """Note the units of variables that are cut between any two entries, where a function tells; return these variables.

    Args:
      lies: is told.
      trace: the function.
      divisions: how its variables are several, by the positions of their placeholders.
      mesh: the mesh on which it is to run.
    """
    learned = [
        variable for axis in mesh.others for variable in _learn_along(lies, trace, divisions, axis, mesh.others[axis])
    ]
    return list({id(variable): variable for variable in learned}.values())


def _learn_along(
    lies: Arrangement, trace: Trace, divisions: Mapping[int, MeshDivision], axis: str, columns: int
) -> list[tf.Variable]:
    """Do what `_learn_units` does along one axis, of variables that are not cut along another one before it."""
    along = {i: along_axis(division) for i, division in divisions.items() if axis_of(division) == axis}
    laid, ops = {i: layout_along_axis(division) for i, division in along.items()}, trace.program.ops
    in_entries = {
        i for i, division in along.items() if isinstance(division, Cut) and division.block == division.blocks == 1
    }
    if columns == 1 or not in_entries:
        return []
    free = {i: (variable, laid[i]) for i, variable in captured_variables(trace).items() if i in in_entries}
    heads = slots_in(trace)
    groups: dict[Any, list[int]] = {}  # a variable and its slots; what a gradient reads by itself is captured once more
    for i, (variable, layout) in free.items():
        groups.setdefault((id(heads.get(id(variable), variable)), layout), []).append(i)
    alike, named = (
        {i: group for group in groups.values() for i in group},
        {ops[i].name: layout for i, layout in laid.items()},
    )
    cut_by_capture = UnitSearch(trace.program, AxisPlanner(axis, columns), named, alike).run()
    for i, cut in cut_by_capture.items():
        variable = free[i][0]
        lies.decide(variable, units={**lies.of(variable).units, (axis, columns): cut})
    return [free[i][0] for i in cut_by_capture]
