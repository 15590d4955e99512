"""`jit_compile="auto"`: what XLA refuses runs uncompiled, is on the plan and in a warning; all else stays compiled."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from tests.helpers.law import assert_close, assert_law


def rows(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 3], dtype=tf.float64)


def per_device(parallel: gs.ParallelFunction, *arguments: Any) -> dict[str, int]:
    """Return how many compiled calls run on each device."""
    found = Counter(n.device for n in parallel.graph_def(*arguments).node if n.attr["_XlaMustCompile"].b)
    return {device.removeprefix("/device:CPU:"): count for device, count in sorted(found.items())}


@contextmanager
def told(name: str, *lines: str) -> Iterator[None]:
    """Expect one warning with these lines, and no other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [re.sub(r"(\.py):\d+", r"\1", str(warning.message)) for warning in caught]
    listed = "\n".join(f"  - test_compiled_auto.py, {line}" for line in lines)
    assert messages == [
        f"jit_compile='auto' leaves these operations of {name} uncompiled:\n{listed}\n"
        "All others that XLA has kernels for are compiled; results are the same."
    ] * bool(lines)
    assert all(warning.filename == __file__ for warning in caught)


GROWS = (
    "Input and output shapes of loop body do not match: (s32[], s32[], f64[7,5], f64[7,5]) vs. "
    "(s32[], s32[], f64[7,10], f64[7,5])"
)
UNKNOWN = "the size of what it takes is not known before it runs"
NO_LENGTH = "XLA compilation requires a fixed tensor list size"
SHARED = "its list of tensors is read or made outside of what is compiled"
NO_VALUE = "Input 0 to node `Fill` with op Fill must be a compile-time constant"


def growing(x: tf.Tensor) -> Any:
    h = tf.tanh(x) * 2
    while tf.shape(h)[1] < 20:
        tf.autograph.experimental.set_loop_options(shape_invariants=[(h, tf.TensorShape([None, None]))])
        h = tf.concat([h, x[:, 4:] if x.shape[1] is None else x], 1)
    return tf.sin(h) * 2, tf.exp(tf.sin(x))


def test_a_loop_whose_shapes_grow() -> None:
    parallel = gs.parallelize(growing, devices=3, jit_compile="auto")
    with told("growing", f"StatelessWhile: {GROWS}", f"Sin, Mul: {UNKNOWN}"):
        found = parallel(rows(7, 5))
    assert_close(found, tf.function(growing)(rows(7, 5)))
    assert per_device(parallel, rows(7, 5)) == {"0": 1, "1": 1, "2": 1}
    with told("growing"):  # it said so once
        parallel(rows(7, 5))


def test_a_loop_of_unknown_end_under_a_tape() -> None:
    w = tf.Variable(rows(3, 3))

    def step(x: tf.Tensor, turns: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            h, turn = x, 0
            while turn < turns:
                h, turn = tf.tanh(h @ w) * 0.5, turn + 1
            loss = tf.reduce_mean(tf.exp(h) ** 2)
        return loss, tape.gradient(loss, w), tf.sin(tf.cos(x))

    parallel = gs.parallelize(step, devices=3, jit_compile="auto")
    expected = tf.function(step)(rows(7, 3), tf.constant(3))
    gradient, loop = "EmptyTensorList, StatelessWhile", "StatelessWhile"
    with told("step", f"EmptyTensorList: {NO_LENGTH}", f"{gradient}: {SHARED}", f"{loop}: {SHARED}"):
        found = parallel(rows(7, 3), tf.constant(3))
    assert_close(found, expected)
    assert per_device(parallel, rows(7, 3), tf.constant(3)) == {"0": 1, "1": 1, "2": 1}


def test_a_shape_that_follows_from_data() -> None:
    def fn(x: tf.Tensor, scale: tf.Tensor) -> Any:
        count = tf.cast(tf.exp(scale[0]), tf.int32)
        return tf.sin(tf.cos(x)), tf.reduce_sum(tf.exp(tf.fill([count, 2], scale[1])))

    parallel = gs.parallelize(fn, devices=3, jit_compile="auto", split={"x": 0})
    with told("fn", f"Fill: {NO_VALUE}", f"Exp, Sum: {UNKNOWN}"):
        found = parallel(rows(7, 3), rows(2))
    assert_close(found, fn(rows(7, 3), rows(2)))
    assert {"1", "2"} <= set(per_device(parallel, rows(7, 3), rows(2)))


def test_what_is_left_out_is_on_the_plan() -> None:
    parallel = gs.parallelize(growing, devices=3, jit_compile="auto")
    with pytest.warns(UserWarning, match="leaves these operations of growing uncompiled"):
        lines = str(parallel.plan(rows(7, 5))).splitlines()
    first = next(k for k, line in enumerate(lines) if "compiled by XLA" in line)
    place = "(test_compiled_auto.py:N)"
    assert [re.sub(r":\d+\)", ":N)", line) for line in lines[first : first + 4]] == [
        "  compiled by XLA between moves: 4 of 7 operations that compute",
        f"    not compiled: 1 x StatelessWhile {place}: {GROWS}",
        f"    not compiled: 1 x Sin {place}: {UNKNOWN}",
        f"    not compiled: 1 x Mul {place}: {UNKNOWN}",
    ]


def test_what_xla_compiles_is_compiled_as_when_all_of_it_is() -> None:
    w = tf.Variable(rows(3, 3))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.nn.softplus(x @ w) @ w) ** 2)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * gradient)
        return loss

    auto, every = (gs.parallelize(step, devices=3, jit_compile=asked) for asked in ("auto", True))
    found = [sorted(n.name for n in p.graph_def(rows(7, 3)).node if n.attr["_XlaMustCompile"].b) for p in (auto, every)]
    assert found[0] == found[1] != []
    assert w.numpy().tolist() == rows(3, 3).numpy().tolist()  # nothing ran


