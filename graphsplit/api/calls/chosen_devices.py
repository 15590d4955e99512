"""The devices of a function: those that its options ask for, whether this process has them or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.api.options import Options, shares_message
from graphsplit.core.device_mesh import device_mesh, devices_of
from graphsplit.core.devices import (
    check_existing,
    in_session_graph,
    missing_devices,
    names_of_devices,
    short_name,
)
from graphsplit.core.gpus import gpu_memory_bytes
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.amounts import count_text
from graphsplit.planning.schedule.automatic_stages import Beginnings, StagesAsked
from graphsplit.program.program import Program


@dataclass(frozen=True)
class ChosenDevices:
    """The devices of a function's shards, and of whole values that belong to nobody, full names."""

    devices: tuple[str, ...]
    default_device: str
    options: Options

    @functools.cached_property
    def _missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(missing_devices([*self.devices, self.default_device])))

    @property
    def missing(self) -> tuple[str, ...]:
        """Those that are not there, so that there are plans and nothing runs; a session has devices of its own."""
        return self._missing if self._missing and not in_session_graph() else ()

    def check(self) -> None:
        """Raise `DeviceError` unless all of them are there."""
        if self.missing:
            wanted_devices, argument = self.options.devices, self.options.devices_argument
            if isinstance(wanted_devices, tuple):
                names = [short_name(name) for name in wanted_devices]
                wanted_devices = names[0] if argument == "device" and len(names) == 1 else names
            check_existing(self.devices, argument, wanted_devices)
            check_existing([self.default_device], "default_device", self.options.tuning["default_device"])

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says where some are missing. (Layouts that are chosen for it have a note of their own.)"""
        if not self.missing:
            return ()
        names = ", ".join(map(short_name, self.missing))
        where = "" if self.options.variables is not None else f", with variables on {short_name(self.default_device)}"
        return (f"this process does not have {names}: the plan is for a process that does{where}",)


def choose_devices(options: Options) -> ChosenDevices:
    """Return the devices that options ask for. Those that are named need not exist. Starts TensorFlow.

    Raises:
      ArgumentError: for shares of the batch, or stages, that do not fit so many devices.
      DeviceError: if there are not as many as a number asks for.
    """
    wanted_devices = options.devices
    devices = (
        names_of_devices(wanted_devices)
        if isinstance(wanted_devices, (str, tuple))
        else devices_of(options.mesh, wanted_devices)
    )
    shares, stages = options.shares, stages_asked(options, devices)
    heads = devices if stages is None else stages.heads
    count = len(heads if options.mesh.is_of_rows else device_mesh(options.mesh, devices).columns[0])
    if shares is not None and len(shares) != count:
        raise ArgumentError(shares_message(shares, count, "device" if stages is None else "pipeline"))
    default = options.tuning["default_device"]
    default_device = devices[0] if default is None else names_of_devices([default], "default_device")[0]
    return ChosenDevices(devices, default_device, options)


def stages_asked(options: Options, devices: Sequence[str]) -> StagesAsked | None:
    """Return the devices of each stage, one for each pipeline; None if no stages are asked for.

    Stages take the devices in order, pipeline after pipeline. Interleaved, they take all of them in turns. On a mesh
    each has a mesh of the other axes.

    Raises:
      ArgumentError: if so many devices do not make whole pipelines.
    """
    if options.stages is None:
        return None
    begins = options.stages if isinstance(options.stages, Beginnings) else None
    count = options.stages if isinstance(options.stages, int) else options.stages.count
    devices_text = count_text(len(devices), "device")
    groups: list[tuple[str, ...]] = [(device,) for device in devices]
    if options.mesh.stages:
        mesh = device_mesh(options.mesh, devices)
        groups, devices_text = [mesh.of_stage(stage_devices).by_row for stage_devices in mesh.stages], f"mesh {mesh}"
    if options.schedule == "interleaved":
        if count % len(groups) or count < 2 * len(groups):
            raise ArgumentError(
                f"stages={options.stages} with schedule='interleaved' on {devices_text}: each device has "
                f"several stages, {2 * len(groups)}, {3 * len(groups)} or more altogether. Choose one of these "
                "numbers, or '1f1b'."
            )
        devices_by_stage = [groups[stage % len(groups)] for stage in range(count)]
    elif options.mesh.stages:
        devices_by_stage = groups
    else:
        if len(devices) % count:
            raise ArgumentError(
                f"stages={options.stages} on {devices_text}: each of {count} stages has a device of its own "
                f"in each pipeline, so they need {count}, {2 * count} or more devices. Choose other devices or stages, "
                "or schedule='interleaved', which has several stages on each device."
            )
        devices_by_stage = [tuple(devices[stage::count]) for stage in range(count)]
    return StagesAsked(tuple(devices_by_stage), begins, gpu_memory_bytes(devices), bool(options.mesh.stages))


def check_no_others(program: Program, options: Options) -> None:
    """Raise `ArgumentError` if a function has stages of its own that is to be cut into stages."""
    own_stages = program.all_stages()
    if options.stages is not None and own_stages:
        option = f"mesh={options.mesh.asked!r}" if options.mesh.stages else f"stages={options.stages}"
        raise ArgumentError(
            f"{option} would cut the function into stages, but it already has stages from on_device:\n"
            f"{bullet_list(list(map(str, own_stages)))}\n"
            "Drop the stages, or on_device."
        )
