"""What a traced function tells of its variables: the units that some consist of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.lying_together import slots_in
from graphsplit.api.layouts.variable_layouts import lay_out
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.layouts import Cut, MeshDivision, along_axis, axis_of, layout_along_axis
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission.axes.plans import AxisPlanner
from graphsplit.emission.axes.units import UnitSearch
from graphsplit.tracing.trace import Trace, captured_variables


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
