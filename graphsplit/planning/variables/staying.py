"""Variables that are used where their parts are along the batch's axis: experts, to which the rows of all shards go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from graphsplit.core.layouts import SINGLE_DEVICE, Cut, Division
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.laid_variables import of_variable
from graphsplit.program.program import Program


def is_staying(division: Division | None) -> TypeGuard[Cut]:
    """Return whether a variable is to be used where its parts are along the batch's axis."""
    return isinstance(division, Cut) and division.stays and division.parts > 1


def as_they_stay(
    program: Program, cuts: Mapping[str, Division], mesh: Mesh
) -> tuple[dict[str, Division], dict[str, str]]:
    """Return how variables lie, of which only those stay that can; and of those that were to, why not, or "".

    Args:
      program: the function, in columns where the mesh has some.
      cuts: how variables lie, by the names of their placeholders.
      mesh: the shards.
    """
    found, said = dict(cuts), {name: "" for name, own in cuts.items() if is_staying(own)}
    while True:  # until no operation takes variables of which only some stay
        wrong = {
            name: why
            for name, own in found.items()
            if is_staying(own) and (why := _why_not(program, name, found, mesh))
        }
        if not wrong:
            return found, said
        said |= wrong
        found |= {name: replace(own, stays=False) for name in wrong if is_staying(own := found[name])}


def _why_not(program: Program, name: str, cuts: Mapping[str, Division], mesh: Mesh) -> str:
    if mesh.shards and not mesh.rows:
        return "the number of rows is not known when it is planned"
    if not mesh.exchanging:
        return "devices have several micro-batches" if mesh.has_turns else "the rows are not shared out"
    columns = [[own[p] for p in mesh.positions] for own in mesh.columns] or [[*mesh.devices]]
    if [*cuts[name].devices] not in columns:
        return "its parts are not on the devices that have rows, one on each"
    own = {i: cut for i in program.captures if is_staying(cut := cuts.get(program.ops[i].name))}
    for op in program.ops:
        if any(program.ops[tensor.op].name == name for tensor in op.inputs):
            layouts = [own[t.op].in_place if t.op in own else SINGLE_DEVICE for t in op.inputs]
            if of_variable(program, op, layouts) is None:
                line = program.line_of(op)
                return f"{op.type} {op.name!r}{f' at {line}' if line else ''} takes it whole"
    return ""
