"""Small models under `keras.distribution`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import graphsplit as gs
from tests.helpers.keras_cases import OPTIMIZERS

layers, distribution = keras.layers, keras.distribution
ROWS = 16  # two batches of 8, one trace; `CASES` have 19 rows, whose last batch has 3


@pytest.fixture(autouse=True, name="enabled")
def fixture_enabled() -> Iterator[gs.keras.KerasDistribution]:
    with gs.keras.enable_distribution() as switched_on:
        yield switched_on
        distribution.set_distribution(None)


def parallel(count: int) -> distribution.DataParallel:
    return distribution.DataParallel(devices=[f"cpu:{d}" for d in range(count)])


def small(seed: int = 1, inputs: bool = True) -> keras.Model:
    """Return a model with dropout, of which each layer has a gradient that is not zero; not built without `inputs`."""
    keras.utils.set_random_seed(seed)
    first = [layers.Input((6,))] if inputs else []
    return keras.Sequential([*first, layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(3)])


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 3)).astype("float32")


def compiled(model: keras.Model, optimizer: str = "adam", **options: Any) -> keras.Model:
    """Compile; make the slots of a built model, since a step that makes them is traced twice."""
    model.compile(OPTIMIZERS[optimizer](), **{"loss": "mse", "metrics": ["mae"], **options})
    if model.built:
        model.optimizer.build(model.trainable_variables)
    keras.utils.set_random_seed(2)
    return model


def numbers_of(history: Any) -> list[tuple[str, Any]]:
    return sorted(history.history.items())
