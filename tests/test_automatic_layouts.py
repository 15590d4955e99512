"""`variables="auto"`: the rule, what it says, what it moves, and that the results stay those of one device."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import compilation
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.holdings import most_held
from tests.helpers.law import assert_close, assert_law

GPUS = [f"GPU:{k}" for k in range(8)]
WIDE = (512, 1024, 1024, 512)
P = 4 * sum(a * b + b for a, b in itertools.pairwise(WIDE))  # bytes of the weights of the wide model
WRITTEN = 'variables="auto": what the function writes is sharded, and gathered once a call'
READ = "what it only reads is replicated"


def network(*sizes: int, optimizer: Any = "adam") -> keras.Model:
    dense = [keras.layers.Dense(size, "tanh") for size in sizes[1:]]
    model = keras.Sequential([keras.Input(sizes[:1]), *dense])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def layouts(model: Any) -> list[str]:
    variables = [variable.value for variable in model.weights]
    return ["home" if (parts := parts_of_variable(v)) is None else parts.layout for v in variables]


def reason(plan: gs.inspect.Plan) -> str:
    [found] = [note for note in plan.notes if note.startswith('variables="auto": ')]
    return found


def specs(rows: int = 64) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    return tf.TensorSpec((rows, WIDE[0])), tf.TensorSpec((rows, WIDE[-1]))


def test_what_moves_over_gpus():
    """A step sends each weight once and each gradient once; a prediction sends rows."""
    found = {}
    for layout in ("home", "auto"):
        model = gs.multi_gpu_model(network(*WIDE), GPUS, variables=layout)
        step, prediction = (traffic(model.plan(*batch)) for batch in (specs(), specs()[:1]))
        found[layout] = max(step.busiest[1:]) / P, sum(prediction.sent.values())
    assert found["home"][0] > 7
    assert found["auto"][0] < 1.8
    assert found["home"][1] > 7 * P
    assert found["auto"][1] == 64 * (WIDE[0] + WIDE[-1]) * 4
    assert reason(model.plan(*specs())) == WRITTEN
    assert reason(model.plan(*specs()[:1])) == f'variables="auto": {READ}'


def test_frozen_weights_are_copied_and_a_table_stays_a_table():
    table = tf.Variable(tf.zeros((50_000, 16)), name="table")
    frozen = tf.Variable(tf.zeros((16, 64)), name="frozen")
    trained = tf.Variable(tf.zeros((64, 64)), name="trained")

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids) @ frozen) @ trained)
        for variable, gradient in zip((table, trained), tape.gradient(loss, (table, trained)), strict=True):
            variable.scatter_sub(gradient) if variable is table else variable.assign_sub(gradient)
        return loss

    plan = gs.parallelize(step, devices=GPUS, variables="auto").plan(tf.TensorSpec((64,), tf.int32))
    assert reason(plan) == f"{WRITTEN}; {READ}"
    assert "  variables replicated: 1, on GPU:0, GPU:1, " in str(plan)
    assert sum(traffic(plan).sent.values()) < table.shape[0] * 16 * 4 / 10  # rows, and not the table


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"devices": 3}, "the devices are logical CPU devices of one process, which share its memory"),
        ({"devices": 1}, "there is one device"),
        ({"devices": ["GPU:0", "CPU:1"]}, "the devices are of several kinds"),
        ({"devices": GPUS[:2], "stages": 2, "micro_batches": 2}, "stages have devices of their own"),
        ({"mesh": {"batch": 2, "model": 2}, "devices": GPUS[:4]}, "the mesh has the axis 'model', along which you lay"),
    ],
)
def test_where_variables_stay(options, why):
    weight = tf.Variable(tf.ones((200, 100)))

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_add(tf.tanh(weight))
        return tf.tanh(x @ weight)

    plan = gs.parallelize(step, variables="auto", **options).plan(tf.TensorSpec((8, 200)))
    assert reason(plan).startswith(f'variables="auto": they stay where they are, as {why}')
    assert not plan.state.parts


def test_few_weights_stay_and_micro_batches_do_not_matter():
    small = gs.multi_gpu_model(network(20, 64, 1), GPUS, variables="auto")
    plan = small.plan(tf.TensorSpec((8, 20)), tf.TensorSpec((8, 1)))
    assert reason(plan).startswith('variables="auto": they stay where they are, as the weights are 5.')
    halves = gs.multi_gpu_model(network(*WIDE), GPUS, variables="auto", micro_batches=2)
    assert reason(halves.plan(*specs())) == WRITTEN


def test_what_does_not_fit_is_gathered_again(monkeypatch):
    """By the plan's own bytes, where memory is known. There are many layers, of which few are used at a time."""
    batch = [tf.TensorSpec((64, 1024))] * 2
    plan = lambda: gs.multi_gpu_model(network(*[1024] * 9), GPUS, variables="auto").plan(*batch)  # noqa: E731
    kept = most_held(plan())
    monkeypatch.setattr(compilation, "gpu_memory_bytes", lambda _: kept)
    assert reason(plan()) == WRITTEN
    monkeypatch.setattr(compilation, "gpu_memory_bytes", lambda _: kept - 1)
    again = plan()
    assert reason(again).startswith('variables="auto": sharded, and gathered again for the backward pass, as otherwise')
    assert f"would hold {format_bytes(kept)}" in reason(again)
    assert most_held(again) < 0.8 * kept


