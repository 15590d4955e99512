"""`with_layout`: tensors inside of a function lie along the axes of a mesh as it asks, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission.checks import check_emitted
from graphsplit.emission.emitter import emit
from graphsplit.planning.device_bytes import traffic
from tests.helpers.mesh_cases import devices_of

WIDTH, HIDDEN, LENGTH = 16, 32, 7
LAYOUT = {"up": (None, "model"), "down": ("model", None), "*": "home"}
WHOLE, SEQUENCE = ("batch", None, None), ("batch", "model", None)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape) * 0.3


def as_it_is(x: tf.Tensor, _: Any) -> tf.Tensor:
    return x


def perceptron(ask: Callable[..., Any]) -> tuple[list[tf.Variable], Callable[..., Any]]:
    """Return weights, and a step of a block whose sequence is cut where nothing else is, if `ask` is `with_layout`."""
    up, down = tf.Variable(numbers(WIDTH, HIDDEN), name="up"), tf.Variable(numbers(HIDDEN, WIDTH), name="down")
    scale = tf.Variable(numbers(WIDTH), name="scale")
    variables = [up, down, scale]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            x = ask(x, SEQUENCE)
            normal = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-3) * scale
            y = x + ask(tf.nn.gelu(ask(normal, WHOLE) @ up) @ down, SEQUENCE)
            loss = tf.reduce_mean((y - 1.0) ** 2)
        for own, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            own.assign_sub(0.1 * gradient)
        return loss, y

    return variables, step


def assert_law(mesh: dict[str, int], batches: Sequence[tf.Tensor], **options: Any) -> gs.ParallelFunction[..., Any]:
    (variables, step), (laid, other) = perceptron(as_it_is), perceptron(gs.with_layout)
    gs.set_variable_layout(laid, LAYOUT, devices_of(mesh), mesh=mesh)
    parallel = gs.parallelize(other, mesh=mesh, devices=devices_of(mesh), **options)
    for x in batches:
        plan = parallel.plan(x)
        plan.check()
        check_emitted(plan, emit(plan))
        for _ in range(2):
            tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), step(x), parallel(x))
    for one, own in zip(variables, laid, strict=True):
        np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9, 1e-10)
    return parallel


def test_a_sequence_is_cut_for_the_bytes_of_the_sums():
    """Two all-gathers and two reduce-scatters, in place of two all-reduces, by TensorFlow's partition graphs."""
    x = tf.constant(numbers(3, LENGTH, WIDTH))
    parallel = assert_law({"model": 2}, [x])
    size = x.shape.num_elements() * 8  # what each of the four moves sends, over both devices
    small = 2 * WIDTH * 8 + 8  # the scale, its gradient, the loss
    ends = x[:, : LENGTH // 2].shape.num_elements() * 8  # of the argument, and of what is returned
    ran = gs.placement(parallel, x, actual=True)
    sent = sum(transfer.bytes for transfer in ran.transfers)
    assert sent == sum(traffic(parallel.plan(x)).by_kind.values())
    assert 4 * size + 2 * ends <= sent <= 4 * size + 2 * ends + small
    roles = {op.provenance.role for op in parallel.plan(x).program.ops}
    assert {"all-gather", "reduce-scatter"} <= roles
    assert "all-reduce" not in roles
    assert f"note: with_layout ('batch', 'model', None) of [3, {LENGTH}, {WIDTH}] at test_with_layout.py:" in str(
        parallel.plan(x)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"batch": 2, "model": 2}, {"batch": 2, "model": 1}], ids=str)
def test_rows_and_sequences(mesh: dict[str, int]):
    assert_law(mesh, [tf.constant(numbers(count, LENGTH, WIDTH)) for count in (3, 1)])


def test_any_number_of_rows_in_one_graph():
    batches = [tf.constant(numbers(count, LENGTH, WIDTH)) for count in (5, 1, 4)]
    assert_law({"batch": 2, "model": 2}, batches, tuning={"reduce_retracing": True})


