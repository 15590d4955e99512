"""Models without values: planned, predicted and laid out without memory; values come later, in parts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import VariableParts, is_initialized, parts_of_variable, read_handle
from tests.helpers.layout_cases import LAYOUTS, small_network
from tests.helpers.memory_of_scripts import printed


def own_handle(variable: tf.Variable) -> tf.Tensor:
    with raw_handles():
        return variable.handle


def with_values(target: Any) -> list[str]:
    return [v.name for v in variables_of(target) if is_initialized(own_handle(v))]


def step_of(model: Any, optimizer: Any) -> Any:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


X = tf.constant(np.random.default_rng(0).normal(size=(7, 31)).astype("float32"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_then_initialized_then_trained(layout: str):
    expected_model, expected_optimizer = small_network()
    plain = tf.function(step_of(expected_model, expected_optimizer))
    options = {key: value for key, value in LAYOUTS[layout].items() if key == "mesh"} or {"devices": 3}
    with gs.keras.without_values(), gs.variable_layout(**LAYOUTS[layout]):
        model, optimizer = small_network()
    names = {name.partition(":")[0].rpartition("/")[2] for name in with_values([model, optimizer])}
    assert names == {"seed_generator_state", "iteration", "learning_rate"}
    step = gs.parallelize(step_of(model, optimizer), **options)
    plan = step.plan(X)
    assert "MatMul" in {op.type for op in plan.sharded_ops}
    prediction = gs.predict(step.function, X, machine="8xA100-SXM4-80GB", **options)
    if layout == "home":  # as with values
        assert prediction.memory_bytes == gs.predict(plain, X, machine="8xA100-SXM4-80GB", devices=3).memory_bytes
    with pytest.raises(gs.errors.ArgumentError, match="These variables have no values yet"):
        step(X)
    assert len(with_values([model, optimizer])) == len(names)  # nothing of this made one
    gs.keras.initialize([model, optimizer])
    for a, b in zip(variables_of([model, optimizer]), variables_of([expected_model, expected_optimizer]), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.name)
    parts = [held for v in variables_of([model, optimizer]) if (held := parts_of_variable(v)) is not None]
    assert len(parts) >= 6 if layout != "home" else not parts
    assert all(held.in_parts for held in parts)
    for _ in range(2):
        np.testing.assert_allclose(step(X), plain(X), rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["some.weights.h5", "some.keras", "checkpoint"])
@pytest.mark.parametrize("library", [keras, pytest.param(tf_keras, marks=pytest.mark.long)])
def test_loaded(library: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, _ = small_network(library)
    path = tmp_path / kind
    if kind == "checkpoint":
        tf.train.Checkpoint(model=source).write(str(path))
    else:
        (source.save if kind.endswith(".keras") else source.save_weights)(path)
    with gs.keras.without_values(), gs.variable_layout("sharded", devices=3):
        model, _ = small_network(library)
    monkeypatch.setattr(VariableParts, "put_together", lambda parts: pytest.fail(f"{parts.path} is put together"))
    gs.load_weights(tf.train.Checkpoint(model=model) if kind == "checkpoint" else model, path)
    for a, b in zip(variables_of(model.weights), variables_of(source.weights), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.name)
    np.testing.assert_allclose(gs.parallelize(model, devices=3)(X), source(X), rtol=1e-4, atol=1e-6)


def test_laid_out_later_and_back():
    with gs.keras.without_values():
        layer = keras.layers.Dense(60)
        layer.build((None, 31))
    for layout in ("sharded", "replicated", "home", "sharded", "home"):
        gs.set_variable_layout(layer, layout, devices=3)
        assert not with_values(layer)
        step = gs.parallelize(lambda x: layer(x), devices=3)
        assert step.plan(X).mesh.shards == 3
        with pytest.raises(gs.errors.ArgumentError, match="have no values yet"):
            step(X)
    gs.set_variable_layout(layer, "sharded", devices=3)
    with pytest.raises(gs.errors.ArgumentError) as found:
        layer.get_weights()
    assert str(found.value).splitlines()[1].startswith("  - dense")
    assert str(found.value).splitlines()[1].endswith("/kernel")
    layer.set_weights([np.ones((31, 60), "float32"), np.zeros(60, "float32")])
    np.testing.assert_allclose(gs.parallelize(lambda x: layer(x), devices=3)(X)[:, 0], tf.reduce_sum(X, 1), rtol=1e-4)
    gs.keras.initialize(layer)  # what has a value keeps it
    assert layer.kernel.numpy().min() == 1.0


def blocks(*contexts: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("values_first", [True, False])
def test_all_devices_get_a_value_that_is_given_later(layout: str, values_first: bool, tmp_path: Path):
    contexts = [gs.keras.without_values(), gs.variable_layout(layout, devices=3)]
    with blocks(*contexts[:: 1 if values_first else -1]):
        layer = keras.layers.Dense(60, use_bias=False)
        layer.build((None, 31))
    gs.keras.initialize(layer)
    step, variable = gs.parallelize(lambda x: layer(x), devices=3), layer.kernel.value
    parts = parts_of_variable(variable)
    path = str(tmp_path / "saved")
    gives = [
        lambda value: layer.set_weights([value]),
        variable.assign,
        lambda value: variable.assign(tf.constant(value)),
        lambda value: tf.train.Checkpoint(v=variable).read(tf.train.Checkpoint(v=tf.Variable(value)).write(path)),
        lambda value: gs.load_weights(
            tf.train.Checkpoint(v=variable), tf.train.Checkpoint(v=tf.Variable(value)).write(path)
        ),
    ]
    for k, give in enumerate(gives):
        step(X)
        value = np.random.default_rng(k).normal(size=(31, 60)).astype("float32")
        give(value)
        np.testing.assert_allclose(step(X), X @ value, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(variable.numpy(), value)
        if layout == "replicated":
            step(X)
            for handle in parts.handles():
                np.testing.assert_array_equal(read_handle(handle, tf.float32), value)
    ordinary = tf.Variable(np.zeros((31, 60), "float32"))
    gs.set_variable_layout(ordinary, layout, devices=3)
    assert type(variable) is type(ordinary)  # nothing is left of that it waited


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_second_value_before_the_first_call(layout: str):
    with gs.keras.without_values():
        layer = keras.layers.Dense(60, use_bias=False)
        layer.build((None, 31))
    layer.kernel.assign(tf.ones((31, 60)))
    gs.set_variable_layout(layer, layout, devices=3)
    layer.kernel.assign(tf.fill((31, 60), 2.0))
    expected = X @ tf.fill((31, 60), 2.0)
    np.testing.assert_allclose(gs.parallelize(lambda x: layer(x), devices=3)(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["home", "sharded", "replicated"])
def test_a_value_may_come_from_a_variable_in_parts(layout: str):
    source = tf.Variable(np.random.default_rng(0).normal(size=(31, 60)).astype("float32"))
    gs.set_variable_layout(source, "sharded", devices=3)
    gs.parallelize(lambda x: x @ source, devices=3)(X)
    assert parts_of_variable(source).in_parts
    with gs.keras.without_values(), gs.variable_layout(layout, devices=3):
        layer = keras.layers.Dense(60, use_bias=False)
        layer.build((None, 31))
    layer.kernel.value.assign(source)
    np.testing.assert_array_equal(layer.kernel.numpy(), source.numpy())
    np.testing.assert_allclose(gs.parallelize(lambda x: layer(x), devices=3)(X), X @ source, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["home", "sharded", "replicated"])
def test_whoever_reads_gets_an_error_that_names_the_variable(layout: str, tmp_path: Path):
    with gs.keras.without_values(), gs.variable_layout(layout, devices=3):
        layer = keras.layers.Dense(60, name="large")
        model = keras.Sequential([keras.layers.Input((31,)), layer])
    reads = [
        lambda: layer.kernel.numpy(),
        lambda: model(X),
        model.get_weights,
        lambda: model.save(tmp_path / "a.keras"),
    ]
    reads += [lambda: tf.train.Checkpoint(model=model).write(str(tmp_path / "a")), lambda: layer.kernel.value + 1.0]
    reads += [lambda: layer.kernel.assign_add(tf.ones((31, 60))), lambda: tf.function(model)(X)]
    reads += [lambda: gs.multi_gpu_model(model, 3).predict(X, verbose=0)]
    for read in reads:
        with pytest.raises(gs.errors.ArgumentError, match=r"no values yet, (.|\n)*/large/(.|\n)*gs.keras.initialize"):
            read()
    assert "unavailable" in repr(layer.kernel.value)
    layer.kernel.assign(tf.fill((31, 60), 2.0))
    layer.bias.assign(tf.ones(60))
    np.testing.assert_allclose(model(X)[:, 0], 2 * tf.reduce_sum(X, 1) + 1, rtol=1e-4)
    if layout == "home":  # and nothing is left of it
        assert type(layer.kernel.value) is type(tf.Variable(1.0))


def test_values_are_drawn_in_the_order_in_which_variables_were_made():
    def layers() -> list[Any]:
        drawing = keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(5))
        found = [keras.layers.Dense(4, kernel_initializer=drawing) for _ in range(3)]
        for layer in found:
            layer.build((None, 3))
        return found

    expected = layers()
    with gs.keras.without_values():
        found = layers()
    gs.keras.initialize(found[::-1])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.kernel, b.kernel)
    assert np.any(found[0].kernel.numpy() != found[1].kernel.numpy())


@pytest.mark.long
def test_the_plan_that_fits_is_chosen_without_values():
    with gs.keras.without_values():
        model, optimizer = small_network()
    step = gs.parallelize(step_of(model, optimizer), devices=2, memory="1GB")
    assert [note for note in step.plan(X).notes if note.startswith("chosen automatically: ")]
    gs.keras.initialize([model, optimizer])
    expected_model, expected_optimizer = small_network()
    np.testing.assert_allclose(step(X), step_of(expected_model, expected_optimizer)(X), rtol=1e-5)


def test_under_model_parallel():
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with gs.keras.enable_distribution(), distribution.scope():
        with gs.keras.without_values():
            layer = keras.layers.Dense(60, kernel_initializer=keras.initializers.GlorotUniform(seed=3))
            layer.build((None, 31))
        parts = parts_of_variable(layer.kernel.value)
        assert parts.devices == ("/device:CPU:0", "/device:CPU:1")
        assert not with_values(layer)
        gs.keras.initialize(layer)
        assert list(parts.bytes_on_devices().values()) == [31 * 30 * 4] * 2
        whole = keras.initializers.GlorotUniform(seed=3)((31, 60))
        np.testing.assert_array_equal(layer.kernel.numpy(), whole)


LARGE = """
layers = keras.layers

