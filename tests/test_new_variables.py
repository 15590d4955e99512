"""Variables that are born in parts: one device's numbers, and nobody has the whole of more than one."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core import initial_values
from graphsplit.core.variables import parted_variables
from graphsplit.core.variables.copied_variables import VariableCopies
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from tests.helpers.layout_cases import numbers

MESH = {"batch": 2, "model": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"layout": "sharded", "devices": 3},
    "replicated": {"layout": "replicated", "devices": 3},
    "patterns": {"layout": {"*kernel*": "sharded", "*bias*": "replicated"}, "devices": 3},
    "axes": {"layout": {"*kernel*": (None, "model"), "*bias": "replicated"}, "mesh": MESH},
    "nested": {"layout": {"*kernel*": ((None, "model"), "sharded"), "*": "home"}, "mesh": MESH},
}
KEPT = ["sharded", "axes"]


def made(library: Any) -> list[tf.Variable]:
    """Return the variables of a model of odd sizes and its optimizer, of initializers of all kinds, of one seed."""
    library.utils.set_random_seed(5)
    kinds = library.initializers
    layers = library.layers
    model = library.Sequential(
        [
            layers.Input((41,)),
            layers.Dense(37, kernel_initializer=kinds.Orthogonal()),
            layers.BatchNormalization(),
            layers.Dense(33, kernel_initializer=kinds.Constant(0.3), bias_initializer="random_normal"),
            layers.Dense(35, kernel_initializer=lambda shape, dtype=None: np.random.normal(size=shape)),
            layers.Dense(7),
        ]
    )
    optimizer = library.optimizers.Adam(amsgrad=True)
    optimizer.build(model.trainable_variables)
    return variables_of([model, optimizer])


def all_parts(variables: list[tf.Variable]) -> list[VariableParts]:
    return [parts for variable in variables if (parts := parts_of_variable(variable)) is not None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in KEPT else pytest.mark.long) for case in LAYOUTS]
)
def test_equal_in_all_bits(case: str, library: Any):
    expected = made(library)
    with gs.variable_layout(**LAYOUTS[case]):
        found = made(library)
    held = all_parts(found)
    assert len(held) >= 3 * 4  # large kernels with their slots
    assert all(parts.in_parts for parts in held)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.trainable) == (b.shape, b.dtype, b.trainable)
        assert re.sub(r"_\d+", "", a.name) == re.sub(r"_\d+", "", b.name)
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.name)
    for parts in held:
        size = parts.variable.dtype.size * parts.variable.shape.num_elements()
        copies = len(parts.devices) if isinstance(parts, VariableCopies) else 1
        assert sum(parts.bytes_on_devices().values()) == copies * size


def test_nobody_has_a_whole_one(monkeypatch: pytest.MonkeyPatch):
    """Of what lies in parts only parts are ever assigned, and of what Keras fills only parts are made."""
    sizes: list[int] = []
    filled: list[tuple[int, str]] = []
    assign, zeros = parted_variables.assign, keras.initializers.Zeros.__call__

    def assigned(handle: tf.Tensor, value: tf.Tensor) -> Any:
        sizes.append(value.shape.num_elements())
        return assign(handle, value)

    def zeros_made(own: Any, shape: Any, dtype: Any = None) -> tf.Tensor:
        value = zeros(own, shape, dtype=dtype)
        filled.append((value.shape.num_elements(), value.device))
        return value

    for module in (parted_variables, initial_values):
        monkeypatch.setattr(module, "assign", assigned)
    monkeypatch.setattr(keras.initializers.Zeros, "__call__", zeros_made)
    monkeypatch.setattr(VariableParts, "put_together", lambda parts: pytest.fail(f"{parts.path} is put together"))
    with gs.variable_layout("sharded", 3):
        model = keras.Sequential([keras.layers.Input((90,)), keras.layers.Dense(90), keras.layers.Dense(90)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    held = all_parts(variables_of([model, optimizer]))
    cut = [parts for parts in held if len(parts.devices) == 3]
    assert len(cut) == 6  # two kernels, with two slots each
    assert max(sizes) == 90 * 30
    assert max(size for size, _ in filled) == 90 * 30
    assert {device for size, device in filled if size == 90 * 30} == {
        f"/job:localhost/replica:0/task:0/device:CPU:{d}" for d in range(3)
    }
    for parts in cut:
        assert list(parts.bytes_on_devices().values()) == [0 + 90 * 30 * 4, 90 * 30 * 4, 90 * 30 * 4]


def values() -> list[Callable[[], tf.Variable]]:
    return [
        lambda: tf.Variable(numbers(60, 40)),
        lambda: tf.Variable(numbers(60, 40).numpy().tolist(), dtype=tf.float64, name="list"),
        lambda: tf.Variable(lambda: tf.random.normal((60, 40)), trainable=False),
        lambda: tf.Variable(lambda: numbers(60, 40), shape=(60, None)),
        lambda: tf.Variable(functools.partial(tf.constant, [2] * 100, dtype=tf.int32), dtype=tf.int32),
        lambda: tf.Variable(tf.fill((60, 40), "text")),
        lambda: tf.Variable(numbers(60, 40), constraint=tf.nn.relu),
        lambda: tf.compat.v1.Variable(lambda: numbers(60, 40), use_resource=True, name="old"),
        lambda: keras.Variable(numbers(60, 40).numpy(), name="of_keras").value,
        lambda: tf.Variable(3),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("position", range(len(values())))
def test_whatever_tensorflow_takes(position: int):
    make = values()[position]
    tf.random.set_seed(3)
    expected = make()
    tf.random.set_seed(3)
    with gs.variable_layout("sharded", 3):
        found = make()
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    for name in ("shape", "dtype", "trainable", "name", "constraint", "synchronization", "aggregation"):
        assert getattr(found, name) == getattr(expected, name), name
    lies = expected.shape.is_fully_defined() and expected.dtype != tf.string and expected.shape.rank > 0
    assert (parts_of_variable(found) is not None) == lies
    gs.set_variable_layout(found, "home")
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_a_creator_of_somebody_else_is_asked():
    asked = []

    def creator(make: Callable[..., Any], **options: Any) -> Any:
        asked.append(options["name"])
        return make(**options)

    with tf.variable_creator_scope(creator), gs.variable_layout("sharded", 3):
        variable = tf.Variable(lambda: numbers(60, 40), name="own")
    assert asked == ["own"]
    assert len(parts_of_variable(variable).devices) == 3
    np.testing.assert_array_equal(variable.numpy(), numbers(60, 40))


def test_the_innermost_block_counts():
    with gs.variable_layout("sharded", 3), gs.variable_layout("home"):
        variable = tf.Variable(numbers(60, 40))
    assert parts_of_variable(variable) is None


def test_training_with_what_was_born_in_parts():
    x, y = numbers(13, 20).numpy(), numbers(13, 3).numpy()
    results = []
    for layout in ("home", "sharded"):
        keras.utils.set_random_seed(2)
        with gs.variable_layout(layout, 3):
            model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(60, "relu"), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        parallel = gs.multi_gpu_model(model, gpus=3)
        losses = [float(parallel.train_on_batch(x, y)) for _ in range(3)]
        results.append([losses, *model.get_weights()])
        sharded = [parts for parts in all_parts(variables_of([model, optimizer])) if parts.in_parts]
        assert (len(sharded) >= 6) == (layout == "sharded")
    for home, sharded in zip(*results, strict=True):
        np.testing.assert_array_equal(sharded, home)


def test_errors():
    idle = pytest.raises(gs.errors.ArgumentError, match="No variable's name fits 'tabel'")
    with idle, gs.variable_layout({"tabel": "sharded"}, devices=2):
        tf.Variable(numbers(60, 40), name="table")
    with (
        pytest.raises(gs.errors.ArgumentError, match="names axes of a mesh"),
        gs.variable_layout((None, "model"), devices=2),
    ):
        pass
    short = pytest.raises(gs.errors.ArgumentError, match="dimension 1 has 1 entries, and 'model' has 2 devices")
    with short, gs.variable_layout({"table": (None, "model")}, mesh=MESH):
        tf.Variable(numbers(60, 1), name="table")


PEAK = """
import gc, sys
import keras, tensorflow as tf
import graphsplit as gs

