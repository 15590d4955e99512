"""Parallelized functions inside of `tf.function`: differentiated from outside, saved, and gone with the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close
from tests.helpers.processes import python

DOUBLE = tf.float64


def rows(count: int = 7, width: int = 3) -> tf.Tensor:
    return tf.random.stateless_normal((count, width), [1, count], dtype=DOUBLE)


def outer(fn: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(lambda x: fn(x), autograph=False)


def model() -> tuple[Callable[[tf.Tensor], Any], tuple[tf.Variable, ...]]:
    w = tf.Variable(rows(3), dtype=DOUBLE)
    b = tf.Variable(rows(1)[0], dtype=DOUBLE)
    return lambda x: {"y": tf.nn.softmax(tf.tanh(x @ w + b)), "loss": tf.reduce_mean((x @ w) ** 2)}, (w, b)


def gradients(fn: Callable[..., Any], variables: Any, watch: bool = True) -> Any:
    x = rows()
    with tf.GradientTape(persistent=True) as tape:
        if watch:
            tape.watch(x)
        result = fn(x)
        cubes = result["y"] ** 3
    return [tape.gradient(cubes, variables), tape.gradient(result["loss"], [x, *variables])]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("called_before", [False, True])
def test_first_traced_under_an_outer_tape(called_before: bool, watch: bool):
    forward, variables = model()
    sharded = outer(gs.parallelize(forward, devices=3))
    if called_before:
        sharded(rows())
    expected = gradients(outer(forward), variables, watch)
    assert_close(gradients(sharded, variables, watch), expected)
    assert_close(gradients(sharded, variables, watch), expected)
    assert_close(gradients(sharded, variables, True), gradients(outer(forward), variables, True))


def orders(fn: Callable[..., Any], variables: Any, count: int) -> list[Any]:
    """Return the derivatives of a scalar of all orders up to `count`, by the input and the variables."""
    x = rows()
    sources = [x, *variables]
    tapes = [tf.GradientTape() for _ in range(count)]
    for tape in tapes:
        tape.__enter__()
        tape.watch(x)
    value, found = tf.reduce_sum(fn(x)["y"] ** 3), []
    for tape in reversed(tapes):
        tape.__exit__(None, None, None)
        found.append(tape.gradient(value, sources, unconnected_gradients="zero"))
        value = tf.add_n([tf.reduce_sum(gradient**2) for gradient in found[-1]])
    return found


@pytest.mark.long
@pytest.mark.parametrize("called_before", [False, True])
def test_higher_derivatives_through_an_outer_function(called_before: bool):
    forward, variables = model()
    sharded = outer(gs.parallelize(forward, devices=2))
    if called_before:
        sharded(rows())
    assert_close(orders(sharded, variables, 3), orders(forward, variables, 3), tolerance=1e-10)


def test_effects_happen_once_under_an_outer_tape():
    counter = tf.Variable(0.0, dtype=DOUBLE)
    w = tf.Variable(2.0, dtype=DOUBLE)

    def forward(x):
        counter.assign_add(tf.reduce_sum(x))
        return tf.square(x) * w

    sharded = outer(gs.parallelize(forward, devices=2))
    with tf.GradientTape() as tape:
        tape.watch(x := rows())
        y = sharded(x)
    found = tape.gradient(y, [x, w])
    assert_close(found, [2 * x * w, tf.reduce_sum(x**2)])
    assert_close(counter.read_value(), tf.reduce_sum(x))


# What has no gradient


@pytest.mark.sampled(4)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: tf.argmax(x, 1),
        lambda x: x > 0,
        lambda x: tf.strings.as_string(x),
        lambda x: None,
        lambda x: (),
        lambda x: {"n": 3, "i": tf.cast(x, tf.int32)},
        lambda x: tf.argmax(tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), (0, x))[1], 1),
    ],
    ids=["argmax", "bool", "string", "None", "nothing", "static", "loop"],
)
def test_results_without_gradients_under_a_tape(fn: Callable[[tf.Tensor], Any], in_graph: bool):
    parallel = gs.parallelize(fn, devices=2)
    call = outer(parallel) if in_graph else parallel
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x := rows())
        result, rest = call(x), tf.square(x)
    expected = tf.function(fn)(x) if in_graph else fn(x)
    assert_close(tf.nest.map_structure(str, result), tf.nest.map_structure(str, expected))
    assert_close(tape.gradient(rest, x), 2 * x)
    if tf.is_tensor(result):
        assert tape.gradient(result, x) is None
    assert not parallel.gradient_plan(x).unsharded_ops


def test_updates_only_under_a_tape():
    total = tf.Variable(0.0, dtype=DOUBLE)

    def update(x):
        total.assign_add(tf.reduce_sum(x))

    with tf.GradientTape() as tape:
        tape.watch(x := rows())
        assert gs.parallelize(update, devices=2)(x) is None
    assert tape.gradient(total, x) is None
    assert_close(total.read_value(), tf.reduce_sum(x))


# Saving


class Served(tf.Module):
    """Calls parallelized functions: with variables, with effects, with gradients inside, for any batch size."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(rows(3))
        self.count = tf.Variable(0.0, dtype=DOUBLE)
        self.forward = gs.parallelize(self._forward, devices=2)
        self.counting = gs.parallelize(self._counting, devices=2, tuning={"reduce_retracing": True})

    def _forward(self, x):
        return tf.nn.softmax(x @ self.w)

    def _counting(self, x):
        self.count.assign_add(1.0)
        return tf.tanh(x @ self.w) * self.count

    @tf.function(input_signature=[tf.TensorSpec([7, 3], DOUBLE)])
    def predict(self, x):
        return self.forward(x)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], DOUBLE)])
    def predict_any(self, x):
        return self.forward(x)

    @tf.function(input_signature=[tf.TensorSpec([7, 3], DOUBLE)])
    def slope(self, x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(self.forward(x) ** 2)
        return tape.gradient(y, self.w)

    @tf.function(input_signature=[tf.TensorSpec([7, 3], DOUBLE)])
    def counted(self, x):
        return self.counting(x)


LOADING = """
import sys
sys.modules["graphsplit"] = None  # any import of it fails
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(sys.argv[2]))
model = tf.saved_model.load(sys.argv[1])
x = np.load(sys.argv[1] + "/x.npy")
with tf.GradientTape() as tape:
    y = tf.reduce_sum(model.predict(x) ** 2)
results = [model.predict(x), model.predict_any(x[:5]), model.slope(x), tape.gradient(y, model.w)]
results += [model.counted(x), model.counted(x)]
np.savez(sys.argv[1] + "/results.npz", *results)
"""


@pytest.mark.long
@pytest.mark.parametrize(("differentiated_before", "devices"), [(False, 2), (True, 1)])
def test_saved_and_loaded_without_graphsplit(tmp_path: Path, devices: int, differentiated_before: bool):
    module, x = Served(), rows()
    if differentiated_before:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(module.predict(x) ** 2)
        tape.gradient(y, module.w)
    expected = [module.predict(x), module.predict_any(x[:5]), module.slope(x), module.slope(x)]
    folder = str(tmp_path / "saved")
    tf.saved_model.save(module, folder)
    expected += [module.counted(x), module.counted(x)]
    np.save(folder + "/x.npy", x)
    done = python("-c", LOADING, folder, devices)
    assert done.returncode == 0, done.stderr
    with np.load(folder + "/results.npz") as found:
        assert_close([tf.constant(found[name]) for name in found.files], expected)


# Memory


@pytest.mark.sampled(1)
@pytest.mark.parametrize("differentiate", [False, True])
def test_outer_graphs_go(differentiate: bool):
    forward, variables = model()
    sharded = gs.parallelize(forward, devices=2)
    graphs = []
    for count in (2, 3, 4):
        function = outer(sharded)
        with tf.GradientTape() as tape:
            loss = function(rows(count))["loss"]
        if differentiate:
            tape.gradient(loss, variables)
        graphs.append(weakref.ref(function.get_concrete_function(rows(count)).graph))
        del function, tape, loss
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3


@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_a_branch_around_a_function_that_writes_laid_out_variables(layout: str):
    def found(function, w):
        @tf.function
        def guarded(x, wanted):
            return tf.cond(wanted, lambda: function(x), lambda: tf.zeros(4, tf.float64))

        answers = [guarded(rows(7, 4), tf.constant(wanted)) for wanted in (True, False, True)]
        return [*answers, tf.identity(w)]

    variables = [tf.Variable(tf.ones((8, 4), tf.float64)) for _ in range(2)]
    steps = [lambda x, w=w: w.assign_add(tf.ones((8, 1), tf.float64) * tf.reduce_sum(x, 0))[0] for w in variables]
    gs.set_variable_layout(variables[1], layout, devices=3)
    assert_close(found(gs.parallelize(steps[1], devices=3), variables[1]), found(steps[0], variables[0]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", ["home", "replicated", "sharded"])
@pytest.mark.parametrize("after", ["home", "replicated", "sharded"])
def test_a_layout_may_change_between_forward_and_backward(before: str, after: str):
    w = tf.Variable(rows(4, 3))

    def f(x):
        return tf.tanh(x @ w) @ tf.transpose(w)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(f(rows(7, 4)) ** 2)
    expected = tape.gradient(loss, w)
    gs.set_variable_layout(w, before, devices=3)
    parallel = gs.parallelize(f, devices=3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(parallel(rows(7, 4)) ** 2)
    gs.set_variable_layout(w, after, devices=3)
    assert_close(tape.gradient(loss, w), expected)
    assert_close(parallel(rows(7, 4)), f(rows(7, 4)))
