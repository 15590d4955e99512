"""How variables would lie on devices that need not exist: as they lie here, or laid out anew. Nothing is moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.api.layouts.divisions import (
    PLACES,
    divided,
    divisions_in_stage,
    divisions_on_mesh,
    groups_for,
    has_layout,
    replicated,
)
from graphsplit.api.layouts.layout_spellings import VariableLayout, check_layout, names_host, spelling_of
from graphsplit.api.layouts.learned_layouts import as_it_lies, places_in_stages, slots_in, stays
from graphsplit.api.layouts.variable_layouts import wanted_layouts
from graphsplit.core.device_mesh import LAYOUTS, DeviceMesh
from graphsplit.core.devices import available_devices, short_name
from graphsplit.core.hosts import host_devices
from graphsplit.core.layouts import Cut, MeshDivision, Replicate, cut_in, in_groups
from graphsplit.core.variables.parted_variables import name_of, parts_of_variable
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.tracing.trace import Trace, captured_variables

Layout = VariableLayout | Mapping[str, VariableLayout] | None


def layout_name(layout: Layout) -> str:
    """Return what a prediction calls a layout: "" for as the variables lie."""
    if layout is None or isinstance(layout, str):
        return spelling_of(layout or "").others
    return "by patterns" if isinstance(layout, Mapping) else str(layout)


def divisions_for(
    trace: Trace, layout: Layout, devices: Sequence[str], mesh: DeviceMesh | None = None, keep: bool = False
) -> dict[str, MeshDivision]:
    """Return how the variables of a traced function would be cut or copied, by the names of their placeholders.

    Args:
      trace: the function.
      layout: as for `set_variable_layout`; None: as they lie, the same number of a device being the same device.
      devices: full names, the first is home.
      mesh: they as a mesh, if there is one: variables that lie along an axis here lie so along that axis there.
      keep: whether variables that are laid out already lie as they lie, and only the others anew.

    Raises:
      ArgumentError: for an unknown layout, a pattern that fits no variable, or more devices here than there; for
        variables that lie along an axis without that axis.
    """
    variables = list(trace.variables)
    if layout is None or not variables:
        return divisions_wanted(trace, [None] * len(variables), devices, mesh)
    wanted = wanted_layouts(variables, layout, slots_in(trace), mesh)
    if keep:
        wanted = [None if has_layout(v) else own for v, own in zip(variables, wanted, strict=True)]
    return divisions_wanted(trace, wanted, devices, mesh)


def divisions_wanted(
    trace: Trace,
    wanted: Sequence[VariableLayout | None],
    devices: Sequence[str],
    mesh: DeviceMesh | None = None,
    reshard: bool = True,
) -> dict[str, MeshDivision]:
    """Return how variables would be cut or copied; see `divisions_for`.

    Args:
      trace, devices, mesh: see there.
      wanted: the layout of each variable; None: as it lies.
      reshard: whether what is sharded is dropped after the forward pass.
    """
    variables, slots = list(trace.variables), slots_in(trace)
    if mesh is None or not mesh.stages:
        found = _divisions(variables, wanted, slots, devices, mesh, reshard)
    else:
        found = _divisions_in_stages(trace, wanted, slots, mesh, reshard)
    captured = captured_variables(trace).items()
    return {trace.program.ops[i].name: found[id(v)] for i, v in captured if id(v) in found}


def _divisions_in_stages(
    trace: Trace,
    wanted: Sequence[VariableLayout | None],
    slots: Mapping[int, tf.Variable],
    mesh: DeviceMesh,
    reshard: bool,
) -> dict[int, MeshDivision]:
    """Return how variables would be cut or copied, each on the devices of its stage; see `lay_in_stages`."""
    places, home, found = places_in_stages(trace, mesh), mesh.devices[0], dict[int, MeshDivision]()
    laid = [(v, own or as_it_lies(v)) for v, own in zip(trace.variables, wanted, strict=True)]
    check_layout({k: own for k, (_, own) in enumerate(laid)}, mesh)
    staying = [(v, own) for v, own in laid if stays(v, own)]
    found |= _divisions([v for v, _ in staying], [own for _, own in staying], slots, mesh.devices, mesh, reshard)
    left = [(v, "home" if own == "host" else own) for v, own in laid if id(v) not in found]  # (a few bytes stay)
    for stage in mesh.stages:
        there = [(v, own) for v, own in left if (places[id(v)] or mesh.devices) == stage]
        stage_mesh, variables = mesh.of_stage(stage), [v for v, _ in there]
        found |= _divisions(variables, [own for _, own in there], slots, stage, stage_mesh, reshard, home)
        layouts = ["home" if own == "sharded" and id(v) not in found else own for v, own in there]
        found |= divisions_in_stage(variables, layouts, stage_mesh, slots, home)
    return found


def _divisions(
    variables: Sequence[tf.Variable],
    wanted: Sequence[VariableLayout | None],
    slots: Mapping[int, tf.Variable],
    devices: Sequence[str],
    mesh: DeviceMesh | None,
    reshard: bool,
    home: str = "",
) -> dict[int, MeshDivision]:
    """Return how variables would be cut or copied, by their ids; `home` has those that are whole: the first device."""
    lying = [v for v, own in zip(variables, wanted, strict=True) if own is None]
    along = {id(v): own for v, own in zip(lying, _elsewhere(lying, mesh), strict=True)}
    found: dict[int, MeshDivision] = _as_they_lie([v for v in lying if along[id(v)] is None], devices)
    wanted = [own or along.get(id(v)) for v, own in zip(variables, wanted, strict=True)]
    copied = [v for v, own in zip(variables, wanted, strict=True) if own == "replicated"]
    found.update({id(v): how for v, how in replicated(copied, devices, slots, devices[0])})

    def belonging(head: tf.Variable, _: str) -> Cut | None:
        division = found.get(id(head))
        cut = None if division is None else cut_in(division)
        return cut if isinstance(cut, Cut) else None

    for word, places in PLACES.items():
        chosen, loads = (
            [v for v, own in zip(variables, wanted, strict=True) if own == word],
            dict.fromkeys(places(devices), 0),
        )
        cuts = divided(chosen, places(devices), slots, loads, word, reshard, belonging, groups_for(word, mesh))
        found.update({id(v): in_groups(cut) for v, cut in cuts if cut.groups or cut.devices != (home or devices[0],)})
    if mesh is not None:
        found.update(divisions_on_mesh(variables, wanted, mesh, slots))
    return found


def _elsewhere(variables: Sequence[tf.Variable], mesh: DeviceMesh | None) -> list[VariableLayout | None]:
    """Return the layouts, as users write them, of variables along axes of a mesh or on the host; None of others.

    Raises:
      ArgumentError: if there are some along axes, and no mesh.
    """
    lying = [parts_of_variable(v) for v in variables]
    found: list[VariableLayout | None] = [
        None if parts is None or (parts.layout in LAYOUTS and not parts.groups) else parts.layout for parts in lying
    ]
    if mesh is not None:
        check_layout({k: own for k, own in enumerate(found) if own is not None}, mesh)
    along = [(v, own) for v, own in zip(variables, found, strict=True) if own is not None and own != "host"]
    if mesh is None and along:
        named = [f"{name_of(v)}: {own!r}" for v, own in along]
        raise ArgumentError(
            "These variables are cut along axes of a mesh, and the prediction has no mesh:\n"
            f"{bullet_list(named)}\n"
            'Pass the mesh, mesh={"batch": 2, "model": 4}, or another layout, variables="home".'
        )
    return found


def _as_they_lie(variables: Sequence[tf.Variable], devices: Sequence[str]) -> dict[int, MeshDivision]:
    found: dict[int, MeshDivision] = {}
    wrong, number_of = list[str](), _numbers_of_devices()
    for variable in variables:
        parts = parts_of_variable(variable)
        if parts is None:
            continue
        division = parts.division
        assert isinstance(division, (Cut, Replicate))  # (of others the layout says how they lie)
        every = (*division.devices, *(division.sums if isinstance(division, Replicate) else ()))
        if any(number_of(device) >= len(devices) for device in every):
            wrong.append(f"{name_of(variable)} on {len(set(division.devices))} devices")
            continue
        on = tuple([devices[number_of(device)] for device in division.devices])
        if isinstance(division, Replicate):
            sums = tuple([devices[number_of(device)] for device in division.sums])
            found[id(variable)] = replace(division, devices=on, sums=sums)
        else:
            found[id(variable)] = replace(division, devices=on)
    if wrong:
        raise ArgumentError(
            f"These variables are on more devices than the {len(devices)} of the prediction:\n"
            f"{bullet_list(wrong)}\n"
            'Predict for more devices, or pass another layout, variables="home".'
        )
    return found


def notes_on_layout(
    trace: Trace, layout: Layout, devices: Sequence[str], mesh: DeviceMesh | None = None
) -> tuple[str, ...]:
    """Return what to say of where variables are predicted.

    It is said if they could lie on more of the devices than they do, and of the host's memory if the devices have it.
    """
    held = [(parts.layout, parts.division) for v in trace.variables if (parts := parts_of_variable(v))]
    is_on_host = names_host(layout) or (layout is None and any(own == "host" for own, _ in held))
    if is_on_host and set(host_devices(devices)) & set(devices):
        return (
            "the devices are CPUs, whose memory is the host's: variables with layout 'host' count as those of "
            f"{' and '.join(map(short_name, host_devices(devices)))}",
        )
    if layout is not None or (mesh is not None and not mesh.axes.is_of_rows):
        return ()
    notes = []
    for kind, what in ((Cut, "sharded"), (Replicate, "replicated")):
        lying = [division for own, division in held if type(division) is kind and own != "host"]
        if not lying:
            continue
        number_of, would = _numbers_of_devices(), divisions_for(trace, what, devices).values()
        used = {0, *[number_of(device) for division in lying for device in division.devices]}
        could = {devices[0], *[device for division in would for device in division.devices]}
        if len(used) < len(could):
            notes.append(
                f"variables are {what} over {len(used)} devices, as they are here, and {len(devices) - len(used)} of "
                f'{len(devices)} have none; variables="{what}" predicts them over all'
            )
    return tuple(notes)


def _numbers_of_devices() -> Callable[[str], int]:
    """Return what numbers devices in the order in which a number of devices is filled: worker after worker."""
    numbers = {device: number for number, device in enumerate(available_devices())}
    return lambda device: numbers.get(device, int(device.rpartition(":")[2]))
