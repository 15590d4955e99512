"""Stages of Keras models, by number and by names of layers: fit, evaluate and predict as on one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import graphsplit as gs
from graphsplit.keras.batches import parts_of_batch
from graphsplit.planning.schedule.schedules import KINDS
from tests.helpers.float64 import EXACT, float64
from tests.helpers.keras_cases import CASES, OPTIMIZERS, assert_same, fit, state
from tests.helpers.messages import message

__all__ = ["float64"]


@pytest.fixture(params=[keras, tf_keras], ids=["keras", "tf_keras"])
def flavor(request: Any) -> Iterator[Any]:
    """Both Kerases, in numbers of which rounding changes nothing that is compared."""
    found, floatx = request.param, request.param.backend.floatx()
    policies = keras.config if found is keras else tf_keras.mixed_precision
    get, put = ("dtype_policy", "set_dtype_policy") if found is keras else ("global_policy", "set_global_policy")
    policy = getattr(policies, get)()
    found.backend.set_floatx("float64")
    getattr(policies, put)("float64")  # (once set, it no longer follows floatx)
    yield found
    found.backend.set_floatx(floatx)
    getattr(policies, put)(policy)


def network(flavor: Any) -> Any:
    """Return a compiled model with two ways through it, names that begin like others, and layers without work."""
    flavor.utils.set_random_seed(5)
    layers = flavor.layers
    given = layers.Input((6,), name="given")
    h = layers.Dense(8, "tanh", name="block1")(given)
    h = layers.Dense(8, "tanh", name="block1_1")(h)
    skip = h
    h = layers.BatchNormalization(name="block2_norm")(layers.Dense(8, use_bias=False, name="block2_dense")(h))
    h = layers.Dropout(0.3 if flavor is keras else 0.0, name="drop")(h)  # (Keras 2 draws from a state of the process)
    h = layers.Add(name="sum")([h, skip])
    model = flavor.Model(given, layers.Dense(2, name="out")(h), name="net")
    model.compile(flavor.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def run(model: Any) -> list[Any]:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((11, 6)), rng.standard_normal((11, 2))
    history = model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False).history
    scores = model.evaluate(x, y, batch_size=8, verbose=0)
    return [*sorted(history.items()), scores, model.predict(x, batch_size=8, verbose=0), *model.get_weights()]


def assert_as_one(flavor: Any, **options: Any) -> Any:
    """Compare a wrapped model with one that is not; return the plan of a training step."""
    expected, model = run(network(flavor)), gs.multi_gpu_model(network(flavor), **options)
    for a, b in zip(run(model), expected, strict=True):
        a, b = (a[1], b[1]) if isinstance(a, tuple) else (a, b)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    x, y = np.ones((8, 6)), np.ones((8, 2))
    step = model._step("train")
    return step.plan(*parts_of_batch((x, y)))


def stages_of_layers(plan: gs.inspect.Plan) -> list[set[str]]:
    """Return which products and sums each stage runs forward."""
    found: list[set[str]] = [set() for _ in plan.stage_starts.stages]
    for op in plan.sharded_ops:
        stage = op.stage
        if op.type in ("MatMul", "AddV2") and not op.provenance.backward:
            found[int(stage.name)].add(op.name.split("/")[1])
    return found


@pytest.mark.sampled(1)
def test_stages_begin_at_layers(flavor: Any):
    """The last one at a layer that computes nothing while predicting: then it begins with the next."""
    plan = assert_as_one(flavor, gpus=3, stages=["drop", "block1_*"], micro_batches=2, schedule="1f1b")
    assert [cut.asked for cut in plan.stage_starts.stages] == ["", "block1_*", "drop"]
    suffix = ["_1", "_2"] if flavor is keras else ["", ""]
    first, second, third = stages_of_layers(plan)
    assert first == {"block1" + suffix[0]}
    assert {"block1_1" + suffix[1], "block2_dense" + suffix[0]} <= second
    assert {"sum" + suffix[0], "out" + suffix[0]} <= third
    assert "named by 'block1_*'" in str(plan)


@pytest.mark.long
def test_a_number_of_stages(flavor: Any):
    plan = assert_as_one(flavor, gpus=4, stages=2, micro_batches=3, schedule="zero-bubble")
    assert len(plan.stage_starts.stages) == 2


def test_stages_that_cannot_be(flavor: Any):
    model = network(flavor)
    assert message(gs.errors.ArgumentError, lambda: gs.multi_gpu_model(model, 2, stages=["block4_*"])) == (
        "stages=['block4_*']: no layer of 'net' has a name that fits 'block4_*'. Its layers are:\n  - given\n"
        "  - block1\n  - block1_1\n  - block2_dense\n  - block2_norm\n  - drop\n  - sum\n  - out"
    )
    for stages in ([], "block2_*", [3], 1.5):
        assert message(gs.errors.ArgumentError, lambda stages=stages: gs.multi_gpu_model(model, 2, stages=stages)) == (
            f"stages={stages!r}: stages of a model are a number, at least 1, or patterns of names of the layers at "
            "which new stages begin, ['block4_*', 'block9_*']."
        )
    assert message(gs.errors.ArgumentError, lambda: gs.multi_gpu_model(model, 3, stages=["out"])) == (
        "stages=['out'] on 3 devices: each of 2 stages has a device of its own in each pipeline, so they need 2, 4 or "
        "more devices. Choose other devices or stages, or schedule='interleaved', which has several stages on each "
        "device."
    )
    wrapped = gs.multi_gpu_model(model, 3, stages=["block1", "block1_1"])
    assert message(gs.errors.ArgumentError, lambda: wrapped.predict(np.ones((4, 6)), verbose=0)) == (
        "stages=['block1', 'block1_1']: each stage needs a beginning of its own.\n"
        "  - 'block1' begins with the function, with which the first stage begins\n"
        "Name layers at which new stages begin, behind the first one."
    )


@pytest.mark.long
@pytest.mark.usefixtures("plain_oracle", "float64")
@pytest.mark.parametrize(
    ("number", "name", "optimizer"), [(i, n, o) for i, (n, o) in enumerate(itertools.product(CASES, OPTIMIZERS))]
)
def test_every_kind_of_model_in_stages(number: int, name: str, optimizer: str):
    """Fit and predict in two stages, with schedules and numbers of micro-batches in turn."""
    case, kind = CASES[name], [*KINDS, None][number % (len(KINDS) + 1)]
    count = 4 if kind == "interleaved" else 2
    asked = {"gpus": 2 * (1 + number % 2) if kind != "interleaved" else 2, "stages": count, "schedule": kind}
    options = {"batch_size": (7, 8, 3)[number % 3], "validation_data": case.data()}
    single, expected = fit(case, optimizer, 1, **options)
    model, history = fit(case, optimizer, {**asked, "micro_batches": 1 + number % 4}, **options)
    assert_same(list(history.items()), list(expected.items()), EXACT)
    assert_same(state(model), state(single), EXACT)
    x, _ = case.data()
    pairs = zip(*(keras.tree.flatten(m.predict(x, verbose=0)) for m in (model, single)), strict=True)
    for a, b in pairs:
        assert_same([("prediction", a)], [("prediction", b)], EXACT)
    plan = model.train_function.plan()
    plan.check()
    assert len(plan.stage_starts.stages) == count or plan.batch == 1  # of which a recurrent layer runs at home