def test_without_a_variable_along_the_axis():
    """Work on whole weights is shared out along the sequence."""
    weight = tf.Variable(numbers(WIDTH, WIDTH))

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:  # traced before, outside
        return tf.tanh(gs.with_layout(x, (None, "model", None)) @ weight)

    x = tf.constant(numbers(1, LENGTH, WIDTH))
    expected = inner(x)
    parallel = gs.parallelize(lambda x: inner(x) * 2.0, mesh={"model": 2}, devices=devices_of({"model": 2}))
    np.testing.assert_allclose(parallel(x), expected * 2.0, 1e-12)
    products = [op for op in parallel.plan(x).program.ops if op.type == "BatchMatMulV2"]
    assert sorted((op.provenance.column, op.out_shapes[0][1]) for op in products) == [(0, 4), (1, 3)]


class Block(keras.layers.Layer):
    def __init__(self, ask: Callable[..., Any] = gs.with_layout):
        super().__init__(name="block")
        self.up, self.down = keras.layers.Dense(HIDDEN, "relu", name="up"), keras.layers.Dense(WIDTH, name="down")
        self.ask = ask

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.ask(self.down(self.ask(self.up(x), ("batch", None, "model"))), SEQUENCE)


def test_a_keras_layer():
    layout = {"*/up/kernel": (None, "model"), "*/up/bias": ("model",), "*/down/kernel": ("model", None), "*": "home"}
    x, y = numbers(6, LENGTH, WIDTH).astype(np.float32), numbers(6, LENGTH, WIDTH, seed=1).astype(np.float32)
    found = []
    for mesh in (None, {"batch": 2, "model": 2}):
        keras.utils.set_random_seed(3)
        net = keras.Sequential([keras.Input((LENGTH, WIDTH)), Block()])
        net.compile("sgd", "mse")
        model = net if mesh is None else gs.multi_gpu_model(net, mesh=mesh, variables=layout)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append([*net.get_weights(), model.predict(x, verbose=0)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_elsewhere_it_does_nothing():
    x = tf.constant(numbers(3, LENGTH, WIDTH))
    assert gs.with_layout(x, SEQUENCE) is x

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = gs.with_layout(x * x, SEQUENCE)
        return tape.gradient(y, x)

    np.testing.assert_array_equal(gradient(x), 2 * x)
    parallel = gs.parallelize(gradient, devices=2)
    np.testing.assert_array_equal(parallel(x), 2 * x)
    assert "with_layout" not in str(parallel.plan(x))


def asked(layout: Any, *shape: int, given: Any = None) -> Callable[[], Any]:
    x = tf.zeros(shape) if given is None else given
    return lambda: gs.with_layout(x, layout)


def planned(layout: Any, *shape: int | None) -> Callable[[], Any]:
    parallel = gs.parallelize(lambda x: gs.with_layout(x, layout) * 2.0, mesh={"batch": 1, "model": 3}, devices=3)
    return lambda: parallel.plan(tf.TensorSpec(shape))


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (asked(("batch", "model"), 2, 3, 4), gs.errors.ArgumentError, "has 2 dimensions, the tensor 3"),
        (asked(("model", "model"), 2, 3), gs.errors.ArgumentError, "'model' is named twice"),
        (asked("model", 2), gs.errors.ArgumentError, "a layout has the name of an axis, or None, for each dimension"),
        (asked((0, 1), 2, 3), gs.errors.ArgumentError, "a layout has the name of an axis, or None, for each dimension"),
        (asked((None,), given=[1.0]), gs.errors.ArgumentError, "takes a tensor and its layout, got [1.0]"),
        (asked((None,), given=keras.Input([])), gs.errors.UnsupportedError, "called on a symbolic Keras tensor"),
        (
            planned(("batch", "modle"), 4, 6),
            gs.errors.ArgumentError,
            "there is no axis 'modle'; there are 'batch', 'model'. Did",
        ),
        (
            planned((None, "model"), 4, 2),
            gs.errors.ArgumentError,
            "dimension 1 has 2 entries, and 'model' has 3 devices",
        ),
        (
            planned((None, "model"), 4, None),
            gs.errors.UnsupportedError,
            "the length of dimension 1 is not known when planning",
        ),
    ],
)
def test_errors(call: Callable[[], Any], kind: type[Exception], expected: str):
    with pytest.raises(kind) as found:
        call()
    assert expected in str(found.value)
