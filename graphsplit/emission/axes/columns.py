"""Columns: a program whose variables lie along one axis of a mesh becomes one whose operations stand in columns.

The axis is planned like any other, with one shard for each of its devices, and what the plan says is written as a
program again: an operation for each column that runs it, and between columns the operations that carry out the moves.
Each knows its column, and the operation that it came from. The rows of the batch are planned on that program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, Layout, is_whole
from graphsplit.core.protos.graphdefs import source_of
from graphsplit.emission.axes.plans import planned_along
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.planning.costs.work import Described
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Op, Program, Provenance, Tensor
from graphsplit.program.reading.reader import build_program

Held = Mapping[str, tuple[tf.DType, tuple[int | None, ...] | None]]


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
    held: Held = field(default_factory=dict)


def in_columns(
    program: Program, axis: str, columns: int, laid: Mapping[str, Layout], held: Held, stride: int = 1
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
    read = replace(_read(plan, graph, resources, stride), stages=stages)
    return Columns(read, tuple(origins), {}, _gathered(plan, positions), resources)


def _obstacles(plan: Plan, laid: Mapping[int, Layout]) -> dict[str, str]:
    """Return the variables whose handles would have to move, and the operations that no rule does in parts."""
    ops, found = plan.program.ops, dict[str, str]()
    for move in plan.moves:
        position = move.tensor.op
        while ops[position].type == "Identity":
            position = ops[position].inputs[0].op
        if position in laid and ops[move.tensor.op].out_dtypes[0] == tf.resource:
            readers = [op for op in ops if move.tensor in op.inputs]
            wrong = next(op for op in readers if plan.steps[op.index].home or not _reads_own(plan, op, move.tensor))
            line = plan.program.line_of(wrong)
            where = f" at {line}" if line else ""
            found[ops[position].name] = f"{wrong.type} {wrong.name!r}{where} takes it whole"
    return found


def _gathered(plan: Plan, laid: Mapping[int, Layout]) -> frozenset[str]:
    """Return the variables whose parts are put together: some operation cannot use them where they are."""
    ops, found = plan.program.ops, set()
    for move in plan.moves:
        op = ops[move.tensor.op]
        while op.type in ("Identity", "Cast"):
            op = ops[op.inputs[0].op]
        is_read = op.type == "ReadVariableOp" and op.inputs[0].op in laid
        if is_read and not is_whole(move.source) and is_whole(move.target):
            found.add(ops[op.inputs[0].op].name)
    return frozenset(found)


def _reads_own(plan: Plan, op: Op, handle: Tensor) -> bool:
    shards, made = plan.steps[op.index].shards, plan.steps[handle.op].shards
    pairs = zip(op.inputs, shards.wants if shards else (), strict=False)
    return made is not None and all(want == made.gives[0] for tensor, want in pairs if tensor == handle)


def _read(plan: Plan, graph: EmittedGraph, resources: Held, stride: int) -> Program:
    """Return what was written for the axis as a program."""
    before, shapes = plan.program, _shapes(plan, graph)
    provenances = {name: _provenance(*body, _arguments(body[1]), stride) for name, body in graph.bodies.items()}
    provenance = _provenance(plan, graph, {}, stride)
    for function in graph.library.function:
        for node in function.node_def:
            node.device = ""  # (whoever plans the rows says where in a row)
    return build_program(
        graph.nodes,
        inputs=graph.inputs,
        input_names=before.input_names,
        captures=graph.captures,
        outputs=graph.outputs,
        effects=graph.effects,
        library=graph.library,
        versions=graph.versions,
        resources=resources,
        given_shapes={name: before.ops[i].out_shapes[0] for name, i in zip(graph.inputs, before.inputs, strict=True)},
        seeds=before.seeds,
        symbols=before.symbols,
        notes=before.notes,
        locate=before.locate,
        shapes=shapes,
        provenance=provenance,
        provenances=provenances,
    )


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
        name = arguments.get(name, name)
        origin = graph.origins[source_of(name)]
        came_from = Provenance() if origin.op is None else plan.program.ops[origin.op].provenance
        is_one = origin.shard is not None or origin.role not in ("op", "constant")
        along, before = column_of.get(name) if is_one else None, came_from.column
        column = before if along is None else along + (before or 0)
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
    found = {name: sizes[name] for name in graph.by_name.order}
    is_known = all(shape is not None and None not in shape for made in found.values() for shape, _ in made)
    return found if is_known else None
