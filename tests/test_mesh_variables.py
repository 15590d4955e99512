"""How variables lie on a whole mesh: cut along an axis, copied or divided over the rows; one device's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission.emitter import emit
from tests.helpers.mesh_cases import (
    HIDDEN,
    PERCEPTRON,
    TRANSFORMER,
    WIDTH,
    Made,
    assert_law,
    boxes,
    bytes_of,
    devices_of,
    forward,
    ids_of,
    message,
    numbers,
    perceptron,
    sgd,
    transformer,
    variable,
)

TWO, THREE = {"batch": 2, "model": 2}, {"batch": 3, "model": 2}

SPELLINGS: dict[str, dict[str, Any]] = {
    "both axes": {"up": ("batch", "model"), "down": ("model", "batch"), "inner": ("model",), "*": "sharded"},
    "sharded": {
        "up": ((None, "model"), "sharded"),
        "down": (("model",), "sharded"),
        "inner": (("model",), "sharded"),
        "*": "sharded",
    },
    "replicated": {
        "up": ((None, "model"), "replicated"),
        "down": (("model", None), "replicated"),
        "inner": (("model",), "replicated"),
        "*": "replicated",
    },
    "one dimension": {"up": (None, ("model", "batch")), "down": (("batch", "model"), None), "*": "home"},
    "the batch's axis": {"up": ("batch", None), "down": (None, "batch"), "inner": ("batch",), "*": "home"},
    "the same in all columns": {"up": (("batch", None), "replicated"), "down": ("model", "batch"), "*": "home"},
    "over all devices": {"up": (("batch",), "sharded"), "down": ("model",), "*": "home"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [TWO, pytest.param(THREE, marks=pytest.mark.many)], ids=str)
@pytest.mark.parametrize("layout", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling(layout: dict[str, Any], mesh: dict[str, int]):
    """Uneven rows, widths that do not divide, fewer rows than devices."""
    assert_law(perceptron, layout, mesh, [tf.constant(numbers(count, WIDTH)) for count in (5, 1)])


@pytest.mark.many
def test_what_each_device_has():
    own, grid = variable("w", 6, 5), devices_of(THREE)

    def lies(layout: Any) -> dict[str, tuple[int, ...]]:
        gs.set_variable_layout(own, layout, grid, mesh=THREE)
        parts = parts_of_variable(own)
        assert parts is not None
        assert parts.layout == layout
        assert parts.in_parts
        np.testing.assert_array_equal(own.numpy(), numbers(6, 5))
        own.assign_add(tf.zeros_like(own))  # put together, and apart again
        parts.take_apart()
        assert sum(parts.bytes_on_devices().values()) == 8 * sum(int(np.prod(box)) for box in boxes(own).values())
        np.testing.assert_array_equal(own.numpy(), numbers(6, 5))
        return boxes(own)

    left, right = ["CPU:0", "CPU:2", "CPU:4"], ["CPU:1", "CPU:3", "CPU:5"]
    assert lies((None, "model")) == {"CPU:0": (6, 3), "CPU:1": (6, 2)}
    assert lies(((None, "model"), "replicated")) == dict.fromkeys(left, (6, 3)) | dict.fromkeys(right, (6, 2))
    assert lies(("batch", "model")) == dict.fromkeys(left, (2, 3)) | dict.fromkeys(right, (2, 2))
    assert lies(("model", "batch")) == dict(zip([*left, *right], [(3, 2), (3, 2), (3, 1)] * 2, strict=True))
    assert lies((("batch", "model"), None)) == dict.fromkeys([*left, *right], (1, 5))
    assert lies(("batch", None)) == dict.fromkeys(left, (2, 5))
    assert lies((("batch", None), "replicated")) == dict.fromkeys([*left, *right], (2, 5))
    assert lies((("batch", None), "sharded")) == dict.fromkeys([*left, *right], (1, 5))
    gs.set_variable_layout(own, ((None, None), "replicated"), grid, mesh=THREE)
    assert parts_of_variable(own).layout == "replicated"


def deep() -> Made:
    """Weights that are gathered, dropped and gathered again: four of 154 kB."""
    weights = [variable(f"{n}/w", 48, 400, seed=n) for n in range(2)] + [
        variable(f"{n}/v", 400, 48, seed=n) for n in range(2)
    ]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = x
            for w, v in zip(weights[:2], weights[2:], strict=True):
                y += tf.tanh(y @ w) @ v
            loss = tf.reduce_mean(y**2)
        return loss, sgd(weights, loss, tape)

    return weights, step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_weights_are_gathered_again(micro_batches: int):
    """Each column puts its own part together, for the forward pass and again for the backward pass."""
    layout = {"*/w": ("batch", "model"), "*/v": ("model", "batch")}
    batches = [tf.constant(numbers(7, 48))]
    parallel = assert_law(deep, layout, TWO, batches, micro_batches=micro_batches)
    plan = parallel.plan(*batches)
    joined = [op for op in plan.program.ops if op.type == "ConcatV2" and op.divides]
    assert {op.provenance.column for op in joined} == {0, 1}
    if micro_batches == 1:
        assert len(joined) > 2 * 4  # more often than once for each weight and column
    assert not plan.state.gathered  # nothing is put together along the other axis


def test_a_transformer_that_is_divided():
    layout = {
        **TRANSFORMER,
        "*/up": ("batch", "model"),
        "*/down": ("model", "batch"),
        "*/o": (("model",), "sharded"),
        "*": "sharded",
    }
    layout |= {f"*/{name}": ((None, "model"), "sharded") for name in "qkv"}
    assert_law(lambda: transformer(4), layout, TWO, [ids_of(5)])


def test_any_number_of_rows_in_one_graph():
    batches = [tf.constant(numbers(n, WIDTH)) for n in (5, 1, 8, 2)]
    assert_law(perceptron, SPELLINGS["sharded"], TWO, batches, tuning={"reduce_retracing": True})


def test_gradients_from_outside():
    """Gradients of a loss outside, and gradients of gradients, which read what was kept."""
    for name in ("both axes", "replicated"):
        (variables, _), (laid, _) = perceptron(), perceptron()
        gs.set_variable_layout(laid, SPELLINGS[name], devices_of(TWO), mesh=TWO)
        x = tf.constant(numbers(5, WIDTH))
        parallel = gs.parallelize(forward(laid), mesh=TWO, devices=devices_of(TWO))
        found = []
        for function, own in ((forward(variables), variables), (parallel, laid)):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(function(x) ** 2)
                gradients = tape.gradient(loss, own)
                norm = tf.add_n([tf.reduce_sum(gradient**2) for gradient in gradients])
            found.append([loss, *gradients, *outer.gradient(norm, own)])
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, 1e-9, 1e-10)


def test_what_takes_a_part_whole():
    """A loop that writes the variable: it is put together for the call, and the plan says why."""
    weight = variable("weight", WIDTH, HIDDEN)
    other = tf.Variable(weight)
    gs.set_variable_layout(weight, ((None, "model"), "sharded"), devices_of(TWO), mesh=TWO)

    def repeated(own: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
        def step(x: tf.Tensor) -> tf.Tensor:
            for _ in tf.range(3):
                own.assign_add(tf.ones_like(own) * tf.reduce_mean(x))
            return x @ own

        return tf.function(step)

    x = tf.constant(numbers(5, WIDTH))
    parallel = gs.parallelize(repeated(weight), mesh=TWO, devices=devices_of(TWO))
    np.testing.assert_allclose(parallel(x), repeated(other)(x), 1e-9)
    np.testing.assert_allclose(weight.numpy(), other.numpy(), 1e-9)
    assert "is gathered for each call" in str(parallel.plan(x))


def wide() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    sizes = [layers.Dense(121, "relu", name="up"), layers.Dropout(0.3, seed=7), layers.Dense(96, name="down")]
    return keras.Sequential([keras.Input((96,)), *sizes, layers.BatchNormalization(), layers.Dense(3)])


def trained(mesh: Any, layout: Any) -> tuple[Any, list[Any]]:
    template = wide()
    template.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2, clipnorm=0.5), "mse")
    model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables=layout)
    x, y = numbers(22, 96).astype(np.float32), numbers(22, 3).astype(np.float32)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return template, [history, model.predict(x[:5], verbose=0)]


LAYERS = {
    "up/kernel": ("batch", "model"),
    "down/kernel": ("model", "batch"),
    "up/bias": (("model",), "sharded"),
    "*": "sharded",
}


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.many)])
def test_a_keras_model_is_divided_over_rows_and_columns(rows: int, tmp_path: Path):
    """The optimizer's slots too; and files are one device's, loaded under every layout."""
    one, expected = trained(None, None)
    template, found = trained({"batch": rows, "model": 2}, LAYERS)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)
    state = [v.value for v in (*template.variables, *template.optimizer.variables)]
    held, total = bytes_of(state), sum(v.dtype.size * v.shape.num_elements() for v in state)
    slices = [int(np.prod(box)) * 4 for v in state if parts_of_variable(v) is not None for box in boxes(v).values()]
    assert len(held) == 2 * rows
    assert sum(held.values()) == total
    assert max(held.values()) <= total / (2 * rows) + max(slices)
    kernel = template.get_layer("up").kernel.value
    slots = [v.value for v in template.optimizer.variables if tuple(v.shape) == (96, 121)]
    assert [boxes(v) for v in slots] == [boxes(kernel)] * 2
    assert {boxes(kernel)[device] for device in ("CPU:0", "CPU:1")} == {(96 // rows, 61), (96 // rows, 60)}
    template.save(tmp_path / "model.keras")
    template.save_weights(tmp_path / "model.weights.h5")
    weights = template.get_weights()
    for a, b in zip(one.get_weights(), weights, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)
    for mesh, layout in ((None, None), (TWO, LAYERS), ({"batch": 5}, "sharded")):
        again = keras.models.load_model(tmp_path / "model.keras")
        model = again if mesh is None else gs.multi_gpu_model(again, mesh=mesh, variables=layout)
        model.predict(numbers(5, 96), verbose=0)
        again.load_weights(tmp_path / "model.weights.h5")  # while they lie in parts
        for a, b in zip(weights, again.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_slots_follow_their_variables_later():
    """An optimizer that is laid out after its model, with the same layouts, goes to where that lies."""
    net = wide()
    gs.set_variable_layout(net, LAYERS, devices_of(TWO), mesh=TWO)
    optimizer = keras.optimizers.Adam()
    optimizer.build(net.trainable_variables)
    gs.set_variable_layout([net, optimizer], LAYERS, devices_of(TWO), mesh=TWO)
    bias, kernel = net.get_layer("up").bias.value, net.get_layer("up").kernel.value
    for own in (bias, kernel):
        slots = [v.value for v in optimizer.variables if v.shape == own.shape and len(v.shape)]
        assert [parts_of_variable(v).division for v in slots[:2]] == [parts_of_variable(own).division] * 2


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2}, {"model": 2, "data": 2}], ids=str)
def test_another_name_for_the_axis_of_the_batch(mesh: dict[str, int]):
    """As Keras' meshes call it; shares of the batch are along it."""
    layout = {"up": ("data", "model"), "down": (("model",), "replicated"), "*": "home"}
    batches = [tf.constant(numbers(count, WIDTH)) for count in (7, 1)]
    parallel = assert_law(perceptron, layout, mesh, batches, shares=[3, 1])
    assert parallel.plan(batches[0]).rows == (5, 2)
    assert "mesh: data=2, model=2" in str(parallel.plan(batches[0]))