class Block(keras.Layer):
    def __init__(self, width, heads):
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))

before = memory("VmRSS")
with gs.keras.without_values(), gs.variable_layout("sharded", devices=8):
    words = layers.Input((128,), dtype="int32")
    x = layers.Embedding(32000, 4096)(words)
    for _ in range(33):
        x = Block(4096, 32)(x)
    model = keras.Model(words, layers.Dense(32000)(x))
plan = gs.parallelize(model, devices=8).plan(tf.zeros((8, 128), tf.int32))
[line] = [line for line in str(plan).splitlines() if "variables sharded" in line]
print(model.count_params(), memory("VmHWM") - before)
"""


LOADED = """
def made(width, count):
    with gs.keras.without_values(), gs.variable_layout("sharded", devices=8):
        dense = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
        return keras.Sequential([keras.layers.Input((width,)), *dense])

def load(model, name):
    is_checkpoint = not name.endswith((".h5", ".keras"))
    gs.load_weights(tf.train.Checkpoint(model=model) if is_checkpoint else model, name)

def save(model, name):
    if kind == ".keras":
        model.save(name)
    elif kind:
        model.save_weights(name)
    else:
        tf.train.Checkpoint(model=model).write(name)

folder, kind, is_source = sys.argv[1:]
for width, count in ((64, 1), (8192, 2)):
    model, name = made(width, count), os.path.join(folder, f"{width}{kind}")
    if is_source == "yes":
        gs.keras.initialize(model)
        save(model, name)
        continue
    before = memory_from_now_on()
    load(model, name)
if is_source != "yes":
    print(memory("VmHWM") - before - 4 * width * width * count, 4 * width * width)
    before = memory_from_now_on()
    save(model, os.path.join(folder, f"again{kind}"))
    print(memory("VmHWM") - before)
"""


@pytest.mark.long
def test_seven_billion_parameters_are_planned_on_a_laptop():
    count, peak = printed(LARGE)
    assert count > 6.9e9
    assert peak < 500e6, peak


@pytest.mark.long
@pytest.mark.parametrize(("kind", "saved"), [(".weights.h5", 2.1), (".keras", 2.1), ("", 1.1)])
def test_the_peak_of_loading_and_saving(kind: str, saved: float, tmp_path: Path):
    """Beside the parts, the host has one variable at a time; Keras' files are written from a copy of it."""
    printed(LOADED, str(tmp_path), kind, "yes")
    loading, largest, saving = printed(LOADED, str(tmp_path), kind, "no")
    assert largest == 4 * 8192 * 8192
    assert loading <= 1.1 * largest, (loading, largest)
    assert saving <= saved * largest, (saving, largest)
