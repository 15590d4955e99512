"""Weights with a copy on every device, slots in parts (ZeRO stage 1): the same bits, and the bytes of an all-reduce."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    COUPLED,
    ELEMENTWISE,
    Optimizer,
    X,
    Y,
    adam,
    assert_no_device_sends_more,
    momentum,
    small_network,
    train,
)

ZERO_1 = {"slots of *": "sharded", "*": "replicated"}


def layouts_of(variables: Sequence[Any]) -> set[str]:
    """Return the layouts of variables of more than 256 bytes; "" is none."""
    values = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    large = [value for value in values if value.shape.num_elements() > 64]
    held = [(parts_of_variable(v), lying_now(v).stays) for v in large]
    return {stays if parts is None else parts.layout for parts, stays in held}


def zero_1(devices: int, **options: Any) -> Optimizer:
    made = Optimizer(**options)
    gs.set_variable_layout(made.weights, "replicated", devices)
    gs.set_variable_layout([slot for slots in made.slots for slot in slots], "sharded", devices)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *COUPLED])
def test_results_are_those_of_one_device(name: str):
    options = COUPLED.get(name) or {"update": ELEMENTWISE[name]}
    made, (plain, _) = zero_1(3, **options), train("home", 3, **options)
    step = gs.parallelize(made.step, devices=3)
    for _ in range(3):
        step(X, Y)
    for a, b in zip(made.variables, plain.variables, strict=True):
        if name in ELEMENTWISE:
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        else:
            assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    plan = step.plan(X, Y)
    plan.check()
    check_emitted(plan, emit(plan))


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {}], ids=["micro-batches", "unknown rows"])
def test_micro_batches_and_any_number_of_rows(options: dict[str, int]):
    made, plain = zero_1(4, update=momentum), Optimizer(momentum)
    signature = [tf.TensorSpec((None, 7)), tf.TensorSpec((None, 5))]
    step = gs.parallelize(
        made.step if options else tf.function(made.step, input_signature=signature), devices=4, **options
    )
    for rows in (11, 2):  # with two, two devices have no rows
        assert_close(step(X[:rows], Y[:rows]), plain.step(X[:rows], Y[:rows]))
    for a, b in zip(made.variables, plain.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("widths", [(64,) * 9, (70, 33, 150, 61)], ids=["whole on their owners", "cut, uneven"])
def test_traffic_is_that_of_an_all_reduce(widths: tuple[int, ...]):
    """A gradient is added up where its slots are, and the update goes to all: (N - 1) / N of the bytes, twice."""
    devices, x = 4, tf.ones((8, widths[0]))
    weights = [tf.Variable(tf.ones(shape) / 64) for shape in itertools.pairwise(widths)]
    slots = [[tf.Variable(tf.zeros_like(weight)) for _ in range(2)] for weight in weights]
    count = tf.Variable(0.0)
    gs.set_variable_layout(slots, "sharded", devices)
    gs.set_variable_layout(weights, "replicated", devices)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.tanh(y @ weight)
            loss = tf.reduce_sum(y)
        count.assign_add(1.0)
        for weight, own, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            adam(weight, own, gradient, count)
        return loss

    parallel = gs.parallelize(step, devices=devices)
    size = sum(4 * weight.shape.num_elements() for weight in weights)
    most = 1.1 * 2 * (devices - 1) / devices * size
    assert_no_device_sends_more(parallel, x, most)


@pytest.mark.long
@pytest.mark.parametrize("how", ["by patterns", "optimizer after it is built", "optimizer before it is built"])
def test_how_it_is_written(how: str):
    model, optimizer = small_network()
    if how == "optimizer before it is built":
        optimizer = keras.optimizers.Adam.from_config(optimizer.get_config())
    if how == "by patterns":
        gs.set_variable_layout([model, optimizer], ZERO_1, 3)
    else:
        gs.set_variable_layout(model, "replicated", 3)
        gs.set_variable_layout(optimizer, "sharded", 3)

    @gs.parallelize(devices=3)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    x = tf.ones((7, *model.input_shape[1:]))
    step(x)
    assert layouts_of(model.trainable_variables) == {"replicated"}
    assert layouts_of([v for v in optimizer.variables if len(v.shape)]) == {"sharded"}
    assert gs.verify(step, x).passed


def test_a_model_before_compile():
    model, optimizer = small_network()
    parallel = gs.multi_gpu_model(model, gpus=3, variables=ZERO_1)
    x = np.ones((7, *model.input_shape[1:]), np.float32)
    parallel.predict(x, verbose=0)
    parallel.compile(optimizer, "mse")
    parallel.fit(x, np.ones((7, *model.output_shape[1:]), np.float32), verbose=0)
    assert layouts_of(model.trainable_variables) == {"replicated"}
    assert layouts_of([v for v in optimizer.variables if len(v.shape)]) == {"sharded"}


def test_patterns_of_slots():
    weight = tf.Variable(tf.ones((90, 8)), name="weight")
    with pytest.raises(gs.errors.ArgumentError, match=r"'slots of \*' is for the slots of an optimizer, and"):
        gs.set_variable_layout(weight, ZERO_1, 3)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])
    gs.set_variable_layout([weight, optimizer], {"slots of *": "sharded", "weight": "replicated"}, 3)  # it has none
    assert layouts_of([weight]) == {"replicated"}
    with pytest.raises(
        gs.errors.ArgumentError, match=r"No variable's name fits 'slots of wait'(?s:.*)Similar to 'slots of wait': "
    ):
        gs.set_variable_layout([weight, optimizer], {"slots of wait": "sharded"}, 3)
