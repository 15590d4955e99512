"""Columns: a program whose variables lie along axes of a mesh becomes one whose operations stand in columns.

Each axis but the batch's is planned by itself, with one shard for each of its devices. What the plan says is written as
a program again: an operation for each column that runs it, and between columns the operations that carry out the moves.
Each knows its column, and the operation that it came from. The rows of the batch are planned on that program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tensorflow as tf

from graphsplit.axes.plans import planned_along
from graphsplit.core.layouts import REPLICATE, Layout, MeshDivision, Nested, axis_of, is_whole, layout_along_axis
from graphsplit.core.protos import source_of
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.planning.costs.work import Described
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.plan import Plan
from graphsplit.planning.settling import settled
from graphsplit.planning.state import State, captured_by, state_of
from graphsplit.planning.variables.in_parts import branches_apart, program_of, with_twins
from graphsplit.program.asked_layouts import asked_of
from graphsplit.program.graph.function_calls import KNOWN_INSIDE
from graphsplit.program.program import Op, Program, Provenance, Tensor
from graphsplit.program.reading.flat_graphs import FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.reader import build_program
from graphsplit.program.sides import SWITCH
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
    wanted_axes = {name for op in trace.program.ops for name in asked_of(op) or () if name}
    if not any(map(axis_of, state.divisions.values())) and not wanted_axes & dict(mesh.others).keys():
        return program_of(trace, state, reshard, mesh=mesh)

    def attempt(whole: dict[str, str]) -> tuple[tuple[Program, State], dict[str, str]]:
        """Let variables lie along axes that no operation takes whole."""
        columns, planned = _Columned(trace, state, whole), (trace.program, state)
        obstacles = columns.cut(mesh, wanted_axes)
        if not obstacles:
            planned = program_of(trace, columns.state, reshard, columns.given, mesh)
            obstacles = columns.taken_whole(planned[1])
        return planned, with_twins(trace, obstacles)

    return settled(attempt)


class _PartOfCapture(NamedTuple):
    """A capture of a program in columns.

    Attributes:
      placeholder: its name here.
      number, name: which capture of the trace it is, or is a part of, and its placeholder's name there.
      part: the number of its part, or of the first of them.
      device: where it is, if it lies along an axis and is one.
      division: how it is several, if it is.
    """

    placeholder: str
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
        # (a branch runs in columns, but not in parts of one)
        in_rows = {
            name for name, division in state.divisions.items() if isinstance(division, Nested) or not axis_of(division)
        }
        self._program = branches_apart(trace, in_rows)
        self._held_shapes: HeldShapes = held_by(trace)
        names = [trace.program.ops[i].name for i in trace.program.captures]
        self._divisions = {name: division for name, division in state.divisions.items() if name not in whole}
        self._captures = [_PartOfCapture(n, k, n, division=self._divisions.get(n)) for k, n in enumerate(names)]
        self._in_place, self._gathered = set[str](), set[str]()

    def cut(self, mesh: Mesh, wanted_axes: Set[str]) -> dict[str, str]:
        """Write the program along each axis; return the variables that cannot lie along one, and why.

        Args:
          mesh: with these axes.
          wanted_axes: those along which something else is to lie.
        """
        stride = math.prod(size for _, size in mesh.others)
        for axis, size in mesh.others:
            stride //= size
            if obstacles := self._cut_along(axis, size, stride, axis in wanted_axes):
                return obstacles
        return {}

    def _cut_along(self, axis: str, size: int, stride: int, is_asked: bool) -> dict[str, str]:
        lying = {
            c.placeholder: c.division for c in self._captures if c.division is not None and axis_of(c.division) == axis
        }
        if not lying and not is_asked:
            return {}
        laid = {placeholder: layout_along_axis(division) for placeholder, division in lying.items()}
        columns = in_columns(self._program, axis, size, laid, self._held_shapes, stride)
        names = {c.placeholder: c.name for c in self._captures}
        if columns.obstacles:
            return {names[placeholder]: why for placeholder, why in columns.obstacles.items()}
        self._in_place |= {names[placeholder] for placeholder in lying}
        self._gathered |= {names[placeholder] for placeholder in columns.gathered}
        placeholders = [columns.program.ops[i].name for i in columns.program.captures]
        pairs = zip(placeholders, columns.origins, strict=True)
        self._captures = [self._part(name, self._captures[k], axis, d) for name, (k, d) in pairs]
        self._program, self._held_shapes = columns.program, columns.held
        return {}

    def _part(self, placeholder: str, origin: _PartOfCapture, axis: str, d: int) -> _PartOfCapture:
        """Return what a capture is in a column along an axis."""
        division = origin.division
        if division is None or axis_of(division) != axis:
            return origin._replace(placeholder=placeholder)
        if isinstance(division, Nested):
            first = origin.part + division.firsts[d]
            return origin._replace(placeholder=placeholder, part=first, division=division.rows[d])
        return origin._replace(placeholder=placeholder, part=origin.part + d, device=division.devices[d], division=None)

    @property
    def given(self) -> tuple[Program, list[tuple[int, int]]]:
        """The program, and of each of its captures which one of the trace it is, and the number of its first part."""
        return self._program, [(capture.number, capture.part) for capture in self._captures]

    @property
    def state(self) -> State:
        """Where the variables are of the program in columns, and how they are several."""
        captured = captured_by(self._trace)
        return replace(
            self._state,
            devices={**self._state.devices, **{c.placeholder: c.device for c in self._captures if c.device}},
            divisions={
                **self._divisions,
                **{capture.placeholder: capture.division for capture in self._captures if capture.division is not None},
            },
            whole=self._whole,
            in_place={
                variable.placeholder: variable.name or variable.placeholder
                for variable in captured
                if variable.placeholder in self._in_place
            },
            gathered=frozenset(self._gathered),
        )

    def taken_whole(self, planned: State) -> dict[str, str]:
        """Return the variables of which an operation takes a column's part whole, and why."""
        captures = [c for c in self._captures if c.placeholder in planned.whole and c.name in self._in_place]
        return {capture.name: planned.whole[capture.placeholder] for capture in captures}


