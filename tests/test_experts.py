"""Experts: each device has some of them, and the tokens of all devices go there and come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.device_bytes import traffic
from tests.helpers.experts import EXPERTS, FOUR, IN_PLACE, ROOM, TOKENS, WIDTH, Layer, rows_of
from tests.helpers.float64 import float64
from tests.helpers.mesh_cases import Made, assert_law, devices_of, sgd, variable

__all__ = ["float64"]


def training(experts: int = EXPERTS) -> Made:
    layer = Layer(experts)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            y = layer(x)
            loss = tf.reduce_mean((y - x) ** 2) + 0.01 * tf.reduce_mean(layer.up**2)
        return loss, sgd(layer.variables, loss, tape), y

    return layer.variables, step


def with_adam() -> Made:
    layer, adam = Layer(), keras.optimizers.Adam(0.01, epsilon=1e-2)
    adam.build(layer.variables)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            y = layer(x)
            loss = tf.reduce_mean((y - x) ** 2)
        adam.apply_gradients(zip(tape.gradient(loss, layer.variables), layer.variables, strict=True))
        return loss, y

    return [*layer.variables, *adam.variables], step


def choosing() -> Made:
    """Experts choose tokens, which are looked up for them: nothing is multiplied by zeros."""
    layer = Layer()
    variables = layer.variables[:-1]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ layer.before)
            chances, places = tf.math.top_k(tf.linalg.matrix_transpose(tf.nn.softmax(h @ layer.gate)), 3)
            active = tf.nn.gelu(tf.einsum("gecm,emh->gech", tf.gather(h, places, batch_dims=1), layer.up))
            made = tf.einsum("gech,ehm->gecm", active, layer.down) * chances[..., None]
            y = h + tf.einsum("gecs,gecm->gsm", tf.one_hot(places, TOKENS, dtype=x.dtype), made)
            loss = tf.reduce_mean((y - x) ** 2)
        return loss, sgd(variables, loss, tape), y

    return variables, step


def alone() -> Made:
    """Whatever may be done with such a variable, and with nothing else."""
    weight = variable("experts/weight", EXPERTS, 3)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        before = tf.reduce_mean(weight), tf.reduce_max(weight, 0), tf.argmax(weight, 0), tf.sort(weight, 0)
        weight.assign(weight * 0.5 + 1.0)
        weight.assign_add(tf.ones((EXPERTS, 3), x.dtype) * before[0] * tf.reduce_sum(x))
        return *before, tf.norm(weight), tf.transpose(weight), tf.gather(weight, [1, 7]), weight[2:5] + 0.0

    return [weight], step


def assert_in_place(plan: gs.inspect.Plan, make: Callable[[], Made] | None = training) -> None:
    """Weights, their gradients and slots stay; what experts read and make of tokens goes from each device to each."""
    assert plan.state.staying
    assert not any(plan.state.staying.values())
    if make is None:
        return
    moved = [plan.program.shape(move.tensor) for move in plan.moves]
    shapes = {tuple(own.shape) for own in make()[0] if own.name[:-2] in plan.state.staying}
    weights = shapes | {(*own[:k], own[k] // 2, *own[k + 1 :]) for own in shapes for k in range(1, len(own))}
    assert weights
    assert not weights.intersection(moved)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"batch": 2}, FOUR, {"batch": 2, "model": 2}, {"batch": 1, "model": 2}], ids=str)
def test_tokens_go_to_experts(mesh: dict[str, int]):
    """Uneven rows, a clipped step, a penalty on the weights."""
    plan = assert_law(training, IN_PLACE, mesh, [rows_of(5)]).plan(rows_of(5))
    if mesh["batch"] == 1:  # one device has all of them
        assert not plan.state.staying
        return
    assert_in_place(plan)
    assert "computed in place, rows are sent to them: experts/" in str(plan)
    tokens = [move.kind for move in plan.moves if plan.program.shape(move.tensor) == (EXPERTS, 5, ROOM, WIDTH)]
    assert tokens == ["all-to-all"] * 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [with_adam, choosing, alone], ids=lambda make: make.__name__)
def test_other_steps(make: Callable[[], Made]):
    plan = assert_law(make, IN_PLACE, FOUR, [rows_of(5)]).plan(rows_of(5))
    assert_in_place(plan, None if make is alone else make)  # (that one returns what has its weight's shape)


def test_both_axes():
    """Each expert is cut along the other axis, too."""
    layout = {
        "*up": (gs.cut("batch", in_place=True), None, "model"),
        "*down": (gs.cut("batch", in_place=True), "model"),
    }
    parallel = assert_law(training, {**layout, "*": "home"}, {"batch": 2, "model": 2}, [rows_of(5)])
    assert_in_place(parallel.plan(rows_of(5)))
    assert "experts/up: [-, -, model], 6 + 6, computed in place" in str(parallel.plan(rows_of(5)))


def test_four_all_to_alls():
    """TensorFlow's own partition graphs send the tokens four times, from each device to each, and no weight."""
    batch, (variables, step) = rows_of(8), training()
    gs.set_variable_layout(variables, IN_PLACE, devices_of(FOUR), mesh=FOUR)
    parallel = gs.parallelize(step, mesh=FOUR, devices=devices_of(FOUR))
    planned, sent = traffic(parallel.plan(batch)), Counter[tuple[str, str]]()
    for transfer in gs.placement(parallel, batch, actual=True).transfers:
        sent[transfer.source_device, transfer.target_device] += transfer.bytes
    one = EXPERTS * 8 * ROOM * WIDTH * 8 * 3 // 4  # what all devices send in an all-to-all of the tokens
    assert planned.by_kind["all-to-all"] == 4 * one
    assert sum(sent.values()) == sum(planned.sent.values())
    home = parallel.plan(batch).default_device
    between = [size for pair, size in sent.items() if home not in pair]
    assert between == [4 * one // 12] * 6


def inference(variables: Sequence[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
    layer = Layer()
    layer.before, layer.gate, layer.up, layer.down, layer.bias = variables
    return layer


def test_tapes_outside():
    """Gradients, and gradients of gradients."""
    found = []
    for is_laid in (False, True):
        variables = Layer().variables
        call: Any = inference(variables)
        if is_laid:
            gs.set_variable_layout(variables, IN_PLACE, devices_of(FOUR), mesh=FOUR)
            call = gs.parallelize(call, mesh=FOUR, devices=devices_of(FOUR))
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(rows_of(5)) ** 2)
            gradients = tape.gradient(loss, variables)
            squares = tf.reduce_sum(gradients[2] ** 2)
        found.append([*gradients, outer.gradient(squares, variables[2])])
    for one, own in zip(*found, strict=True):
        np.testing.assert_allclose(one, own, 1e-9, 1e-10)


def branching() -> Made:
    """A branch writes the weight."""
    layer = Layer()

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        tf.cond(tf.reduce_sum(x) < 100, lambda: layer.up.assign_sub(0.1 * layer.up), lambda: layer.up + 0.0)
        return (layer(x),)

    return layer.variables, step


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "rows", "options", "why"),
    [
        (FOUR, 2, {}, "its parts are not on the devices that have rows, one on each"),
        ({"batch": 2}, 5, {"micro_batches": 2}, "devices have several micro-batches"),
    ],
)
def test_gathered_all_the_same(mesh: dict[str, int], rows: int, options: dict[str, Any], why: str):
    """The plan says why."""
    plan = assert_law(training, IN_PLACE, mesh, [rows_of(rows)], **options).plan(rows_of(rows))
    assert set(plan.state.staying.values()) == {why}
    assert f"variable experts/up is gathered before it is used: {why}" in str(plan)


