"""Logical GPUs: several devices out of each GPU, before TensorFlow starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.gpus.nvidia_driver import smallest_memory_mb
from graphsplit.core.tensorflow_internals import eager_context_started
from graphsplit.errors import DeviceError


def has_gpus() -> bool:
    """Return whether TensorFlow has a GPU to use: one that is there and was not hidden."""
    return bool(tf.config.get_visible_devices("GPU"))


def count_gpus() -> int:
    """Return how many GPU devices this process has, or will have when TensorFlow starts; it does not start here."""
    gpus = tf.config.get_visible_devices("GPU")
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)


def gpu_memory_bytes(devices: Sequence[str]) -> int | None:
    """Return the memory of the smallest of these GPUs of this process; None for other devices, or if it is not told."""
    if not all(name.startswith("/device:GPU:") for name in devices):
        return None
    gpus = tf.config.get_visible_devices("GPU")
    limits = [cut.memory_limit for gpu in gpus for cut in tf.config.get_logical_device_configuration(gpu) or ()]
    known = min(limits) if limits and None not in limits else smallest_memory_mb()
    return None if known is None else known * 2**20


def cut_gpus(count: int, memory_mb: int) -> tuple[str, ...]:
    """Divide the GPUs that TensorFlow may use into `count` logical ones: see `use_logical_devices`."""
    asked = f"use_logical_devices({count}, kind='GPU', memory_mb={memory_mb})"
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        raise DeviceError(
            f"{asked} divides GPUs, and TensorFlow finds none here; `graphsplit doctor` says what it finds. To try "
            f"several devices without GPUs: use_logical_devices({count})."
        )
    shares = [count // len(gpus) + (i < count % len(gpus)) for i in range(len(gpus))]
    if eager_context_started():
        _check_started(asked, gpus, [memory_mb] * count)
    else:
        _check_memory(asked, max(shares), memory_mb)
        used = {gpu: share for gpu, share in zip(gpus, shares, strict=True) if share}
        tf.config.set_visible_devices(list(used), "GPU")
        for gpu, share in used.items():
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)
            tf.config.set_logical_device_configuration(gpu, [limit] * share)
    return tuple(f"GPU:{i}" for i in range(count))


def _check_memory(asked: str, most: int, memory_mb: int) -> None:
    """Raise `DeviceError` if a GPU would have to hold more than it has. (TensorFlow would fail at its first tensor.)"""
    there = smallest_memory_mb()
    if there is not None and most * memory_mb > there:
        raise DeviceError(
            f"{asked}: {most} logical GPUs of {memory_mb} MB on one GPU need {most * memory_mb} MB, and it has "
            f"{there} MB, of which the driver keeps some hundred. Give memory_mb={there * 9 // 10 // most} or less."
        )


def _check_started(asked: str, gpus: list[tf.config.PhysicalDevice], wanted: list[int]) -> None:
    found = [cut.memory_limit for gpu in gpus for cut in tf.config.get_logical_device_configuration(gpu) or ()]
    if found != wanted:
        how = f" of {', '.join(map(str, dict.fromkeys(found)))} MB" if found else ", which are not divided"
        raise too_late(asked, "GPU", how)


def too_late(asked: str, kind: str, how: str = "") -> DeviceError:
    """Return the error for what was asked when TensorFlow had already started with devices of a kind."""
    existing = len(tf.config.list_logical_devices(kind))
    first = "Call it first in the program, before any tensor, variable or model is made."
    if "ipykernel" in sys.modules:
        first = "Restart the notebook's runtime and run this cell first, before any that makes a tensor or model."
    found: DeviceError = DeviceError(
        f"{asked} was called after TensorFlow had started with {existing} {kind} device{'s' if existing != 1 else ''}"
        f"{how}; devices are fixed from then on. {first}"
    )
    return found
