"""How variables become several: slices, owners and copies, chosen so that devices hold alike many bytes. None moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.layout_spellings import WORDS, LayoutOnMesh, VariableLayout, spelling_of
from graphsplit.core.device_mesh import DeviceMesh
from graphsplit.core.devices import task_of
from graphsplit.core.gpus import can_be_cut
from graphsplit.core.hosts import host_devices
from graphsplit.core.layouts import Cut, MeshDivision, Replicate, Shard, in_groups
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import bytes_of_variable, name_of
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.variables.partitioning import STAYS, Held, shares


def divisions_on_mesh(
    lies: Arrangement,
    variables: Sequence[tf.Variable],
    wanted: Sequence[VariableLayout | None],
    mesh: DeviceMesh,
    slots: Mapping[int, tf.Variable],
    reshard: bool = True,
) -> dict[int, MeshDivision]:
    """Return how variables are several whose layouts name axes of a mesh, by their ids.

    Raises:
      ArgumentError: for all that cannot lie so.
    """
    named = [
        (v, layout) for v, layout in zip(variables, wanted, strict=True) if layout is not None and layout not in WORDS
    ]
    layouts = [
        (v, LayoutOnMesh(spelling_of(layout), v.shape.as_list(), mesh, reshard, _units(lies, v, slots)))
        for v, layout in named
        if v.shape.is_fully_defined()
    ]
    wrong = [f"{name_of(v)}: its shape is open, {v.shape}" for v, _ in named if not v.shape.is_fully_defined()]
    wrong += [f"{name_of(variable)}: {why}" for variable, layout_on_mesh in layouts for why in layout_on_mesh.wrong()]
    wrong += [f"{name_of(v)}: TensorFlow cannot cut {v.dtype.name}" for v, _ in layouts if not can_be_parted(v)]
    if wrong:
        raise ArgumentError(f"These variables cannot have these layouts on mesh {mesh}:\n{bullet_list(wrong)}")
    shared = _shared(layouts, slots, mesh, reshard)
    return {id(v): layout_on_mesh.division(shared[id(v)]) for v, layout_on_mesh in layouts}


def divisions_in_stage(
    lies: Arrangement,
    variables: Sequence[tf.Variable],
    wanted: Sequence[VariableLayout | None],
    mesh: DeviceMesh,
    slots: Mapping[int, tf.Variable],
) -> dict[int, MeshDivision]:
    """Return how variables made elsewhere are several on the devices of a stage, if they are whole or copied there.

    Numbers stay, and integers that are whole: TensorFlow has those of 32 bits on the CPU.
    """
    away = [
        (v, layout)
        for v, layout in zip(variables, wanted, strict=True)
        if can_be_parted(v) and v.shape.rank and not v.dtype.is_integer
        if lies.device_of(v) not in mesh.devices
    ]
    on_stage = Arrangement(mesh.devices[0])
    copies = replicated(on_stage, [v for v, layout in away if layout == "replicated"], mesh.devices, slots)
    whole = {id(v): Cut(0, v.shape[0], 1, devices=mesh.devices[:1]) for v, layout in away if layout == "home"}
    return {**whole, **{id(v): how for v, how in copies}}


def _shared(
    layouts: Sequence[tuple[tf.Variable, LayoutOnMesh]],
    slots: Mapping[int, tf.Variable],
    mesh: DeviceMesh,
    reshard: bool,
) -> dict[int, list[MeshDivision]]:
    """Return how parts are shared out over the devices that axes of a mesh leave each, by the variables' ids."""
    divisions: dict[int, list[MeshDivision]] = {id(variable): [] for variable, _ in layouts}
    by_devices: dict[tuple[str, ...], list[tuple[tf.Variable, Sequence[int]]]] = {}
    for variable, layout in layouts:
        for devices, shape in layout.shared:
            by_devices.setdefault(devices, []).append((variable, shape))
    for every, parts in by_devices.items():
        groups = mesh.groups(every)
        devices = groups[0] if groups else every
        wholes = held_of([variable for variable, _ in parts], slots)
        held_parts = [replace(whole, shape=tuple(shape)) for whole, (_, shape) in zip(wholes, parts, strict=True)]
        for (variable, shape), share in zip(parts, shares(held_parts, len(devices)), strict=True):
            if share is None:  # a few bytes
                cut = Cut(0, shape[0], 1, devices=devices[:1], groups=groups)
            else:
                chosen = tuple([devices[k] for k in share.devices])
                cut = replace(share.cut, reshard=reshard, devices=chosen, groups=groups)
            divisions[id(variable)].append(in_groups(cut))
    return divisions


def _units(
    lies: Arrangement, variable: tf.Variable, slots: Mapping[int, tf.Variable]
) -> Mapping[tuple[str, int], Shard]:
    """Return the units that functions told of a variable, or of the one that it is a slot of; see `LayoutOnMesh`."""
    return {**lies.of(slots.get(id(variable), variable)).units, **lies.of(variable).units}


