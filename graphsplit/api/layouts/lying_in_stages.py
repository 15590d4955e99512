"""Variables of a function in stages on a mesh: they lie on the devices of the stage that uses them.

Layouts are set before any function is known, on the devices of the first stage. A traced function that is cut into
stages knows: a variable belongs to the first stage that reads it, its slots with it; what no stage reads, and follows
from one stage, belongs to that one (moving averages). What belongs to no stage stays where it is, and numbers do.

The first function that uses a variable says where it belongs; others, whose stages may begin elsewhere, leave it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graphsplit.api.layouts.layout_spellings import VariableLayout
from graphsplit.api.layouts.lying_together import slots_in
from graphsplit.api.layouts.variable_layouts import lay_out, stage_known, wait_for_calls
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.devices import canonical_name
from graphsplit.core.variables.parted_variables import bytes_of_variable, parts_of_variable
from graphsplit.core.variables.running_calls import calls
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.program.program import is_write
from graphsplit.program.stages import Stage
from graphsplit.tracing.trace import Trace, captured_variables


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
