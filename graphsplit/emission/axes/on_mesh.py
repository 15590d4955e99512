"""What is planned for a traced function whose variables lie along axes of a mesh that are not the batch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import NamedTuple

from graphsplit.core.layouts import MeshDivision, Nested, axis_of, layout_along_axis
from graphsplit.emission.axes.columns import Held, in_columns
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.settling import settled
from graphsplit.planning.state import State, captured_by, state_of
from graphsplit.planning.variables.in_parts import program_of, with_twins
from graphsplit.program.asked_layouts import asked_of
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace, held_by


def program_on_mesh(
    trace: Trace,
    state: State | None = None,
    reshard: bool = True,
    mesh: Mesh = Mesh(),  # noqa: B008  # frozen
) -> tuple[Program, State]:
    """Return what is planned for a traced function: its program, in columns and parts as its variables; and its state.

    Variables are taken apart along one axis after the other. What each column has of a variable is then one of the
    variables of the program in columns, and may be several in its turn, over the devices of that column.

    Args:
      trace: the function.
      state, reshard: see `program_of`.
      mesh: its shards, with the axes along which variables lie; see `program_of`.
    """
    state = state or state_of(trace)
    asked = {name for op in trace.program.ops for name in asked_of(op) or () if name}
    if not any(map(axis_of, state.divisions.values())) and not asked & dict(mesh.others).keys():
        return program_of(trace, state, reshard, mesh=mesh)

    def attempt(whole: dict[str, str]) -> tuple[tuple[Program, State], dict[str, str]]:
        """Let variables lie along axes that no operation takes whole."""
        columns, planned = _Columned(trace, state, whole), (trace.program, state)
        obstacles = columns.cut(mesh, asked)
        if not obstacles:
            planned = program_of(trace, columns.state, reshard, columns.given, mesh)
            obstacles = columns.taken_whole(planned[1])
        return planned, with_twins(trace, obstacles)

    return settled(attempt)


class _PartOfCapture(NamedTuple):
    """A capture of a program in columns.

    Attributes:
      there: the name of its placeholder.
      number, name: which capture of the trace it is, or is a part of, and its placeholder's name there.
      part: the number of its part, or of the first of them.
      device: where it is, if it lies along an axis and is one.
      division: how it is several, if it is.
    """

    there: str
    number: int
    name: str
    part: int = 0
    device: str = ""
    division: MeshDivision | None = None


class _Columned:
    """A traced function's program, as it is written along one axis of a mesh after the other, and its captures.

    Args:
      trace: of the function.
      state: of the trace's own program.
      whole: the variables that are put together for a call, and why.
    """

    def __init__(self, trace: Trace, state: State, whole: Mapping[str, str]):
        self._trace, self._state, self._whole = trace, state, whole
        self._program = trace.program
        self._held: Held = held_by(trace)
        names = [trace.program.ops[i].name for i in trace.program.captures]
        self._divisions = {name: own for name, own in state.divisions.items() if name not in whole}
        self._captures = [_PartOfCapture(n, k, n, division=self._divisions.get(n)) for k, n in enumerate(names)]
        self._in_place, self._gathered = set[str](), set[str]()

    def cut(self, mesh: Mesh, asked: Set[str]) -> dict[str, str]:
        """Write the program along each axis; return the variables that cannot lie along one, and why.

        Args:
          mesh: with these axes.
          asked: those along which something else is to lie.
        """
        stride = math.prod(size for _, size in mesh.others)
        for axis, size in mesh.others:
            stride //= size
            if obstacles := self._cut_along(axis, size, stride, axis in asked):
                return obstacles
        return {}

    def _cut_along(self, axis: str, size: int, stride: int, is_asked: bool) -> dict[str, str]:
        lying = {c.there: c.division for c in self._captures if c.division is not None and axis_of(c.division) == axis}
        if not lying and not is_asked:
            return {}
        laid = {there: layout_along_axis(division) for there, division in lying.items()}
        found = in_columns(self._program, axis, size, laid, self._held, stride)
        names = {c.there: c.name for c in self._captures}
        if found.obstacles:
            return {names[there]: why for there, why in found.obstacles.items()}
        self._in_place |= {names[there] for there in lying}
        self._gathered |= {names[there] for there in found.gathered}
        there = [found.program.ops[i].name for i in found.program.captures]
        pairs = zip(there, found.origins, strict=True)
        self._captures = [self._part(name, self._captures[k], axis, d) for name, (k, d) in pairs]
        self._program, self._held = found.program, found.held
        return {}

    def _part(self, there: str, before: _PartOfCapture, axis: str, d: int) -> _PartOfCapture:
        """Return what a capture is in a column along an axis."""
        division = before.division
        if division is None or axis_of(division) != axis:
            return before._replace(there=there)
        if isinstance(division, Nested):
            first = before.part + division.firsts[d]
            return before._replace(there=there, part=first, division=division.rows[d])
        return before._replace(there=there, part=before.part + d, device=division.devices[d], division=None)

    @property
    def given(self) -> tuple[Program, list[tuple[int, int]]]:
        """The program, and of each of its captures which one of the trace it is, and the number of its first part."""
        return self._program, [(own.number, own.part) for own in self._captures]

    @property
    def state(self) -> State:
        """Where the variables are of the program in columns, and how they are several."""
        captured = captured_by(self._trace)
        return replace(
            self._state,
            devices={**self._state.devices, **{own.there: own.device for own in self._captures if own.device}},
            divisions={
                **self._divisions,
                **{own.there: own.division for own in self._captures if own.division is not None},
            },
            whole=self._whole,
            in_place={
                own.placeholder: own.name or own.placeholder for own in captured if own.placeholder in self._in_place
            },
            gathered=frozenset(self._gathered),
        )

    def taken_whole(self, planned: State) -> dict[str, str]:
        """Return the variables of which an operation takes a column's part whole, and why."""
        own = [own for own in self._captures if own.there in planned.whole and own.name in self._in_place]
        return {one.name: planned.whole[one.there] for one in own}
