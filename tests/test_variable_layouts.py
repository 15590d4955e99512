"""Variables in parts: the law with state divided over devices, and bytes really divided."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import Cut
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.variables.division import divide
from graphsplit.planning.variables.partitioning import Held, shares
from tests.helpers.law import assert_close, assert_law
from tests.helpers.layout_cases import (
    COUPLED,
    ELEMENTWISE,
    Optimizer,
    X,
    Y,
    adam,
    assert_coupled_law,
    assert_same_bits,
    crossing,
    deep_step,
    momentum,
    numbers,
    train,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_give_the_same_bits(name: str, devices: int):
    assert_same_bits("sharded", name, devices)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_the_parts_of_a_variable_is_exact(name: str, devices: int):
    _, plan = assert_coupled_law("sharded", name, devices)
    assert any(part for _, part in plan.state.parts)


def test_state_is_divided():
    sharded, plan = train("sharded", 4, update=adam)
    held = [parts_of_variable(variable) for variable in sharded.variables]
    bytes_on: dict[str, int] = {}
    for variable, parts in zip(sharded.variables, held, strict=True):
        on = {variable.device: variable.dtype.size} if parts is None else parts.bytes_on_devices()
        for device, size in on.items():
            bytes_on[device] = bytes_on.get(device, 0) + size
    total = sum(v.dtype.size * v.shape.num_elements() for v in sharded.variables)
    assert sum(bytes_on.values()) == total  # nothing is anywhere twice
    largest = max(v.dtype.size * max(p.shapes[0][0], 1) for v, p in zip(sharded.variables, held, strict=True) if p)
    assert len(bytes_on) == 4
    assert max(bytes_on.values()) <= total / 4 + 150 * 4 + largest
    optimizers = {plan.owners.of_ops[op.index] for op in plan.ops_once if op.type == "Sqrt"}
    assert len(optimizers) == 4  # and the optimizer's work with it
    moved = [move for move in plan.moves if move.kind == "send" and plan.program.bytes(move.tensor) > 16]
    assert not moved  # a slot never travels


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 4])
def test_traffic_is_spread_over_the_devices(devices: int):
    """Each weight is sent by its owner, and each gradient to its owner: twice (N - 1) / N of the bytes, each way."""
    found = {}
    for layout in ("home", "sharded"):
        weights = [tf.Variable(tf.ones((64, 64)), name=f"weight_{k}") for k in range(8)]
        if layout == "sharded":
            gs.set_variable_layout(weights, layout, devices)
        parallel = gs.parallelize(deep_step(weights), devices=devices)
        plan = parallel.plan(tf.ones((8, 64)))
        with partition_graphs() as graphs:
            parallel(tf.ones((8, 64)))
        sends = crossing(graphs)
        assert sends
        found[layout] = traffic(plan).busiest, sends
    size = 8 * 64 * 64 * 4
    (_, sent, received), star = found["home"]
    assert sent >= (devices - 1) * size
    assert received >= (devices - 1) * size
    (_, sent, received), spread = found["sharded"]
    assert max(sent, received) <= 1.05 * 2 * (devices - 1) / devices * size
    others = [count for (a, b), count in star.items() if "CPU:0" not in a and "CPU:0" not in b]
    assert not others  # with one home, all goes through it
    between = [count for (a, b), count in spread.items() if "CPU:0" not in a and "CPU:0" not in b]
    assert len(between) == (devices - 1) * (devices - 2)
    assert all(count >= 2 * 8 // devices for count in between)  # weights one way, gradients the other


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_any_number_of_rows(rows: int):
    home, sharded = (train(layout, 4, calls=1, update=momentum)[0] for layout in ("home", "sharded"))
    x, y = numbers(rows, 7, seed=3), numbers(rows, 5, seed=4)
    for made in (home, sharded):
        gs.parallelize(made.step, devices=4)(x, y)
    for a, b in zip(sharded.variables, home.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_unknown_numbers_of_rows():
    home, sharded = Optimizer(adam), Optimizer(adam)
    gs.set_variable_layout(sharded.variables, "sharded", 3)
    signature = [tf.TensorSpec((None, 7)), tf.TensorSpec((None, 5))]
    step = gs.parallelize(tf.function(sharded.step, input_signature=signature), devices=3)
    plain = tf.function(home.step)
    for rows in (11, 2, 6):
        assert_close(step(X[:rows], Y[:rows]), plain(X[:rows], Y[:rows]))
    for a, b in zip(sharded.variables, home.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-4)  # 3 steps of Adam amplify
    assert step.plan(X, Y).program.batch_is_unknown


def test_a_tape_outside():
    weight = tf.Variable(numbers(40, 50, seed=7))
    gs.set_variable_layout(weight, "sharded", 3)
    apply = gs.parallelize(lambda x: tf.nn.tanh(x @ weight), devices=3)
    x = numbers(7, 40, seed=8)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(apply(x) ** 2)
        found = tape.gradient(loss, [x, weight])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.nn.tanh(x @ weight) ** 2)
        assert_close(found, tape.gradient(loss, [x, weight]))
        weight.assign_sub(0.1 * found[1])


@pytest.mark.parametrize("seed", range(12))
def test_shares(seed: int):
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, 9))
    variables = [
        Held(f"v{k}", tuple(int(s) for s in rng.integers(1, 60, rng.integers(0, 4))), int(rng.choice([1, 2, 4, 8])))
        for k in range(int(rng.integers(1, 30)))
    ]
    load = [0] * devices
    slice_bytes = 0
    for variable, share in zip(variables, shares(variables, devices), strict=True):
        if share is None:
            continue
        assert len(set(share.devices)) == len(share.devices) == share.cut.parts
        assert sum(share.cut.lengths) == variable.shape[share.cut.axis]
        assert min(share.cut.lengths) > 0
        for d, length in zip(share.devices, share.cut.lengths, strict=True):
            load[d] += variable.bytes // share.cut.length * length
            slice_bytes = max(slice_bytes, variable.bytes // share.cut.length * length)
    assert max(load) <= sum(load) / devices + slice_bytes + sum(v.bytes for v in variables) / devices / 4


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_slots_count_with_their_variable(slots: int):
    """Whether a variable is cut does not depend on whether its optimizer's slots are laid out with it."""
    shapes = [(400, 40), (60, 40), *[(80,)] * 6]
    variables = [Held(f"v{k}", shape, 4) for k, shape in enumerate(shapes)]
    more = [Held(f"adam/{one.name}_{k}", one.shape, 4, i) for k in range(slots) for i, one in enumerate(variables)]
    found = [share for share in shares([*variables, *more], 6) if share is not None]
    assert [share.cut.parts for share in found] == [6, 6, *[1] * 6] * (slots + 1)
    assert [share.devices for share in found] == [share.devices for share in found[: len(shapes)]] * (slots + 1)


