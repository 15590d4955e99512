"""The devices of a function: those that its options ask for, whether this process has them or not."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from graphsplit.api.options import Options, weights_message
from graphsplit.api.pipeline_devices import stages_asked
from graphsplit.core.device_mesh import count_of, device_mesh
from graphsplit.core.devices import (
    check_existing,
    in_session_graph,
    missing_devices,
    names_of_devices,
    resolve_devices,
    short_name,
)
from graphsplit.core.errors import ArgumentError


@dataclass(frozen=True)
class ChosenDevices:
    """The devices of a function, full names.

    Attributes:
      devices: of the shards.
      home: of whole values that belong to nobody.
      options: that asked for them.
    """

    devices: tuple[str, ...]
    home: str
    options: Options

    @functools.cached_property
    def _missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(missing_devices([*self.devices, self.home])))

    @property
    def missing(self) -> tuple[str, ...]:
        """Those that are not there, so that there are plans and nothing runs; a session has devices of its own."""
        return self._missing if self._missing and not in_session_graph() else ()

    def check(self) -> None:
        """Raise `DeviceError` unless all of them are there."""
        if self.missing:
            asked, argument = self.options.devices, self.options.devices_argument
            if isinstance(asked, tuple):
                names = [short_name(name) for name in asked]
                asked = names[0] if argument == "device" and len(names) == 1 else names
            check_existing(self.devices, argument, asked)
            check_existing([self.home], "home", self.options.home)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says where some are missing."""
        if not self.missing:
            return ()
        names = ", ".join(map(short_name, self.missing))
        return (
            f"this process does not have {names}: planned for one that does, with the variables on "
            f"{short_name(self.home)}",
        )


def choose_devices(options: Options) -> ChosenDevices:
    """Return the devices that options ask for. Those that are named need not exist. Starts TensorFlow.

    Raises:
      ArgumentError: for shares of the batch, or stages, that do not fit so many devices.
      DeviceError: if there are not as many as a number asks for.
    """
    asked = count_of(options.mesh) if options.devices is None else options.devices
    devices = names_of_devices(asked) if isinstance(asked, (str, tuple)) else resolve_devices(asked)
    weights, stages = options.weights, stages_asked(options, devices)
    heads = device_mesh(options.mesh, devices).columns[0] if options.mesh else devices
    count = len(heads if stages is None else stages.heads)
    if weights is not None and len(weights) != count:
        raise ArgumentError(weights_message(weights, count, "device" if stages is None else "pipeline"))
    home = devices[0] if options.home is None else names_of_devices([options.home], "home")[0]
    return ChosenDevices(devices, home, options)