def memory(field):
    [line] = [line for line in open("/proc/self/status") if line.startswith(field)]
    return int(line.split()[1]) * 1024

gs.use_logical_devices(4)

def made(width, count):
    with gs.variable_layout("sharded", 4):
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
        model = keras.Sequential([keras.layers.Input((width,)), *layers])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    return model, optimizer

made(64, 1)  # whatever TensorFlow and Keras need once
gc.collect()
before = memory("VmRSS")
model, optimizer = made(4096, 3)
print(memory("VmHWM") - before, sum(4 * v.shape.num_elements() for v in [*model.variables, *optimizer.variables]))
"""


@pytest.mark.long
def test_the_peak_of_a_process_that_makes_a_model():
    """At most the parts of all, and one variable that is drawn."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=500)
    peak, total = map(int, done.stdout.split())
    largest = 4 * 4096 * 4096
    assert total > 9 * largest
    assert peak <= total + 1.1 * largest, (peak, total, largest)


def test_nobody_looks_for_functions_that_cannot_know_a_new_variable(monkeypatch: pytest.MonkeyPatch):
    """To look through all objects of the process takes up to a second: only for what functions may have captured."""
    looked = []
    monkeypatch.setattr(parted_variables, "ask_at_call", lambda values, _: looked.append(len(values)))
    with gs.variable_layout("sharded", devices=3):
        made = tf.Variable(tf.ones((300, 5)))
    later = tf.Variable(tf.ones((300, 5)))
    gs.set_variable_layout(later, "sharded", devices=3)
    assert all(parts_of_variable(own) is not None for own in (made, later))
    assert not looked
    traced = tf.Variable(tf.ones((300, 5)))
    tf.function(lambda: traced + 1).get_concrete_function()
    gs.set_variable_layout(traced, "sharded", devices=3)
    assert looked == [1]
