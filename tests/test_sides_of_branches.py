"""Branches behind a `Switch`: one device's numbers whichever side is taken, and no effect that may be dead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import EmittedGraph, check_emitted, emit
from graphsplit.errors import CheckError
from graphsplit.planning.device_bytes import live_bytes, traffic
from graphsplit.planning.tasks import SEND, tasks_of
from graphsplit.program.program import Tensor
from graphsplit.program.sides import MERGE, SWITCH, merged_side, sides_of
from graphsplit.runtime.executable import make_executable
from tests.helpers.broken_plans import with_nodes

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]  # none of them is the host
Step = Callable[[tf.Tensor], Sequence[tf.Tensor]]


def numbers(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 11], dtype=tf.float64)


def variables() -> list[tf.Variable]:
    """Return three weights and a counter. Each weight takes part in each program."""
    with tf.device(DEVICES[0]):
        weights = [tf.Variable(0.3 * numbers(13, 8, seed=k), name=f"weight_{k}") for k in range(3)]
        return [*weights, tf.Variable(0, name="count")]


def two_of_one_predicate(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        is_taken = tf.reduce_sum(x) > 0
        first = tf.cond(is_taken, lambda: w.assign_add(0.1 * u), lambda: tf.zeros_like(w))
        second = tf.cond(is_taken, lambda: u.assign(0.5 * w), lambda: w + 0.0)
        s.assign(first + second)
        return tf.reduce_sum(x @ w), tf.reduce_sum(s)

    return step


def results_of_other_shapes(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        def update() -> tf.Tensor:
            w.assign_add(0.1 * u)
            return tf.reduce_sum(w, 0, keepdims=True)

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: s + 1.0)
        return tf.reduce_sum(x @ w), tf.reduce_sum(found), tf.shape(found)

    return step


def one_in_another(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        loss = tf.reduce_mean((x @ w) ** 2)

        def inner_update() -> tf.Tensor:
            u.assign(0.9 * u + 0.1 * w)
            return loss * 2.0

        def other_update() -> tf.Tensor:
            s.assign_add(u)
            return tf.reduce_sum(s)

        def update() -> tf.Tensor:
            found = tf.cond(count % 2 == 0, inner_update, other_update)
            w.assign_sub(0.01 * u)
            return found

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: tf.reduce_sum(u))
        count.assign_add(1)
        w.assign_add(0.01 * s)  # (which must not wait for what may be dead)
        return loss, found

    return step


def rows_on_both_sides(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        def update() -> tf.Tensor:
            made = tf.tanh(x @ w)
            w.assign_sub(0.01 * tf.matmul(x, made, transpose_a=True))
            u.assign_add(0.1 * w)
            return tf.reduce_mean(made, 1)

        def skip() -> tf.Tensor:
            made = tf.sigmoid(x @ u)
            s.assign_add(0.01 * tf.matmul(x, made, transpose_a=True))
            return tf.reduce_sum(made, 1)

        found = tf.cond(tf.reduce_sum(x) > 0, update, skip)
        w.assign_add(0.001 * s)
        return tf.reduce_sum(found), found

    return step


def rows_in_one_in_another(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        def update() -> tf.Tensor:
            made = tf.tanh(x @ w)

            def inner_update() -> tf.Tensor:
                u.assign_sub(0.01 * tf.matmul(x, made, transpose_a=True))
                return made * 2.0

            found = tf.cond(count % 2 == 0, inner_update, lambda: tf.zeros_like(made))
            w.assign_sub(0.01 * tf.matmul(x, found, transpose_a=True) + 0.01 * s)
            return tf.reduce_mean(found, 1) + tf.reduce_sum(u)

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: tf.ones([tf.shape(x)[0]], tf.float64))
        count.assign_add(1)
        return tf.reduce_sum(found), found

    return step


def rows_of_a_table(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        ids = tf.cast(tf.abs(x[:, :4]) * 3, tf.int32) % 13
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.gather(w, ids)) ** 2) + tf.reduce_mean((x @ u) ** 2)
        of_table, of_weight = tape.gradient(loss, [w, u])

        def update() -> tf.Tensor:
            w.assign_sub(0.1 * tf.convert_to_tensor(of_table) + 0.01 * s)
            u.assign_sub(0.1 * of_weight)
            return tf.reduce_sum(w)

        return loss, tf.cond(tf.reduce_sum(x) > 0, update, lambda: loss)

    return step


def gradients_of_a_branch(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        with tf.GradientTape() as tape:
            made = tf.cond(count % 2 == 0, lambda: tf.tanh(x @ w), lambda: x @ w * u[0])
            loss = tf.reduce_mean((made @ tf.transpose(u)) ** 2)
        gradients = tape.gradient(loss, [w, u])

        def update() -> tf.Tensor:
            w.assign_sub(0.01 * gradients[0] + 0.001 * s)
            u.assign_sub(0.01 * gradients[1])
            return tf.reduce_sum(w)

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: loss)
        count.assign_add(1)
        return loss, found

    return step


def chosen(x: tf.Tensor, count: tf.Variable) -> tf.Tensor:
    """Return 0 for numbers below 0, and another number for each other batch: of the sides, and of none."""
    return tf.where(tf.reduce_sum(x) > 0, tf.gather([1, 7, 2, -3], count % 4), 0)


def one_of_several(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    """Of three sides, the last one is taken for 7 and -3, too. What the first computes is not written."""

    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2) + tf.reduce_mean((x @ u) ** 2)
        of_weight, of_other = tape.gradient(loss, [w, u])

        def one() -> tf.Tensor:
            s.assign(0.5 * s + of_weight)
            w.assign_sub(0.1 * s)
            return tf.reduce_sum(x @ w, 1)

        def other() -> tf.Tensor:
            u.assign_sub(0.1 * of_other + 0.01 * w)
            return tf.reduce_mean(tf.sigmoid(x @ u), 1)

        found = tf.switch_case(chosen(x, count), [lambda: tf.reduce_mean(x @ s, 1), one, other])
        count.assign_add(1)
        w.assign_add(0.001 * s)  # (which must not wait for what may be dead)
        return loss, found

    return step


def several_in_one_in_another(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        made = tf.tanh(x @ w)

        def one() -> tf.Tensor:
            u.assign_sub(0.01 * tf.matmul(x, made, transpose_a=True))
            return tf.cond(count % 2 == 0, lambda: s.assign_add(0.1 * u), lambda: s + u)

        def other() -> tf.Tensor:
            sides = [lambda: w.assign_add(0.01 * s), lambda: w + 0.0, lambda: u.assign(0.9 * u), lambda: s * 2.0]
            return tf.switch_case(count + 0, sides)

        inner = lambda: tf.switch_case(count % 3, [one, other, lambda: u + s])  # noqa: E731
        found = tf.cond(tf.reduce_sum(x) > 0, inner, lambda: w - s)
        count.assign_add(1)
        return tf.reduce_sum(made), tf.reduce_sum(found)

    return step


def gradients_of_several(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        with tf.GradientTape() as tape:
            sides = [lambda: tf.tanh(x @ w), lambda: x @ w * u[0], lambda: tf.sigmoid(x @ u)]
            loss = tf.reduce_mean((tf.switch_case(chosen(x, count), sides) @ tf.transpose(u)) ** 2)
        gradients = tape.gradient(loss, [w, u], unconnected_gradients="zero")

        def update() -> tf.Tensor:
            w.assign_sub(0.01 * gradients[0] + 0.001 * s)
            return tf.reduce_sum(u.assign_sub(0.01 * gradients[1]))

        writes = [lambda: loss, update, lambda: tf.reduce_sum(s.assign(gradients[0]))]
        found = tf.switch_case(chosen(x, count), writes)
        count.assign_add(1)
        return loss, found

    return step


def draws_by_a_seed(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    """Of a mask each shard draws what is for its rows, of noise each device what is for its part."""

    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        def update() -> tf.Tensor:
            made = tf.nn.experimental.stateless_dropout(x @ w, 0.5, tf.stack([count, 1]))
            noise = tf.random.stateless_normal((13, 8), tf.stack([count, 3]), dtype=tf.float64)
            w.assign_sub(0.01 * tf.matmul(x, made, transpose_a=True) + 0.01 * noise)
            u.assign_add(0.1 * noise * w)
            return tf.reduce_sum(made, 1)

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: tf.reduce_sum(x @ s, 1))
        count.assign_add(1)
        return tf.reduce_sum(found), found

    return step


PROGRAMS = [
    *(two_of_one_predicate, results_of_other_shapes, one_in_another, rows_on_both_sides, rows_in_one_in_another),
    *(rows_of_a_table, gradients_of_a_branch, draws_by_a_seed),
    *(one_of_several, several_in_one_in_another, gradients_of_several),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 2},
    "any rows": {"tuning": {"reduce_retracing": True}},
    "compiled": {"jit_compile": True},
    "recomputed": {"recompute": "blocks"},
    "stages": {"stages": 3, "micro_batches": 2, "schedule": "1f1b"},
    "tape outside": {},
}


def called(step: Callable[..., Any], x: tf.Tensor, from_outside: bool) -> list[tf.Tensor]:
    if not from_outside:
        return [*step(x)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = step(x)
        total = tf.reduce_sum(results[0])
    return [*results, tape.gradient(total, x)]


def assert_one_device(
    program: Callable[..., Step], layout: Any, signs: Sequence[int], from_outside: bool = False, **options: Any
) -> gs.inspect.Plan:
    """Compare results and variables of calls with batches of 7, 2, 5, 1 and 3 rows; return the last plan."""
    plain, laid = variables(), variables()
    if layout is not None:
        gs.set_variable_layout(laid[:3], layout, devices=DEVICES)
    single, many = tf.function(program(*plain)), gs.parallelize(program(*laid), devices=DEVICES, **options)
    for count, sign in zip((7, 2, 5, 1, 3), signs, strict=True):
        x = sign * tf.abs(numbers(count, 13, seed=count))
        for made, expected in zip(called(many, x, from_outside), called(single, x, from_outside), strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-12)
        for own, other in zip(laid, plain, strict=True):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)
    plan = many.plan(x)
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    return plan


TAKEN = {"taken": [1] * 5, "not taken": [-1] * 5, "in turn": [1, -1, 1, 1, -1]}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("layout", ["sharded", "replicated", "host"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_those_of_one_device(program: Callable[..., Step], layout: str, how: str, taken: str):
    if program is results_of_other_shapes and how == "tape outside":
        pytest.skip("TensorFlow itself has no gradient of it: it adds up both sides")
    if program in (gradients_of_a_branch, gradients_of_several) and how == "compiled":
        pytest.skip("XLA itself compiles the gradient of the side that is not taken for a batch without rows")
    plan = assert_one_device(program, layout, TAKEN[taken], how == "tape outside", **OPTIONS[how])
    assert not plan.state.whole
    types = [op.type for op in plan.program.ops]
    assert SWITCH in types
    assert MERGE in types
    assert {"If", "Case"}.isdisjoint(types)
    held = {op.index for op in plan.program.ops if op.type.startswith("Assign")}
    assert not any(sides_of(plan.program).of_op(i) for i in held)
    if layout == "sharded":
        merged = [op for op in plan.program.ops if op.type == MERGE and "part_" in op.name]
        assert {device for op in merged for device in plan.places.once(op)} == {
            f"/device:{device}" for device in DEVICES
        }


def draws_by_a_generator(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    generator = tf.random.Generator.from_seed(7)

    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        def update() -> tf.Tensor:
            w.assign_sub(0.1 * u + 0.01 * generator.normal((13, 8), dtype=tf.float64))
            return tf.reduce_sum(w)

        found = tf.cond(tf.reduce_sum(x) > 0, update, lambda: tf.reduce_sum(s))
        return tf.reduce_sum(x @ w), found, generator.uniform((2,))

    return step


def writes_rows(w: tf.Variable, u: tf.Variable, s: tf.Variable, _: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        ids = tf.cast(tf.abs(x[:, :4]) * 3, tf.int32) % 13
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.gather(w, ids)) ** 2) + tf.reduce_mean((x @ u) ** 2)
        of_table, of_weight = tape.gradient(loss, [w, u])

        def update() -> tf.Tensor:
            w.scatter_mul(tf.IndexedSlices(1.0 - 0.1 * of_table.values, of_table.indices))
            u.assign_sub(0.1 * of_weight)
            return tf.reduce_sum(s.assign_add(0.1 * u))

        return loss, tf.cond(tf.reduce_sum(x) > 0, update, lambda: loss)

    return step


def writes_rows_of_several(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable) -> Step:
    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        ids = tf.cast(tf.abs(x[:, 0]) * 3, tf.int32) % 13
        sides = [
            lambda: tf.reduce_sum(s),
            lambda: tf.reduce_sum(w.scatter_add(tf.IndexedSlices(x[:, :8], ids))),
            lambda: tf.reduce_sum(w.scatter_nd_update(tf.constant([[3], [5]]), u[:2])),
        ]
        found = tf.switch_case(chosen(x, count), sides)
        count.assign_add(1)
        return tf.reduce_sum(x @ w), found

    return step


@pytest.mark.sampled(4)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("how", ["plain", "micro-batches"])
@pytest.mark.parametrize("layout", ["sharded", "replicated", "host"])
@pytest.mark.parametrize("program", [draws_by_a_generator, writes_rows, writes_rows_of_several])
def test_what_stays_a_branch_has_the_numbers_of_one_device(
    program: Callable[..., Step], layout: str, how: str, taken: str
):
    plan = assert_one_device(program, layout, TAKEN[taken], **OPTIONS[how])
    assert [op for op in plan.program.ops if op.type in ("If", "Case")]
    assert [note for note in plan.program.notes if "stays a branch, on one device: " in note]
    assert "stays a branch, on one device: " in str(plan)


@pytest.mark.parametrize("how", ["plain", "micro-batches"])
@pytest.mark.parametrize("program", [rows_on_both_sides, one_of_several])
def test_at_home_a_branch_stays_one(program: Callable[..., Step], how: str):
    plan = assert_one_device(program, "home", TAKEN["in turn"], **OPTIONS[how])
    assert [op for op in plan.program.ops if op.type in ("If", "Case")]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("copies_take_time")
@pytest.mark.parametrize("how", ["plain", "micro-batches"])
@pytest.mark.parametrize("program", [rows_on_both_sides, one_of_several, several_in_one_in_another])
def test_layouts_that_are_chosen(program: Callable[..., Step], how: str):
    plan = assert_one_device(program, None, TAKEN["in turn"], variables="auto", **OPTIONS[how])
    assert not [op for op in plan.program.ops if op.type in ("If", "Case")]
    assert len(plan.state.divisions) >= 3
    written = [op for op in plan.program.ops if op.type == "AssignVariableOp" and "part_" in op.name]
    assert {device for op in written for device in plan.places.once(op)} == {f"/device:{device}" for device in DEVICES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"micro_batches": 2, "schedule": "1f1b"}, {"micro_batches": 2, "tuning": {"reduce_retracing": True}}],
    ids=str,
)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_a_branch_inside_of_a_stage(layout: str, options: dict[str, Any]):
    """Forward it adds something up in a slot; the update is in another stage by itself."""

    def program(w: tf.Variable, u: tf.Variable, s: tf.Variable, count: tf.Variable, *stage: str) -> Step:
        def place(function: Callable[..., Any]) -> Callable[..., Any]:
            return gs.on_device(function, stage) if stage else function

        def forward(x: tf.Tensor) -> tf.Tensor:
            made = tf.tanh(x @ w)

            def add_up() -> tf.Tensor:
                return tf.reduce_sum(s.assign(0.9 * s + 0.1 * tf.matmul(x, made, transpose_a=True)))

            return made * (1 + 0.01 * tf.cond(count % 2 == 0, add_up, lambda: tf.reduce_sum(u)))

        def update(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
            def change() -> tf.Tensor:
                w.assign_sub(0.1 * gradients[0])
                return tf.reduce_sum(u.assign_sub(0.1 * gradients[1]))

            return tf.cond(tf.reduce_sum(gradients[1]) > 0, change, lambda: tf.reduce_sum(w))

        def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((place(forward)(x) @ tf.transpose(u) + tf.sign(x)) ** 2)
            found = place(update)(tape.gradient(loss, [w, u]))
            count.assign_add(1)
            return loss, found

        return step

    plain, laid = variables(), variables()
    gs.set_variable_layout(laid[:3], layout, devices=DEVICES)
    stage = ["CPU:3", "CPU:4"]
    single, many = tf.function(program(*plain)), gs.parallelize(program(*laid, *stage), devices=DEVICES[:2], **options)
    for count, sign in zip((7, 2, 1, 5, 6), (1, -1, -1, 1, 1), strict=True):
        x = sign * tf.abs(numbers(count, 13, seed=count))
        for made, expected in zip(many(x), single(x), strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-12)
        for own, other in zip(laid, plain, strict=True):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)
    plan = many.plan(x)
    plan.check()
    check_emitted(plan, emit(plan))
    assert not plan.state.whole
    assert not [op for op in plan.program.ops if op.type == "If"]
    devices = {f"/device:{device}" for device in stage}
    products = [op for op in plan.sharded_ops if op.type == "MatMul" and sides_of(plan.program).of_op(op.index)]
    assert {plan.places.on(op, d) for op in products for d in range(plan.mesh.shards)} == devices
    written = [op for op in plan.program.ops if op.type == "AssignVariableOp"]
    held = {device for op in written for device in plan.places.once(op)}
    assert held == {f"/device:{device}" for device in DEVICES}


MESH = {"batch": 2, "model": 2}
ON_MESH = {
    "nested": {"weight_0": (None, "model"), "weight_1": ("model", "batch"), "weight_2": ("batch", "model")},
    "mixed": {"weight_0": (None, "model"), "weight_1": "sharded", "weight_2": "sharded"},
    "words": {"weight_0": ("batch", "model"), "weight_1": ((None, "model"), "sharded")},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ON_MESH)
@pytest.mark.parametrize("program", PROGRAMS)
def test_several_axes_of_a_mesh(program: Callable[..., Step], layout: str):
    """Predicates are made in each column, and decide everywhere as in the first."""
    plain, laid = variables(), variables()
    gs.set_variable_layout(laid[:3], {**ON_MESH[layout], "*": "home"}, mesh=MESH)
    single, many = tf.function(program(*plain)), gs.parallelize(program(*laid), mesh=MESH)
    for count, sign in zip((7, 2, 5, 1, 3), TAKEN["in turn"], strict=True):
        x = sign * tf.abs(numbers(count, 13, seed=count))
        for made, expected in zip(many(x), single(x), strict=True):
            np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-12)
        for own, other in zip(laid, plain, strict=True):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)
    plan = many.plan(x)
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    assert not plan.state.whole
    held = [op.index for op in plan.program.ops if op.type.startswith("Assign")]
    assert not any(sides_of(plan.program).of_op(i) for i in held)
    assert len({device for i in held for device in plan.places.once(plan.program.ops[i])}) >= 2


# Sides that are not taken


def raises_errors(w: tf.Variable, _: tf.Tensor) -> tf.Tensor:
    return w.assign(tf.debugging.check_numerics(1.0 / w, "not finite"))


def divides_integers(w: tf.Variable, _: tf.Tensor) -> tf.Tensor:
    return w.assign_add(tf.cast(7 // tf.cast(w, tf.int32), tf.float64))


def divides_constants(w: tf.Variable, _: tf.Tensor) -> tf.Tensor:
    """It reads nothing of the step."""
    return w.assign_add(tf.cast(7 // tf.constant([0] * 8), tf.float64) + w)


def raises_to_powers(w: tf.Variable, _: tf.Tensor) -> tf.Tensor:
    return w.assign_add(tf.cast(2 ** (tf.cast(w, tf.int32) - 1), tf.float64))


def compares_labels(w: tf.Variable, _: tf.Tensor) -> tf.Tensor:
    labels = tf.cast(tf.reduce_sum(w, 1), tf.int32) - 1
    return w.assign_add(tf.expand_dims(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, w), 1) + w)


def adds_rows_up(w: tf.Variable, x: tf.Tensor) -> tf.Tensor:
    numbers_of_rows = tf.cast(tf.reduce_sum(x, 1), tf.int32) * 0 + 99
    return w.assign_add(tf.math.unsorted_segment_sum(x[:, :8], tf.math.abs(numbers_of_rows), 13))


FAILING = [raises_errors, divides_integers, divides_constants, raises_to_powers, compares_labels, adds_rows_up]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("write", FAILING)
def test_what_fails_fails_only_if_it_is_taken(write: Callable[..., tf.Tensor], is_taken: bool):
    with tf.device(DEVICES[0]):
        weight = tf.Variable(tf.zeros((13, 8), tf.float64))
    gs.set_variable_layout(weight, "sharded", devices=DEVICES)

    def step(x: tf.Tensor, is_taken: tf.Tensor) -> tf.Tensor:
        tf.cond(is_taken, lambda: write(weight, x), lambda: weight.assign(weight))
        return tf.reduce_sum(x @ weight)

    made, x = gs.parallelize(step, devices=DEVICES), numbers(7, 13)
    assert not made.plan(x, tf.constant(True)).state.whole
    if is_taken:
        with pytest.raises(tf.errors.InvalidArgumentError):
            made(x, tf.constant(True))
    assert float(made(x, tf.constant(False))) == 0
    assert np.all(weight.numpy() == 0)


def test_a_side_that_is_not_taken_does_not_run():
    """A call back into Python counts; it is pure, as far as TensorFlow is told."""
    runs: list[int] = []

    def count(x: np.ndarray) -> np.ndarray:
        runs.append(1)
        return x

    def program(w: tf.Variable, *_: tf.Variable) -> Step:
        def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
            def update() -> tf.Tensor:
                made = tf.numpy_function(count, [w * 2.0], tf.float64, stateful=False)
                return w.assign(tf.ensure_shape(made, (13, 8)))

            return (tf.reduce_sum(tf.cond(tf.reduce_sum(x) > 0, update, lambda: w + 0.0)),)

        return step

    [weight, *_] = variables()
    gs.set_variable_layout(weight, "sharded", devices=DEVICES)
    step = gs.parallelize(program(weight), devices=DEVICES)
    before = weight.numpy()
    step(-tf.abs(numbers(7, 13)))
    assert not runs
    step(tf.abs(numbers(7, 13)))
    assert runs == [1]
    np.testing.assert_allclose(weight.numpy(), 2 * before)


def test_of_two_sides_that_one_counts_for_which_more_is_sent():
    laid = variables()
    gs.set_variable_layout(laid[:3], "sharded", devices=DEVICES)

    def step(x: tf.Tensor, is_taken: tf.Tensor) -> tf.Tensor:
        w, u, s, _ = laid
        many = lambda: w.assign_add(u @ tf.transpose(s) @ w + w @ tf.transpose(w) @ s)  # noqa: E731
        return tf.reduce_sum(tf.cond(is_taken, many, lambda: w.assign(s @ tf.transpose(u) @ u)))

    arguments = numbers(7, 13), tf.constant(True)
    plan = gs.parallelize(step, devices=DEVICES).plan(*arguments)
    swapped = gs.parallelize(lambda x, is_taken: step(x, ~is_taken), devices=DEVICES).plan(*arguments)
    of_both = sum(task.bytes[0] for task in tasks_of(plan).tasks if task.kind == SEND)
    assert 0 < sum(traffic(plan).sent.values()) < of_both
    assert sum(traffic(swapped).sent.values()) == sum(traffic(plan).sent.values())


def live_bytes_of(then: int, otherwise: int) -> dict[str, int]:
    """Return what is alive at most on each device, of a step whose sides update so many weights."""
    weights = variables()[:3]
    gs.set_variable_layout(weights, "sharded", devices=DEVICES)

    def step(x: tf.Tensor, is_taken: tf.Tensor) -> tf.Tensor:
        products = [tf.tanh(x @ weight) for weight in weights]

        def update(count: int) -> tf.Tensor:
            for weight, product in zip(weights[:count], products, strict=False):
                weight.assign_sub(0.1 * tf.matmul(x, tf.sigmoid(product), transpose_a=True))
            return tf.reduce_sum(products[0])

        return tf.cond(is_taken, lambda: update(then), lambda: update(otherwise))

    return live_bytes(gs.parallelize(step, devices=DEVICES).plan(numbers(7, 13), tf.constant(True)))


def test_of_two_sides_that_one_is_alive_which_has_more():
    largest = live_bytes_of(3, 0)
    assert live_bytes_of(3, 2) == live_bytes_of(2, 3) == largest
    smaller = live_bytes_of(1, 0)
    assert all(smaller[f"/device:{device}"] < largest[f"/device:{device}"] for device in DEVICES)


# Waits, and the checker


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    laid = variables()
    gs.set_variable_layout(laid[:3], "sharded", devices=DEVICES)
    return gs.parallelize(rows_on_both_sides(*laid), devices=DEVICES).plan(numbers(7, 13))


def behind_a_switch(graph: EmittedGraph) -> str:
    return next(node.name for node in graph.nodes if node.op == "Tanh" and graph.sides.of_node(node.name))


def last_write(graph: EmittedGraph) -> str:
    return [node.name for node in graph.nodes if node.op.startswith("Assign")][-1]


def waiting(graph: EmittedGraph) -> EmittedGraph:
    first, later = behind_a_switch(graph), last_write(graph)
    return with_nodes(graph, lambda nodes: next(n for n in nodes if n.name == later).input.append(f"^{first}"))


def reading_the_dead(graph: EmittedGraph) -> EmittedGraph:
    """Let a write read what is passed on to one side, in place of what is there on both."""

    def change(nodes: list[Any]) -> None:
        by_name = {node.name: node for node in nodes}
        write = by_name[last_write(graph)]
        [merge] = [n for n in nodes if n.op == MERGE and n.input[0].split(":")[0] in by_name][:1]
        write.input[1] = merge.input[0]

    return with_nodes(graph, change)


def merging_one_side(graph: EmittedGraph) -> EmittedGraph:
    def change(nodes: list[Any]) -> None:
        merge = next(n for n in nodes if n.op == MERGE)
        merge.input[1] = merge.input[0]

    return with_nodes(graph, change)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (waiting, "which may be dead where it is not"),
        (reading_the_dead, "reads"),
        (merging_one_side, "reads"),
        (lambda g: dataclasses.replace(g, effects=(*g.effects, behind_a_switch(g))), "has to be there"),
    ],
)
def test_broken_graphs(plan: gs.inspect.Plan, broken: Callable[[EmittedGraph], EmittedGraph], message: str):
    graph = emit(plan)
    check_emitted(plan, graph)
    with pytest.raises(CheckError, match=message):
        check_emitted(plan, broken(graph))


def test_sides_of_nodes_are_found_without_the_plan(plan: gs.inspect.Plan):
    with pytest.raises(CheckError, match="joins what is not the two sides of one branch"):
        len(merging_one_side(emit(plan)).sides.switches)


def test_a_merge_joins_both_sides_of_one_branch():
    first, second = Tensor(3, 0), Tensor(5, 0)
    assert merged_side("m", [frozenset([(first, 0)]), frozenset([(first, 1)])]) == frozenset()
    for ends in ([(first, 0)], [(first, 0)]), ([(first, 0)], []), ([(first, 0)], [(second, 1)]):
        with pytest.raises(CheckError):
            merged_side("m", [frozenset(end) for end in ends])


@pytest.mark.parametrize("sign", [1, -1])
def test_who_waits_for_a_side_that_is_not_taken_runs(sign: int):
    """A write that would wait for a node of either side waits for one that runs in any case."""
    laid = variables()
    gs.set_variable_layout(laid[:3], "sharded", devices=DEVICES)
    parallel = gs.parallelize(rows_on_both_sides(*laid), devices=DEVICES)
    x = sign * tf.abs(numbers(7, 13))
    planned = parallel._planned((x,), {}, runs=True)
    ops, sides = list(planned.plan.program.ops), sides_of(planned.plan.program)
    behind = [op.index for op in ops if op.type in ("Tanh", "Sigmoid") and sides.of_op(op.index)]
    assert len(behind) == 2
    writes = [op for op in ops if op.type.startswith("Assign") and op.index > max(behind)]
    for op in writes:
        ops[op.index] = dataclasses.replace(op, controls=(*op.controls, *behind))
    program = dataclasses.replace(planned.plan.program, ops=tuple(ops))
    changed = dataclasses.replace(planned.plan, program=program)
    graph = emit(changed)
    check_emitted(changed, graph)
    assert any("either_side" in node.name for node in graph.nodes)
    plain = variables()
    expected = tf.function(rows_on_both_sides(*plain))(x)
    results = make_executable(planned.trace, changed, "step")([x])
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-9)
    for own, other in zip(laid, plain, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-9, atol=1e-12)


def test_a_branch_in_columns_reads_the_copy_of_each_column():
    b, scale = tf.Variable(numbers(8), name="b"), tf.Variable(tf.constant(1.5, tf.float64), name="scale")
    mesh = {"batch": 2, "model": 2}
    gs.set_variable_layout(b, ("model",), mesh=mesh)
    gs.set_variable_layout(scale, "replicated", mesh=mesh)

    def step(x: tf.Tensor) -> Sequence[tf.Tensor]:
        total = tf.reduce_sum(x)
        return total, tf.cond(total > 0, lambda: tf.reduce_sum(b) * scale, lambda: tf.constant(3.0, tf.float64))

    parallel = gs.parallelize(step, devices=4, mesh=mesh)
    for x in (numbers(7, 3) + 2, numbers(7, 3) - 2):
        np.testing.assert_allclose(parallel(x), step(x), rtol=1e-12)
    plan = parallel.plan(numbers(7, 3))
    check_emitted(plan, emit(plan))
