"""Mirrored variables: the law with a copy on every device, equal copies at any time, and what travels for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    COUPLED,
    ELEMENTWISE,
    Optimizer,
    X,
    Y,
    adam,
    assert_coupled_law,
    assert_law_under_tapes_outside,
    assert_no_device_sends_more,
    assert_same_bits,
    momentum,
    numbers,
    train,
)


def copies_of(variable: tf.Variable) -> list[np.ndarray]:
    """Return what each copy holds, as it lies there."""
    parts = parts_of_variable(variable)
    assert parts is not None
    assert parts.layout == "replicated"
    handles = [part.handle for part in parts._parts]
    assert len({handle.device for handle in handles}) == len(parts.devices)
    return [tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype).numpy() for handle in handles]


def assert_equal_copies(variables: Sequence[tf.Variable]) -> None:
    for variable in variables:
        parts = parts_of_variable(variable)
        assert parts is not None
        assert parts.in_parts  # nobody has to make them equal
        first, *others = copies_of(variable)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [3, 1, 2, 4, 5])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_give_the_same_bits(name: str, devices: int):
    made = assert_same_bits("replicated", name, devices)
    if devices > 1:
        assert_equal_copies(made.variables)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [3, 5])
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_a_variable_is_exact(name: str, devices: int):
    made, plan = assert_coupled_law("replicated", name, devices)
    assert plan.state.copied
    assert_equal_copies(made.variables)


def deep(devices: int) -> tuple[list[tf.Variable], Callable[[tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
    """Return equal mirrored weights, a product with all, and a training step."""
    weights = [tf.Variable(tf.ones((64, 64)), name=f"weight_{k}") for k in range(8)]
    gs.set_variable_layout(weights, "replicated", devices)

    def forward(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = tf.nn.tanh(x @ weight)
        return x

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return weights, forward, step


def test_traffic_is_that_of_an_all_reduce():
    """Of each gradient a part is added up on each device and sent to all: twice (N - 1) / N of the bytes, each way."""
    devices, x = 4, tf.ones((8, 64))  # (counted by operations: of each shard's rows as if they were all)
    weights, forward, step = deep(devices)
    size = 8 * 64 * 64 * 4
    for function, most in ((step, 1.05 * 2 * (devices - 1) / devices * size), (forward, 4 * 8 * 64 * 4)):
        parallel = gs.parallelize(function, devices=devices)
        assert_no_device_sends_more(parallel, x, most)
    assert_equal_copies(weights)


def test_any_number_of_rows():
    signature = [tf.TensorSpec((None, 7)), tf.TensorSpec((None, 5))]
    made, plain = Optimizer(momentum), Optimizer(momentum)
    gs.set_variable_layout(made.variables, "replicated", 4)
    step = gs.parallelize(tf.function(made.step, input_signature=signature), devices=4)
    for rows in (11, 2, 5):  # with two, two devices have no rows, and copies all the same
        assert_close(step(X[:rows], Y[:rows]), plain.step(X[:rows], Y[:rows]))
        assert_equal_copies(made.variables)
    for a, b in zip(made.variables, plain.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    assert step.plan(X, Y).program.batch_is_unknown


def test_micro_batches_and_fewer_devices_than_copies():
    made, plain = Optimizer(momentum), Optimizer(momentum)
    gs.set_variable_layout(made.variables, "replicated", 4)
    for devices, count in ((2, 3), (4, 1)):
        step = gs.parallelize(made.step, devices=devices, micro_batches=count)
        assert_close(step(X[:3], Y[:3]), plain.step(X[:3], Y[:3]))
        assert_equal_copies(made.variables)
        plan = step.plan(X[:3], Y[:3])
        plan.check()
        check_emitted(plan, emit(plan))
    other = gs.parallelize(lambda x: x @ made.weights[0], devices=["CPU:4", "CPU:1"])  # CPU:4 has no copy
    assert_close(other(X), X @ plain.weights[0])
    assert traffic(other.plan(X)).sent["/device:CPU:0"] == 7 * 150 * 4 + 7 * 11 * 4  # and the rows


def test_one_truth():
    weight = tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(weight, "replicated", 3)
    parts = parts_of_variable(weight)
    assert parts is not None
    double = gs.parallelize(lambda x: (weight.assign(2 * weight), x @ weight)[1], devices=3)
    read = tf.function(lambda: tf.reduce_sum(weight))
    write = tf.function(lambda: weight.assign_add(tf.ones_like(weight)))
    x, expected = numbers(5, 30), weight.numpy()
    for _ in range(2):
        expected = 2 * expected
        assert_close(double(x), x @ expected)
        assert_close(read(), tf.reduce_sum(tf.constant(expected)))
        np.testing.assert_array_equal(weight.numpy(), expected)
        np.testing.assert_array_equal(weight.read_value(), expected)
        assert parts.in_parts  # who only reads leaves the copies as they are
        write()
        assert not parts.in_parts
        expected = 2 * (expected + 1)
        assert_close(double(x), x @ expected)
        weight.assign(tf.ones_like(weight))
        expected = 2 * np.ones((30, 40), np.float32)
        assert_close(double(x), x @ expected)
    copied = copies_of(weight)
    gs.set_variable_layout(weight, "home")
    assert parts_of_variable(weight) is None
    np.testing.assert_array_equal(weight.numpy(), copied[2])
    gs.set_variable_layout(weight, "sharded", 3)
    gs.set_variable_layout(weight, "replicated", 3)
    assert_close(double(x), x @ (2 * expected))


def test_a_loop_that_writes_them_each_time_is_told():
    weight = tf.Variable(numbers(30, 40), name="weight")
    gs.set_variable_layout(weight, "replicated", 2)
    apply = gs.parallelize(lambda x: x @ weight, devices=2)
    x = numbers(4, 30)
    for _ in range(9):
        weight.assign_add(tf.ones_like(weight))
        apply(x)
    weight.assign_add(tf.ones_like(weight))
    said = (
        "Variable 'weight', replicated on CPU:0, CPU:1, was read or changed by other code between each of the last 10 "
        "calls of a parallelized function, so each call moved its 4800 bytes again (and perhaps those of other "
        "variables). Move that code into the function, or set the variable's layout to 'home'."
    )
    with pytest.warns(UserWarning, match="was read or changed") as found:
        apply(x)
    assert [str(warning.message) for warning in found] == [said]
    weight.assign_add(tf.ones_like(weight))
    apply(x)  # once is enough


def test_what_takes_a_variable_otherwise_has_it_by_itself():
    table, expected = tf.Variable(numbers(300, 4)), tf.Variable(numbers(300, 4))
    gs.set_variable_layout(table, "replicated", 3)

    def update(to: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        to.scatter_nd_add([[2], [7]], tf.ones((2, 4)))
        return x @ tf.transpose(to)

    step, apply = (
        gs.parallelize(lambda x: update(table, x), devices=3),
        gs.parallelize(lambda x: x @ tf.transpose(table)),
    )
    x = numbers(5, 4)
    for _ in range(2):
        assert_close(step(x), update(expected, x))
        np.testing.assert_array_equal(table.numpy(), expected.numpy())
        assert_close(apply(x), x @ tf.transpose(expected))  # by copies that were made again
    assert "ResourceScatterNdAdd" in str(step.plan(x))


def test_random_updates_are_drawn_once():
    weight, plain = tf.Variable(numbers(30, 40)), tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "replicated", 3)

    def step(to: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        to.assign_add(tf.random.stateless_normal((30, 40), [1, 2]) + tf.reduce_mean(x))
        return x @ to

    parallel = gs.parallelize(lambda x: step(weight, x), devices=3)
    x = numbers(5, 30)
    assert_close(parallel(x), step(plain, x))
    assert_equal_copies([weight])
    drawn = [op for op in parallel.plan(x).program.ops if "Random" in op.type]
    assert len(drawn) == len([op for op in drawn if not op.device])


def test_a_tape_outside():
    weight = tf.Variable(numbers(40, 50, seed=7))
    gs.set_variable_layout(weight, "replicated", 3)
    assert_law_under_tapes_outside(weight, 3)


def test_the_checker_sees_another_copy():
    made, plan = train("replicated", 3, calls=1, update=adam)
    graph = emit(plan)
    reads = [op for op in plan.program.ops if op.type == "ReadVariableOp" and op.index in plan.owners.groups]
    copies = [graph.prefixes[device] + reads[0].name for device in plan.devices]
    reader = next(n for n in graph.nodes if graph.origins[n.name].shard == 1 and copies[1] in n.input)
    reader.input[list(reader.input).index(copies[1])] = copies[2]
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, graph)
    assert made.weights


def test_errors():
    with tf.device("CPU:3"):
        variable = tf.Variable(numbers(20, 20), name="table")
        count = tf.Variable(3)
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.set_variable_layout(variable, "replicated", 2)
    said = (
        "A replicated variable must be on one of the devices that get copies. These are on none of CPU:0, CPU:1:\n"
        "  - table on CPU:3\n"
        "Make them on one of these devices, under tf.device, or add their device to devices=."
    )
    assert str(found.value) == said
    is_none_of_them = pytest.raises(gs.errors.ArgumentError, match="A replicated variable must be on one of")
    with is_none_of_them, gs.variable_layout("replicated", devices=2), tf.device("CPU:3"):
        tf.Variable(numbers(20, 20), name="table")
    gs.set_variable_layout([variable, count], "replicated", 4)
    assert parts_of_variable(count) is None  # counters stay where they are
