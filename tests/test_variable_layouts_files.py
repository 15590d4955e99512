"""Variables in parts: files, Keras' fit, and the page do not know of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    keras_model,
    numbers,
)


def test_files_do_not_know_of_it(tmp_path: Path):
    module = tf.Module()
    module.weight = tf.Variable(numbers(30, 40), name="weight")
    value = module.weight.numpy()
    gs.set_variable_layout(module, "sharded", 3)
    gs.parallelize(lambda x: x @ module.weight, devices=3)(numbers(2, 30))
    tf.train.Checkpoint(m=module).write(str(tmp_path / "saved"))
    other = tf.Module()
    other.weight = tf.Variable(tf.zeros((30, 40)))
    tf.train.Checkpoint(m=other).read(str(tmp_path / "saved")).assert_consumed()
    np.testing.assert_array_equal(other.weight.numpy(), value)
    gs.set_variable_layout(other, "sharded", 5)
    apply = gs.parallelize(lambda x: x @ other.weight, devices=5)
    apply(numbers(2, 30))
    module.weight.assign(tf.ones((30, 40)))
    tf.train.Checkpoint(m=module).write(str(tmp_path / "ones"))
    tf.train.Checkpoint(m=other).read(str(tmp_path / "ones"))
    assert_close(apply(tf.ones((2, 30))), tf.fill((2, 40), 30.0))


def never_whole(*_: Any) -> None:
    raise AssertionError("a variable in parts was put together")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_saved_models(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch):
    module, x = tf.Module(), numbers(4, 30)
    module.weight, module.calls = tf.Variable(numbers(30, 40), name="weight"), tf.Variable(tf.zeros(40))

    def scores(x: Any) -> Any:
        return x @ module.weight

    @tf.function
    def count(x: Any) -> Any:
        if tf.reduce_sum(x) > -1e9:
            module.calls.assign_add(tf.ones(40))
        return module.inner(x) + module.calls

    parallel = gs.parallelize(scores, devices=3)
    module.inner, module.count = tf.function(scores), count
    module.before = tf.function(scores).get_concrete_function(x)
    module.serve = tf.function(scores, input_signature=[tf.TensorSpec((None, 30))])
    module.several = tf.function(lambda x: parallel(x))
    gs.set_variable_layout(module, layout, 3)
    module.after = tf.function(scores).get_concrete_function(x)
    functions = ("inner", "before", "after", "serve", "several")
    expected = scores(x)
    module.count(x)
    module.several(x)
    parallel(x)  # (the parts have the value)
    with monkeypatch.context() as patch:
        if layout == "sharded":
            patch.setattr(VariableParts, "put_together", never_whole)
        tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.serve)
        assert parts_of_variable(module.weight).in_parts  # type: ignore[union-attr]
        assert parallel.plan(x).state.parts  # (not the one that was traced for the file)
        assert_close(parallel(x), expected)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    for model in (loaded, module):
        assert_close(model.count(x), expected + 2.0)
        for name in functions:
            assert_close(getattr(model, name)(x), expected, name)
    assert_close(loaded.signatures["serving_default"](x)["output_0"], expected)
    module.weight.assign(2.0 * module.weight)
    for name in functions:
        assert_close(getattr(module, name)(x), 2.0 * expected, name)
    assert b"part_" not in (tmp_path / "model" / "saved_model.pb").read_bytes()


MESH = {"mesh": {"batch": 2, "model": 2}, "variables": {"*up/kernel": (None, "model"), "*": "home"}}


@pytest.mark.long
@pytest.mark.parametrize("options", [{"gpus": 3, "variables": "sharded"}, MESH], ids=["sharded", "mesh"])
def test_keras_models_are_exported_and_train_on(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    x, y = numbers(5, 20), numbers(5, 2)

    def trained(**options: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((20,)), keras.layers.Dense(64, "relu", name="up"), keras.layers.Dense(2)]
        template = keras.Sequential(layers)
        model = gs.multi_gpu_model(template, **options) if options else template
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
        return template, model

    template, model = trained(**options)
    expected = model.predict(x, verbose=0)
    parts = [own for v in model.variables if (own := parts_of_variable(v.value)) is not None]
    with monkeypatch.context() as patch:
        patch.setattr(VariableParts, "put_together", never_whole)
        model.export(str(tmp_path / "wrapped"), verbose=False)
        template.export(str(tmp_path / "template"), verbose=False)
        tf.saved_model.save(model, str(tmp_path / "saved"))
        assert [own.in_parts for own in parts] == [True] * len(parts) != []
        model.fit(x, y, verbose=0)
    for name in ("wrapped", "template", "saved"):
        [scores] = tf.saved_model.load(str(tmp_path / name)).signatures["serving_default"](x).values()
        assert_close(scores, expected, name)
    one, _ = trained()
    one.fit(x, y, verbose=0)
    for found, own in zip(template.get_weights(), one.get_weights(), strict=True):
        assert_close(found, own)


@pytest.mark.long
def test_keras_fit(tmp_path: Path):
    x, y = numbers(21, 6, 6, 3).numpy(), np.arange(21) % 5
    results = []
    for layout in ("home", "sharded", "replicated"):
        template = keras_model()
        model = gs.multi_gpu_model(template, gpus=3, variables=layout)
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / f"{layout}.weights.h5", save_weights_only=True),
            keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch)),
        ]
        history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        parted = [v.path for v in template.optimizer.variables if parts_of_variable(v.value) is not None]
        assert any("dense" in path for path in parted) == (layout != "home")
        evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
        template.save(tmp_path / f"{layout}.keras")
        template.load_weights(tmp_path / f"{layout}.weights.h5")
        results.append((history, evaluated, model.predict(x, verbose=0), template.get_weights()))
    layouts = ("home", "sharded", "replicated")
    weights = [keras.models.load_model(tmp_path / f"{layout}.keras").get_weights() for layout in layouts]
    for home, *others in [*zip(*map(tf.nest.flatten, results), strict=True), *zip(*weights, strict=True)]:
        for other in others:
            np.testing.assert_allclose(other, home, rtol=0, atol=2e-5 * max(1.0, float(np.max(np.abs(home)))))


@pytest.mark.long
def test_a_small_fit():
    x, y = numbers(7, 6).numpy(), numbers(7, 2).numpy()
    results = []
    for layout in ("home", "sharded", "replicated"):
        keras.utils.set_random_seed(3)
        template = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(100, "relu"), keras.layers.Dense(2)])
        template.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model = gs.multi_gpu_model(template, gpus=3, variables=layout)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        laid = {parts.layout for v in template.variables if (parts := parts_of_variable(v.value)) is not None}
        assert laid == ({layout} if layout != "home" else set())
        results.append([*template.get_weights(), *[v.numpy() for v in template.optimizer.variables]])
    for home, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, home)


def test_the_page():
    text = (Path(__file__).parent.parent / "docs" / "variables.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:3])
    found: dict[str, Any] = {}
    exec(compile(code, "docs/variables.md", "exec"), found)
    assert any(parts_of_variable(variable.value) is not None for variable in found["larger"].variables)
    assert all(parts_of_variable(variable.value) is None for variable in found["model"].variables)
