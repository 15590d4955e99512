"""Wrapped models answer: plans, placements and verdicts of their steps, `strict`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.calls import compilation
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import rows

ROWS = 7
KERASES = [pytest.param(keras, id="keras"), pytest.param(tf_keras, id="tf_keras", marks=pytest.mark.long)]


def wrapped(module=keras, devices=3, **options):
    layers = module.layers
    template = module.Sequential([layers.Input((4,)), layers.Dense(8, "relu"), layers.Dropout(0.5), layers.Dense(2)])
    model = gs.multi_gpu_model(template, devices, **options)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def data(count=ROWS):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 4)), random.normal(size=(count, 2))


@pytest.mark.parametrize("module", KERASES)
def test_plans_of_steps(module):
    model, (x, y) = wrapped(module), data()
    training, prediction = model.plan(x, y), model.plan(x)
    assert training.rows == prediction.rows == (3, 2, 2)
    assert {"MatMul", "ReluGrad"} <= {op.type for op in training.sharded_ops}
    assert "ReluGrad" not in {op.type for op in prediction.sharded_ops}
    assert "ReluGrad" not in {op.type for op in model.plan(x, y, step="test").sharded_ops}
    assert model.plan(x, y, np.ones(ROWS)).rows == (3, 2, 2)


def test_a_plan_changes_nothing():
    model, (x, y) = wrapped(), data()
    model.train_on_batch(x, y)

    def values():
        metrics = [variable for metric in model.metrics for variable in metric.variables]
        return [tf.identity(variable) for variable in (*model.variables, *model.optimizer.variables, *metrics)]

    before = values()
    model.plan(x, y)
    model.placement(x, y, step="test")
    assert gs.verify(model, x, y).passed
    for a, b in zip(before, values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("module", KERASES)
def test_specifications_as_a_batch(module):
    model = wrapped(module)
    plan = model.plan(tf.TensorSpec([ROWS, 4]), tf.TensorSpec([ROWS, 2]))
    assert plan.rows == (3, 2, 2)
    assert model.plan(tf.TensorSpec([None, 4])).rows == ()
    assert "planned for any batch size" in str(model.plan(tf.TensorSpec([None, 4])))


def test_without_a_batch_the_step_that_ran_most():
    model, (x, y) = wrapped(), data(20)
    with pytest.raises(gs.errors.ArgumentError) as error:
        model.plan()
    assert str(error.value) == (
        f"Without arguments, plan() and placement() describe the step that ran most, and {model.name!r} has run no "
        "step since it was wrapped and compiled. Pass a batch or tf.TensorSpecs: x and y for training, x alone for "
        "prediction."
    )
    model.fit(x, y, batch_size=6, epochs=2, verbose=0)
    model.predict(x, verbose=0)
    assert model.plan().batch == 6
    assert model.placement().title == f"{model.name}.train_step"
    assert model.plan(step="predict").batch == 20


def test_what_really_ran():
    model, (x, _) = wrapped(), data()
    placement = gs.placement(model, x, actual=True)
    assert set(placement.devices) == {"/device:CPU:0", "/device:CPU:1", "/device:CPU:2"}
    assert placement.rows == (3, 2, 2)
    placement.assert_on("shard_2/*", "CPU:2")
    assert model.placement(x, actual=True).actual


@pytest.mark.long
@pytest.mark.parametrize("module", [keras, tf_keras])
def test_what_ran_is_asked_about_after_another_step_ran(module):
    """A metric's variables are made in the first step, which lays them out: a prediction after it moves nothing."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.float32)
    histories = []
    for devices in (None, 3):
        module.utils.set_random_seed(1)
        model = module.Sequential([module.Input((4,)), module.layers.Dense(1, "sigmoid")])
        model = model if devices is None else gs.multi_gpu_model(model, devices, variables="sharded")
        model.compile("sgd", "binary_crossentropy", metrics=["AUC"])
        losses = [model.fit(x, y, batch_size=6, verbose=0).history["loss"]]
        model.predict(x, verbose=0)
        losses.append(model.fit(x, y, batch_size=6, verbose=0).history["loss"])
        histories.append(losses)
    np.testing.assert_allclose(*histories, rtol=1e-5)
    assert len(model.train_function.step._traces.all()) == 1
    made = [v if isinstance(v, tf.Variable) else v.value for metric in model.metrics for v in metric.variables]
    assert any(parts_of_variable(variable) is not None for variable in made)
    assert model.plan() is model.plan(x[:6], y[:6])


