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
from graphsplit.core.variables.parted_variables import parts_of_variable
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


def test_saved_models(tmp_path: Path):
    module = tf.Module()
    module.weight = tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(module, "sharded", 3)
    parallel = gs.parallelize(lambda x: x @ module.weight, devices=3)  # (which lives until the end, and is not saved)
    parallel(numbers(2, 30))
    x = numbers(4, 30)

    def serve() -> Any:
        return tf.function(lambda x: x @ module.weight, input_signature=[tf.TensorSpec((None, 30))])

    module.serve = serve()
    tf.saved_model.save(module, str(tmp_path / "model"))
    expected = module.serve(x)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert_close(loaded.serve(x), expected)
    module.serve = serve()
    module.serve(x)
    with pytest.raises(gs.UnsupportedError, match="'weight:0' is in parts, and these functions were traced while it"):
        tf.saved_model.save(module, str(tmp_path / "again"))
    gs.set_variable_layout(module, "home")
    module.serve = serve()
    module.serve(x)
    tf.saved_model.save(module, str(tmp_path / "again"))
    loaded = tf.saved_model.load(str(tmp_path / "again"))
    assert_close(loaded.serve(x), expected)


@pytest.mark.long
def test_keras_fit(tmp_path: Path):
    x, y = numbers(21, 6, 6, 3).numpy(), np.arange(21) % 5
    results = []
    for layout in ("home", "sharded", "mirrored"):
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
    layouts = ("home", "sharded", "mirrored")
    weights = [keras.models.load_model(tmp_path / f"{layout}.keras").get_weights() for layout in layouts]
    for home, *others in [*zip(*map(tf.nest.flatten, results), strict=True), *zip(*weights, strict=True)]:
        for other in others:
            np.testing.assert_allclose(other, home, rtol=0, atol=2e-5 * max(1.0, float(np.max(np.abs(home)))))


def test_a_small_fit():
    x, y = numbers(7, 6).numpy(), numbers(7, 2).numpy()
    results = []
    for layout in ("home", "sharded", "mirrored"):
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
