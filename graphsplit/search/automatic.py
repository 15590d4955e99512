"""`memory=` and `plan="auto"`: what is asked, and the plan that is chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.device_mesh import LAYOUTS
from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.costs.machine import Machine
from graphsplit.costs.machine_files import known_machines
from graphsplit.costs.machine_files import machine as machine_of
from graphsplit.search.candidates import (
    Table,
    counts_of_devices,
    large_names,
    meshes_of,
    savings_left_open,
)
from graphsplit.search.plan_search import Choice, Search
from graphsplit.search.question import Question
from graphsplit.search.refusal import refuse

AS_THEY_ARE = "as they are"

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*$", re.IGNORECASE)
_UNITS = " KMGT"
_LEAST_BYTES = 1000  # a number below it is one of gigabytes, whose unit was forgotten


@dataclass(frozen=True)
class Automatic:
    """What is chosen automatically, and what that was told.

    Attributes:
      memory: bytes that each device may hold; None: as many as the machine's do.
      machine: by which speed is predicted; None: the one that looks like this.
      whole: whether the number of devices and stages are chosen as well: `plan="auto"`.
      lays_out: whether variables may be laid out; else they stay as they lie.
      on_mesh: whether they may be cut along an axis of a mesh, if none is given.
    """

    memory: float | None = None
    machine: str | os.PathLike[str] | Machine | None = None
    whole: bool = False
    lays_out: bool = True
    on_mesh: bool = True

    @property
    def given(self) -> dict[str, Any]:
        """The option that asks for it, for messages."""
        return {"plan": "auto"} if self.whole else {"memory": self.memory and int(self.memory)}


@dataclass(eq=False)
class Choices:
    """What was chosen for a function.

    Attributes:
      made: by arguments.
      changes: how often layouts of variables had changed by then; what was chosen before counts no more.
      ran: the last one that ran.
    """

    made: dict[Hashable, Choice] = field(default_factory=dict)
    changes: int = 0
    ran: Choice | None = None


def choose(question: Question, before: Choice | None = None) -> Choice:
    """Return the fastest plan that fits; the one that ran before, for other sizes, if it fits here, too.

    Raises:
      ArgumentError: if nothing fits: with what comes closest, and what would help.
    """
    search = Search(question)
    choice = (before and search.again(before.chosen)) or search.run()
    if choice is None:
        refuse(search)
    return choice


def table_for(
    automatic: Automatic,
    given: Mapping[str, Any],
    rows: int,
    devices: int,
    fewest: int,
    sizes: Mapping[str, int],
    slots: Sequence[str] = (),
) -> Table:
    """Return what may differ between plans.

    Args:
      automatic: what is asked.
      given: the options that the function has.
      rows: of the batch.
      devices: how many there are.
      fewest: the smallest number of devices: those on which variables lie.
      sizes: bytes of the variables that may be laid out, by name; nothing, if they lie in parts already.
      slots: those that may be on the host of the devices, if it has a memory of its own.
    """
    mesh = given["mesh"]
    savings = savings_left_open(given, -(-rows // (mesh.rows if mesh.axis else devices)))
    layouts = LAYOUTS if sizes and automatic.lays_out else (AS_THEY_ARE,)
    if mesh.axis:
        return Table((devices,), layouts, savings, meshes=(mesh,), is_on_mesh=True)
    may_be = automatic.on_mesh and layouts == LAYOUTS and not given["jit_compile"]
    meshes, own = meshes_of(devices, rows) if may_be else (), tuple(slots) if layouts == LAYOUTS else ()
    if not automatic.whole:
        return Table((devices,), layouts, savings, meshes=meshes, slots=own)
    stages = tuple([count for count in dict.fromkeys((devices, 2)) if count > 1 and devices % count == 0])
    large = large_names(sizes) if automatic.lays_out else ()
    return Table(counts_of_devices(fewest, devices), layouts, savings, stages, large, meshes, slots=own)


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
            "The search for a plan predicts speed, and the GPUs that the function is to run on are not here. Name the "
            "machine that has them: machine='8xA100-SXM4-80GB'; `graphsplit machines` lists all."
        )
    details = tf.config.experimental.get_device_details(gpus[0])
    model = str(details.get("device_name", "GPU"))
    found = machine_of_gpu(model)
    if found is not None:
        return found
    raise UnsupportedError(
        f"The search for a plan predicts speed, and no machine file describes {model!r}. Write one by "
        "`graphsplit calibrate -o here.toml`, and name it: machine='here.toml'."
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

    >>> parse_memory("40GB"), parse_memory("2GiB"), parse_memory(1000)
    (40000000000.0, 2147483648.0, 1000.0)
    """
    if memory is None:
        return None
    found = memory
    if match := _BYTES.match(memory) if isinstance(memory, str) else None:
        found = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS.index(match[2].upper() or " ")
    is_number = isinstance(found, (int, float, np.number)) and not isinstance(found, bool)
    if not is_number or not 0 < found < float("inf"):
        raise ArgumentError(
            f"memory={memory!r}: it is what each device may hold, a number of bytes above 0, or a text, '40GB' or "
            "'40GiB'."
        )
    if found is memory and found < _LEAST_BYTES:
        raise ArgumentError(f"memory={memory!r} is a number of bytes. Write memory='{memory}GB'.")
    return float(found)


def checked_automatic(plan: Any, memory: Any, machine: Any) -> Automatic | None:
    """Return what is to be chosen automatically; None if nothing is.

    Raises:
      ArgumentError: for options that cannot be meant.
    """
    if plan not in (None, "auto"):
        raise ArgumentError(f"plan={plan!r}: it is 'auto', for the fastest plan that fits, or None, for what you say.")
    if plan is None and memory is None:
        if machine is not None:
            raise ArgumentError(
                f"machine={machine!r} is that by which plans are compared. Give memory= or plan='auto' as well."
            )
        return None
    if machine is not None:
        machine_of(machine)
    return Automatic(parse_memory(memory), machine, plan is not None)
