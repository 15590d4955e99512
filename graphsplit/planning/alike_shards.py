"""Shards that are alike: what one of them computes, holds and sends tells it of all of them.

A large mesh has few kinds of devices. Shards are alike that follow each other, have as much of everything that is cut,
and whose devices do nothing else and exchange values with other kinds of devices only: they slice and add up nothing
for each other. Of each such group the first and the last are looked at. What other devices have for the shards is there
from the first one's turn to the last one's, and the last one stands for all behind the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from graphsplit.core.layouts import Shard
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.state import devices_of_handles
from graphsplit.rules import Sharded

_Notes = dict[str, list[object]]


@dataclass(frozen=True)
class AlikeShards:
    """Which shards are not looked at.

    Attributes:
      told_by: for each of them the shard that stands for it.
      devices: for each device of a shard that stands for others their devices, its own among them.
    """

    told_by: Mapping[int, int] = field(default_factory=dict)
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def times(self, device: str) -> int:
        """Return for how many devices one stands."""
        return len(self.devices.get(device, ("",)))


def kinds_of_shards(plan: Decisions) -> list[int]:
    """Return a number for each shard: the same for those that have as much of everything that is cut.

    Shards with as many rows may still differ: slices of an axis that does not divide are no rows.
    """
    cuts = {Shard(0): None}  # the rows themselves
    for step in plan.steps:
        _note_cuts(step.shards, cuts)
    entries_by_cut = [[sum(counts) for counts in zip(*plan.mesh.pieces(cut), strict=True)] for cut in cuts]
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(column, len(numbers)) for column in zip(*entries_by_cut, strict=True)]


def _note_cuts(sharded: Sharded | None, cuts: dict[Shard, None]) -> None:
    """Note how an operation on the shards has cut what it reads and makes, and what its functions do."""
    if sharded is not None:
        cuts.update({cut: None for cut in (*sharded.wants, *sharded.gives) if isinstance(cut, Shard)})
        for body in sharded.bodies.values():
            for step in body.steps:
                _note_cuts(step.shards, cuts)


def find_alike_shards(plan: Decisions) -> AlikeShards:
    """Return which shards of a plan need not be looked at; none if shards exchange values with each other."""
    mesh = plan.mesh
    shards_by_device: dict[str, list[int]] = {}
    for d, device in enumerate(mesh.devices):
        shards_by_device.setdefault(device, []).append(d)
    if mesh.columns or plan.program.stages or len(shards_by_device) < len(set(mesh.positions)):
        return AlikeShards()
    handle_devices = devices_of_handles(plan.program, plan.state)
    apart = {plan.default_device, *plan.places.all_once, *plan.owners.of_tensors.values(), *handle_devices}
    kinds = kinds_of_shards(plan)
    notes: _Notes = {
        device: [[kinds[d] for d in shards]] for device, shards in shards_by_device.items() if device not in apart
    }
    if not all(_note(collective, notes, apart) for collective in plan.collectives):
        return AlikeShards()
    told_by, devices = dict[int, int](), dict[str, tuple[str, ...]]()
    for _, group in itertools.groupby(shards_by_device, key=lambda device: notes.get(device, device)):
        _, *alike_devices = group
        if len(alike_devices) > 1:
            devices[alike_devices[-1]] = tuple(alike_devices)
            for device in alike_devices[:-1]:
                told_by.update(zip(shards_by_device[device], shards_by_device[alike_devices[-1]], strict=True))
    return AlikeShards(told_by, devices)


def _note(collective: Collective, notes: _Notes, apart: Collection[str]) -> bool:
    """Note what a collective has on each device, and what is read there; return False if shards have it of each other.

    Each value is noted by its number among those of its device, and what comes from elsewhere by its size.
    """
    values, numbers = collective.values, list[int]()
    reads = [read for reads in collective.reads for read in reads]
    for value in values:
        notes_of_device = notes.get(value.device)
        numbers.append(len(notes_of_device) if notes_of_device is not None else -1)
        if notes_of_device is not None:
            from_elsewhere = [values[k] for k in value.of if values[k].device != value.device]
            if any(other.device not in apart for other in from_elsewhere):
                return False
            of = [numbers[k] if values[k].device == value.device else (values[k].bytes,) for k in value.of]
            notes_of_device.append((type(value), value.bytes, of))
    for i, device in reads:
        value, notes_of_device = values[i], notes.get(device)
        if notes_of_device is not None:
            if value.device != device and value.device not in apart:
                return False
            notes_of_device.append((numbers[i] if value.device == device else None, value.bytes))
    return True
