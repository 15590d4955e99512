"""How variables would lie on devices that need not exist: as they lie here, or laid out anew. Nothing is moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.api.layouts.layout_spellings import VariableLayout, check_layout, names_host, spelling_of
from graphsplit.api.layouts.learned_layouts import lie_as_asked, slots_in
from graphsplit.api.layouts.variable_layouts import decide_in_stages
from graphsplit.core.device_mesh import LAYOUTS, DeviceMesh
from graphsplit.core.devices import available_devices, short_name
from graphsplit.core.hosts import host_devices
from graphsplit.core.layouts import Cut, Replicate
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.tracing.trace import Trace

VariableLayouts = VariableLayout | Mapping[str, VariableLayout] | None


def layout_name(layout: VariableLayouts) -> str:
    """Return what a prediction calls a layout: "" for as the variables lie."""
    if layout is None or isinstance(layout, str):
        return spelling_of(layout or "").along_others
    return "by patterns" if isinstance(layout, Mapping) else str(layout)


def lying_elsewhere(
    as_here: Arrangement, trace: Trace, devices: Sequence[str], mesh: DeviceMesh | None = None, on_first: bool = False
) -> Arrangement:
    """Return how the variables of a traced function lie on devices that need not exist: as they do here.

    Args:
      as_here: how they lie; the same number of a device is the same device.
      trace: the function.
      devices: full names, the first is the default device.
      mesh: they as a mesh, if there is one: variables that lie along an axis here lie so along that axis there.
      on_first: whether all are whole, on the first device.

    Raises:
      ArgumentError: for variables on more devices here than there, and for those along axes without that axis.
    """
    variables, elsewhere, number_of = list(trace.variables), Arrangement(devices[0], as_here), _numbers_of_devices()
    along = [None] * len(variables) if on_first else _elsewhere(as_here, variables, mesh)
    wrong = list[str]()
    for variable, layout in zip(variables, along, strict=True):
        division = as_here.of(variable).division
        if on_first:
            elsewhere.decide(variable, division=None, stays="", wish=None)
        elif layout is not None:
            elsewhere.decide(variable, division=None)
        if division is None or on_first or layout is not None:
            continue
        assert isinstance(division, (Cut, Replicate))  # (of others the layout says how they lie)
        every = (*division.devices, *(division.sums if isinstance(division, Replicate) else ()))
        if any(number_of(device) >= len(devices) for device in every):
            wrong.append(f"{name_of(variable)} on {len(set(division.devices))} devices")
            continue
        named = {device: devices[number_of(device)] for device in every}
        division = replace(division, devices=tuple([named[device] for device in division.devices]))
        if isinstance(division, Replicate):
            division = replace(division, sums=tuple([named[device] for device in division.sums]))
        elsewhere.decide(variable, division=division, over=division.devices)
    if wrong:
        raise ArgumentError(
            f"These variables are on more devices than the {len(devices)} of the prediction:\n"
            f"{bullet_list(wrong)}\n"
            'Predict for more devices, or pass another layout, variables="home".'
        )
    if any(along):
        decide_in_stages(elsewhere, variables, along, slots_in(trace), devices, mesh, True)
    return elsewhere


def _elsewhere(
    as_here: Arrangement, variables: Sequence[tf.Variable], mesh: DeviceMesh | None
) -> list[VariableLayout | None]:
    """Return the layouts, as users write them, of variables along axes of a mesh or on the host; None of others.

    Raises:
      ArgumentError: if there are some along axes, and no mesh.
    """
    lying = [as_here.of(v) for v in variables]
    layouts: list[VariableLayout | None] = [
        None
        if lying_here.division is None or (lying_here.layout in LAYOUTS and not lying_here.groups)
        else lying_here.layout
        for lying_here in lying
    ]
    if mesh is not None:
        check_layout({k: layout for k, layout in enumerate(layouts) if layout is not None}, mesh)
    along = [
        (v, layout) for v, layout in zip(variables, layouts, strict=True) if layout is not None and layout != "host"
    ]
    if mesh is None and along:
        named = [f"{name_of(v)}: {layout!r}" for v, layout in along]
        raise ArgumentError(
            "These variables are cut along axes of a mesh, and the prediction has no mesh:\n"
            f"{bullet_list(named)}\n"
            'Pass the mesh, mesh={"batch": 2, "model": 4}, or another layout, variables="home".'
        )
    return layouts


def notes_on_layout(
    as_here: Arrangement, trace: Trace, layout: VariableLayouts, devices: Sequence[str], mesh: DeviceMesh | None = None
) -> tuple[str, ...]:
    """Return what to say of where variables are predicted.

    It is said if they could lie on more of the devices than they do, and of the host's memory if the devices have it.
    """
    laid = [(record.layout, record.division) for v in trace.variables if (record := as_here.of(v)).division is not None]
    is_on_host = names_host(layout) or (layout is None and any(kept_layout == "host" for kept_layout, _ in laid))
    if is_on_host and set(host_devices(devices)) & set(devices):
        return (
            "the devices are CPUs, whose memory is the host's: variables with layout 'host' count as those of "
            f"{' and '.join(map(short_name, host_devices(devices)))}",
        )
    if layout is not None or (mesh is not None and not mesh.axes.is_of_rows):
        return ()
    notes = []
    for kind, what in ((Cut, "sharded"), (Replicate, "replicated")):
        lying = [division for kept_layout, division in laid if type(division) is kind and kept_layout != "host"]
        if not lying:
            continue
        number_of, would = _numbers_of_devices(), lying_elsewhere(as_here, trace, devices, on_first=True)
        lie_as_asked(would, trace, what, devices, None)
        used = {0, *[number_of(device) for division in lying for device in division.devices]}
        could = {devices[0], *[device for variable in trace.variables for device in would.devices_of(variable)]}
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
