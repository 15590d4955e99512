"""What is planned for a traced function whose variables lie along an axis of a mesh that is not the batch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphsplit.axes.columns import in_columns
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.layouts import Cut, EvenCut, Shard
from graphsplit.core.parted_variables import parts_of
from graphsplit.planning.state import State, program_of, state_of
from graphsplit.program.asked_layouts import asked_of
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace, held_by


def program_on_mesh(
    trace: Trace,
    find_state: Callable[[Trace], State] = state_of,
    reshard: bool = True,
    grid: DeviceMesh | None = None,
) -> tuple[Program, State]:
    """Return what is planned for a traced function: its program, in columns and parts as its variables; and its state.

    Args:
      trace: the function.
      find_state, reshard: see `program_of`.
      grid: the mesh on which the function runs, if any: along its axis may lie what no variable is cut for.
    """
    state = find_state(trace)
    cuts = {name: own for name, own in state.divisions.items() if isinstance(own, Cut) and own.along}
    found_axes = {(own.along, own.parts) for own in cuts.values()}
    if not found_axes and grid is not None and grid.axis and any(asked_of(op) for op in trace.program.ops):
        found_axes = {(grid.axis, len(grid.columns))}
    if not found_axes:
        return program_of(trace, find_state, reshard)
    [(axis, count)] = found_axes
    whole: dict[str, str] = {}
    while True:  # until no operation takes a variable whole that lies along the axis
        laid = {name: _layout(own) for name, own in cuts.items() if name not in whole}
        found = in_columns(trace.program, axis, count, laid, held_by(trace))
        if not found.obstacles:
            break
        whole.update(found.obstacles)
    names = [trace.program.ops[i].name for i in trace.program.captures]
    devices = dict(state.devices)
    for position, (k, d) in zip(found.program.captures, found.origins, strict=True):
        if names[k] in laid:
            devices[found.program.ops[position].name] = cuts[names[k]].devices[d]
    called = {
        name: parts.path
        for name, handle in zip(names, trace.captures, strict=True)
        if name in laid and (parts := parts_of(handle)) is not None
    }
    divisions = {name: own for name, own in state.divisions.items() if name not in whole}
    left = replace(state, devices=devices, divisions=divisions, whole=whole, in_place=called, gathered=found.gathered)
    return program_of(trace, lambda _: left, reshard, (found.program, found.origins))


def _layout(cut: Cut) -> Shard:
    return Shard(cut.axis, (cut.block,), EvenCut(cut.length))
