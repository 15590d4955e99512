"""Variables that a function updates together, and that therefore lie together, whatever they are called.

Layouts are set before any function is known. Then optimizers of Keras say which slots belong to which variables, and
for all others names do. A traced function knows: see `updated_together`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import PLACES, cut_of, divided, has_layout, owned_bytes
from graphsplit.api.layouts.new_variables import slots_by_name
from graphsplit.api.layouts.variable_layouts import (
    lay_divided,
    lay_out,
    lay_out_in_stages,
    wait_for_calls,
    wanted_layouts,
)
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import Cut
from graphsplit.core.variables.parted_variables import (
    are_any_parts,
    bytes_of_variable,
    parts_of_variable,
    tell_functions,
)
from graphsplit.core.variables.running_calls import calls
from graphsplit.errors import UnsupportedError
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.variables.updates import updated_together
from graphsplit.tracing.trace import Trace, captured_variables


def slots_in(trace: Trace) -> dict[int, tf.Variable]:
    """Return the variable that each slot of a traced function belongs to, by the slot's id.

    Slots are updated together with their variable. Of what is updated by itself, names tell.
    """
    groups = _groups(trace)
    told = {id(slot): group[0] for group in groups for slot in group[1:]}
    known = {id(variable) for group in groups for variable in group}
    named = slots_by_name(list(trace.variables)).items()
    return {**told, **{slot: told.get(id(head), head) for slot, head in named if slot not in known}}


def _groups(trace: Trace) -> list[list[tf.Variable]]:
    """Return the variables that are updated together, first the one that is trained: it is used before its slots."""
    captured = captured_variables(trace)
    variables = {id(variable): variable for variable in captured.values()}
    groups = updated_together(trace.program, {i: id(variable) for i, variable in captured.items()})
    return [sorted([variables[k] for k in group], key=lambda variable: not variable.trainable) for group in groups]


def lay_together(trace: Trace) -> tuple[str, ...]:
    """Move variables to where those are with which a traced function updates them; return what a plan says.

    These are divided ones, and slots that no layout was set for: they were made after that of their variables was.
    """
    if not (are_any_parts() and tf.executing_eagerly()):
        return ()
    moved, groups = _lay_new(trace), _groups(trace)
    moved += [variable for layout in PLACES for variable in _lay_together(groups, trace.variables, layout)]
    if not moved:
        return ()
    size = sum(map(bytes_of_variable, moved))
    return (
        f"{count_text(len(moved), 'variable')} ({format_bytes(size)}) moved to the devices of the variables that are "
        "updated with them",
    )


def _lay_new(trace: Trace) -> list[tf.Variable]:
    """Give slots without a layout the one that was asked for their variables; return them."""
    heads, together = slots_in(trace), dict[tuple[Any, ...], list[tf.Variable]]()
    for slot in [own for own in trace.variables if id(own) in heads and not hasattr(own, "_graphsplit_laid")]:
        head = heads[id(slot)]
        layout, *how = getattr(head, "_graphsplit_laid", ("home", ()))
        is_there = layout != "replicated" or canonical_name(slot.device) in how[0]  # (one of the copies is the slot)
        if layout != "home" and is_there and not head._graphsplit_automatic and head.shape == slot.shape:
            together.setdefault(tuple(how), []).append(slot)
    for (devices, mesh, reshard), slots in together.items():
        layouts = [heads[id(slot)]._graphsplit_laid[0] for slot in slots]
        lay_out(slots, layouts, heads, devices, mesh, reshard_after_forward=reshard)
    return [slot for slots in together.values() for slot in slots]


def lay_out_as_asked(
    trace: Trace, layout: Any, devices: Sequence[str], mesh: DeviceMesh | None, runs: bool
) -> tuple[str, ...]:
    """Lay out those variables of a traced function that have no layout yet; return what a plan says.

    Args:
      trace: the function.
      layout: as for `set_variable_layout`.
      devices, mesh: full names; they as a mesh, if they are one.
      runs: whether they are to be laid out, and not only planned as if they were.

    Raises:
      ArgumentError: if a pattern fits no variable, and there are variables to be laid out.
      UnsupportedError: in a graph, where none can be laid out.
    """
    variables, slots = list(trace.variables), slots_in(trace)
    new, said = [v for v in variables if not has_layout(v)], f"variables={layout!r}"
    if new and runs:
        wanted = wanted_layouts(variables, layout, slots, mesh)
        layouts = [None if has_layout(v) else own for v, own in zip(variables, wanted, strict=True)]
        if any(own not in (None, "home") for own in layouts) and not tf.executing_eagerly():
            raise UnsupportedError(
                f"{said} lays variables out in the first call, which is in a graph. Call the function once outside of "
                "tf.function, or lay them out before: gs.set_variable_layout."
            )
        lay_out_in_stages(variables, layouts, slots, devices if mesh is None else mesh.devices, mesh, True)
    kept = len(variables) - len(new)
    return (f"{said}; {count_text(kept, 'variable')} that had a layout keep it" if kept else said,)


def _lay_together(
    groups: Sequence[Sequence[tf.Variable]], variables: Sequence[tf.Variable], layout: str
) -> list[tf.Variable]:
    lying = {id(variable): cut for variable in variables if (cut := cut_of(variable, layout)) is not None}
    apart = [v for group in groups if _are_apart(group, layout) for v in group if id(v) in lying]
    if not apart:
        return []
    over: tuple[tuple[str, ...], ...] = next((cut.groups for cut in lying.values() if cut.groups), ())
    devices = over[0] if over else tuple(dict.fromkeys([device for cut in lying.values() for device in cut.devices]))
    moving = set(map(id, apart))
    owned = owned_bytes([v for v in variables if id(v) in lying and id(v) not in moving], devices)
    slots = {id(slot): group[0] for group in groups for slot in group[1:]}
    moved = []
    for variable, cut in divided(apart, devices, slots, owned, layout, groups=over):
        before = lying[id(variable)]
        if _where(cut) != _where(before):
            moved.append(variable)
            _move(variable, replace(cut, reshard=before.reshard), layout, devices)
    return moved


def _are_apart(group: Sequence[tf.Variable], layout: str) -> bool:
    """Return whether variables that are updated together are divided in several ways."""
    cuts = [cut_of(variable, layout) for variable in group]
    return len({_where(cut) for cut in cuts if cut is not None}) > 1


def _where(cut: Cut) -> tuple[object, ...]:
    return cut.axis, cut.devices, cut.groups


def _move(variable: tf.Variable, cut: Cut, layout: str, devices: Sequence[str]) -> None:
    with calls.lock:
        wait_for_calls([variable])
        over = devices
        if (parts := parts_of_variable(variable)) is not None:
            over = parts.over
            parts.release(variable)
        else:
            variable._graphsplit_stays = ""
            tell_functions([variable])
        lay_divided(variable, cut, layout, over)
