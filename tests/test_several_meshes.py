"""Variables laid out over several meshes in one process, and over other devices than those of who uses them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import Optimizer, X, Y, adam, held_by_device, momentum, numbers

FIRST, SECOND = ["CPU:0", "CPU:1"], ["CPU:4", "CPU:2", "CPU:3"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("one", "other"), [("sharded", "replicated"), ("replicated", "sharded")])
def test_two_meshes(one: str, other: str):
    plain = [Optimizer(adam), Optimizer(momentum)]
    made = [Optimizer(adam)]
    with tf.device("CPU:3"):
        made.append(Optimizer(momentum))
    for optimizer, layout, devices in zip(made, (one, other), (FIRST, SECOND), strict=True):
        gs.set_variable_layout(optimizer.variables, layout, devices)
    pairs = zip(made, (FIRST, SECOND), strict=True)
    steps = [gs.parallelize(optimizer.step, devices=devices) for optimizer, devices in pairs]
    for _ in range(2):
        for step, alone in zip(steps, plain, strict=True):
            assert_close(step(X, Y), alone.step(X, Y))
    for optimizer, alone in zip(made, plain, strict=True):
        for a, b in zip(optimizer.variables, alone.variables, strict=True):
            assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))


def test_one_function_with_variables_of_two_meshes():
    """It has the right values, whichever devices it runs on; the plan says which variables lie where."""
    a, b = tf.Variable(numbers(30, 40)), tf.Variable(numbers(40, 30))
    with tf.device("CPU:4"):
        c = tf.Variable(numbers(30, 30))
    values = [tf.constant(v.numpy()) for v in (a, b, c)]
    gs.set_variable_layout(a, "sharded", FIRST)
    gs.set_variable_layout(b, "sharded", SECOND)
    gs.set_variable_layout(c, "replicated", SECOND)

    def step(x: tf.Tensor) -> tf.Tensor:
        a.assign_add(tf.transpose(b))  # of which no part is where a's is
        c.assign(c + tf.matmul(a, b))
        return x @ a @ b @ c

    first, second, third = values
    parallel = gs.parallelize(step, devices=["CPU:1", "CPU:3", "CPU:0"])
    x = numbers(7, 30)
    for _ in range(2):
        first = first + tf.transpose(second)
        third = third + first @ second
        assert_close(parallel(x), x @ first @ second @ third)
    for variable, value in zip((a, b, c), (first, second, third), strict=True):
        assert_close(tf.convert_to_tensor(variable), value)


def test_copies_elsewhere_than_the_shards():
    """A function none of whose devices has a copy is sent one."""
    weight = tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "replicated", FIRST)
    apply = gs.parallelize(lambda x: (weight.assign_add(tf.ones_like(weight)), x @ weight)[1], devices=SECOND)
    x, value = numbers(7, 30), weight.numpy()
    for k in (1, 2):
        assert_close(apply(x), x @ (value + k))
    held = parts_of_variable(weight)
    assert held is not None
    assert held.in_parts  # both copies were written, where they are
    np.testing.assert_array_equal(weight.numpy(), value + 1 + 1)


def test_a_loop_that_reads_parts_each_time_is_told():
    weight = tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(weight, "sharded", 2)
    apply = gs.parallelize(lambda x: x @ weight, devices=2)
    x = numbers(4, 30)
    for _ in range(9):
        apply(x)
        tf.reduce_sum(weight)
    said = (
        "Variable 'weight', sharded on CPU:0, CPU:1, was read or changed by other code between each of the last 10 "
        "calls of a parallelized function, so each call moved its 4800 bytes again (and perhaps those of other "
        "variables). Move that code into the function, or set the variable's layout to 'home'."
    )
    apply(x)
    tf.reduce_sum(weight)
    with pytest.warns(UserWarning, match="was read or changed") as found:
        apply(x)
    tf.reduce_sum(weight)
    apply(x)  # once is enough
    assert [str(warning.message) for warning in found] == [said]


@pytest.mark.long
def test_a_loop_that_changes_the_layout_each_time_has_the_right_values():
    weight, value = tf.Variable(numbers(30, 40)), numbers(30, 40)
    apply = gs.parallelize(lambda x: (weight.assign(weight + 1.0), x @ weight)[1], devices=3)
    x = numbers(5, 30)
    for k, layout in enumerate(["sharded", "replicated", "home", "sharded", "home", "replicated"]):
        gs.set_variable_layout(weight, layout, 3)
        assert_close(apply(x), x @ (value + k + 1.0))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_layout_over_other_devices_than_before(layout: str):
    """It moves to the devices that are asked for: more, fewer, or others."""
    weights = [tf.Variable(numbers(30, 40)), tf.Variable(numbers(90, seed=1)), tf.Variable(numbers(90, seed=2))]
    values = [weight.numpy() for weight in weights]
    for names in (["CPU:0", "CPU:1"], [f"CPU:{k}" for k in range(5)], ["CPU:0", "CPU:1", "CPU:2"], ["CPU:0", "CPU:4"]):
        gs.set_variable_layout(weights, layout, names)
        held, whole = held_by_device(weights), sum(value.nbytes for value in values)
        assert sorted(device.rpartition("device:")[2] for device in held) == names
        assert sum(held.values()) == whole * (len(names) if layout == "replicated" else 1)
        for weight, value in zip(weights, values, strict=True):
            np.testing.assert_array_equal(weight.numpy(), value)
