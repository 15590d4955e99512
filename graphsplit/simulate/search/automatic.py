"""What a search for a plan compares, and by which machine: `memory=` and `plan="auto"`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.device_mesh import LAYOUTS
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import known_machines
from graphsplit.planning.options import Options
from graphsplit.simulate.search.candidates import (
    Table,
    counts_of_devices,
    large_names,
    meshes_of,
    savings_left_open,
)
from graphsplit.simulate.search.plan_search import Choice, Search
from graphsplit.simulate.search.question import Question
from graphsplit.simulate.search.refusal import refuse

AS_THEY_ARE = "as they are"


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
    options: Options,
    rows: int,
    devices: int,
    fewest: int,
    sizes: Mapping[str, int],
    slots: Sequence[str] = (),
) -> Table:
    """Return what may differ between plans.

    Args:
      options: those that the function has.
      rows: of the batch.
      devices: how many there are.
      fewest: the smallest number of devices: those on which variables lie.
      sizes: bytes of the variables that may be laid out, by name; nothing, if they lie in parts already.
      slots: those that may be on the host of the devices, if it has a memory of its own.
    """
    mesh = options.mesh
    savings = savings_left_open(options, -(-rows // (devices if mesh.is_of_rows else mesh.rows)))
    layouts = LAYOUTS if sizes and options.lays_out else (AS_THEY_ARE,)
    if not mesh.is_of_rows:
        return Table((devices,), layouts, savings, meshes=(mesh,), is_on_mesh=True)
    if options.stages is not None:
        return Table((devices,), layouts, savings)
    may_be = layouts == LAYOUTS and not options.jit_compile
    meshes, own = meshes_of(devices, rows) if may_be else (), tuple(slots) if layouts == LAYOUTS else ()
    if options.plan is None:
        return Table((devices,), layouts, savings, meshes=meshes, slots=own)
    stages = tuple([count for count in dict.fromkeys((devices, 2)) if count > 1 and devices % count == 0])
    large = large_names(sizes) if options.lays_out else ()
    return Table(counts_of_devices(fewest, devices), layouts, savings, stages, large, meshes, slots=own)


def machine_like(named: Machine | None, devices: Sequence[str]) -> Machine:
    """Return the machine by which speed is predicted: the one that is named, or the one that looks like this one.

    Raises:
      UnsupportedError: for GPUs that no machine file describes.
      ArgumentError: for a machine of another kind than the devices.
    """
    kind = devices[0].rpartition("device:")[2].partition(":")[0]
    if named is not None:
        found = named
    elif kind == "CPU":
        known = known_machines()["cpu"]
        found = replace(known, host=replace(known.host, threads=os.cpu_count() or 1))
    else:
        found = _gpu_machine()
    if found.device.kind != kind:
        raise ArgumentError(
            f"plan={found.name!r}: the machine has {found.device.kind} devices, but the function runs on "
            f"{devices[0]!r}. Name a machine of that kind, or other devices."
        )
    return replace(found, devices=max(found.devices, len(devices)))


def _gpu_machine() -> Machine:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise ArgumentError(
            "The search for a plan predicts speed, and this process has none of the GPUs that the function runs on. "
            "Name the machine that has them: plan='8xA100-SXM4-80GB'; `graphsplit machines` lists all."
        )
    details = tf.config.experimental.get_device_details(gpus[0])
    model = str(details.get("device_name", "GPU"))
    found = machine_of_gpu(model)
    if found is not None:
        return found
    raise UnsupportedError(
        f"The search for a plan predicts speed, and no machine file describes {model!r}. Write one by "
        "`graphsplit calibrate -o here.toml`, and name it: plan='here.toml'."
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