def groups_for(layout: Any, mesh: DeviceMesh | None) -> tuple[tuple[str, ...], ...]:
    """Return the groups of devices over each of which a variable of a layout is divided; none if it is one group."""
    return mesh.groups(mesh.by_row) if mesh is not None and layout == "sharded" else ()


PLACES: Mapping[Any, Callable[[Sequence[str]], Sequence[str]]] = {"sharded": tuple, "host": host_devices}
"""Over which devices a variable is divided, by its layout: all, or their hosts. (Most have one, with all of it.)"""


def divided(
    lies: Arrangement,
    variables: Iterable[tf.Variable],
    devices: Sequence[str],
    slots: Mapping[int, tf.Variable],
    loads: dict[str, int],
    layout: str = "sharded",
    reshard: bool = True,
    groups: tuple[tuple[str, ...], ...] = (),
) -> list[tuple[tf.Variable, Cut]]:
    """Return how variables are divided over devices, those that are. Slots go to where their variables lie.

    Args:
      variables, devices, reshard: what, over which, and whether it is dropped after the forward pass.
      slots: the variables of slots.
      loads: the bytes that each device owns already; theirs are added.
      layout: what is known of variables that lie so already counts.
      groups: of devices, over each of which they are divided; see `Cut`.
    """
    devices = groups[0] if groups else devices
    fewest = STAYS if layout == "host" else -1  # (for a few bytes no device asks its host)
    large = [v for v in variables if can_be_parted(v) and bytes_of_variable(v) > fewest]
    chosen = sorted(large, key=lambda variable: id(variable) in slots)
    wholes, owned = held_of(chosen, slots), [loads[device] for device in devices]
    cut_by_id: dict[int, tuple[tf.Variable, Cut]] = {}
    for variable, held_variable, share in zip(chosen, wholes, shares(wholes, len(devices), owned), strict=True):
        head = slots.get(id(variable))
        cut = None
        if head is not None and head.shape == variable.shape:
            cut = cut_by_id[id(head)][1] if id(head) in cut_by_id else lies.cut_of(head, layout)
        if cut is None and share is not None:
            on = tuple([devices[d] for d in share.devices])
            cut = replace(share.cut, reshard=reshard, devices=on, groups=groups)
        if cut is not None:
            cut_by_id[id(variable)] = variable, cut
            for device, length in zip(cut.devices, cut.lengths, strict=True):
                loads[device] = loads.get(device, 0) + held_variable.bytes // cut.length * length
    return list(cut_by_id.values())


def held_of(variables: Sequence[tf.Variable], slots: Mapping[int, tf.Variable]) -> list[Held]:
    """Return what is to be shared out; of slots it is known which variable each belongs to.

    For a variable that is not among them stands the first of its slots.
    """
    positions = {id(variable): i for i, variable in enumerate(variables)}
    heads: list[int | None] = []
    for i, variable in enumerate(variables):
        head = slots.get(id(variable))
        position = None if head is None else positions.setdefault(id(head), i)
        heads.append(None if position == i else position)
    pairs = zip(variables, heads, strict=True)
    return [
        Held(name_of(v), tuple(v.shape.as_list()), v.dtype.size, head, v.dtype.is_integer or v.dtype.is_bool)
        for v, head in pairs
    ]


def replicated(
    lies: Arrangement, variables: Sequence[tf.Variable], devices: Sequence[str], slots: Mapping[int, tf.Variable]
) -> list[tuple[tf.Variable, Replicate]]:
    """Return how variables are copied to devices, those that are: all but counters, which change in every step.

    What all copies need of a sum is added up where the variable's parts would lie.

    Args:
      variables, devices: which, and to which.
      slots: the variables of slots.
    """
    several = len({task_of(device) for device in devices}) > 1  # where a counter's only copy may be lost, it has others
    movable = [v for v in variables if can_move(v) and (several or v.shape.rank or not v.dtype.is_integer)]
    places = {id(v): lies.device_of(v) for v in movable}
    chosen = [v for v in movable if places[id(v)] in devices and len(devices) > 1]
    copies = []
    for variable, share in zip(chosen, shares(held_of(chosen, slots), len(devices)), strict=True):
        sums = [places[id(variable)]] if share is None else [devices[d] for d in share.devices]
        copies.append((variable, Replicate(tuple(devices), tuple(sums))))
    return copies


def can_move(variable: tf.Variable) -> bool:
    """Return whether a variable's value can lie elsewhere: numbers of known shape."""
    return bool(variable.shape.is_fully_defined() and variable.dtype.size and variable.dtype != tf.string)


def can_be_parted(variable: tf.Variable) -> bool:
    """Return whether a variable can lie in parts: also of a type that TensorFlow cuts and joins."""
    return can_move(variable) and can_be_cut(variable.dtype)
