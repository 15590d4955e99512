"""Several shards on a device, one after the other: one device's results, and the memory of one shard."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from tests.helpers.keras_cases import CASES, assert_same, fit, state
from tests.helpers.law import assert_close, assert_law, rows
from tests.helpers.messages import message
from tests.helpers.micro_batches import GIVEN, singles, training
from tests.helpers.random_calls import SPLIT, TOLERANCE
from tests.helpers.regression import regression_step
from tests.helpers.sampler import sample_arguments, sample_program

pytestmark = pytest.mark.sampled(quick=5)


def types(plan: gs.inspect.Plan, phase: int) -> set[str]:
    return {plan.program.ops[i].type for i in plan.phases[phase].ops}


# The law


def test_gradients_optimizer_and_masks_are_those_of_one_device():
    dropouts = [
        lambda: layers.Dropout(0.4, seed=7),
        lambda: layers.Dense(4, "relu"),
        lambda: layers.Dropout(0.2, seed=8),
    ]
    sharded = ["MatMul", "TanhGrad", "StatelessRandomUniformV2"]
    plan = assert_law(lambda: training(*dropouts), [GIVEN, GIVEN], devices=1, micro_batches=4, sharded=sharded)
    assert plan.rows == (3, 3, 3, 2)
    assert set(plan.devices) == {"/device:CPU:0"}
    assert len(plan.phases) == 1  # forward and backward of a shard, before the next


@pytest.mark.parametrize(
    ("shares", "expected"), [(None, (2, 2, 2, 2, 2, 1)), ((1, 4), (1, 1, 3, 3, 3)), ((0, 1), (4, 4, 3))]
)
def test_the_shards_of_each_device_take_turns(shares: Any, expected: tuple[int, ...]):
    plan = assert_law(training, [GIVEN], devices=2, micro_batches=3, shares=shares, sharded=["MatMul"])
    assert plan.rows == expected
    assert [f"/device:CPU:{position}" for position in plan.mesh.positions] == list(plan.devices)


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_fewer_rows_than_shards_are_fewer_shards(batch: int):
    given = singles(rows(batch, 6), rows(batch, 3))
    plan = assert_law(training, [given], devices=2, micro_batches=4, sharded=["MatMul"], at_home=None)
    assert plan.rows == (1,) * batch
    assert [device[-1] for device in plan.devices].count("0") == (batch + 1) // 2  # no device gets more than its share


def test_batch_normalization_makes_all_wait():
    plan = assert_law(
        lambda: training(layers.BatchNormalization, lambda: layers.Dense(4, "tanh"), layers.BatchNormalization),
        [GIVEN, GIVEN],
        devices=2,
        micro_batches=2,
        sharded=["MatMul", "Mean"],
    )
    assert len(plan.phases) > 3
    text = str(plan)
    assert "all shards synchronize, holding up to " in text, text
    [line] = [line for line in text.splitlines() if "all shards synchronize" in line]
    assert "more" in line


def test_rows_that_see_each_other_stay_exact():
    def make():
        w = tf.Variable(rows(6, 4))

        def step(x, y):
            with tf.GradientTape() as tape:
                a, b = tf.tanh(x @ w), tf.tanh(y @ w)
                scores = tf.matmul(a, b, transpose_b=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(len(x)), scores))
            w.assign_sub(tape.gradient(loss, w))
            return loss

        return step, [w]

    plan = assert_law(make, [(rows(11, 6), rows(11, 6))], devices=1, micro_batches=3, sharded=["Tanh"], at_home=None)
    assert len(plan.phases) == 3


def test_what_a_normaliser_does_not_need_waits_for_it():
    """The sum of the weights is needed backward: all shards wait for it, and their activations do not."""

    def make():
        w, v = tf.Variable(rows(6, 64)), tf.Variable(rows(64, 3))

        def step(x, y, weight):
            with tf.GradientTape() as tape:
                errors = tf.reduce_sum((tf.tanh(x @ w) @ v - y) ** 2, 1)
                loss = tf.reduce_sum(errors * weight) / tf.reduce_sum(weight)
            for variable, gradient in zip((w, v), tape.gradient(loss, (w, v)), strict=True):
                variable.assign_sub(0.01 * gradient)
            return loss

        return step, [w, v]

    given = (rows(11, 6), rows(11, 3), tf.abs(rows(11)))
    plan = assert_law(make, [given], devices=1, micro_batches=3, sharded=["Tanh", "TanhGrad"])
    assert types(plan, 0) == {"Sum"}
    assert {"Tanh", "TanhGrad"} <= types(plan, 1)


def test_gradients_from_outside():
    w = tf.Variable(rows(6, 4))

    def forward(x):
        h = tf.tanh(x @ w)
        return h - tf.reduce_mean(h, 0), tf.reduce_mean(h**2)

    found, x = [], rows(11, 6)
    parallel = gs.parallelize(forward, devices=2, micro_batches=3)
    for function in (forward, parallel):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, loss = function(x)
            total = tf.reduce_sum(y**3) + loss
        found.append((y, loss, tape.gradient(total, [x, w])))
    assert_close(found[1], found[0])
    plan = parallel.gradient_plan(x)
    plan.check()
    check_emitted(plan, emit(plan))
    assert plan.rows == (2, 2, 2, 2, 2, 1)
    assert len(plan.phases) > 3  # forward and backward are never of one phase


def test_second_derivatives_and_jacobians_from_outside():
    w = tf.Variable(rows(6, 4))

    def forward(x):
        h = tf.tanh(x @ w)
        return tf.reduce_sum(h**3, 1)

    found, x = [], rows(7, 6)
    for function in (forward, gs.parallelize(forward, devices=2, micro_batches=2)):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            gradient = tape.gradient(y, x)
            total = tf.reduce_sum(gradient**2)
        found.append((gradient, outer.gradient(total, [x, w]), outer.jacobian(y, w)))
    assert_close(found[1], found[0])


def test_variables_in_parts():
    def make():
        step, variables = training(lambda: layers.Dense(4, "relu"))
        return step, variables

    step, variables = make()
    twin, expected = make()
    gs.set_variable_layout(variables, "sharded", devices=2)
    parallel = gs.parallelize(step, devices=2, micro_batches=3)
    for _ in range(2):
        assert_close(parallel(*GIVEN), twin(*GIVEN))
    for a, b in zip(variables, expected, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    plan = parallel.plan(*GIVEN)
    plan.check()
    check_emitted(plan, emit(plan))
    assert plan.rows == (2, 2, 2, 2, 2, 1)


@pytest.mark.long
def test_loops_and_branches():
    def make():
        w = tf.Variable(rows(6, 6))

        def step(x):
            with tf.GradientTape() as tape:
                h = x
                for _ in tf.range(3):
                    h = tf.tanh(h @ w)
                loss = tf.reduce_mean(h**2)
            w.assign_sub(tape.gradient(loss, w))
            scanned = tf.cond(tf.reduce_sum(w) > 0, lambda: tf.map_fn(tf.cumsum, x), lambda: -x)
            met = tf.while_loop(lambda i, g: i < 3, lambda i, g: (i + 1, tf.tanh(g @ w) - tf.reduce_mean(g, 0)), (0, x))
            return loss, scanned, met[1]

        return step, [w]

    plan = assert_law(make, [(rows(11, 6),)], devices=2, micro_batches=2, sharded=["StatelessWhile", "StatelessIf"])
    assert plan.rows == (3, 3, 3, 2)
    [turns] = [body for step in plan.steps for body in step.bodies.values() if body.phases]
    assert len(turns.phases) == 2  # each turn, the shards meet


def test_any_batch_size_in_one_trace():
    def make():
        keras.utils.set_random_seed(3)
        wide = {"dtype": "float64"}  # a bias is a sum of small steps: its rounding is not relative to what it is
        hidden = [layers.Dense(5, "tanh", **wide), layers.BatchNormalization(**wide), layers.Dropout(0.3, **wide)]
        model = keras.Sequential([layers.Input((6,), **wide), *hidden, layers.Dense(3, **wide)])
        return regression_step(model)

    sizes = (11, 7, 2, 1, 6, 12)
    calls = [(rows(size, 6), rows(size, 3)) for size in sizes]
    plan = assert_law(
        make,
        calls,
        devices=2,
        micro_batches=3,
        tuning={"reduce_retracing": True},
        sharded=["MatMul", "TanhGrad"],
        at_home=None,
    )
    assert plan.program.batch_is_unknown
    assert plan.mesh.positions == (0, 0, 0, 1, 1, 1)


def test_gradients_from_outside_of_any_batch_size():
    w = tf.Variable(rows(6, 4))
    parallel = gs.parallelize(
        lambda x: tf.reduce_mean(tf.tanh(x @ w) ** 2), devices=2, micro_batches=2, tuning={"reduce_retracing": True}
    )
    for size in (9, 5, 2, 1):
        x, found = rows(size, 6), []
        for function in (parallel.function, parallel):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = function(x)
            found.append((loss, tape.gradient(loss, [x, w])))
        assert_close(found[1], found[0])


def test_gradients_that_are_not_finite_in_one_micro_batch_skip_the_step():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Input((6,)), layers.Dense(4, "tanh", dtype="mixed_float16"), layers.Dense(3)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
        optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
            return loss

        return step, [*model.variables, *optimizer.variables]

    x, y = GIVEN
    bad = tf.tensor_scatter_nd_update(x, [[4, 0]], [np.inf])
    calls = [(x, y), (bad, y), (x, y)]
    plan = assert_law(make, calls, devices=1, micro_batches=4, sharded=["MatMul"], tolerance=2e-3)
    assert plan.rows == (3, 3, 3, 2)


def test_batches_that_travel_ahead():
    step, variables = training()
    twin, expected = training()
    parallel = gs.parallelize(step, devices=2, micro_batches=2)
    batches = [singles(rows(size, 6), rows(size, 3)) for size in (7, 7, 3)]
    found = list(parallel.map(iter(batches)))
    assert_close(found, [twin(*batch) for batch in batches])
    for a, b in zip(variables, expected, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    assert parallel.plan(*batches[0]).rows == (2, 2, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize(("name", "gpus"), [("dense", 1), ("convolutional", 2)])
def test_keras_models(name: str, gpus: int):
    case = CASES[name]
    single, history = fit(case, "adam", 1)
    model = gs.multi_gpu_model(case.model(), gpus, micro_batches=3)
    assert model is not model.template
    model.compile(single.optimizer.__class__.from_config(single.optimizer.get_config()), **case.compile)
    keras.utils.set_random_seed(2)
    x, y = case.data()
    found = model.fit(x, y, verbose=0, epochs=2).history
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)
    assert_same(state(model), state(single))
    plan = model.train_function.plan()
    assert len(plan.devices) == 3 * gpus
    assert model.predict(x, verbose=0).shape == single.predict(x, verbose=0).shape


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed: int):
    check_random_program(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 100))
def test_many_random_programs(seed: int):
    check_random_program(seed)


def check_random_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, devices = tf.float64, int(rng.integers(1, 4))
    calls = [sample_arguments(seed + i, int(rng.choice([1, 3, 5, 8, 13])), dtype) for i in range(2)]
    options: dict[str, Any] = {"micro_batches": int(rng.integers(2, 5)), "devices": devices, "split": SPLIT}
    if rng.random() < 0.3:
        options["shares"] = rng.integers(1, 4, devices).tolist()
    assert_law(lambda: sample_program(seed, dtype), calls, at_home=None, tolerance=TOLERANCE[dtype], **options)


# What a user reads


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4", None])
def test_numbers_of_micro_batches_that_cannot_be_meant(count: Any):
    expected = (
        f"micro_batches must be a whole number of at least 1, got {count!r}. Each device splits its rows into so many "
        "parts and computes one after the other; 1 computes all rows at once."
    )
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(abs, micro_batches=count)) == expected
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    assert message(gs.errors.ArgumentError, lambda: gs.multi_gpu_model(model, 1, micro_batches=count)) == expected
