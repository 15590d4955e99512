"""A mesh of two axes: weights in parts along one, rows of the batch along the other, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import along, traffic
from tests.helpers.mesh_cases import (
    HIDDEN,
    LENGTH,
    MESHES,
    PERCEPTRON,
    TRANSFORMER,
    VOCABULARY,
    WIDTH,
    Made,
    assert_gradients_from_outside,
    assert_law,
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_perceptron(mesh: dict[str, int]):
    """Indivisible widths, uneven rows, fewer rows than devices."""
    batches = [tf.constant(numbers(count, WIDTH)) for count in (5, 1)]
    parallel = assert_law(perceptron, PERCEPTRON, mesh, batches)
    planned = sum(traffic(parallel.plan(batches[0])).sent.values())
    ran = gs.placement(parallel, batches[0], actual=True)  # TensorFlow's own partition graphs
    assert sum(transfer.bytes for transfer in ran.transfers) == planned


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "mesh"), [(4, MESHES[1]), (3, MESHES[0])], ids=str)
def test_a_transformer(heads: int, mesh: dict[str, int]):
    """Heads, also three over two devices, and the layers between; weights never move along the axis."""
    parallel = assert_law(lambda: transformer(heads), TRANSFORMER, mesh, [ids_of(5)])
    plan = parallel.plan(ids_of(5))
    assert not plan.state.gathered
    emitted = parallel.placement(ids_of(5)).transfers
    more = sum(transfer.bytes for transfer in emitted) - sum(traffic(plan).sent.values())
    assert 0 <= more <= 64  # integers of shapes, which are no moves
    activation = 5 * LENGTH * WIDTH * 8
    sums = 4 * 2 * activation  # two all-reduces forward and two backward, each a reduce-scatter and an all-gather
    others = (
        2 * activation
    )  # what the first column makes for the others: looked-up rows, the gradient of the last layer
    if mesh == MESHES[0]:
        assert sums < traffic(plan).by_kind[along("model")] <= sums + others + 1000
    along_axis = next(line for line in str(plan).splitlines() if "along 'model': " in line)
    assert "4 all-reduces" in along_axis
    assert "computed in place" in str(plan)


def test_any_number_of_rows_in_one_graph():
    parallel = assert_law(
        perceptron,
        PERCEPTRON,
        MESHES[1],
        [tf.constant(numbers(n, WIDTH)) for n in (5, 1, 8, 2)],
        tuning={"reduce_retracing": True},
    )
    assert len({id(parallel.plan(tf.constant(numbers(n, WIDTH)))) for n in (8, 2)}) == 1


def test_micro_batches():
    assert_law(perceptron, PERCEPTRON, MESHES[1], [tf.constant(numbers(7, WIDTH))], micro_batches=2)


@pytest.mark.parametrize("others", ["replicated", "sharded"])
def test_variables_beside(others: str):
    """Those that are not cut along the axis lie in copies, or in parts that are put together."""
    assert_law(perceptron, {**PERCEPTRON, "*": others}, MESHES[1], [tf.constant(numbers(5, WIDTH))])


def branching() -> Made:
    """A branch on activations in parts, a list of them, and a loop."""
    weight, other = variable("weight", WIDTH, HIDDEN), variable("other", HIDDEN, WIDTH)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            h = x @ weight
            h = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(h), lambda: 2.0 * h)
            rows = tf.map_fn(lambda row: tf.sin(row) + tf.reduce_max(row), h)
            _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y)), (0, rows @ other))
            loss = tf.reduce_mean(y**2)
        return loss, sgd([weight, other], loss, tape)

    return [weight, other], step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_known", [True, False])
def test_loops_branches_and_lists(is_known: bool):
    layout = {"weight": (None, "model"), "other": ("model", None)}
    batches = [tf.constant(numbers(count, WIDTH)) for count in ((5,) if is_known else (5, 1, 4))]
    assert_law(branching, layout, MESHES[1], batches, tuning={"reduce_retracing": not is_known})


def test_gradients_from_outside():
    assert_gradients_from_outside(PERCEPTRON, MESHES[1])


def test_a_mesh_without_another_axis():
    """It is what `devices` says, for predictions and plans that are chosen as well; beside stages, for each of them."""
    assert_law(perceptron, {"*": "home"}, {"batch": 3}, [tf.constant(numbers(5, WIDTH))])
    mesh, x = {"batch": 4}, tf.constant(numbers(8, WIDTH))
    variables = perceptron()[0]
    function = forward(variables)
    staged = {"stages": 2, "micro_batches": 2}
    plans = [
        gs.parallelize(forward(perceptron()[0]), **own, **staged).plan(x)
        for own in ({"devices": 4}, {"mesh": {"batch": 2}})
    ]
    assert [(len(plan.devices), len(plan.mesh.devices)) for plan in plans] == [(4, 4)] * 2
    parallel = gs.parallelize(function, mesh=mesh)
    predicted = [len(gs.predict(parallel, x, machine="8xH100-SXM5", devices=n).of_devices) for n in (None, 4, 2)]
    assert predicted == [4, 4, 2]
    assert len(gs.parallelize(function, mesh=mesh, plan="auto").plan(x).devices) <= 4


def test_what_is_put_together_is_said():
    """A decomposition that needs all entries."""
    table = variable("table", VOCABULARY, WIDTH)
    one = tf.Variable(table)
    mesh = MESHES[0]
    gs.set_variable_layout(table, ("model", None), devices_of(mesh), mesh=mesh)
    parallel = gs.parallelize(lambda x: x @ tf.linalg.qr(table)[0], mesh=mesh, devices=devices_of(mesh))
    x = tf.constant(numbers(3, VOCABULARY))
    np.testing.assert_allclose(parallel(x), x @ tf.linalg.qr(one)[0], 1e-9)
    assert "table: [model, -], 6 + 5, gathered before it is used" in str(parallel.plan(x))


def network() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(HIDDEN, "relu", name="up"),
            layers.Dropout(0.3, seed=7),
            layers.Dense(WIDTH, name="down"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, name="last"),
        ]
    )


@pytest.mark.long
def test_a_keras_model_fits(tmp_path: Any):
    layout = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None), "*": "home"}
    x, y = numbers(22, WIDTH).astype(np.float32), numbers(22, 3).astype(np.float32)
    found = []
    for mesh in (None, MESHES[1]):
        template = network()
        template.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2, clipnorm=0.5), "mse")
        model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables=layout)
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        predictions, loss = model.predict(x[:5], verbose=0), model.evaluate(x, y, verbose=0)
        found.append((history, predictions, loss, template.get_weights(), template))
    for one, other in zip(found[0][:3], found[1][:3], strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    for one, other in zip(found[0][3], found[1][3], strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    template = found[1][4]
    kernel = template.get_layer("up").kernel.value
    slots = [v.value for v in template.optimizer.variables if tuple(v.shape) == (WIDTH, HIDDEN)]
    assert len(slots) == 2
    for own in (kernel, *slots):
        parts = parts_of_variable(own)
        assert parts is not None
        assert parts.layout == (None, "model")
    template.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.get_weights()[0], found[1][3][0])


def laid_out(layout: Any, mesh: Any = MESHES[1], **options: Any) -> Callable[[], None]:
    own = [variable("block/up", WIDTH, HIDDEN), variable("block/bias", HIDDEN)]
    return lambda: gs.set_variable_layout(own, layout, devices_of(MESHES[1]), mesh=mesh, **options)


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (
            laid_out({"*/up": (None, "modle")}),
            gs.errors.ArgumentError,
            "has no axis 'modle'; it has 'batch', 'model'. Did you mean",
        ),
        (laid_out({"*/up": (None, "model")}, None), gs.errors.ArgumentError, "names axes of a mesh: pass the mesh"),
        (
            laid_out({"*/bias": (None, "model")}),
            gs.errors.ArgumentError,
            "block/bias: (None, 'model') has 2 dimensions, the variable 1",
        ),
        (laid_out({"*/down": (None, "model")}), gs.errors.ArgumentError, "No variable's name fits '*/down'"),
        (laid_out("home", {"batch": 3, "model": 2}), gs.errors.ArgumentError, "3 x 2 = 6 devices, and there are 4"),
        (
            laid_out("home", {"batch": 2, "model": 0}),
            gs.errors.ArgumentError,
            "'model' must have at least 1 device, got 0",
        ),
        (laid_out("home", 4), gs.errors.ArgumentError, "mesh must map axes to numbers of devices"),
    ],
)
def test_what_cannot_be_meant(call: Callable[[], Any], kind: type[Exception], expected: str):
    assert expected in message(kind, call)


def test_too_few_entries_for_the_axis():
    own = variable("narrow", WIDTH, 2)
    call = lambda: gs.set_variable_layout(own, (None, "model"), devices=3, mesh={"model": 3})  # noqa: E731
    assert "narrow: dimension 1 has 2 entries, and 'model' has 3 devices" in message(gs.errors.ArgumentError, call)
    assert parts_of_variable(own) is None


def test_variables_of_another_mesh():
    laid, step = perceptron()
    gs.set_variable_layout(laid, PERCEPTRON, devices_of(MESHES[1]), mesh=MESHES[1])
    x = tf.constant(numbers(5, WIDTH))
    for parallel in (
        gs.parallelize(step, devices=4),
        gs.parallelize(step, mesh={"batch": 1, "model": 3}),
        gs.parallelize(step, mesh={"batch": 2, "columns": 2}),
    ):
        found = message(gs.errors.ArgumentError, lambda parallel=parallel: parallel(x))
        assert "up along 'model' on CPU:0, CPU:1" in found
    gs.set_variable_layout(laid, PERCEPTRON, mesh={"batch": 1, "model": 3})  # moved
    gs.parallelize(step, mesh={"batch": 1, "model": 3})(x)
    gs.set_variable_layout(laid, "home")
    gs.parallelize(step, devices=4)(x)
