"""GPUs of a measurement: how one is divided among contestants, and how much memory each took."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from graphsplit.core.gpus import NoDriverAnswerError, read_driver, smallest_memory_mb

_SPARE = 0.9  # CUDA itself takes some hundred MiB in each process


def memory_of_each(devices: int, contestants: Sequence[str]) -> int | None:
    """Return the MiB of each logical GPU, if GPUs have to be divided to be so many; else None.

    All contestants' processes exist at the same time: the plain one with one device, each other with all of them.

    Raises:
      typer.BadParameter: if there is no GPU, or it is not known how much memory one has.
    """
    try:
        gpus = len(read_driver().gpus)
    except NoDriverAnswerError as error:
        raise typer.BadParameter(f"no GPU to measure on, {error}; `graphsplit doctor` says what it finds") from None
    if gpus >= devices:
        return None
    there, most = smallest_memory_mb(), sum(-(-(1 if name == "plain" else devices) // gpus) for name in contestants)
    if there is None:
        raise typer.BadParameter("the driver does not tell a GPU's memory; say what each gets, --memory-mb 2000")
    return int(there * _SPARE) // most


def make_devices(devices: int, kind: str, memory_mb: int | None = None, threads: int | None = 1) -> list[str]:
    """Make so many devices of a kind, "cpu" or "gpu", exist in this process, and return their names.

    An operation has so many threads on a CPU device; None for TensorFlow's default, all cores.
    """
    import tensorflow as tf

    import graphsplit as gs

    if kind == "cpu":
        gs.use_logical_devices(devices, threads_per_device=threads)
        return [f"CPU:{d}" for d in range(devices)]
    if memory_mb is not None:
        return list(gs.use_logical_devices(devices, kind="GPU", memory_mb=memory_mb))
    found = len(tf.config.list_physical_devices("GPU"))
    if found < devices:
        raise LookupError(f"{devices} GPUs asked for, {found} here")
    return [f"GPU:{d}" for d in range(devices)]


def reset_peaks(devices: Sequence[str]) -> None:
    """Forget how much memory GPUs held so far."""
    import tensorflow as tf

    for device in devices:
        if device.startswith("GPU"):
            tf.config.experimental.reset_memory_stats(device)


def peak_bytes(devices: Sequence[str]) -> dict[str, int]:
    """Return the most memory that tensors took on each GPU since `reset_peaks`."""
    import tensorflow as tf

    gpus = [device for device in devices if device.startswith("GPU")]
    return {device: int(tf.config.experimental.get_memory_info(device)["peak"]) for device in gpus}
