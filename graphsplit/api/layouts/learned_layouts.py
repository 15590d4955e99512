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

from graphsplit.api.layouts.divisions import PLACES, cut_of, divided, has_layout, owned_bytes
from graphsplit.api.layouts.layout_spellings import VariableLayout
from graphsplit.api.layouts.new_variables import slots_by_name
from graphsplit.api.layouts.variable_layouts import (
    lay_divided,
    lay_out,
    lay_out_in_stages,
    stage_known,
    wait_for_calls,
    wanted_layouts,
)
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import Cut, MeshDivision, along_axis, axis_of, layout_along_axis
from graphsplit.core.variables.parted_variables import (
    are_any_parts,
    bytes_of_variable,
    parts_of_variable,
    tell_functions,
)
from graphsplit.core.variables.running_calls import calls
from graphsplit.emission.axes.plans import AxisPlanner
from graphsplit.emission.axes.units import UnitSearch
from graphsplit.errors import UnsupportedError
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.variables.updates import updated_together
from graphsplit.program.program import is_write
from graphsplit.program.stages import Stage
from graphsplit.tracing.trace import Trace, captured_variables


def slots_in(trace: Trace) -> dict[int, tf.Variable]:
    """Return the variable that each slot of a traced function belongs to, by the slot's id.

    Slots are updated together with their variable. Of what is updated by itself, names tell.
    """
    groups = _groups(trace)
    told = {id(slot): group[0] for group in groups for slot in group[1:]}
    known = {id(variable) for group in groups for variable in group}
    named = slots_by_name(list(trace.variables)).items()
    return {**told, **{slot: told.get(id(head), head) for slot, head in named if slot not in known}}


def _groups(trace: Trace) -> list[list[tf.Variable]]:
    """Return the variables that are updated together, first the one that is trained: it is used before its slots."""
    captured = captured_variables(trace)
    variables = {id(variable): variable for variable in captured.values()}
    groups = updated_together(trace.program, {i: id(variable) for i, variable in captured.items()})
    return [sorted([variables[k] for k in group], key=lambda variable: not variable.trainable) for group in groups]


def lay_together(trace: Trace) -> tuple[str, ...]:
    """Move variables to where those are with which a traced function updates them; return what a plan says.

    These are divided ones, and slots that no layout was set for: they were made after that of their variables was.
    """
    if not (are_any_parts() and tf.executing_eagerly()):
        return ()
    moved, groups = _lay_new(trace), _groups(trace)
    moved += [variable for layout in PLACES for variable in _lay_together(groups, trace.variables, layout)]
    if not moved:
        return ()
    size = sum(map(bytes_of_variable, moved))
    return (
        f"{count_text(len(moved), 'variable')} ({format_bytes(size)}) moved to the devices of the variables that are "
        "updated with them",
    )


def _lay_new(trace: Trace) -> list[tf.Variable]:
    """Give slots without a layout the one that was asked for their variables; return them."""
    heads, together = slots_in(trace), dict[tuple[Any, ...], list[tf.Variable]]()
    for slot in [own for own in trace.variables if id(own) in heads and not hasattr(own, "_graphsplit_laid")]:
        head = heads[id(slot)]
        layout, *how = getattr(head, "_graphsplit_laid", ("home", ()))
        is_there = layout != "replicated" or canonical_name(slot.device) in how[0]  # (one of the copies is the slot)
        if layout != "home" and is_there and not head._graphsplit_automatic and head.shape == slot.shape:
            together.setdefault(tuple(how), []).append(slot)
    for (devices, mesh, reshard), slots in together.items():
        layouts = [heads[id(slot)]._graphsplit_laid[0] for slot in slots]
        lay_out(slots, layouts, heads, devices, mesh, reshard_after_forward=reshard)
    return [slot for slots in together.values() for slot in slots]


def lay_out_as_asked(
    trace: Trace, layout: Any, devices: Sequence[str], mesh: DeviceMesh | None, runs: bool
) -> tuple[str, ...]:
    """Lay out those variables of a traced function that have no layout yet; return what a plan says.

    Args:
      trace: the function.
      layout: as for `set_variable_layout`.
      devices, mesh: full names; they as a mesh, if they are one.
      runs: whether they are to be laid out, and not only planned as if they were.

    Raises:
      ArgumentError: if a pattern fits no variable, and there are variables to be laid out.
      UnsupportedError: in a graph, where none can be laid out.
    """
    variables, slots = list(trace.variables), slots_in(trace)
    new, said = [v for v in variables if not has_layout(v)], f"variables={layout!r}"
    if new and runs:
        wanted = wanted_layouts(variables, layout, slots, mesh)
        layouts = [None if has_layout(v) else own for v, own in zip(variables, wanted, strict=True)]
        if any(own not in (None, "home") for own in layouts) and not tf.executing_eagerly():
            raise UnsupportedError(
                f"{said} lays variables out in the first call, which is in a graph. Call the function once outside of "
                "tf.function, or lay them out before: gs.set_variable_layout."
            )
        lay_out_in_stages(variables, layouts, slots, devices if mesh is None else mesh.devices, mesh, True)
    kept = len(variables) - len(new)
    return (f"{said}; {count_text(kept, 'variable')} that had a layout keep it" if kept else said,)


