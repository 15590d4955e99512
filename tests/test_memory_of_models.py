"""`multi_gpu_model(memory=...)`: the first batch of training chooses; what follows finds variables as they are."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.simulate.search.plan_search import Search
from tests.helpers.layout_cases import held_by_device
from tests.helpers.messages import raises

X = np.random.default_rng(0).normal(size=(38, 16)).astype(np.float32)  # batches of 16, 16 and 6, on 3 devices
Y = 2 * X[:, :1]


def made() -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(64, "relu", name=f"hidden_{k}") for k in range(3)]
    return keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dropout(0.2), keras.layers.Dense(1)])


def state_of(model: keras.Model) -> int:
    return sum(int(np.prod(v.shape)) * 4 for v in [*model.variables, *model.optimizer.variables])


@pytest.mark.long
def test_a_model_is_fitted_under_a_limit_of_memory(monkeypatch):
    searches = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: searches.append(self) or run(self))
    alone, template = made(), made()
    alone.compile("adam", "mse")
    expected = alone.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history["loss"]
    model = gs.multi_gpu_model(template, gpus=3, memory=state_of(alone))
    model.compile("adam", "mse")
    assert np.shape(model.predict(X, batch_size=38, verbose=0)) == (38, 1)
    assert all(parts_of_variable(v.value) is None for v in template.variables), "training chooses where variables live"
    del searches[:]
    found = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history["loss"]
    assert len(searches) == 1, "the last, smaller batch runs by what was chosen"
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for own, other in zip(template.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    held = held_by_device([own.value for own in [*template.variables, *template.optimizer.variables]])
    assert len(held) == 3
    assert max(held.values()) < 0.5 * state_of(alone)
    losses = [own.evaluate(X, Y, batch_size=38, verbose=0) for own in (model, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert "variables as they are" in model.plan(X).explain()


def test_an_optimizer_of_its_own_is_not_needed():
    """Without training the first batch chooses."""
    template = made()
    model = gs.multi_gpu_model(template, gpus=2, memory="1MB")
    scores = [own.predict(X, batch_size=38, verbose=0) for own in (model, template)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-6)
    assert "chosen automatically: 2 devices" in model.plan(X).explain()


@pytest.mark.long
def test_nothing_fits_and_a_plan_for_other_devices():
    template = made()
    template.compile("adam", "mse")
    model = gs.multi_gpu_model(template, gpus=2, memory="20kB")
    with pytest.raises(gs.errors.ArgumentError, match=r"does not fit: each device may hold 20\.0 kB"):
        model.fit(X, Y, batch_size=16, verbose=0)
    gpus = [f"GPU:{k}" for k in range(8)]
    plan = gs.multi_gpu_model(made(), gpus=gpus, plan="8xA100-SXM4-80GB").plan(X)
    assert "predicted for 8xA100-SXM4-80GB" in plan.explain()


def test_weights_that_stay_on_the_cpu():
    with raises(
        gs.errors.ArgumentError,
        "cpu_relocation=True keeps the weights on the CPU, memory='1kB' chooses where they are. Choose one.",
    ):
        gs.multi_gpu_model(made(), gpus=2, cpu_relocation=True, memory="1kB")