@pytest.mark.parametrize("slot", ["Adam/m/{}", "{}/Momentum"])
def test_names_that_end_in_other_numbers_are_other_variables(slot: str):
    """Small biases stay whole, however many there are."""
    names = ["bias", *[f"bias_{k}" for k in range(1, 12)]]
    variables = [Held(name, (96,), 4) for name in [*names, *[slot.format(name) for name in names]]]
    found = [share for share in shares([*variables, Held("large", (32, 32), 4)], 4) if share is not None]
    assert [share.cut.parts for share in found] == [*[1] * 24, 4]
    assert [share.devices for share in found[:12]] == [share.devices for share in found[12:24]]


@pytest.mark.parametrize("slots", [0, 2])
def test_small_variables_are_balanced_by_their_number(slots: int):
    """What one takes to update does not depend on its bytes; what stays counts for the first device."""
    shapes = [(800, 64), (4,), (16,), (512,), (), *[(32,)] * 8]
    variables = [Held(f"v{k}", shape, 4) for k, shape in enumerate(shapes)]
    more = [Held(f"m{k}", one.shape, 4, i) for k in range(slots) for i, one in enumerate(variables)]
    stays = [Held("iteration", (), 8, is_integer=True), Held("seed", (2,), 4, is_integer=True), Held("empty", (0,), 4)]
    found = shares([*variables, *more, *stays], 4)
    assert found[0].cut.parts == 4
    assert found[-3:] == [None] * 3
    assert (found[4] is None) == (slots == 0)  # a number with slots is trained, another one is a rate
    owned = Counter([0 if share is None else share.devices[0] for share in found if share != found[0]])
    assert len(owned) == 4
    assert max(owned.values()) - min(owned.values()) <= 1 + slots