HeldShapes = Mapping[str, tuple[tf.DType, tuple[int | None, ...] | None]]


@dataclass(frozen=True)
class Columns:
    """A program in columns.

    Attributes:
      program: see there.
      origins: for each of its captures, which capture of the original it is, and which part: that of its column.
      obstacles: captures that cannot lie along the axis, by placeholder name, and why; then there is no such program.
      gathered: the captures that are put together along the axis before they are used, by placeholder name.
      held: what its own captures hold; see `in_columns`.
    """

    program: Program
    origins: tuple[tuple[int, int], ...]
    obstacles: Mapping[str, str]
    gathered: frozenset[str] = frozenset()
    held: HeldShapes = field(default_factory=dict)


def in_columns(
    program: Program, axis: str, columns: int, laid: Mapping[str, Layout], held: HeldShapes, stride: int = 1
) -> Columns:
    """Return a program in columns.

    Args:
      program: the function, for one device.
      axis: what the axis is called.
      columns: how many devices it has.
      laid: how captured variables lie along it, by the names of their placeholders: `Shard` or `Replicate`.
      held: what captured variables hold, by the same names: dtype and shape.
      stride: by how much the number of a column is higher than that of the one before along this axis.
    """
    stages, plan = program.stages, planned_along(replace(program, stages=()), axis, columns, laid)
    program = plan.program  # some of it taken apart
    positions = {i: laid[name] for i in program.captures if (name := program.ops[i].name) in laid}
    obstacles = _obstacles(plan, positions)
    if obstacles:
        return Columns(program, tuple([(k, 0) for k in range(len(program.captures))]), obstacles)
    graph = emit(plan)
    origins = [
        (k, d)
        for k, position in enumerate(program.captures)
        for d in (range(columns) if position in positions else [0])
    ]
    names = [program.ops[position].name for position in program.captures]
    parts = [(capture, names[k], d) for capture, (k, d) in zip(graph.captures, origins, strict=True)]
    resources = {
        capture: (held[name][0], plan.mesh.shape_on(d, held[name][1], laid.get(name, REPLICATE)))
        for capture, name, d in parts
        if name in held
    }
    cut_program = replace(_read(plan, graph, resources, stride), stages=stages)
    return Columns(cut_program, tuple(origins), {}, _gathered(plan, positions), resources)


def _obstacles(plan: Plan, laid: Mapping[int, Layout]) -> dict[str, str]:
    """Return the variables whose handles would have to move, and the operations that no rule does in parts."""
    ops, why_by_variable = plan.program.ops, dict[str, str]()
    for move in plan.moves:
        position = move.tensor.op
        while ops[position].type == "Identity":
            position = ops[position].inputs[0].op
        if position in laid and ops[move.tensor.op].out_dtypes[0] == tf.resource:
            readers = [op for op in ops if move.tensor in op.inputs]
            wrong = next(op for op in readers if plan.steps[op.index].once or not _reads_own(plan, op, move.tensor))
            line = plan.program.line_of(wrong)
            where = f" at {line}" if line else ""
            why_by_variable[ops[position].name] = f"{wrong.type} {wrong.name!r}{where} takes it whole"
    return why_by_variable