@pytest.mark.long
def test_a_prediction_names_what_was_chosen():
    step = network(*WIDE)
    model = gs.multi_gpu_model(step, 4, variables="auto")
    asked = {"machine": "8xA100-SXM4-80GB", "devices": 8}
    chosen = gs.predict(model, *specs(), **asked)
    assert chosen.layout == "auto"
    assert chosen.sent_bytes == gs.predict(model, *specs(), **asked, variables="auto").sent_bytes
    assert chosen.step_s < gs.predict(model, *specs(), **asked, variables="home").step_s


@pytest.mark.usefixtures("copies_take_time")
def test_a_model_is_predicted_trained_and_predicted():
    """What predictions copied is divided once it is trained; then it stays so."""
    x, y = np.random.default_rng(0).random((2, 33, 24)).astype("float32")
    template, model = (network(24, 40, 24) for _ in range(2))
    model.set_weights(template.get_weights())
    model = gs.multi_gpu_model(model, 3, variables="auto")
    assert_close(model(x), template(x))
    assert_close(tf.constant(model.predict(x, verbose=0)), tf.constant(template.predict(x, verbose=0)))
    assert layouts(model) == ["replicated"] * 4
    for own in (template, model):
        own.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert layouts(model)[::2] == ["sharded"] * 2
    assert "replicated" not in layouts(model)
    slots = [parts_of_variable(own.value) for own in model.optimizer.variables if own.shape == (24, 40)]
    assert [own.devices for own in slots] == [parts_of_variable(model.weights[0].value).devices] * 2
    assert not any(own.division.reshard for own in slots)
    assert_close(model.get_weights()[0] + tf.zeros(()), template.get_weights()[0] + tf.zeros(()))
    assert_close(tf.constant(model.predict(x, verbose=0)), tf.constant(template.predict(x, verbose=0)))
    assert layouts(model)[::2] == ["sharded"] * 2
    assert "replicated" not in layouts(model)
    assert gs.verify(model, x, y)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert len(model._function("train").step._programs_so_far()) == 3  # 16, 1 and all rows: nothing is traced again


@pytest.mark.long
@pytest.mark.usefixtures("copies_take_time")
def test_layouts_that_somebody_set_stay():
    x = np.ones((8, 24), "float32")
    model = network(24, 40, 24)
    kernel, _, last, _ = [variable.value for variable in model.weights]
    gs.set_variable_layout(kernel, "replicated", 3)
    gs.set_variable_layout(last, "host", 3)
    model = gs.multi_gpu_model(model, 3, variables="auto")
    model.fit(x, x, verbose=0)
    assert layouts(model)[::2] == ["replicated", "home"]  # (CPU:0 is the host, too)
    model.predict(x, verbose=0)
    gs.set_variable_layout(model, "home")
    model.predict(x, verbose=0)
    assert layouts(model)[::2] == ["replicated"] * 2
    gs.set_variable_layout(kernel, "replicated", 3)  # from now on it is somebody's
    model.fit(x, x, verbose=0)
    assert layouts(model)[::2] == ["replicated", "sharded"]


@pytest.mark.usefixtures("copies_take_time")
def test_a_loop_of_ones_own():
    def make() -> tuple[Any, list[tf.Variable]]:
        weight = tf.Variable(tf.reshape(tf.range(800, dtype=tf.float32) / 800, (20, 40)), name="weight")
        speed = tf.Variable(tf.zeros((20, 40)), name="weight/momentum", trainable=False)
        scale = tf.Variable(tf.fill((40,), 0.5), name="scale")

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ weight) * scale)
            speed.assign(0.9 * speed + tape.gradient(loss, weight))
            weight.assign_sub(0.1 * speed)
            return loss

        return step, [weight, speed, scale]

    batches = [(tf.random.normal((rows, 20)),) for rows in (7, 7, 2)]
    plan = assert_law(make, batches, sharded=["MatMul"], variables="auto")
    assert reason(plan) == f"{WRITTEN}; {READ}"
    assert "  variables sharded: 2, on CPU:0, CPU:1, CPU:2" in str(plan)
    assert "  variables replicated: 1, on CPU:0, CPU:1, CPU:2" in str(plan)


@pytest.mark.usefixtures("copies_take_time")
def test_inside_of_a_graph_variables_stay():
    weight = tf.Variable(tf.ones((20, 40)))
    step = gs.parallelize(lambda x: tf.tanh(x @ weight), devices=3, variables="auto")
    x = tf.ones((7, 20))
    assert_close(tf.function(lambda x: step(x))(x), tf.tanh(x @ weight))
    assert parts_of_variable(weight) is None
    assert reason(step.plan(x)).endswith("as the function is called inside of a graph")


def test_what_cannot_be_meant():
    model = network(20, 64, 1)
    chosen = "Layout 'auto' is chosen when a function first runs, for all variables that have no layout yet"
    for call in (
        lambda: gs.multi_gpu_model(model, 2, variables={"*kernel": "sharded", "*": "auto"}),
        lambda: gs.set_variable_layout(model, "auto", 2),
    ):
        with pytest.raises(gs.errors.ArgumentError, match=chosen):
            call()
    with pytest.raises(gs.errors.ArgumentError, match=r"Unknown layout 'shraded'\. Did you mean 'sharded'\?"):
        gs.parallelize(variables="shraded")
    with pytest.raises(gs.errors.ArgumentError, match=r"names axes of a mesh: pass the mesh"):
        gs.parallelize(variables={"*": (None, "model")})
    with pytest.raises(gs.errors.ArgumentError, match=r"memory=.* with variables='sharded': it chooses"):
        gs.parallelize(variables="sharded", memory="1GB")
