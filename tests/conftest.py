"""Five logical CPU devices for every test; TensorFlow starts here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture
def plain_oracle() -> Iterator[None]:
    """Let a `tf.function` compute what was written.

    TensorFlow's graph optimizer, which graphsplit leaves out on CPUs, turns divisions by constants into products with
    their reciprocals. In Adam's float32 scalars that is 1e-9 in a float64 model, a thousand times what is tested.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before["disable_meta_optimizer"]})
