"""What is planned for a traced function: its program, in parts where its variables are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.layouts import MeshDivision, axis_of
from graphsplit.core.tensorflow_internals import resource_value
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.settling import settled
from graphsplit.planning.state import State, captured_by, state_of
from graphsplit.planning.variables.branches import without_branches
from graphsplit.planning.variables.division import Divided, divide
from graphsplit.planning.variables.sparse_updates import with_sums_of_rows
from graphsplit.planning.variables.staying import as_they_stay, is_staying
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace

_INSIDE = "the function is called inside of a tf.function, which may use the variable itself"


def program_of(
    trace: Trace,
    state: State | None = None,
    reshard: bool = True,
    columns: tuple[Program, Sequence[tuple[int, int]]] | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008  # frozen
) -> tuple[Program, State]:
    """Return what is planned for a traced function: its program, in parts where its variables are; and its state.

    Args:
      trace: the function.
      state: where its variables and tables live, and how they are several; None: as `state_of` says.
      reshard: see `divide`.
      columns: its program, if some variables are in parts there already, and for each capture the original's, and part.
      mesh: the shards, among which variables are used where their parts are that lie so.
    """
    state = replace(state or state_of(trace), captured=captured_by(trace))
    program, origins = columns or (trace.program, [(k, 0) for k in range(len(trace.captures))])
    if not state.divisions and columns is None:
        inside = {v.name: _INSIDE for v in trace.variables if parts_of_variable(v) is not None}
        return program, replace(state, whole=inside) if inside else state
    if columns is None:
        program = branches_apart(trace, state.divisions.keys(), _without_rows(state, mesh))
    names = [program.ops[i].name for i in program.captures]

    def attempt(whole: dict[str, str]) -> tuple[tuple[Program, State], dict[str, str]]:
        """Let variables lie in parts that no operation takes whole, or together with those of other devices."""
        allowed = {n: division for n, division in state.divisions.items() if n not in whole and n not in state.in_place}
        cuts = {n: division for n, division in allowed.items() if not axis_of(division)}
        cuts, staying = as_they_stay(program, cuts, mesh)
        divided = divide(program, cuts, reshard)
        devices = {name: device for name, device in state.devices.items() if name not in cuts}
        obstacles = divided.obstacles or _apart(divided, devices, names, cuts)
        parts = tuple([(origins[k][0], origins[k][1] + part) for k, part in divided.origins])
        new_divisions = {**cuts, **{name: state.divisions[name] for name in state.in_place}}
        staying_by_name = {state.captured[origins[names.index(n)][0]].name: why for n, why in staying.items()}
        all_whole = {**state.whole, **whole}
        divided_state = replace(
            state, devices=devices, divisions=new_divisions, parts=parts, whole=all_whole, staying=staying_by_name
        )
        return (divided.program, divided_state), with_twins(trace, obstacles)

    return settled(attempt)


def _without_rows(state: State, mesh: Mesh) -> set[str]:
    """Return the variables that lie whole on a device without rows of the batch, by their placeholders' names."""
    with_rows, whole = {*mesh.devices}, {n: cut for n, cut in state.divisions.items() if cut.parts == 1}
    return {name for name, cut in whole.items() if not {*cut.devices} <= with_rows}


def branches_apart(trace: Trace, names: Set[str], apart: Set[str] = frozenset()) -> Program:
    """Return a traced function's program without branches that take some variables, by their placeholders' names.

    Args:
      trace: the function.
      names: the variables.
      apart: see `without_branches`.
    """
    shapes = _shapes(trace)
    program = with_sums_of_rows(trace.program, names, shapes)
    return without_branches(program, names, _captured_twice(trace), shapes, apart)


def _shapes(trace: Trace) -> dict[str, Sequence[int | None]]:
    """Return the shapes of captured variables, of known rank, by the names of their handles' placeholders."""
    handles = [tensor for tensor in trace.function.inputs if tensor.dtype == tf.resource]
    values = [(handle.op.name, resource_value(handle)) for handle in handles]
    return {name: value[1].as_list() for name, value in values if value is not None and value[1].rank is not None}


def _captured_twice(trace: Trace) -> set[str]:
    """Return the placeholders of what a function captures more than once, as `with_twins` says."""
    handles = Counter(map(id, trace.captures))
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    return {trace.program.ops[i].name for i, handle in pairs if handles[id(handle)] > 1}


def with_twins(trace: Trace, whole: Mapping[str, str]) -> dict[str, str]:
    """Return captures that are taken whole, and why, with other captures of their variables.

    What a gradient reads by itself is captured once more, and a value cannot be whole and in parts at once.
    """
    captures = zip(trace.program.captures, trace.captures, strict=True)
    handles = {trace.program.ops[i].name: id(handle) for i, handle in captures}
    reasons = {handles[name]: reason for name, reason in whole.items() if name in handles}
    return {**whole, **{name: reasons[own_handle] for name, own_handle in handles.items() if own_handle in reasons}}


def _apart(
    divided: Divided, devices: Mapping[str, str], names: Sequence[str], cuts: Mapping[str, MeshDivision]
) -> dict[str, str]:
    """Return the variables that an operation takes together with others, which lie on other devices."""
    handles = [i for i, _ in divided.program.handles]
    ops = divided.program.ops
    origins = {i: part_origin for i, part_origin in zip(handles, divided.origins, strict=True) if ops[i].layout is None}
    why_by_name = {}
    for op in divided.program.ops:
        taken = [tensor.op for tensor in op.inputs if tensor.op in origins]
        if len({ops[i].device or devices.get(ops[i].name, "") for i in taken} - {""}) > 1:
            reason = f"{op.type} {op.name!r} takes it together with variables on other devices"
            taken_names = {names[origins[i][0]] for i in taken}
            why_by_name.update({name: reason for name in taken_names if name in cuts and not is_staying(cuts[name])})
    return why_by_name