def test_a_number_with_slots_lies_elsewhere_and_is_trained():
    """Its value is found again by eager code, by a checkpoint's way of writing, and at home."""

    class Number(tf.Module):
        def __init__(self) -> None:
            self.weight = tf.Variable(tf.reshape(tf.range(600, dtype=tf.float64) / 600, (20, 30)), name="weight")
            self.scale = tf.Variable(tf.constant(0.5, tf.float64), name="scale")
            self.speed = tf.Variable(tf.constant(0.0, tf.float64), name="scale/momentum", trainable=False)

        def step(self, x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ self.weight) * self.scale)
            by_weight, by_scale = tape.gradient(loss, [self.weight, self.scale])
            self.speed.assign(0.9 * self.speed + by_scale)
            self.scale.assign_sub(self.speed)
            self.weight.assign_sub(by_weight)
            return loss

    alone, several = Number(), Number()
    gs.set_variable_layout(several, "sharded", 3)
    assert parts_of_variable(several.scale).devices == parts_of_variable(several.speed).devices
    assert parts_of_variable(several.scale).devices != parts_of_variable(several.weight).devices[:1]
    step = gs.parallelize(several.step, devices=3)
    for rows in (7, 2, 1):
        x = tf.random.stateless_normal((rows, 20), (rows, 1), dtype=tf.float64)
        assert "MatMul" in {op.type for op in step.plan(x).sharded_ops}
        assert_close(step(x), alone.step(x))
    assert_close([v.value() for v in several.variables], [v.value() for v in alone.variables])
    several.scale.assign(0.25)
    alone.scale.assign(0.25)
    assert_close(step(x), alone.step(x))
    gs.set_variable_layout(several, "home")
    assert_close([v.value() for v in several.variables], [v.value() for v in alone.variables])


def test_a_gradient_that_a_loop_adds_up_is_reduced_part_by_part():
    """It is only handed on behind the loop: no device receives all of it from all others."""

    def make() -> tuple[Any, list[tf.Variable]]:
        weight = tf.Variable(tf.reshape(tf.range(576, dtype=tf.float64) / 576, (24, 24)), name="weight")
        gs.set_variable_layout(weight, "sharded", 3)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                turn = lambda k, h: (k + 1, tf.tanh(h @ weight))  # noqa: E731
                _, h = tf.while_loop(lambda k, h: k < 3, turn, [0, x])
                loss = tf.reduce_mean(h**2)
            weight.assign_sub(tape.gradient(loss, weight))
            return loss

        return step, [weight]

    batches = [(tf.random.stateless_normal((rows, 24), (rows, 2), dtype=tf.float64),) for rows in (7, 3, 2)]
    plan = assert_law(make, batches, sharded=["StatelessWhile"])
    size = 24 * 24 * 8
    assert max(traffic(plan).received.values()) < 2 * size  # two thirds of the weight, and of its gradient
    assert not [move for move in plan.moves if move.kind == "reduce" and plan.program.bytes(move.tensor) == size]


def test_a_program_in_parts_is_a_program():
    made = Optimizer(adam)
    program = gs.parallelize(made.step, devices=2).plan(X, Y).program
    name = program.ops[program.captures[0]].name
    divided = divide(program, {name: Cut(0, 7, 3, devices=("a", "b", "c"))})
    divided.program.check()
    assert divided.origins[:3] == ((0, 0), (0, 1), (0, 2))
    assert len(divided.program.captures) == len(program.captures) + 2
    with pytest.raises(gs.errors.CheckError):  # (the check can fail)
        type(program)(**{**divided.program.__dict__, "ops": divided.program.ops[:-5]}).check()


def test_slots_lie_with_their_variables():
    names = ["w1", "w10", "w11", "Variable", "Variable"]
    variables = [Held(name, (9, 9), 4) for name in [*names, *[f"Adam/m/{name}" for name in names]]]
    where = [share.devices for share in shares([*variables, Held("large", (800, 8), 4)], 4) if share is not None]
    assert where[:5] == where[5:10]  # unnamed ones by their order
    assert len(set(where[:5])) == 4  # and none of them because one number begins with another
