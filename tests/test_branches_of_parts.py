"""Branches that write variables in parts: the law, where the parts are updated, and which branches stay as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import traffic
from graphsplit.program.program import Program

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]  # none of them is the host
ROWS = 7
STAYS = "note: If 'cond(/effects)?' stays a branch, on one device: "
CHOSEN = "the side of If 'cond' that is taken runs where its variables are"


def numbers(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 11], dtype=tf.float64)


def variable(*shape: int, seed: int = 0, name: str = "weight") -> tf.Variable:
    with tf.device(DEVICES[0]):
        return tf.Variable(numbers(*shape, seed=seed), name=name)


class Skipping:
    """A step of momentum that is skipped where the loss is too large, and says which it was."""

    def __init__(self) -> None:
        self.weight, self.slot = variable(13, 8), variable(13, 8, seed=1, name="slot")
        with tf.device(DEVICES[0]):
            self.count = tf.Variable(0, name="count")
        self.variables = [self.weight, self.slot, self.count]

    def step(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ self.weight))
        gradient = tape.gradient(loss, self.weight)

        def update() -> tf.Tensor:
            self.slot.assign(0.5 * self.slot + gradient)
            self.weight.assign_sub(0.1 * self.slot)  # (what was just written)
            tf.cond(self.count > 1, lambda: self.weight.assign(0.5 * self.weight), lambda: self.weight + 0.0)
            self.count.assign_add(1)
            return tf.reduce_sum(self.slot)

        def skip() -> tf.Tensor:
            self.slot.assign(tf.zeros_like(self.slot))
            return tf.reduce_sum(self.weight)

        return loss, tf.cond(loss < 100.0, update, skip) + tf.reduce_sum(self.weight)


def assert_same(step: Callable[..., Any], plain: Callable[..., Any], batches: list[tf.Tensor]) -> None:
    for x in batches:
        for own, expected in zip(step(x), plain(x), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-12)


def reads_before_writes(program: Program) -> int:
    """Check that what changes a variable comes after all earlier reads of it; return how many reads there are."""
    before: list[set[int]] = []
    for op in program.ops:
        own = {*[tensor.op for tensor in op.inputs], *op.controls}
        before.append(own.union(*[before[i] for i in own]))
    count = 0
    for op in program.ops:
        if op.type.startswith("Assign"):
            others = program.ops[: op.index]
            reads = {o.index for o in others if o.type == "ReadVariableOp" and o.inputs[0] == op.inputs[0]}
            assert reads <= before[op.index], op.name
            count += len(reads)
    return count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, pytest.param({"micro_batches": 2}, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("layout", ["sharded", "host", "replicated", {"slot": "host", "*": "sharded"}], ids=str)
def test_what_a_branch_writes_is_chosen_where_its_parts_are(layout: Any, options: dict[str, Any]):
    plain, made = Skipping(), Skipping()
    gs.set_variable_layout(made.variables, layout, devices=DEVICES)
    step = gs.parallelize(made.step, devices=DEVICES, **options)
    batches = [
        numbers(rows, 13, seed=rows) * scale for rows, scale in ((7, 1), (2, 99), (5, 1), (7, 1), (3, 1), (7, 99))
    ]
    assert_same(step, tf.function(plain.step), batches)
    for own, expected in zip(made.variables, plain.variables, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-11, atol=1e-13)
    plan = step.plan(batches[0])
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    assert not plan.state.whole
    assert f"note: {CHOSEN}" in str(plan)
    assert not any(op.type == "If" for op in plan.program.ops)
    assert reads_before_writes(plan.program)


def test_where_variables_are_whole_a_branch_stays_one():
    made = Skipping()
    plan = gs.parallelize(made.step, devices=DEVICES).plan(numbers(ROWS, 13))
    assert any(op.type == "If" for op in plan.program.ops)
    assert CHOSEN not in str(plan)


def draws(weight: tf.Variable) -> tf.Tensor:
    return weight.assign_add(tf.random.normal(weight.shape, dtype=tf.float64))


def loops(weight: tf.Variable) -> tf.Tensor:
    total = tf.while_loop(lambda v: tf.reduce_sum(v) < 9.0, lambda v: (v + 1.0,), [tf.identity(weight)])[0]
    return weight.assign(total)


def looks_up(weight: tf.Variable) -> tf.Tensor:
    return weight.assign_add(tf.gather(weight, tf.cast(tf.reduce_sum(weight, 1), tf.int32)))


def writes_rows(weight: tf.Variable) -> tf.Tensor:
    return weight.scatter_update(tf.IndexedSlices(tf.ones((1, 8), tf.float64), [3]))


def asserts(weight: tf.Variable) -> tf.Tensor:
    tf.debugging.assert_greater(tf.reduce_sum(weight), tf.constant(0.0, tf.float64))
    return weight.assign_add(weight)


@pytest.mark.parametrize("write", [draws, loops, looks_up, writes_rows, asserts])
def test_what_is_not_pure_stays_a_branch(write: Callable[[tf.Variable], tf.Tensor]):
    """The weight is 0 and the side is not taken: draws, errors and endless loops would be the plan's."""
    with tf.device(DEVICES[0]):
        weight = tf.Variable(tf.zeros((13, 8), tf.float64))
    gs.set_variable_layout(weight, "sharded", devices=DEVICES)

    def step(x: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_sum(x @ weight)
        tf.cond(loss > 0, lambda: write(weight), lambda: weight.assign(weight))
        return loss

    made = gs.parallelize(step, devices=DEVICES)
    assert float(made(numbers(ROWS, 13))) == 0
    assert np.all(weight.numpy() == 0)
    plan = made.plan(numbers(ROWS, 13))
    assert "takes it whole" in next(iter(plan.state.whole.values()))
    assert re.search(STAYS, str(plan))
    assert CHOSEN not in str(plan)


def divides_by_numbers(weight: tf.Variable) -> tf.Tensor:
    halves = tf.cast(weight, tf.int32) // 2 + tf.cast(weight, tf.int32) ** 2
    return weight.assign_add(tf.cast(halves, tf.float64))


def takes_a_slice(weight: tf.Variable) -> tf.Tensor:
    return weight.assign_add(weight * tf.reduce_sum(weight[2:7, ::2]))


@pytest.mark.parametrize("write", [divides_by_numbers, takes_a_slice])
def test_known_integers_that_cannot_fail_are_no_obstacle(write: Callable[[tf.Variable], tf.Tensor]):
    def make(weight: tf.Variable) -> Callable[[tf.Tensor], tuple[tf.Tensor]]:
        def step(x: tf.Tensor) -> tuple[tf.Tensor]:
            loss = tf.reduce_sum(x @ weight)
            tf.cond(loss > 0, lambda: write(weight), lambda: weight.assign(2.0 * weight))
            return (loss,)

        return step

    plain, own = variable(13, 8), variable(13, 8)
    gs.set_variable_layout(own, "sharded", devices=DEVICES)
    step = gs.parallelize(make(own), devices=DEVICES)
    assert_same(step, tf.function(make(plain)), [numbers(rows, 13, seed=rows) for rows in (7, 2, 5)])
    np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-12)
    plan = step.plan(numbers(7, 13))
    assert f"note: {CHOSEN.replace('cond', 'cond/effects')}" in str(plan)
    assert not plan.state.whole