@pytest.mark.parametrize("rows", [12, 13])
@pytest.mark.parametrize("module", [keras, tf_keras])
def test_a_batch_that_ran_is_not_traced_again(module, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Keras' own code knows the rows of batches that are all alike; questions about one of these know them, too."""
    traced, trace = [], compilation.trace_function
    monkeypatch.setattr(compilation, "trace_function", lambda *a: traced.append(a) or trace(*a))
    model, (x, y) = gs.multi_gpu_model(module.Sequential([module.Input((4,)), module.layers.Dense(2)]), 3), data(rows)
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(x, y, batch_size=6, verbose=0)
    model.predict(x, batch_size=6, verbose=0)
    before = len(traced)
    ran = model.plan()
    assert model.plan(x[:6], y[:6]) is ran
    model.plan(x[:6])
    assert gs.verify(model, x[:6], y[:6]).passed
    assert len(traced) == before


@pytest.mark.parametrize("module", KERASES)
def test_verify(module):
    model, (x, y) = wrapped(module), data()
    report = gs.verify(model, x, y)
    assert report.passed, str(report)
    assert len(report.devices) == 3
    assert any("dense" in d.name for d in report.differences)
    assert len(gs.verify(model, x).differences) < len(report.differences)


def test_verify_takes_nothing_else():
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.verify(3, rows(3, 4))
    assert str(error.value) == (
        "verify takes a function made by parallelize or a model made by multi_gpu_model, got 3."
    )
    alone = gs.multi_gpu_model(wrapped().template, gpus=1)
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.verify(alone, *data())
    assert str(error.value) == (
        "verify takes a function made by parallelize or a model made by multi_gpu_model, got "
        f"{alone!r}. Write gs.verify(gs.multi_gpu_model(model, gpus=4), x, y). (On one device, multi_gpu_model gives "
        "back the model itself.)"
    )
    model = wrapped()
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.verify(model)  # (which has run no step)
    assert str(error.value) == "verify runs a step of the model: give it a batch, x and y."
    model.predict(data()[0], verbose=0)
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.verify(model)
    assert str(error.value) == "verify runs a step of the model: give it a batch, x and y."


class Counting(keras.layers.Layer):
    def call(self, x):
        return x + tf.cast(tf.size(tf.unique(tf.reshape(x, [-1])).y), x.dtype)


def test_strict():
    template = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2), Counting()])
    model = gs.multi_gpu_model(template, 3, strict=True)
    model.compile("sgd", "mse")
    with pytest.raises(gs.errors.StrictError, match="which entries are new depends on all rows"):
        model.fit(*data(), verbose=0)
    with pytest.raises(gs.errors.StrictError, match="which entries are new depends on all rows"):
        model.plan(*data())
    gs.multi_gpu_model(template, 3).predict(data()[0], verbose=0)
    with pytest.raises(gs.errors.ArgumentError, match="strict must be True or False, got"):
        gs.multi_gpu_model(template, 3, strict="yes")


def test_a_step_that_there_is_not_and_one_that_is_eager():
    model, (x, y) = wrapped(), data()
    with pytest.raises(gs.errors.ArgumentError) as error:
        model.plan(x, y, step="fit")
    assert str(error.value) == f"step='fit' of {model.name!r}: write 'train', 'test' or 'predict'."
    model.compile("adam", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="run_eagerly=True"), pytest.raises(gs.errors.ArgumentError) as error:
        model.plan(x, y)
    assert str(error.value) == (
        f"{model.name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device, and has no "
        "plan. Compile it without run_eagerly."
    )


def test_a_models_own_methods_stay_its_own():
    class Planner(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def plan(self, horizon):
            return horizon + 1

    template = Planner()
    template(np.ones((2, 4)))
    model = gs.multi_gpu_model(template, 2)
    assert model.plan(3) == 4
    assert gs.placement(model, np.ones((5, 4))).rows == (3, 2)


@pytest.mark.long
def test_a_plan_for_gpus_that_are_not_here():
    model, (x, y) = wrapped(devices=["GPU:0", "GPU:1"]), data()
    assert model.plan(x, y).devices == ("/device:GPU:0", "/device:GPU:1")
    with pytest.raises(gs.errors.DeviceError, match=r"^gpus=\['GPU:0', 'GPU:1'\]: GPU:0, GPU:1 do not exist\. This"):
        model.fit(x, y, verbose=0)
