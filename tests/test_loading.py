"""`load_weights`: the weights that Keras and TensorFlow load, and no device has the whole of a variable in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from graphsplit.core.variables.values import host_tensor

KINDS = ("some.weights.h5", "some.keras", "checkpoint")
LAYOUTS: dict[str, dict[str, Any]] = {
    "home": {"layout": "home"},
    "sharded": {"layout": "sharded", "devices": 3},
    "replicated": {"layout": "replicated", "devices": 3},
    "axes": {"layout": {"*kernel*": ((None, "model"), "sharded"), "*": "home"}, "mesh": {"batch": 2, "model": 2}},
}


def made(library: Any, seed: int) -> tuple[Any, Any]:
    library.utils.set_random_seed(seed)
    layers = [library.layers.Dense(60, name="one"), library.layers.BatchNormalization(name="norm")]
    model = library.Sequential([library.layers.Input((31,)), *layers, library.layers.Dense(45, name="two")])
    model.compile(library.optimizers.Adam(name="adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)


QUICK = [("sharded", keras, kind) for kind in KINDS] + [("axes", tf_keras, "checkpoint")]
CASES = [(layout, library, kind) for layout in LAYOUTS for library in (keras, tf_keras) for kind in KINDS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "library", "kind"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{case[1].__name__}-{case[2]}", marks=() if case in QUICK else pytest.mark.long
        )
        for case in CASES
    ],
)
def test_loaded(layout: str, kind: str, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, saved = made(library, 1)
    source.train_on_batch(np.ones((4, 31), "float32"), np.ones((4, 45), "float32"))
    path = tmp_path / kind
    if kind == "checkpoint":
        saved.write(str(path))
    else:
        (source.save if kind.endswith(".keras") else source.save_weights)(path)
    with gs.variable_layout(**LAYOUTS[layout]):
        target, checkpoint = made(library, 2)
    held = [parts for v in variables_of(target) if (parts := parts_of_variable(v)) is not None]
    assert len(held) == 0 if layout == "home" else len(held) >= 6
    if layout != "replicated":  # (a copy takes the value)
        monkeypatch.setattr(VariableParts, "put_together", lambda parts: pytest.fail(f"{parts.path} is put together"))
    before = [parts.bytes_on_devices() for parts in held]
    gs.load_weights(checkpoint if kind == "checkpoint" else target, path)
    assert all(parts.in_parts for parts in held if layout != "replicated")
    assert [parts.bytes_on_devices() for parts in held] == before
    pairs = list(zip(*[variables_of([model.weights, model.optimizer]) for model in (target, source)], strict=True))
    assert len(pairs) >= 8 + 2 * 6
    for a, b in pairs if kind != "some.weights.h5" else pairs[:8]:
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.name)
    assert "assign" not in vars(keras.Variable)  # Keras is as it was


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint64", "bool", "complex64"]
)
@pytest.mark.parametrize("at", [(range(2, 5), range(7)), (range(6), [0, 1, 4, 5]), (range(3, 3), range(7))])
def test_some_entries_of_an_array(dtype: str, at: tuple[Any, Any], tmp_path: Path):
    kind = tf.as_dtype(dtype)
    array = (np.arange(42).reshape(6, 7) % 3).astype(kind.as_numpy_dtype)
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["a"] = array
        sources = [array, array[::-1][::-1]] + [file["a"]] * (dtype not in ("bfloat16", "float8_e4m3fn"))
        found = [host_tensor(source, at, kind) for source in sources]
    expected = array[np.ix_(*at)]
    for tensor in found:
        assert tensor.dtype == kind
        np.testing.assert_array_equal(tensor.numpy().astype("complex64"), expected.astype("complex64"))
    if kind.is_floating and kind.size > 1:
        variable = tf.Variable(found[0])
        del found
        variable.assign_add(tf.ones_like(variable))
        np.testing.assert_array_equal(variable.numpy(), expected + expected.dtype.type(1))
    other = tf.float64 if kind.is_floating and kind.size > 2 else kind
    assert host_tensor(array, at, other).dtype == other


def test_errors(tmp_path: Path):
    saved = tf.Module()
    saved.w, saved.other = tf.Variable(tf.ones((64, 8)), name="w"), tf.Variable(tf.ones((3, 5)), name="other")
    path = tf.train.Checkpoint(saved).write(str(tmp_path / "some"))
    target = tf.Module()
    target.w, target.more = tf.Variable(tf.zeros((8, 64)), name="w"), tf.Variable(tf.zeros(3), name="more")
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.load_weights(tf.train.Checkpoint(target), path)
    assert str(found.value) == (
        f"The checkpoint {path} lacks variables of the target, or has them in other shapes:\n"
        "  - w (8, 64)\n"
        "  - more (3,)"
    )
    assert not target.w.numpy().any()  # nothing was loaded
    saved.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
    path = tf.train.Checkpoint(saved).write(str(tmp_path / "table"))
    with pytest.raises(gs.errors.UnsupportedError, match="state that is not a variable:\n  - table"):
        gs.load_weights(tf.train.Checkpoint(saved), path)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("w", (3,))
        session.run(variable.initializer)
        path = tf.compat.v1.train.Saver([variable]).save(session, str(tmp_path / "old"))
    with pytest.raises(gs.errors.UnsupportedError, match="is a checkpoint of names"):
        gs.load_weights(tf.train.Checkpoint(target), path)


@pytest.mark.parametrize("layout", ["home", "sharded", "replicated"])
def test_a_checkpoint_with_strings(layout: str, tmp_path: Path):
    def module(word: str, number: float) -> tf.Module:
        own = tf.Module()
        own.word, own.words = tf.Variable(word), tf.Variable([word, word + word])
        own.some, own.is_so = tf.Variable(number), tf.Variable(number > 1)
        own.numbers = tf.Variable(tf.fill((64, 8), number))
        return own

    path = tf.train.Checkpoint(module("ab", 2.0)).write(str(tmp_path / "some"))
    target = module("c", 1.0)
    gs.set_variable_layout([target.some, target.numbers], layout, devices=3)
    gs.load_weights(tf.train.Checkpoint(target), path)
    assert (target.word.numpy(), target.words.numpy().tolist()) == (b"ab", [b"ab", b"abab"])
    assert (target.is_so.numpy(), target.some.numpy()) == (True, 2.0)
    np.testing.assert_array_equal(target.numbers, tf.fill((64, 8), 2.0))


def test_a_training_checkpoint_that_was_numbered(tmp_path: Path):
    """`Checkpoint.save` counts, and what the target lacks is left in the file."""
    model, checkpoint = made(keras, 1)
    path = checkpoint.save(str(tmp_path / "some"))
    other, _ = made(keras, 2)
    gs.set_variable_layout(other, "sharded", devices=3)
    gs.load_weights(tf.train.Checkpoint(model=other), path)
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def old_model() -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(40, name=f"layer_{i}") for i in range(6)]
    return keras.Sequential([keras.Input((6,)), *layers], name="model")


# no checksums; of an archive the end tells what is where
NOT_SEEN = {("all.weights.h5", "one bit"), ("all.safetensors", "one bit"), ("all.keras", "begins otherwise")}
FILES = ["all.keras", "all.weights.h5", "checkpoint", "all.safetensors"]


def saved_as(kind: str, folder: Path) -> tuple[Any, Path]:
    """Return a path to load, of other values than those of `old_model`, and the file to damage."""
    model = old_model()
    for variable in model.variables:
        variable.assign(variable + 1.0)
    path = folder / kind
    if kind == "checkpoint":
        return tf.train.Checkpoint(model=model).write(str(path)), Path(f"{path}.data-00000-of-00001")
    if kind.endswith(".safetensors"):
        safetensors_numpy = pytest.importorskip("safetensors.numpy")
        safetensors_numpy.save_file({v.path: v.numpy() for v in model.variables}, path)
    else:
        model.save(path) if kind.endswith(".keras") else model.save_weights(path)
    return path, path


def load(kind: str, model: Any, path: Any) -> None:
    gs.load_weights(tf.train.Checkpoint(model=model) if kind == "checkpoint" else model, path)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", ["home", "sharded"])
@pytest.mark.parametrize("damage", ["cut off", "empty", "begins otherwise", "one bit"])
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_change_nothing(kind: str, damage: str, layout: str, tmp_path: Path) -> None:
    path, file = saved_as(kind, tmp_path)
    content = bytearray(file.read_bytes())
    if (kind, damage) in NOT_SEEN:
        pytest.skip("nothing in the file tells")
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    elif damage == "begins otherwise":
        content[:8] = b"\xff" * 8
    file.write_bytes(content[: {"cut off": len(content) // 2, "empty": 0}.get(damage, len(content))])
    model = old_model()
    gs.set_variable_layout(model, layout, devices=2)
    before = model.get_weights()
    with pytest.raises(gs.GraphsplitError, match=kind):
        load(kind, model, path)
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory")], ids=["interrupt", "memory"])
@pytest.mark.parametrize("kind", FILES)
def test_the_error_says_which_variables_are_new(
    kind: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved_as(kind, tmp_path)
    model, taken, take = old_model(), [], VariableParts.take
    gs.set_variable_layout(model, "sharded", devices=2)
    before = model.get_weights()

    def take_some(parts: Any, value: Any) -> bool:
        taken.append(parts)
        if len(taken) >= 4:
            raise error
        return take(parts, value)

    monkeypatch.setattr(VariableParts, "take", take_some)
    with pytest.raises(gs.errors.ArgumentError if isinstance(error, Exception) else KeyboardInterrupt) as raised:
        load(kind, model, path)
    names = [v.path for v, was in zip(model.variables, before, strict=True) if not np.array_equal(v.numpy(), was)]
    assert 3 <= len(names) < len(before)
    assert str(path) in str(raised.value)
    assert names == [line.removeprefix("  - ") for line in str(raised.value).splitlines() if line.startswith("  - ")]


def test_damaged_indices(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors.index.json"
    for content in ("", "{", "[]", "3", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        path.write_text(content)
        with pytest.raises(gs.GraphsplitError, match=path.name):
            gs.load_weights(old_model(), path)


def test_what_a_checkpoint_has_beside_the_target_is_said(tmp_path: Path):
    def made() -> tuple[keras.Model, keras.Optimizer]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
        return model, keras.optimizers.Adam(0.1)

    model, optimizer = made()
    model.compile(optimizer, "mse")
    model.fit(tf.ones((5, 6)), tf.ones((5, 4)), verbose=0)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "trained"))
    again, new = made()
    gs.set_variable_layout(again, "sharded", devices=2)
    with pytest.warns(UserWarning, match=r"(?s)were not loaded:\n.*optimizer/_variables/2.*optimizer\.build"):
        gs.load_weights(tf.train.Checkpoint(model=again, optimizer=new), path)
    new.build(again.trainable_variables)
    gs.load_weights(tf.train.Checkpoint(model=again, optimizer=new), path)
    for found, expected in zip(new.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