GPUS = [f"GPU:{k}" for k in range(8)]


def scaled(inner: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), 1.8),
        (lambda: scaled(keras.optimizers.Adam(clipnorm=1.0)), 1.8),
        (lambda: keras.optimizers.Adam(clipnorm=1.0), 1.8),
        (lambda: keras.optimizers.RMSprop(clipnorm=1.0), 1.8),
    ],
    ids=["accumulation", "loss scaling and clipping", "clipping", "clipping, RMSprop"],
)
def test_an_update_moves_weights_and_gradients_once(make: Callable[[], keras.optimizers.Optimizer], most: float):
    """In weights' bytes, by the busiest of eight GPUs: each sends 7/8 of the weights and of the gradients' parts."""
    sizes = (256, 256, 256, 256)
    model = keras.Sequential([keras.Input((256,)), *[keras.layers.Dense(size, "relu") for size in sizes]])
    model.compile(make(), "mse")
    plan = gs.multi_gpu_model(model, GPUS, variables="auto").plan(*[tf.TensorSpec((64, 256))] * 2)
    weights = 4 * sum(256 * size + size for size in sizes)
    assert max(traffic(plan).busiest[1:]) / weights < most + 0.05, str(plan)
    assert not plan.state.whole


@pytest.mark.parametrize("parts", [3, 5])
def test_whether_all_are_finite_is_asked_where_the_parts_are(parts: int):
    """Few answers are joined one after the other, more at once."""
    devices = [f"CPU:{k}" for k in range(5)][-parts:]

    def make(weight: tf.Variable) -> Callable[[tf.Tensor], tuple[tf.Tensor, ...]]:
        def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weight))
            gradient = tf.tanh(tape.gradient(loss, weight))
            is_finite = tf.reduce_all(tf.math.is_finite(gradient))
            is_large = tf.reduce_any(gradient > 0.9)
            weight.assign_sub(0.1 * tf.where(is_finite, gradient, tf.zeros_like(gradient)))
            return loss, tf.cast(is_finite, tf.int32), tf.cast(is_large, tf.int32)

        return step

    plain, own = variable(13, 8), variable(13, 8)
    gs.set_variable_layout(own, "sharded", devices=devices)
    step = gs.parallelize(make(own), devices=devices)
    batches = [numbers(7, 13, seed=1) * scale for scale in (0.01, 1.0, np.inf, 9.0)]
    for x in batches[:2] + batches[3:]:
        for made, expected in zip(step(x), tf.function(make(plain))(x), strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-12)
    assert int(step(batches[2])[1]) == 0
    np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-12)
    program = step.plan(batches[0]).program
    types = [op.type for op in program.ops]
    assert (types.count("LogicalAnd"), types.count("LogicalOr")) == ((2, 2) if parts == 3 else (0, 0))
    assert (types.count("All"), types.count("Any")) == ((3, 3) if parts == 3 else (6, 6))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_equal_operations_of_a_branch_are_computed_once(layout: str):
    """An optimizer computes its rate anew for each variable; both sides, and branches inside, have rates of their own.

    What is not equal stays: another number, another operand, what the other side computes, a variable read again after
    it was written.
    """

    def make(weights: list[tf.Variable], count: tf.Variable) -> Callable[[tf.Tensor], tuple[tf.Tensor, ...]]:
        def rate(base: float) -> tf.Tensor:
            return 1.0 - tf.pow(tf.constant(base, tf.float64), tf.cast(count, tf.float64) + 1.0)

        def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
            loss = sum(tf.reduce_mean(tf.square(x @ weight)) for weight in weights)

            def shrink() -> tf.Tensor:
                for weight in weights:
                    weight.assign(weight * rate(0.5) * rate(0.25))
                return rate(0.5)

            def update() -> tf.Tensor:
                for weight in weights:
                    weight.assign_sub(0.01 * rate(0.5) * tf.tanh(weight))
                tf.cond(loss > 10.0, shrink, lambda: rate(0.75))
                count.assign_add(1)
                return rate(0.5)

            return loss, tf.cond(loss > 0.1, update, lambda: rate(0.5) + rate(0.5)), rate(0.5)

        return step

    def made() -> tuple[list[tf.Variable], tf.Variable]:
        with tf.device(DEVICES[0]):
            return [variable(13, 8, seed=k) for k in range(3)], tf.Variable(0, name="count")

    (plain, plain_count), (weights, count) = made(), made()
    gs.set_variable_layout([*weights, count], layout, devices=DEVICES)
    step = gs.parallelize(make(weights, count), devices=DEVICES)
    batches = [numbers(rows, 13, seed=rows) * scale for rows, scale in ((7, 1), (2, 9), (5, 0.01), (7, 1), (3, 5))]
    assert_same(step, tf.function(make(plain, plain_count)), batches)
    for laid, expected in zip([*weights, count], [*plain, plain_count], strict=True):
        np.testing.assert_allclose(laid.numpy(), expected.numpy(), rtol=1e-12)
    plan = step.plan(batches[0])
    check_emitted(plan, emit(plan))
    program = plan.program
    powers = [op for op in program.ops if op.type == "Pow"]
    # In `update` before and after the count changes, in `shrink` two, beside that one, on the other side, and outside.
    assert len(powers) == 7, [op.name for op in powers]
    numbers_inside = [op for op in program.ops if op.type == "Const" and op.name.startswith("cond/")]
    assert len({op.attr("value").SerializeToString() for op in numbers_inside}) == len(numbers_inside)