@pytest.mark.long
def test_each_size_is_asked_about() -> None:
    parallel = gs.parallelize(growing, devices=3, jit_compile="auto", reduce_retracing=True)
    with told("growing", f"StatelessWhile: {GROWS}", f"Sin, Mul: {UNKNOWN}"):
        found = parallel(rows(7, 5))
    assert_close(found, tf.function(growing)(rows(7, 5)))
    for n in (6, 2, 1):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert_close(parallel(rows(n, 5)), tf.function(growing)(rows(n, 5)))
    assert parallel.plan().program.batch_is_unknown
    assert per_device(parallel, rows(7, 5)) == {"0": 1, "1": 1, "2": 1}


@pytest.mark.long
def test_in_a_graph_that_knows_no_sizes_nothing_is_compiled() -> None:
    fn = lambda x: tf.exp(tf.sin(x)) * 2  # noqa: E731
    parallel = gs.parallelize(fn, devices=3, jit_compile="auto", reduce_retracing=True)
    outer = tf.function(lambda x: parallel(x) + 1, input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    for n in (7, 2):
        assert_close(outer(rows(n, 3)), fn(rows(n, 3)) + 1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"reduce_retracing": True}], ids=["known", "unknown"])
def test_a_tape_around_the_call(options: dict[str, Any]) -> None:
    w = tf.Variable(rows(3, 3))

    def fn(x: tf.Tensor, turns: tf.Tensor) -> tf.Tensor:
        h, turn = tf.sin(tf.cos(x)), 0
        while turn < turns:
            h, turn = tf.tanh(h @ w) * 0.5, turn + 1
        return tf.exp(h) * 2

    parallel = gs.parallelize(fn, devices=3, jit_compile="auto", **options)
    found = []
    for function in (tf.function(fn), parallel):
        with warnings.catch_warnings(), tf.GradientTape() as tape:
            warnings.simplefilter("ignore")
            y = function(rows(7, 3), tf.constant(3))
        found.append((y, tape.gradient(y, w)))
    assert_close(found[1], found[0])
    lines = str(parallel.gradient_plan(rows(7, 3), tf.constant(3))).splitlines()
    assert options or any("EmptyTensorList" in line and NO_LENGTH in line for line in lines)


@pytest.mark.long
def test_variables_in_parts() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        w = tf.Variable(rows(8, 8))
        gs.set_variable_layout([w], "sharded", 3)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(tf.nn.softplus(x @ w) @ w) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    assert_law(make, [(rows(7, 8),)] * 2, jit_compile="auto")


def small(flavor: Any) -> Any:
    flavor.utils.set_random_seed(1)
    layers = [flavor.layers.Dense(4, "tanh"), flavor.layers.Dense(2)]
    return flavor.Sequential([flavor.Input((3,)) if flavor is keras else flavor.layers.InputLayer((3,)), *layers])


@pytest.mark.long
@pytest.mark.parametrize("flavor", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_fit(flavor: Any) -> None:
    x, y = rows(10, 3).numpy().astype("float32"), rows(10, 2, seed=1).numpy().astype("float32")
    single, template = small(flavor), small(flavor)
    several = gs.multi_gpu_model(template, 3)
    single.compile("sgd", "mse")
    several.compile("sgd", "mse", jit_compile="auto")
    found = []
    for model in (single, several):
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append((history.history["loss"], model.get_weights(), model.predict(x, verbose=0)))
    for a, b in zip(tf.nest.flatten(found[1]), tf.nest.flatten(found[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert per_device(several.train_function.step, False, tf.constant(x[:4]), tf.constant(y[:4]))


def test_other_words_are_refused() -> None:
    with pytest.raises(gs.ArgumentError) as caught:
        gs.parallelize(tf.sin, jit_compile="always")  # type: ignore[arg-type, unused-ignore]
    assert str(caught.value) == "jit_compile is True, False, or 'auto' for what XLA can compile, got 'always'."
