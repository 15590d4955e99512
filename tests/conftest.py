"""Five logical CPU devices for every test; TensorFlow starts here and nowhere else."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

import graphsplit as gs

DEVICES = 5

gs.use_logical_devices(DEVICES)
tf.config.list_logical_devices()  # starts TensorFlow


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    tf.keras.utils.set_random_seed(0)