def test_any_number_of_rows():
    plain, step = training()
    variables, other = training()
    gs.set_variable_layout(variables, IN_PLACE, devices_of(FOUR), mesh=FOUR)
    function = tf.function(other, input_signature=[tf.TensorSpec((None, TOKENS, WIDTH), tf.float64)])
    parallel = gs.parallelize(function, mesh=FOUR, devices=devices_of(FOUR))
    for rows in (5, 2):
        for one, own in zip(step(rows_of(rows)), parallel(rows_of(rows)), strict=True):
            np.testing.assert_allclose(one, own, 1e-9, 1e-10)
    for one, own in zip(plain, variables, strict=True):
        np.testing.assert_allclose(one, own.numpy(), 1e-9, 1e-10)
    said = parallel.plan(rows_of(5)).state.staying
    assert set(said.values()) == {"the number of rows is not known when it is planned"}


def test_a_branch_writes_it():
    """Each part is chosen where it is."""
    plain, step = branching()
    variables, other = branching()
    gs.set_variable_layout(variables, IN_PLACE, devices_of(FOUR), mesh=FOUR)
    parallel = gs.parallelize(other, mesh=FOUR, devices=devices_of(FOUR))
    np.testing.assert_allclose(step(rows_of(5))[0], parallel(rows_of(5))[0], 1e-9, 1e-10)
    for one, own in zip(plain, variables, strict=True):
        np.testing.assert_allclose(one, own.numpy(), 1e-9, 1e-10)
    text = str(parallel.plan(rows_of(5)))
    assert "note: the side of If 'cond/effects' that is taken runs where its variables are" in text
    assert "is gathered for each call" not in text


@pytest.mark.long
def test_prediction():
    """Of devices that need not exist, and of variables that lie so here."""
    variables, step = training()
    batch = tf.TensorSpec((16, TOKENS, WIDTH), tf.float64)
    assert_in_place(gs.predict(step, batch, machine="8xH100-SXM5", mesh={"batch": 8}, variables=IN_PLACE).plan)
    gs.set_variable_layout(variables, IN_PLACE, devices_of(FOUR), mesh=FOUR)
    assert_in_place(gs.predict(step, batch, machine="8xH100-SXM5", mesh={"batch": 8}).plan)


@keras.saving.register_keras_serializable()
class Experts(keras.layers.Layer):
    """Every expert sees every token, and a router weights what they make of it."""

    def build(self, shape: Any) -> None:
        self.router = self.add_weight(shape=(shape[-1], EXPERTS), name="router")
        self.up = self.add_weight(shape=(EXPERTS, shape[-1], 5), name="up")
        self.down = self.add_weight(shape=(EXPERTS, 5, shape[-1]), name="down")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        made = tf.einsum("beh,ehd->bed", tf.nn.relu(tf.einsum("bd,edh->beh", x, self.up)), self.down)
        return tf.einsum("bed,be->bd", made, tf.nn.softmax(x @ self.router))


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_fit(tmp_path: Any):
    x = np.random.default_rng(0).normal(size=(13, 6))
    weights = []
    for mesh in (None, {"batch": 2}):
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), Experts(name="experts")])
        layout = {
            "experts/up": (gs.cut("batch", in_place=True),),
            "experts/down": (gs.cut("batch", in_place=True),),
        }
        model = net if mesh is None else gs.multi_gpu_model(net, mesh=mesh, variables={**layout, "*": "home"})
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-2), "mse")
        model.fit(x, x, batch_size=5, epochs=2, shuffle=False, verbose=0)
        model.save_weights(tmp_path / f"{mesh is None}.weights.h5")
        weights.append([*model.get_weights(), model.predict(x, verbose=0)])
    for one, own in zip(*weights, strict=True):
        np.testing.assert_allclose(one, own, 1e-9, 1e-10)
