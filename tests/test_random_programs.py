"""Random programs on several devices against one. A rule that is only nearly right makes some seed fail."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from graphsplit.emission.emitter import emit
from tests.helpers.law import assert_law
from tests.helpers.sampler import sample_arguments, sample_program

SEEDS = 40
TOLERANCE = {tf.float32: 2e-4, tf.float64: 1e-10}
SPLIT = {"x": 0, "y": 0, "z": 1, "ids": 0}


def run(seed: int) -> None:
    rng = np.random.default_rng(10_000 + seed)
    dtype = tf.float32 if rng.random() < 0.3 else tf.float64
    devices = int(rng.integers(1, 6))
    rows = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 13, 33]))
    weights = rng.integers(1, 4, devices).tolist() if rng.random() < 0.3 else None
    plan = assert_law(
        lambda: sample_program(seed, dtype),
        [sample_arguments(seed + i, rows, dtype) for i in range(2)],
        devices=devices,
        at_home=None,
        tolerance=TOLERANCE[dtype],
        split=SPLIT,
        weights=weights,
    )
    emit(plan).check()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_program(seed: int) -> None:
    run(seed)