def test_a_model_with_another_name_for_the_axis_of_the_batch():
    net = keras.Sequential([keras.Input((96,)), keras.layers.Dense(121, name="up"), keras.layers.Dense(3)])
    model = gs.multi_gpu_model(
        net, mesh={"data": 2, "model": 2}, variables={"up/kernel": ("data", "model"), "*": "home"}
    )
    x = numbers(5, 96).astype(np.float32)
    expected = net(x)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, 1e-5, 1e-5)
    assert parts_of_variable(net.get_layer("up").kernel.value).layout == ("data", "model")


def lays(layout: Any, **given: Any) -> Callable[[], None]:
    own = [variable("block/up", WIDTH, HIDDEN), variable("block/bias", HIDDEN)]
    given = {"mesh": TWO, **given}
    return lambda: gs.set_variable_layout(own, layout, devices_of(TWO), **given)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lays({"*/up": ("model", "model")}), "names axis 'model' twice; each axis cuts one dimension of a variable"),
        (lays({"*/up": (("model", "model"), None)}), "names axis 'model' twice"),
        (
            lays({"*/up": (("batch", None), "modle")}),
            "'modle' is no axis of mesh (batch=2, model=2), and none of 'home', 'r",
        ),
        (
            lays({"*/up": (("batch", "model"), "replicated")}),
            "name all axes of mesh (batch=2, model=2), so 'replicated' a",
        ),
        (lays({"*/up": (None, 3)}), "names, for each dimension, an axis of a mesh or None"),
        (
            lays({"*/up": (None, ("model", "bach"))}),
            "has no axis 'bach'; it has 'batch', 'model'. Did you mean 'batch'?",
        ),
        (lays({"*/bias": ("batch", "model")}), "block/bias: ('batch', 'model') has 2 dimensions, the variable 1"),
        (lays("home", mesh={"batch": 2, "home": 2}), "'home' is a layout; give the axis another name"),
        (
            lambda: gs.parallelize(abs, mesh={"data": 2, "batch": 2}),
            "names of the axis over which the batch is split. Call the one ",
        ),
    ],
)
def test_what_cannot_be_meant(call: Callable[[], Any], expected: str):
    assert expected in message((gs.errors.ArgumentError, gs.errors.UnsupportedError), call)