def test_a_deep_chain_of_sums_is_planned():
    """A gradient that is multiplied by number after number stays a partial sum, however long that takes."""
    weight = variable(13, 8)
    gs.set_variable_layout(weight, "sharded", devices=DEVICES)
    length = sys.getrecursionlimit() + 100

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight))
        gradient = tape.gradient(loss, weight)
        for _ in range(length):
            gradient = gradient * loss
        weight.assign_sub(gradient)
        return loss

    plan = gs.parallelize(step, devices=DEVICES).plan(numbers(ROWS, 13))
    assert not plan.state.whole
    scattered = [move for move in plan.moves if move.kind in ("reduce", "reduce-scatter")]
    assert sum(plan.program.bytes(move.tensor) for move in scattered) < 3 * 13 * 8 * 8


def of_any_length(weight: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
    """A branch that writes a variable of any length, beside one in parts."""
    with tf.device(DEVICES[0]):
        last = tf.Variable(numbers(3), shape=[None])

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss = tf.reduce_sum(x @ weight)

        def update() -> tf.Tensor:
            weight.assign_sub(0.1 * weight)
            last.assign([loss, loss])
            return loss

        return tf.cond(loss > 0, update, lambda: loss), last.read_value()

    return step


def of_some_rows(weight: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
    """A branch that is taken where as many rows are kept as the variable has."""

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.reduce_sum(tf.tile(x, [2, 1]), 1) > 0
        kept = tf.boolean_mask(tf.tile(x, [2, 1])[:, :8], found)
        as_many = tf.reduce_sum(tf.cast(found, tf.int32)) == 13
        changed = tf.cond(as_many, lambda: weight.assign_add(kept), lambda: weight.assign(weight))
        return tf.reduce_sum(x @ weight), tf.reduce_sum(changed)

    return step


@pytest.mark.parametrize("make", [of_any_length, of_some_rows])
def test_branches_of_unknown_shapes_stay_branches(make: Callable[[tf.Variable], Callable[..., Any]]):
    plain, own = variable(13, 8), variable(13, 8)
    gs.set_variable_layout(own, "sharded", devices=DEVICES)
    step = gs.parallelize(make(own), devices=DEVICES)
    assert_same(step, tf.function(make(plain)), [numbers(rows, 13, seed=rows) for rows in (7, 2, 5)])
    np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=1e-12)
    assert re.search(STAYS, str(step.plan(numbers(7, 13))))


def test_what_a_branch_only_reads_is_read_before_it_changes():
    def make(weight: tf.Variable, other: tf.Variable) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            loss = tf.reduce_sum(x @ weight)

            def update() -> tf.Tensor:
                weight.assign_add(0.1 * weight)
                return tf.reduce_sum(other)

            found = tf.cond(loss < 1e9, update, lambda: tf.constant(0.0, tf.float64))
            other.assign(other + 1.0)
            return loss, found

        return step

    plain, own = [[variable(13, 8), variable(5, 3, seed=3, name="other")] for _ in range(2)]
    step = gs.parallelize(make(*own), devices=DEVICES)
    assert reads_before_writes(step.plan(numbers(7, 13)).program) > 1
    gs.set_variable_layout(own[0], "sharded", devices=DEVICES)
    assert_same(step, tf.function(make(*plain)), [numbers(7, 13, seed=k) for k in range(3)])
    plan = step.plan(numbers(7, 13))
    assert f"note: {CHOSEN.replace('cond', 'cond/effects')}" in str(plan)
    assert reads_before_writes(plan.program) > 1


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["sharded", {"adam*": "host", "*": "home"}, {"adam*": "host", "*": "sharded"}], ids=str
)
def test_loss_scaling_updates_parts_where_they_are(layout: Any):
    """Of a batch with an infinite row the update is skipped, and the scale is halved."""
    x, y = numbers(11, 16).numpy().astype(np.float32), numbers(11, 3, seed=1).numpy().astype(np.float32)
    x[5], found = np.inf, []
    for split in (False, True):
        keras.utils.set_random_seed(3)
        with tf.device(DEVICES[0]):
            layers = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(3)]
            template = keras.Sequential([keras.Input((16,)), *layers])
            scaled = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(1e-2, epsilon=1e-2, global_clipnorm=1.0),
                initial_scale=4.0,
                dynamic_growth_steps=2,
            )
            template.compile(scaled, keras.losses.MeanSquaredError())
            model = gs.multi_gpu_model(template, gpus=DEVICES, variables=layout) if split else template
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append([own.numpy() for own in [*template.variables, *scaled.variables]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)  # float32
    large = [own.value for own in scaled.inner_optimizer.variables if own.value.shape.num_elements() > 64]
    assert len(large) == 4
    assert all(parts_of_variable(slot).in_parts for slot in large)
    assert f"note: {CHOSEN}" in str(model.plan(x[:4], y[:4]))