def _lay_together(
    groups: Sequence[Sequence[tf.Variable]], variables: Sequence[tf.Variable], layout: str
) -> list[tf.Variable]:
    lying = {id(variable): cut for variable in variables if (cut := cut_of(variable, layout)) is not None}
    apart = [v for group in groups if _are_apart(group, layout) for v in group if id(v) in lying]
    if not apart:
        return []
    over: tuple[tuple[str, ...], ...] = next((cut.groups for cut in lying.values() if cut.groups), ())
    devices = over[0] if over else tuple(dict.fromkeys([device for cut in lying.values() for device in cut.devices]))
    moving = set(map(id, apart))
    owned = owned_bytes([v for v in variables if id(v) in lying and id(v) not in moving], devices)
    slots = {id(slot): group[0] for group in groups for slot in group[1:]}
    moved = []
    for variable, cut in divided(apart, devices, slots, owned, layout, groups=over):
        before = lying[id(variable)]
        if _where(cut) != _where(before):
            moved.append(variable)
            _move(variable, replace(cut, reshard=before.reshard), layout, devices)
    return moved


def _are_apart(group: Sequence[tf.Variable], layout: str) -> bool:
    """Return whether variables that are updated together are divided in several ways."""
    cuts = [cut_of(variable, layout) for variable in group]
    return len({_where(cut) for cut in cuts if cut is not None}) > 1


def _where(cut: Cut) -> tuple[object, ...]:
    return cut.axis, cut.devices, cut.groups


def _move(variable: tf.Variable, cut: Cut, layout: str, devices: Sequence[str]) -> None:
    with calls.lock:
        wait_for_calls([variable])
        over = devices
        if (parts := parts_of_variable(variable)) is not None:
            over = parts.over
            parts.release(variable)
        else:
            variable._graphsplit_stays = ""
            tell_functions([variable])
        lay_divided(variable, cut, layout, over)


def lay_in_stages(trace: Trace, mesh: DeviceMesh) -> tuple[str, ...]:
    """Move variables of a traced function to the devices of their stages; return what a plan says.

    Args:
      trace: the function, with its stages.
      mesh: the mesh of its first stage, which knows the devices of all.
    """
    if not trace.program.stages or not mesh.stages or not tf.executing_eagerly():
        return ()
    places = places_in_stages(trace, mesh)
    moved = [v for v in trace.variables if (place := places[id(v)]) and _is_elsewhere(v, place)]
    for devices in mesh.stages:
        _lay([v for v in moved if places[id(v)] == devices], slots_in(trace), mesh.of_stage(devices))
    for variable in trace.variables:
        variable._graphsplit_stage = places[id(variable)]
    size = sum(map(bytes_of_variable, moved))
    said = f"{count_text(len(moved), 'variable')} ({format_bytes(size)}) moved to the devices of their stages"
    return (said,) if moved else ()


def places_in_stages(trace: Trace, mesh: DeviceMesh) -> dict[int, tuple[str, ...]]:
    """Return the devices of the stage to which each variable of a traced function belongs, none for one of no stage."""
    found, slots = stages_of_variables(trace), slots_in(trace)
    devices_of = {
        stage: next((own for own in mesh.stages if {*own} == {*stage.devices}), ()) for stage in found.values()
    }
    places: dict[int, tuple[str, ...]] = {}
    for variable in trace.variables:
        known = stage_known(variable, mesh) or stage_known(slots.get(id(variable)), mesh)
        places[id(variable)] = known or (devices_of[found[id(variable)]] if id(variable) in found else ())
    return places


def stages_of_variables(trace: Trace) -> dict[int, Stage]:
    """Return the stages to which variables of a traced function belong, by the variables' ids."""
    captured = captured_variables(trace)
    found: dict[int, Stage] = {}
    read: list[set[int]] = []  # by each operation beside all stages: the variables that it follows from, and the stages
    after: list[set[Stage]] = []
    written: dict[int, set[Stage]] = {}
    for op in trace.program.ops:
        sources = [tensor.op for tensor in op.inputs]
        variables, stages = set().union(*[read[i] for i in sources]), set().union(*[after[i] for i in sources])
        if op.index in captured:
            variables = {id(captured[op.index])}
        if op.stage is not None:
            found.update({variable: op.stage for variable in variables if variable not in found})
            variables, stages = set(), {op.stage}
        elif is_write(op.type) and sources and sources[0] in captured:
            written.setdefault(id(captured[sources[0]]), set()).update(stages)
        read.append(variables)
        after.append(stages)
    found = {**{variable: next(iter(own)) for variable, own in written.items() if len(own) == 1}, **found}
    slots = slots_in(trace)
    for slot, head in slots.items():  # (any of those that are updated together may be the one that is read)
        if slot in found:
            found.setdefault(id(head), found[slot])
    return {**found, **{slot: found[id(head)] for slot, head in slots.items() if id(head) in found}}