def test_nothing_moves_where_a_layout_is_wrong():
    own = [variable("block/up", WIDTH, HIDDEN), variable("block/bias", HIDDEN)]
    call = lambda: gs.set_variable_layout(own, {"*/up": ("batch", "model"), "*": (None, "model")}, mesh=TWO)  # noqa: E731
    assert "block/bias" in message(gs.errors.ArgumentError, call)
    assert [parts_of_variable(variable) for variable in own] == [None, None]


def test_variables_of_another_mesh():
    laid, step = perceptron()
    gs.set_variable_layout(laid, SPELLINGS["both axes"], devices_of(TWO), mesh=TWO)
    x = tf.constant(numbers(5, WIDTH))
    for mesh in ({"batch": 1, "model": 2}, {"model": 2, "batch": 2}):
        parallel = gs.parallelize(step, mesh=mesh)
        found = message(gs.errors.ArgumentError, lambda parallel=parallel: parallel(x))
        assert "up along 'model' on CPU:0, CPU:2, CPU:1, CPU:3" in found
        assert f"The function runs on mesh ({', '.join(f'{name}={size}' for name, size in mesh.items())})" in found


@pytest.mark.parametrize("mesh", [{"batch": 1, "model": 2}, TWO], ids=str)
def test_what_is_not_cut_has_one_owner(mesh: dict[str, int]):
    """Columns do not repeat its optimizer's step."""
    (laid, _), x = perceptron(), tf.constant(numbers(5, WIDTH))
    gs.set_variable_layout(laid, PERCEPTRON, mesh=mesh)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(laid)(x) ** 2)
        for own, gradient in zip(laid, tape.gradient(loss, laid), strict=True):
            own.assign_sub(0.1 * gradient / tf.sqrt(gradient**2 + 0.1))
        return loss

    graph = emit(gs.parallelize(step, mesh=mesh).plan(x))
    counts = Counter(node.op for node in graph.nodes)
    assert counts["AssignSubVariableOp"] == counts["Sqrt"] == 1 + 3 * 2  # only the last bias is not cut


def test_variables_of_open_shape_are_named() -> None:
    whole, half = (
        tf.Variable(tf.ones((3, 4)), shape=tf.TensorShape(shape), name=name)
        for name, shape in (("whole", None), ("half", (None, 4)))
    )
    with pytest.raises(
        gs.errors.ArgumentError, match=r"whole: its shape is open, <unknown>\n.*half: its shape is open, \(None, 4\)"
    ):
        gs.set_variable_layout([whole, half], {"*": (None, "model")}, mesh={"batch": 2, "model": 2})
    gs.set_variable_layout([whole, half], "sharded", devices=2)
    np.testing.assert_array_equal((whole + half).numpy(), 2 * np.ones((3, 4), np.float32))
