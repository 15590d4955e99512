"""What is planned for a traced function whose variables lie along an axis of a mesh that is not the batch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphsplit.axes.columns import Columns, in_columns
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.layouts import MeshDivision, Nested, along_axis, axis_of, layout_along_axis
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.state import State, captured_by, state_of
from graphsplit.planning.variables.in_parts import program_of, with_twins
from graphsplit.program.asked_layouts import asked_of
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace, held_by


def program_on_mesh(
    trace: Trace,
    state: State | None = None,
    reshard: bool = True,
    grid: DeviceMesh | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008  # frozen
) -> tuple[Program, State]:
    """Return what is planned for a traced function: its program, in columns and parts as its variables; and its state.

    Variables are taken apart along the axis first. What each column has of a variable is then one of the variables of
    the program in columns, and may be several in its turn, over the devices of that column.

    Args:
      trace: the function.
      state, reshard: see `program_of`.
      grid: the mesh on which the function runs, if any: along its axis may lie what no variable is cut for.
      mesh: its shards; see `program_of`.
    """
    state = state or state_of(trace)
    lying = {name: own for name, own in state.divisions.items() if axis_of(own)}
    found_axes = {(axis_of(own), along_axis(own).parts) for own in lying.values()}
    if not found_axes and grid is not None and grid.axis and any(asked_of(op) for op in trace.program.ops):
        found_axes = {(grid.axis, len(grid.columns))}
    if not found_axes:
        return program_of(trace, state, reshard, mesh=mesh)
    [(axis, count)] = found_axes
    whole: dict[str, str] = {}
    while True:  # until no operation takes a variable whole that lies along the axis
        own = {name: division for name, division in lying.items() if name not in whole}
        laid = {name: layout_along_axis(division) for name, division in own.items()}
        found = in_columns(trace.program, axis, count, laid, held_by(trace))
        obstacles = found.obstacles
        if not obstacles:
            columns = _Columned(trace, own, found)
            program, planned = program_of(trace, columns.state(state, whole), reshard, columns.given, mesh)
            obstacles = columns.taken_whole(planned)
            if not obstacles:
                return program, planned
        whole.update(with_twins(trace, obstacles))


class _Columned:
    """The captures of a program in columns.

    Args:
      trace: of the function.
      own: how the variables are several that lie along the axis, by the names of their placeholders in the trace.
      found: the program in columns.
    """

    def __init__(self, trace: Trace, own: Mapping[str, MeshDivision], found: Columns):
        self._trace = trace
        self._own = own
        self._names = [trace.program.ops[i].name for i in trace.program.captures]
        self._program = found.program
        self._captures = [
            (found.program.ops[position].name, self._names[k], k, d)
            for position, (k, d) in zip(found.program.captures, found.origins, strict=True)
        ]
        self._gathered = found.gathered

    @property
    def given(self) -> tuple[Program, list[tuple[int, int]]]:
        """The program, and of each of its captures which one of the trace it is, and the number of its first part."""
        origins = []
        for _, name, k, d in self._captures:
            division = self._own.get(name)
            origins.append((k, division.firsts[d] if isinstance(division, Nested) else d))
        return self._program, origins

    def state(self, state: State, whole: Mapping[str, str]) -> State:
        """Return where the variables are of the program in columns, and how they are several.

        Args:
          state: of the trace's own program.
          whole: the variables that are put together for a call, and why.
        """
        devices = dict(state.devices)
        divisions = {name: division for name, division in state.divisions.items() if name not in whole}
        for there, name, _, d in self._captures:
            division = self._own.get(name)
            if isinstance(division, Nested):
                divisions[there] = division.rows[d]
            elif division is not None:
                devices[there] = division.devices[d]
        captured = captured_by(self._trace)
        called = {own.placeholder: own.name or own.placeholder for own in captured if own.placeholder in self._own}
        return replace(
            state, devices=devices, divisions=divisions, whole=whole, in_place=called, gathered=self._gathered
        )

    def taken_whole(self, planned: State) -> dict[str, str]:
        """Return the variables of which an operation takes a column's part whole, and why."""
        return {
            name: planned.whole[there]
            for there, name, _, _ in self._captures
            if there in planned.whole and name in self._own
        }
