"""`plan="auto"`: what it is told, and the machine by which speed is predicted; `plan_search` compares."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.costs.machine import Machine
from graphsplit.costs.machine_files import known_machines
from graphsplit.costs.machine_files import machine as machine_of

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B\s*$")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Automatic:
    """What `plan="auto"` was told besides.

    Attributes:
      memory: bytes that each device has; None: as many as the machine's do.
      machine: by which speed is predicted; None: the one that looks like this.
    """

    memory: float | None = None
    machine: str | os.PathLike[str] | Machine | None = None


def machine_like(automatic: Automatic, devices: Sequence[str]) -> Machine:
    """Return the machine by which speed is predicted: the one named, or that which looks like this one.

    Raises:
      UnsupportedError: for GPUs that no machine file describes.
      ArgumentError: for a machine of another kind than the devices.
    """
    kind = devices[0].rpartition("device:")[2].partition(":")[0]
    if automatic.machine is not None:
        found = machine_of(automatic.machine)
    elif kind == "CPU":
        known = known_machines()["cpu"]
        found = replace(known, host=replace(known.host, threads=os.cpu_count() or 1))
    else:
        found = _gpu_machine()
    if found.device.kind != kind:
        raise ArgumentError(
            f"machine={found.name!r} has {found.device.kind} devices, and the function is to run on {devices[0]!r}. "
            "Name a machine of that kind, or other devices."
        )
    return replace(found, devices=max(found.devices, len(devices)))


def _gpu_machine() -> Machine:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise ArgumentError(
            "plan='auto' predicts speed, and the GPUs that the function is to run on are not here. Name the machine "
            "that has them: machine='8xA100-SXM4-80GB'; `graphsplit machines` lists all."
        )
    details = tf.config.experimental.get_device_details(gpus[0])
    model = str(details.get("device_name", "GPU"))
    found = machine_of_gpu(model)
    if found is not None:
        return found
    raise UnsupportedError(
        f"plan='auto' predicts speed, and no machine file describes {model!r}. Write one by `graphsplit calibrate -o "
        "here.toml`, and name it: machine='here.toml'."
    )


def machine_of_gpu(model: str) -> Machine | None:
    """Return the machine with a model of GPU, as the driver calls that; of several variants the most like it.

    >>> machine_of_gpu("NVIDIA A100-SXM4-80GB").device.name
    'A100-SXM4-80GB'
    """
    words = re.split(r"[\s-]", model)
    named = [(found.device.name.split("-"), found) for found in known_machines().values()]
    alike = [(sum(part in words for part in parts), found) for parts, found in named if parts[0] in words]
    return max(alike, key=lambda pair: pair[0])[1] if alike else None


def parse_memory(memory: Any) -> float | None:
    """Return how many bytes `memory` says.

    >>> parse_memory("40GB"), parse_memory(1000)
    (40000000000.0, 1000.0)
    """
    if memory is None:
        return None
    match = _BYTES.match(memory) if isinstance(memory, str) else None
    if match:
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < float("inf"):
        raise ArgumentError(f"memory={memory!r}: it is a number of bytes, or a text like '40GB', for each device.")
    return float(memory)


def checked_automatic(plan: Any, memory: Any, machine: Any) -> Automatic | None:
    """Return the options of an automatic plan; None if none is asked for.

    Raises:
      ArgumentError: for options that cannot be meant.
    """
    if plan not in (None, "auto"):
        raise ArgumentError(f"plan={plan!r}: it is 'auto', for the fastest plan that fits, or None, for what you say.")
    if plan is None:
        for name, value in (("memory", memory), ("machine", machine)):
            if value is not None:
                raise ArgumentError(f"{name}={value!r} is used by plan='auto' only. Give that as well.")
        return None
    if machine is not None:
        machine_of(machine)
    return Automatic(parse_memory(memory), machine)
