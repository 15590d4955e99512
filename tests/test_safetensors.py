"""`load_weights` of safetensors: read by slices into what lies in parts, with names of the user's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from graphsplit.keras import safetensors_files
from tests.helpers.layout_cases import LAYOUTS, small_network
from tests.helpers.memory_of_scripts import printed

X = tf.constant(np.random.default_rng(0).normal(size=(7, 31)).astype("float32"))


@pytest.fixture(autouse=True)
def few_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "_AT_A_TIME", 1000)


def made() -> Any:
    model, optimizer = small_network()
    model.compile(optimizer, "mse")
    return model


def written(tensors: dict[str, Any], path: Path) -> Path:
    files = pytest.importorskip("safetensors.numpy")
    files.save_file({name: np.array(value, order="C") for name, value in tensors.items()}, path)
    return path


def torch_name(name: str) -> Any:
    """The names and axes that torch has: a layer's weight is `[out, in]`."""
    called = name.removeprefix("net/").replace("/", ".")
    return (called.replace("kernel", "weight"), (1, 0)) if called.endswith("kernel") else called


def as_torch(model: Any) -> dict[str, Any]:
    found = {}
    for weight in model.weights:
        source = torch_name(weight.path)
        is_kernel = isinstance(source, tuple)
        found[source[0] if is_kernel else source] = weight.numpy().T if is_kernel else weight.numpy()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["file", "index"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded(layout: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = made()
    source.set_weights([np.random.default_rng(k).normal(size=w.shape) for k, w in enumerate(source.weights)])
    tensors = as_torch(source)
    path = tmp_path / f"model.safetensors{'.index.json' if kind == 'index' else ''}"
    if kind == "file":
        written(tensors, path)
    else:
        of = {name: f"model-0000{1 + k % 2}-of-00002.safetensors" for k, name in enumerate(tensors)}
        for file in set(of.values()):
            written({name: value for name, value in tensors.items() if of[name] == file}, tmp_path / file)
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": of}))
    with gs.keras.without_values(), gs.variable_layout(**LAYOUTS[layout]):
        model = made()
    if layout != "replicated":  # (of which one copy takes the value: the others are old, until they are next read)
        monkeypatch.setattr(VariableParts, "put_together", lambda parts: pytest.fail(f"{parts.path} is put together"))
    gs.load_weights(model, path, names=torch_name)
    held = [parts for v in variables_of(model.weights) if (parts := parts_of_variable(v)) is not None]
    assert len(held) >= 2 if layout != "home" else not held
    assert all(parts.in_parts for parts in held if layout != "replicated")
    for a, b in zip(model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    mesh = LAYOUTS[layout].get("mesh")
    step = gs.parallelize(model, devices=3 if mesh is None else None, mesh=mesh)
    np.testing.assert_allclose(step(X), source(X), rtol=1e-4, atol=1e-5)


def test_dtypes_and_scalars(tmp_path: Path):
    values = {"a": tf.cast(X, tf.bfloat16).numpy(), "b": np.array(3, np.int32), "c": X.numpy().astype("float16")}
    path = written(values, tmp_path / "some.safetensors")
    target = {"a": tf.Variable(X, name="a"), "b": tf.Variable(0, name="b")}
    target["c"] = tf.Variable(tf.zeros((7, 31), tf.float16), name="c")
    gs.set_variable_layout(target["a"], "sharded", devices=3)
    gs.load_weights(target, path)
    np.testing.assert_array_equal(target["a"], values["a"].astype("float32"))
    np.testing.assert_array_equal(target["c"], values["c"])
    assert int(target["b"]) == 3


def test_what_does_not_fit(tmp_path: Path):
    w, more = tf.Variable(tf.zeros((3, 5)), name="w"), tf.Variable(tf.zeros(3), name="more")
    path = written({"w": np.ones((5, 3), "float32"), "rotary.freq": np.ones(2)}, tmp_path / "some.safetensors")
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.load_weights([w, more], path)
    assert str(found.value).splitlines()[1:4] == [
        "  - w: shape (3, 5), and 'w' gives (5, 3)",
        "  - more: no tensor 'more'",
        "  - tensor 'rotary.freq': no variable takes it",
    ]
    with pytest.raises(gs.errors.ArgumentError, match="more: names has none for it"):
        gs.load_weights([w, more], path, names={"w": "w"})
    with pytest.raises(
        gs.errors.ArgumentError, match=r"w: \(2, 0\) is no order of the axes of 'w', which has shape \(5, 3\)"
    ):
        gs.load_weights(w, path, names={"w": ("w", (2, 0))})
    assert not w.numpy().any()
    gs.load_weights([w, more], path, names={"w": ("w", (1, 0))}, ignore=["more", "rotary.*"])
    assert w.numpy().all()
    gs.load_weights(w, path, names={"w": ("w", (1, 0))}, ignore="rotary.*")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(gs.errors.ArgumentError, match=r"names files that are not there:\n.*gone.safetensors"):
        gs.load_weights(w, index)
    with pytest.raises(gs.errors.ArgumentError, match="names and ignore are for safetensors"):
        gs.load_weights(w, "some.keras", ignore=["w"])


def test_variables_of_one_name(tmp_path: Path):
    two = [tf.Variable(tf.zeros((3, 5)), name="w") for _ in range(2)]
    other = tf.Variable(tf.zeros(3), name="other")
    path = written({"w": np.ones((3, 5), "float32"), "other": np.ones(3, "float32")}, tmp_path / "some.safetensors")
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.load_weights([*two, other], path)
    assert str(found.value).splitlines()[1:-1] == ["  - w: 2 variables have this name; load each in a call of its own"]
    assert not any(v.numpy().any() for v in (*two, other))
    gs.load_weights([*two, other], path, ignore="w")
    for variable in two:
        gs.load_weights(variable, path, ignore=["other"])
    assert all(v.numpy().all() for v in (*two, other))
    one = tf.Variable(tf.zeros((3, 5)), name="one")
    gs.load_weights([one, two[0]], path, names={"one": "w", "w": "w"}, ignore="other")  # tied weights
    assert one.numpy().all()


@pytest.mark.parametrize("layout", ["home", "sharded"])
def test_other_kinds_of_numbers(layout: str, tmp_path: Path):
    values = {"a": np.ones((60, 5), "int32"), "b": np.ones((60, 5)), "c": np.ones(3, bool), "d": np.ones(3, "int32")}
    path = written(values, tmp_path / "some.safetensors")
    dtypes = {"a": tf.float32, "b": tf.int32, "c": tf.int32, "d": tf.int64}
    target = [tf.Variable(tf.zeros(values[name].shape, dtype), name=name) for name, dtype in dtypes.items()]
    gs.set_variable_layout(target, layout, devices=3)
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.load_weights(target, path)
    assert str(found.value).splitlines()[1:-1] == [
        "  - a: float32, and 'a' is int32",
        "  - b: int32, and 'b' is float64",
        "  - c: int32, and 'c' is bool",
    ]
    assert not any(v.numpy().any() for v in target)
    gs.load_weights(target[3], path, ignore="[abc]")
    assert target[3].numpy().all()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(gs.errors.UnsupportedError, match="needs safetensors: pip install safetensors"):
        gs.load_weights(tf.Variable(1.0), tmp_path / "some.safetensors")


PEAK = """
from safetensors.numpy import save_file

for size in (64, 8192):
    with gs.keras.without_values(), gs.variable_layout("sharded", devices=2):
        layers = [keras.layers.Dense(size, use_bias=False, name=name) for name in "ab"]
        for layer in layers:
            layer.build((None, size))
    path = f"{sys.argv[1]}/{size}.safetensors"
    save_file({name: np.ones((size, size), "float32") for name in "ab"}, path)
    before = memory_from_now_on()
    gs.load_weights(layers, path, names={"a/kernel": ("a", (1, 0)), "b/kernel": "b"})
print(memory("VmHWM") - before - 2 * 4 * size * size, 4 * size * size)
"""


@pytest.mark.long
def test_the_peak_of_loading(tmp_path: Path):
    """Beside the parts the host has a few bytes at a time."""
    pytest.importorskip("safetensors")
    peak, largest = printed(PEAK, str(tmp_path))
    assert peak <= 0.3 * largest, (peak, largest)
