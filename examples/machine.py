"""The devices that the examples run on."""

from __future__ import annotations

import tensorflow as tf

import graphsplit as gs


def devices(count: int) -> tuple[str, ...]:
    """Return the first `count` GPUs or, on a machine without any, that many new logical CPU devices."""
    if not tf.config.list_physical_devices("GPU"):
        gs.use_logical_devices(count)
    return gs.available_devices()[:count]
