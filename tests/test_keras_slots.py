"""The slots of an optimizer begin as on one device, under every layout of the variables."""

from __future__ import annotations

import re
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import graphsplit as gs

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6)), RNG.normal(size=(8, 1))


class Slow(keras.optimizers.SGD):  # type: ignore[misc]
    """Every second step goes back half of the way to where it was."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow = [self.add_variable_from_reference(variable, name="slow") for variable in variables]
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign(variable)

    def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
        super().update_step(gradient, variable, rate)
        slow = self.slow[self._get_variable_index(variable)]
        back = keras.ops.cast(self.iterations % 2 == 1, "float32") * 0.5
        variable.assign(variable - back * (variable - slow))
        slow.assign(keras.ops.where(back > 0, variable, slow))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variables", ["home", "replicated", "sharded", "host"])
@pytest.mark.parametrize("built", [False, True])
def test_slots_begin_as_keras_has_them(variables: str, built: bool):
    """Keras builds an optimizer in the graph of a step, where what `build` assigns is lost; and says nothing."""
    losses, told = [], []
    for options in (None, {"gpus": 2, "variables": variables}):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer, made = Slow(0.05), gs.multi_gpu_model(made, **options) if options else made
        made.compile(optimizer, "mse")
        if built:
            optimizer.build(made.trainable_variables)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses.append(made.fit(X, Y, batch_size=8, epochs=4, verbose=0).history["loss"])
        told = [str(warning.message) for warning in caught if "Slow.build" in str(warning.message)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len(told) == (not built and variables != "home")
    assert all(re.search(r"slow.* and 1 more.*optimizer\.build\(model\.trainable_variables\)", text) for text in told)