def _gathered(plan: Plan, laid: Mapping[int, Layout]) -> frozenset[str]:
    """Return the variables whose parts are put together: some operation cannot use them where they are."""
    ops, variables = plan.program.ops, set()
    for move in plan.moves:
        op = ops[move.tensor.op]
        while op.type in ("Identity", "Cast"):
            op = ops[op.inputs[0].op]
        is_read = op.type == "ReadVariableOp" and op.inputs[0].op in laid
        if is_read and not is_whole(move.source) and is_whole(move.target):
            variables.add(ops[op.inputs[0].op].name)
    return frozenset(variables)


def _reads_own(plan: Plan, op: Op, handle: Tensor) -> bool:
    shards, of_handle = plan.steps[op.index].shards, plan.steps[handle.op].shards
    pairs = zip(op.inputs, shards.wants if shards else (), strict=False)
    return of_handle is not None and all(want == of_handle.gives[0] for tensor, want in pairs if tensor == handle)


def _read(plan: Plan, graph: EmittedGraph, resources: HeldShapes, stride: int) -> Program:
    """Return what was written for the axis as a program."""
    program, shapes = plan.program, _shapes(plan, graph)
    split = {name: body for name, body in graph.bodies.items() if body[0].default_device}  # (others are in one column)
    provenances = {name: _provenance(*body, _arguments(body[1]), stride) for name, body in split.items()}
    _decide_once(graph)
    for function in graph.library.function:
        for node in function.node_def:
            node.device = ""  # (whoever plans the rows says where in a row)
    flat = FlatGraph(
        nodes=graph.nodes,
        inputs=graph.inputs,
        captures=graph.captures,
        outputs=graph.outputs,
        effects=graph.effects,
        library=graph.library,
        versions=graph.versions,
    )
    known = KnownBefore(
        resources=resources,
        shapes={name: program.ops[i].out_shapes[0] for name, i in zip(graph.inputs, program.inputs, strict=True)},
        symbols=program.symbols,
        results=shapes,
    )
    labels = Labels(
        input_names=program.input_names,
        seeds=program.seeds,
        notes=program.notes,
        locate=program.locate,
        provenance=_provenance(plan, graph, {}, stride),
        provenances=provenances,
    )
    return build_program(flat, known, labels)


def _decide_once(graph: EmittedGraph) -> None:
    """Let each `Switch` of a side read the predicate of the first column: by that it is told which sides are alike."""
    first: dict[Tensor, str] = {}
    for node in graph.nodes:
        op = graph.origins[node.name].op
        if node.op == SWITCH and op is not None and op in graph.predicates:
            node.input[1] = first.setdefault(graph.predicates[op], node.input[1])


def _arguments(graph: EmittedGraph) -> dict[str, str]:
    """Return the placeholders of a graph by their names as arguments of a function."""
    return {f"a{i}": name for i, name in enumerate(graph.inputs)}


def _provenance(
    plan: Plan, graph: EmittedGraph, arguments: Mapping[str, str], stride: int
) -> Callable[[str], Provenance]:
    """Return what says where an operation comes from that was written for the axis, and in which column it is.

    Args:
      plan: of the axis.
      graph: what was written.
      arguments: the names in it of what has another name in a function.
      stride: see `in_columns`.
    """
    columns = {device: stride * number for number, device in enumerate(plan.devices)}
    column_of = {node.name: columns.get(node.device) for node in graph.nodes}

    def provenance(name: str) -> Provenance:
        if KNOWN_INSIDE in name and name not in graph.origins:
            return Provenance()  # (a constant that only the body of a branch has)
        name = arguments.get(name, name)
        origin = graph.origins[source_of(name)]
        came_from = Provenance() if origin.op is None else plan.program.ops[origin.op].provenance
        is_one = origin.shard is not None or origin.role not in ("op", "constant")
        along, column_before = column_of.get(name) if is_one else None, came_from.column
        column = column_before if along is None else along + (column_before or 0)
        moves = (came_from.role, came_from.axis) if origin.role == "op" else (origin.role, plan.mesh.axis)
        return replace(came_from, column=column, role=moves[0], axis=moves[1])

    return functools.cache(provenance)


def _shapes(plan: Plan, graph: EmittedGraph) -> dict[str, Sequence[Described]] | None:
    """Return what each node makes, as its layout along the axis says; None where TensorFlow has to be asked.

    It is asked about sizes that are not known, about lists, and about what is inside of loops and branches.
    """
    if plan.program.symbols or any(op.bodies or tf.variant in op.out_dtypes for op in plan.program.ops):
        return None
    sizes = sizes_of(plan, graph)
    results_by_node = {name: sizes[name] for name in graph.by_name.order}
    is_known = all(
        shape is not None and None not in shape for results in results_by_node.values() for shape, _ in results
    )
    return results_by_node if is_known else None
