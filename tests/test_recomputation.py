"""Recomputation: one device's numbers, and less that is kept between the passes."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.device_bytes import live_bytes
from tests.helpers.recomputation import Step, network, training


def rows(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, *shape)).astype(np.float32)


def after(step: Step, run: Step, batches: tuple[int, ...]) -> list[np.ndarray]:
    """Return losses, and all variables, after a step for each batch; then the variables are as they were."""
    variables = step.variables  # type: ignore[attr-defined]
    before = [v.numpy() for v in variables]
    losses = [run(rows(count, 6, 8), rows(count, 6, 3)).numpy() for count in batches]
    found = [*losses, *[v.numpy() for v in variables]]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return found


@pytest.fixture(scope="module")
def step() -> Step:
    return training(network(blocks=2))


@pytest.fixture(scope="module")
def expected(step: Step) -> list[np.ndarray]:
    return after(step, tf.function(step), (7, 7))


CASES = [
    pytest.param("blocks", {"devices": 3}),
    pytest.param("blocks", {"devices": 1}, marks=pytest.mark.long),
    pytest.param(0.4, {"devices": 2}, marks=pytest.mark.long),
    pytest.param(["block_*_up", "block_*_attention"], {"devices": 2, "micro_batches": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("asked", "options"), CASES, ids=str)
def test_a_training_step(step: Step, expected: list[np.ndarray], asked: Any, options: dict[str, Any]):
    """Dropout's masks, statistics and slots are those of one device."""
    again = gs.parallelize(step, **options, recompute=asked)
    for a, b in zip(expected, after(step, again, (7, 7)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    arguments = rows(7, 6, 8), rows(7, 6, 3)
    plan = again.plan(*arguments)
    plan.check()
    assert "recomputing: " in str(plan)
    kept = gs.parallelize(step, **options).plan(*arguments)
    assert max(live_bytes(plan).values()) < (0.6 if asked == "blocks" else 0.95) * max(live_bytes(kept).values())


def test_nothing_of_a_block_is_read_by_the_backward_pass(step: Step):
    """What is made again waits for a gradient, and has taken the place of what was made before."""
    arguments = rows(6, 6, 8), rows(6, 6, 3)
    plan = gs.parallelize(step, devices=2, recompute="blocks").plan(*arguments)
    ops = plan.program.ops
    again = [op for op in ops if op.name.endswith("/again")]
    made = {op.provenance.origin for op in again}
    assert len(again) > 40
    late = {op.index for op in ops if op.provenance.is_gradient}
    first = {op.provenance.origin: op.index for op in ops if op.name == op.provenance.origin}
    readers = {tensor.op for i in late for tensor in ops[i].inputs}
    assert not readers & {first[name] for name in made}
    assert sum(bool(op.controls) for op in again) >= 2
    assert not any(op.stateful for op in again)


@pytest.mark.long
def test_gradients_from_outside():
    model = network()
    x = tf.constant(rows(5, 6, 8))

    def gradients(forward: Step) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(forward(x) ** 2)
        return tape.gradient(loss, [x, *model.trainable_variables])

    def forward(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    expected = gradients(tf.function(forward))
    found = gradients(gs.parallelize(forward, devices=2, recompute="blocks"))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_loops_effects_and_draws():
    """A loop, an effect and a stateful draw run once."""
    weights = [tf.Variable(rows(8, 8) * 0.3) for _ in range(6)]
    calls = tf.Variable(0)
    lstm = keras.layers.LSTM(8, return_sequences=True)
    lstm.build((None, 6, 8))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(tf.matmul(lstm(h), weight)) * tf.random.uniform(tf.shape(h), seed=3)
                calls.assign_add(1)
            loss = tf.reduce_sum(h**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    def ran(run: Step) -> list[np.ndarray]:
        tf.random.set_seed(5)
        for k, weight in enumerate(weights):
            weight.assign(rows(8, 8) * 0.1 * (k + 1))
        calls.assign(0)
        losses = [run(tf.constant(rows(count, 6, 8))).numpy() for count in (5, 4)]
        return [*losses, calls.numpy(), *[weight.numpy() for weight in weights]]

    kept = ran(gs.parallelize(step, devices=2))
    for a, b in zip(kept, ran(gs.parallelize(step, devices=2, recompute="blocks")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert kept[2] == 12


@pytest.mark.long
def test_a_keras_model_fits():
    x, y = rows(10, 6, 8), rows(10, 6, 3)
    results = []
    for asked in (None, "blocks"):
        model = gs.multi_gpu_model(network(), gpus=2, recompute=asked)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        results.append(model.get_weights())
        plan = str(model.plan(x[:4], y[:4]))
        assert ("recomputing: " in plan) == (asked is not None)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_along_an_axis():
    model = network()
    step = training(model)
    expected = after(step, tf.function(step), (5,))
    mesh = {"batch": 2, "model": 2}
    gs.set_variable_layout(
        list(step.variables),  # type: ignore[attr-defined]
        {"*up/kernel": (None, "model"), "*up/bias": ("model",), "*down/kernel": ("model", None), "*": "home"},
        mesh=mesh,
    )
    run = gs.parallelize(step, mesh=mesh, recompute="blocks")
    for a, b in zip(expected, after(step, run, (5,)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert "recomputing: " in str(run.plan(rows(5, 6, 8), rows(5, 6, 3)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            0,
            "recompute must be 'blocks'; patterns of names of layers, ['block_*']; the share of the activations to ",
        ),
        ("all", "recompute, 0.5; or None, which stores all. Got 'all'."),
        (
            ["blok_*_up"],
            "recompute: no operation is in a layer whose name 'blok_*_up' fits. Names here are like 'block_",
        ),
    ],
)
def test_what_cannot_be_meant(step: Step, asked: Any, expected: str):
    with pytest.raises(gs.errors.ArgumentError, match=re.escape(expected)):
        gs.parallelize(step, devices=2, recompute=asked).plan(rows(5, 6, 8), rows(5, 6, 3))
