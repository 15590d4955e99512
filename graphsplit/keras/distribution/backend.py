"""What Keras asks of a backend for `keras.distribution`: devices, processes, how values lie. One process drives all."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name, names_of_devices, task_of
from graphsplit.core.keras_internals import tensorflow_distribution
from graphsplit.core.tensorflow_internals import own_task
from graphsplit.errors import ArgumentError, UnsupportedError


def list_devices_with(original: Any) -> Any:
    """Return Keras' `list_devices`, which in a cluster gives full names: each worker's first CPU is a "cpu:0" there."""

    def list_devices(device_type: str | None = None) -> list[str]:
        if own_task() is None:
            found: list[str] = original(device_type)
            return found
        kind = None if device_type is None else device_type.upper()
        devices = tf.config.list_logical_devices(kind)
        others = [device for device in devices if device.device_type != "CPU"] if kind is None else []
        names = [canonical_name(device.name) for device in others or devices]
        return [name for name in names if task_of(name) is not None] or names  # a client has no rows to compute

    return list_devices


def get_device_count(device_type: str | None = None) -> int:
    """Return how many devices the backend lists now."""
    return len(tensorflow_distribution().list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,  # noqa: ARG001  # (Keras' signature)
) -> None:
    """Do nothing for one process, and say what to do for several.

    Raises:
      ArgumentError: if there are so many addresses, and so many processes are not.
      UnsupportedError: for several processes.
    """
    jobs = job_addresses.split(",") if job_addresses else []
    if len(jobs) > 1 and num_processes is not None and num_processes != len(jobs):
        raise ArgumentError(f"{job_addresses!r} has {len(jobs)} jobs, but num_processes is {num_processes}.")
    if not jobs and (num_processes or 1) == 1:
        return
    asked = job_addresses or f"{num_processes} processes"
    raise UnsupportedError(
        f"keras.distribution.initialize: {asked!r} asks for a process on each machine that runs this program. With "
        "graphsplit one process uses the devices of all: start `graphsplit worker` on each machine and call "
        "graphsplit.connect([addresses]) here; keras.distribution.list_devices() then returns their devices."
    )


def num_processes() -> int:
    """Return 1: one process drives all devices, other machines' too."""
    return 1


def process_id() -> int:
    """Return 0: there is one process."""
    return 0


def distribute_value(value: Any, layout: Any) -> Any:  # noqa: ARG001
    """Return the value; the step that reads it divides it."""
    return value


def distribute_data_input(batch: Any, layout: Any, batch_dim_name: str) -> Any:  # noqa: ARG001
    """Return the batch, which is the global one; the step that reads it divides it."""
    return batch


def to_backend_device(name: str) -> str:
    """Return a device's full name."""
    return canonical_name(str(name))


def to_backend_mesh(mesh: Any) -> tuple[str, ...]:
    """Return the full names of a mesh's devices, in its order. They need not be here: there are plans of others."""
    return names_of_devices([str(name) for name in mesh.devices.flatten()])


def to_backend_layout(layout: Any) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Return the axes of a layout, and its mesh.

    Raises:
      ValueError: if it has no mesh, as Keras' other backends do.
    """
    if layout.device_mesh is None:
        raise ValueError("Cannot create sharding when device mesh is not set for TensorLayout.")
    return layout.axes, layout.device_mesh.backend_mesh