def _is_elsewhere(variable: tf.Variable, devices: Sequence[str]) -> bool:
    """Return whether a variable is to be moved to devices, or one of which it stays."""
    parts = parts_of_variable(variable)
    lies_on = {canonical_name(variable.device)} if parts is None else set(parts.devices)
    return not stays(variable, as_it_lies(variable)) and not lies_on <= set(devices)


def stays(variable: tf.Variable, layout: VariableLayout) -> bool:
    """Return whether a variable of a layout is in no stage: numbers, integers that are whole, what is on the host."""
    return bool(
        not variable.shape.rank
        or layout == "host"
        or (layout == "home" and variable.dtype.is_integer)
        or not variable.shape.is_fully_defined()
    )


def as_it_lies(variable: tf.Variable) -> VariableLayout:
    """Return the layout that a variable has."""
    parts = parts_of_variable(variable)
    return getattr(variable, "_graphsplit_stays", "") or "home" if parts is None else parts.layout


def _lay(variables: Sequence[tf.Variable], slots: Mapping[int, tf.Variable], mesh: DeviceMesh) -> None:
    """Lay variables out as they lie, on the devices of another stage."""
    with calls.lock:
        wait_for_calls(variables)
        layouts: list[VariableLayout | None] = []
        for variable in variables:
            layouts.append(as_it_lies(variable))
            variable._graphsplit_stays = ""
        reshards = all(parts.reshards for v in variables if (parts := parts_of_variable(v)) is not None)
        lay_out(variables, layouts, slots, mesh.devices, mesh, reshard_after_forward=reshards)


def lay_out_in_units(trace: Trace, divisions: Mapping[str, MeshDivision], mesh: DeviceMesh) -> None:
    """Lay those variables of a traced function out anew of whose units it tells; arguments as of `learn_units`."""
    told, slots = learn_units(trace, divisions, mesh), slots_in(trace)
    lying = [(own, parts) for own in told if (parts := parts_of_variable(own))]
    for alike in mesh.alike:
        found = [(own, parts) for own, parts in lying if set(parts.devices) <= set(alike.devices)]
        variables, layouts = [own for own, _ in found], [parts.layout for _, parts in found]
        reshard = all(parts.reshards for _, parts in found)
        lay_out(variables, layouts, slots, alike.devices, alike, reshard_after_forward=reshard)


def learn_units(trace: Trace, divisions: Mapping[str, MeshDivision], mesh: DeviceMesh) -> list[tf.Variable]:
    """Note the units of variables that are cut between any two entries, where a function tells; return these variables.

    Args:
      trace: the function.
      divisions: how its variables are several, by the names of their placeholders.
      mesh: the mesh on which it is to run.
    """
    found = [own for axis in mesh.others for own in _learn_along(trace, divisions, axis, mesh.others[axis])]
    return list({id(own): own for own in found}.values())


def _learn_along(trace: Trace, divisions: Mapping[str, MeshDivision], axis: str, columns: int) -> list[tf.Variable]:
    """Do what `learn_units` does along one axis, of variables that are not cut along another one before it."""
    along = {name: along_axis(own) for name, own in divisions.items() if axis_of(own) == axis}
    laid = {name: layout_along_axis(own) for name, own in along.items()}
    in_entries = {name for name, own in along.items() if isinstance(own, Cut) and own.block == own.blocks == 1}
    program = trace.program
    if columns == 1 or not in_entries:
        return []
    named = [(i, own, program.ops[i].name) for i, own in captured_variables(trace).items()]
    free = {i: (own, laid[name]) for i, own, name in named if name in in_entries}
    heads = slots_in(trace)
    groups: dict[Any, list[int]] = {}  # a variable and its slots; what a gradient reads by itself is captured once more
    for i, (own, layout) in free.items():
        groups.setdefault((id(heads.get(id(own), own)), layout), []).append(i)
    alike = {i: group for group in groups.values() for i in group}
    found = UnitSearch(program, AxisPlanner(axis, columns), laid, alike).run()
    for i, cut in found.items():
        known = getattr(free[i][0], "_graphsplit_units", {})
        free[i][0]._graphsplit_units = {**known, (axis, columns): cut}
    return [free[i][0] for i in found]
