"""Variables that are used where their parts are along the batch's axis: experts, to which the rows of all shards go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from graphsplit.core.layouts import SINGLE_DEVICE, Cut, Layout, MeshDivision
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.settling import settled
from graphsplit.planning.variables.laid_variables import of_variable
from graphsplit.program.program import Program


def is_staying(division: MeshDivision | None) -> TypeGuard[Cut]:
    """Return whether a variable is to be used where its parts are along the batch's axis."""
    return isinstance(division, Cut) and division.stays and division.parts > 1


def as_they_stay(
    program: Program, cuts: Mapping[str, MeshDivision], mesh: Mesh
) -> tuple[dict[str, MeshDivision], dict[str, str]]:
    """Return how variables lie, of which only those stay that can; and of those that were to, why not, or "".

    Args:
      program: the function, in columns where the mesh has some.
      cuts: how variables lie, by the names of their placeholders.
      mesh: the shards.
    """

    def lying(why_by_name: Mapping[str, str]) -> dict[str, MeshDivision]:
        return {
            name: replace(division, stays=False) if name in why_by_name and is_staying(division) else division
            for name, division in cuts.items()
        }

    # (an operation may take variables of which only some stay)
    why_by_name = settled(lambda reasons: (reasons, _wrong(program, lying(reasons), mesh)))
    return lying(why_by_name), {
        name: why_by_name.get(name, "") for name, division in cuts.items() if is_staying(division)
    }


def _wrong(program: Program, cuts: Mapping[str, MeshDivision], mesh: Mesh) -> dict[str, str]:
    """Return which variables cannot be used where their parts are, and why; the program is read once."""
    staying = {name: division for name, division in cuts.items() if is_staying(division)}
    if mesh.shards and not mesh.rows:
        return dict.fromkeys(staying, "the number of rows is not known when it is planned")
    if not mesh.exchanging or mesh.has_turns:
        why = "devices have several micro-batches" if mesh.has_turns else "the rows are not shared out"
        return dict.fromkeys(staying, why)
    columns = [[column[p] for p in mesh.positions] for column in mesh.columns] or [[*mesh.devices]]
    apart = "its parts are not on the devices that have rows, one on each"
    wrong = {name: apart for name, division in staying.items() if [*division.devices] not in columns}
    handles = {i: staying[name].in_place for i in program.captures if (name := program.ops[i].name) in staying}
    return {**taken_whole(program, handles), **wrong}


def taken_whole(program: Program, handles: Mapping[int, Layout]) -> dict[str, str]:
    """Return the variables that an operation takes otherwise than each device its own, and why, by their placeholders.

    Args:
      program: the function.
      handles: how variables lie, by the positions of their placeholders.
    """
    wrong: dict[str, str] = {}
    for op in program.ops if handles else ():
        taken = [tensor.op for tensor in op.inputs if tensor.op in handles]
        layouts = [handles.get(tensor.op, SINGLE_DEVICE) for tensor in op.inputs]
        if taken and of_variable(program, op, layouts) is None:
            line = program.line_of(op)
            place = f" at {line}" if line else ""
            for i in taken:
                wrong.setdefault(program.ops[i].name, f"{op.type} {op.name!r}{place} takes it whole")
    return wrong
