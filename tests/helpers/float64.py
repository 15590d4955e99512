"""Keras in float64, in which a sum in another order differs by 1e-15: what differs by more is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest

EXACT = 1e-11  # a few hundred roundings, and a division by something small


@pytest.fixture
def float64() -> Iterator[None]:
    """Make layers, losses, metrics and optimizers of float64 numbers."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
