"""Keras under a dtype policy, as a parameter of a test."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make layers of the policy that the test is given, indirectly, by its name."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)
