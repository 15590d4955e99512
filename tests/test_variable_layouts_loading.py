"""Files and laid out variables: the template's bytes, loaded part by part, whole when a save is broken off."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from tests.helpers.layout_cases import numbers

LAYOUTS = ("home", "sharded", "replicated")


def made(layout: str, devices: int = 3, seed: int = 3) -> Any:
    """Return a model that was trained for a step, its variables laid out so."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(100, "relu", name="one"), keras.layers.Dense(5, name="two")]
    template = keras.Sequential([keras.layers.Input((6,), name="rows"), *layers], name="both")
    template.compile(keras.optimizers.SGD(0.1, momentum=0.9, name="sgd"), "mse")
    model = gs.multi_gpu_model(template, gpus=devices, variables=layout)
    model.train_on_batch(numbers(8, 6).numpy(), numbers(8, 5).numpy())
    return model


def parts(model: Any) -> list[VariableParts]:
    found = [parts_of_variable(v.value) for v in (*model.variables, *model.optimizer.variables)]
    return [held for held in found if held is not None]


def written(folder: Path, model: Any) -> dict[str, bytes]:
    """Return the content of all files that a model can write, but for the times at which they were written."""
    folder.mkdir()
    model.save_weights(folder / "some.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "checkpoint"))
    model.save(folder / "some.keras")
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".keras"}
    with zipfile.ZipFile(folder / "some.keras") as archive:
        for name in ("config.json", "model.weights.h5"):
            found[f"some.keras/{name}"] = archive.read(name)
    return found


def test_files_are_those_of_the_template_byte_for_byte(tmp_path: Path):
    found = {layout: written(tmp_path / layout, made(layout)) for layout in LAYOUTS}
    assert len(found["home"]) == 5
    for layout in ("sharded", "replicated"):
        assert found[layout].keys() == found["home"].keys()
        for name, content in found["home"].items():
            assert found[layout][name] == content, (layout, name)


def test_what_is_saved_stays_in_parts(tmp_path: Path):
    """No device ever holds a variable whole for a file, or for the host."""
    model = made("sharded", devices=5)
    before = [held.bytes_on_devices() for held in parts(model)]
    assert len(before) >= 4
    assert all(held.in_parts for held in parts(model))
    written(tmp_path / "files", model)
    for value, weight in zip(model.get_weights(), model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(weight), value)
    assert all(held.in_parts for held in parts(model))
    assert [held.bytes_on_devices() for held in parts(model)] == before


def load_checkpoint(model: Any, folder: Path) -> None:
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(folder / "checkpoint")).assert_consumed()


def load_weights(model: Any, folder: Path) -> None:
    model.load_weights(folder / "some.weights.h5")


def set_weights(model: Any, folder: Path) -> None:
    model.set_weights(made("home", seed=7).get_weights())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("load", [load_checkpoint, load_weights, set_weights])
def test_what_is_loaded_goes_to_the_parts(load: Callable[[Any, Path], None], tmp_path: Path):
    """The variables are never whole on a device, before somebody asks for that."""
    source = made("home", seed=7)
    written(tmp_path / "files", source)
    model = made("sharded", devices=5)
    before = [held.bytes_on_devices() for held in parts(model)]
    assert all(held.in_parts for held in parts(model))
    load(model, tmp_path / "files")
    assert all(held.in_parts for held in parts(model))
    assert [held.bytes_on_devices() for held in parts(model)] == before
    x, y = numbers(8, 6).numpy(), numbers(8, 5).numpy()
    np.testing.assert_allclose(model.predict(x, verbose=0), source.predict(x, verbose=0), atol=1e-6)
    if load is load_checkpoint:  # the slots, too
        np.testing.assert_allclose(model.train_on_batch(x, y), source.train_on_batch(x, y), rtol=1e-5)
    for a, b in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_value_that_another_variable_has_in_parts_goes_to_the_parts():
    """As Keras gives weights their moving average at the end of `fit`: neither of the two becomes whole."""
    to, source = (keras.Variable(numbers(30, 40, seed=seed)) for seed in (1, 2))
    value = source.numpy()
    gs.set_variable_layout([to, source], "sharded", 3)
    for given in (source, source.value):
        to.value.assign(given)
        assert all(parts_of_variable(own.value).in_parts for own in (to, source))  # type: ignore[union-attr]
        np.testing.assert_array_equal(to.numpy(), value)


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_values_that_do_not_fit_change_nothing(layout: str):
    weight = tf.Variable(numbers(30, 40), name="weight")
    value, plain = weight.numpy(), tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(weight, layout, 3)
    said = []
    for wrong in (tf.zeros((3, 3)), np.zeros((40, 30), np.float32), tf.zeros((30, 40), tf.float64), "text"):
        for variable in (weight, plain):
            with pytest.raises((ValueError, TypeError, tf.errors.OpError)) as found:
                variable.assign(wrong)
            said.append((type(found.value), str(found.value)))
        assert said[-1] == said[-2]
    np.testing.assert_array_equal(weight.numpy(), value)
    assert weight.assign(2 * value) is not None
    assert weight.assign(3 * value, read_value=False) is None
    np.testing.assert_array_equal(weight.numpy(), 3 * value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [".weights.h5", ".keras"])
def test_an_interrupted_save_leaves_the_old_file_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, path = made("sharded"), tmp_path / f"some{kind}"
    save = model.save if kind == ".keras" else model.save_weights
    save(path)
    before = path.read_bytes()
    model.train_on_batch(numbers(8, 6).numpy(), numbers(8, 5).numpy())
    as_array, asked = VariableParts.as_array, []

    def interrupted(held: VariableParts) -> np.ndarray | None:
        asked.append(held.name)
        if len(asked) > 2:
            raise KeyboardInterrupt
        return as_array(held)

    with monkeypatch.context() as patched:
        patched.setattr(VariableParts, "as_array", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    save(path)
    assert path.read_bytes() != before
