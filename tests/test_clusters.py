"""`jit_compile=True`: what a shard computes between two moves is one call that XLA compiles; the law holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_close, assert_law

__all__ = ["float64"]


def rows(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 3], dtype=tf.float64)


def calls(parallel: gs.ParallelFunction, *arguments: Any) -> list[Any]:
    """Return the compiled calls of what runs."""
    found = [n for n in parallel.graph_def(*arguments).node if n.attr["_XlaMustCompile"].b]
    assert found
    return found


def per_device(found: list[Any]) -> Counter[str]:
    return Counter(node.device for node in found)


def dense(optimizer: bool = True) -> Callable[[], tuple[Callable[..., Any], list[tf.Variable]]]:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        w, b, m = tf.Variable(rows(3, 3)), tf.Variable(rows(3)), tf.Variable(tf.zeros((3, 3), tf.float64))

        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                h = tf.nn.softplus(tf.tanh(x @ w + b) @ w)
                loss = tf.reduce_mean((h - y) ** 2)
            by_w, by_b = tape.gradient(loss, [w, b])
            if optimizer:
                m.assign(0.9 * m + by_w)
                w.assign_sub(0.1 * m)
                b.assign_sub(0.1 * by_b)
            return loss, h, by_b

        return step, [w, b, m]

    return make


@pytest.mark.parametrize("devices", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 5))])
def test_a_training_step(devices: int) -> None:
    batches = [(rows(7, 3, seed=s), rows(7, 3, seed=s + 1)) for s in range(3)]
    assert_law(dense(), batches, devices=devices, jit_compile=True)


def test_one_call_for_each_device_and_one_function_for_equal_shards() -> None:
    step, _ = dense()()
    parallel = gs.parallelize(step, devices=3, jit_compile=True)
    found = calls(parallel, rows(9, 3), rows(9, 3))
    assert per_device(found) == {"/device:CPU:0": 2, "/device:CPU:1": 1, "/device:CPU:2": 1}
    names = {node.name: node.attr["f"].func.name for node in found}
    shards = [name for node, name in names.items() if "/shard_" in node]
    assert len(shards) == 3
    assert len(set(shards)) == 1


def test_a_placement_says_where_compiled_operations_ran() -> None:
    parallel = gs.parallelize(lambda x: tf.tanh(tf.square(x) * 2), devices=3, jit_compile=True)
    placement = parallel.placement(rows(9, 3), actual=True)
    found = [op for op in placement.select("*Tanh*") if op.type == "Tanh"]
    assert [op.actual.rpartition(":")[2] for op in found] == ["0", "1", "2"]
    assert all(op.reason.startswith("compiled by XLA as part of graphsplit/compiled/shard_") for op in found)


@pytest.mark.long
def test_a_compiled_function_is_compiled_for_each_shard() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        step, variables = dense()()
        return tf.function(step, jit_compile=True), variables

    plan = assert_law(make, [(rows(7, 3), rows(7, 3, seed=1))] * 2)
    assert plan.jit_compile
    assert not any(op.type == "PartitionedCall" for op in plan.program.ops)


@pytest.mark.long
def test_any_number_of_rows() -> None:
    batches = [(rows(n, 3), rows(n, 3, seed=1)) for n in (7, 4, 1, 2)]
    plan = assert_law(dense(), batches, jit_compile=True, tuning={"reduce_retracing": True})
    assert plan.program.batch_is_unknown


def test_micro_batches() -> None:
    step, _ = dense()()
    parallel = gs.parallelize(step, devices=2, micro_batches=2, jit_compile=True)
    found = [n for n in calls(parallel, rows(8, 3), rows(8, 3)) if "/shard_" in n.name]
    assert per_device(found) == {"/device:CPU:0": 2, "/device:CPU:1": 2}
    assert len({n.attr["f"].func.name for n in found}) == 1


@pytest.mark.long
def test_micro_batches_of_different_sizes() -> None:
    assert_law(dense(), [(rows(11, 3), rows(11, 3, seed=1))] * 2, devices=2, micro_batches=3, jit_compile=True)


@pytest.mark.long
def test_a_tape_around_the_call() -> None:
    step, [w, b, _] = dense(optimizer=False)()
    parallel = gs.parallelize(step, devices=3, jit_compile=True)
    x, y = rows(7, 3), rows(7, 3, seed=1)
    found = []
    for function in (step, parallel):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss, h, by_b = function(x, y)
        found.append([tape.gradient(result, [x, w, b]) for result in (loss, h, by_b)])
    assert_close(found[1], found[0])


@pytest.mark.long
def test_a_jacobian_around_the_call() -> None:
    w = tf.Variable(rows(3, 3))

    def fn(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.softplus(tf.tanh(x @ w) @ w)

    found = []
    for function in (tf.function(fn), gs.parallelize(fn, devices=3, jit_compile=True)):
        with tf.GradientTape() as tape:
            y = function(rows(7, 3))
        found.append(tape.jacobian(y, w))
    assert_close(found[1], found[0])


@pytest.mark.long
def test_loops_and_lists_of_tensors() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        w = tf.Variable(rows(3, 3))

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                states = tf.TensorArray(tf.float64, 4)
                h = x
                for k in tf.range(4):
                    h = tf.tanh(h @ w)
                    states = states.write(k, h)
                loss = tf.reduce_mean(states.stack() ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    assert_law(make, [(rows(7, 3),)] * 2, jit_compile=True)


@pytest.mark.long
def test_random_numbers_are_those_of_one_device() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        w = tf.Variable(rows(3, 3))

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                h = tf.nn.experimental.stateless_dropout(tf.tanh(x @ w), 0.5, [1, 2])
                loss = tf.reduce_mean((h @ w) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss, h

        return step, [w]

    assert_law(make, [(rows(7, 3),)] * 2, jit_compile=True)


def test_a_loop_whose_turns_are_split_stays_so() -> None:
    def fn(x: tf.Tensor) -> Any:
        h, k = tf.sin(tf.cos(x)), tf.constant(0.0, tf.float64)
        while tf.reduce_max(tf.abs(h)) > 0.1:
            h, k = tf.tanh(h @ tf.ones((3, 3), tf.float64) * 0.1) * 0.5, k + tf.reduce_sum(h)
        return h, tf.sin(tf.cos(k) * 2)

    parallel = gs.parallelize(fn, devices=3, jit_compile=True)
    nodes = parallel.graph_def(rows(7, 3)).node
    assert [node.device for node in nodes if "While" in node.op] == ["/device:CPU:0"]
    assert_close(parallel(rows(7, 3)), tf.function(fn)(rows(7, 3)))
    text = "    not compiled: 1 x StatelessWhile: the devices exchange data in each of its iterations"
    assert text in str(parallel.plan(rows(7, 3))).splitlines()


def test_what_xla_refuses_names_the_line() -> None:
    def growing(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x) * 2
        while tf.shape(h)[1] < 20:
            tf.autograph.experimental.set_loop_options(shape_invariants=[(h, tf.TensorShape([None, None]))])
            h = tf.concat([h, x], 1)
        return h * 2

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        gs.parallelize(growing, devices=3, jit_compile=True)(rows(7, 5))
    assert re.sub(r":\d+:", ":N:", caught.value.message) == (
        "CPU:0, test_clusters.py:N: Input and output shapes of loop body do not match: (s32[], s32[], f64[7,5], "
        "f64[7,5]) vs. (s32[], s32[], f64[7,10], f64[7,5]). XLA cannot compile this. Leave out "
        "jit_compile=True, or compile a Keras model with jit_compile=False, which is not its default where a GPU is. "
        "You may put @tf.function(jit_compile=True) on functions inside that XLA can compile."
    )


def test_what_is_not_compiled_is_on_the_plan() -> None:
    def fn(x: tf.Tensor) -> Any:
        h = tf.tanh(x) * 2
        mask = tf.random.stateless_uniform(tf.shape(h), [1, 2], dtype=h.dtype)
        return tf.where(mask > 0.5, h, 0), tf.unique(tf.cast(h[:, 0], tf.int32)).y

    parallel = gs.parallelize(fn, devices=3, jit_compile=True)
    lines = str(parallel.plan(rows(7, 5))).splitlines()
    first = next(k for k, line in enumerate(lines) if "compiled by XLA" in line)
    assert lines[first : first + 4] == [
        "  compiled by XLA between moves: 9 of 13 operations that compute",
        "    not compiled: 2 x StatelessRandomGetKeyCounter: XLA draws other random numbers",
        "    not compiled: 1 x StatelessRandomUniformV2: XLA draws other random numbers",
        "    not compiled: 1 x Unique: the size of what it returns follows from the data",
    ]
    assert_close(parallel(rows(7, 5)), fn(rows(7, 5)))


def small(flavor: Any) -> Any:
    flavor.utils.set_random_seed(1)
    layers = [flavor.layers.Dense(4, "tanh"), flavor.layers.Dense(2)]
    return flavor.Sequential([flavor.Input((3,)) if flavor is keras else flavor.layers.InputLayer((3,)), *layers])


@pytest.mark.long
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("flavor", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_fit(flavor: Any, by_position: bool) -> None:
    x, y = rows(10, 3).numpy().astype("float32"), rows(10, 2, seed=1).numpy().astype("float32")
    single, template = small(flavor), small(flavor)
    several = gs.multi_gpu_model(template, 3)
    options = (None, None, None, False, 1, True)
    found = []
    for model in (single, several):
        asked = model is several
        named = {"jit_compile": True} if asked and not by_position else {}
        model.compile("sgd", "mse", *(options if asked and by_position else ()), **named)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append((history.history["loss"], model.get_weights(), model.predict(x, verbose=0)))
    for a, b in zip(tf.nest.flatten(found[1]), tf.nest.flatten(found[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    step = several.train_function.step
    assert calls(step, False, tf.constant(x[:4]), tf.constant(y[:4]))


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.MaxPool2D(), keras.layers.Flatten(), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


@pytest.mark.long
@pytest.mark.usefixtures("float64", "plain_oracle")
def test_a_network_whose_normalization_needs_all_rows() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        model = network()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return step, [v.value for v in (*model.variables, *optimizer.variables)]

    assert_law(make, [(tf.reshape(rows(7, 192), (7, 8, 8, 3)), rows(7, 2))] * 2, jit_compile=True, tolerance=EXACT)
