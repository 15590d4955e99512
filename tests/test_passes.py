"""The passes of planning: each decides what it is for and nothing else, and no later one takes it back."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.axes.plans import planned_along
from graphsplit.core.layouts import EvenCut, Shard
from graphsplit.planning import planner
from tests.helpers.hosts import plan_on_hosts

DECIDES = {
    "choose_default_device": {"default_device", "notes"},
    "recompute": {"program", "notes"},
    "merge_moments": {"program"},
    "propagate": {"steps", "owners", "moves"},
    "read_rows": {"program", "steps"},
    "start_stages": {"program", "stage_starts", "owners", "moves"},
    "wait_for_readers": {"program"},
    "put_in_order": {"order"},
    "carry_out_moves": {"collectives"},
    "fill_buckets": {"collectives"},
    "add_in_turns": {"collectives"},
    "divide_into_phases": {"phases"},
    "take_turns": {"schedules", "turns"},
    "go_through_gateways": {"collectives"},
    "note_stages": {"notes"},
    "check": set(),
}
ROWS = 16


def training_step(layers: int = 4, normalized: bool = False) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a step whose small gradients travel together; those that others wait for go first if it is normalized."""
    rng = np.random.default_rng(0)
    kernels = [tf.Variable(rng.normal(size=(12, 12)), name=f"kernel_{k}") for k in range(layers)]
    biases = [tf.Variable(rng.normal(size=12), name=f"bias_{k}") for k in range(layers)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for kernel, bias in zip(kernels, biases, strict=True):
                x = tf.tanh(tf.nn.bias_add(x @ kernel, bias))
                x = x - tf.reduce_mean(x, 0) if normalized else x
            loss = tf.reduce_mean((x - 1.0) ** 2)
        for w, gradient in zip([*kernels, *biases], tape.gradient(loss, [*kernels, *biases]), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    return step


def with_stage_in_a_branch(x: tf.Tensor) -> tf.Tensor:
    stage = gs.on_device(tf.tanh, "CPU:1")
    return tf.map_fn(lambda row: stage(row) + 1.0, x)


def reading_late() -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function with a large tensor that could be made at once and is read at the end, as a momentum is."""
    table = tf.Variable(np.ones((600, 20)), name="table")

    def run(x: tf.Tensor) -> tf.Tensor:
        y = tf.tile(x, [1, 600])
        for _ in range(12):
            y = tf.tanh(y)
        total = tf.reduce_sum(y)
        table.assign(0.9 * table + total)
        return total

    return run


def looking_up() -> Callable[[tf.Tensor], tf.Tensor]:
    table = tf.Variable(np.ones((600, 20)), name="table")
    return lambda x: tf.gather(table, tf.cast(x[:, 0], tf.int32))


def with_large_weights(**options: Any) -> gs.ParallelFunction:
    """Return a function whose weights in parts are better dropped after each of their uses than kept for all turns."""
    kernels = [tf.Variable(np.ones(shape), name="kernel") for shape in [(12, 600), (600, 12)] * 3]
    gs.set_variable_layout(kernels, "sharded", devices=2)
    return gs.parallelize(lambda x: functools.reduce(tf.matmul, kernels, x), devices=2, **options)


def standardized(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


class OnHosts:
    """A function of a variable that another host has than that of the first device."""

    def plan(self, x: tf.TensorSpec) -> gs.inspect.Plan:
        with tf.device("CPU:1"):
            weight = tf.Variable(np.ones(12))
        return plan_on_hosts(lambda x: x * weight, (1, 1), x)


CASES: dict[str, Callable[[], gs.ParallelFunction | OnHosts]] = {
    "variables in parts": with_large_weights,
    "variables in parts, and turns": lambda: with_large_weights(micro_batches=2),
    "variables on another host": OnHosts,
    "lookups": lambda: gs.parallelize(looking_up(), devices=2),
    "stages": lambda: gs.parallelize(training_step(), devices=4, stages=2, micro_batches=2, schedule="1f1b"),
    "buckets": lambda: gs.parallelize(training_step(), devices=3),
    "an order": lambda: gs.parallelize(training_step(normalized=True), devices=3),
    "hosts": lambda: gs.parallelize(
        training_step(), devices=[f"/job:worker/task:{task}/device:CPU:{d}" for task in (0, 1) for d in (0, 1)]
    ),
    "micro-batches": lambda: gs.parallelize(training_step(), devices=2, micro_batches=2),
    "recomputing": lambda: gs.parallelize(training_step(), devices=2, recompute="blocks"),
    "what is read late": lambda: gs.parallelize(reading_late(), devices=2),
    "moments": lambda: gs.parallelize(standardized, devices=2, tuning={"exchange_bytes": 1 << 19}),
    "a stage in a loop": lambda: gs.parallelize(with_stage_in_a_branch, devices=2),
}


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """Which fields of the plan each pass changes, in order."""
    found: list[tuple[str, set[str]]] = []

    def watched(decide: Callable[[gs.inspect.Plan], gs.inspect.Plan]) -> Callable[[gs.inspect.Plan], gs.inspect.Plan]:
        def run(before: gs.inspect.Plan) -> gs.inspect.Plan:
            after = decide(before)
            names = [field.name for field in dataclasses.fields(after)]
            changed = {name for name in names if getattr(before, name) is not getattr(after, name)}
            found.append((decide.__name__, {n for n in changed if getattr(before, n) != getattr(after, n)}))
            return after

        return run

    monkeypatch.setattr(planner, "PASSES", tuple(map(watched, planner.PASSES)))
    return found


def test_each_pass_decides_what_it_is_for(decided: list[tuple[str, set[str]]]):
    seen: dict[str, set[str]] = {name: set() for name in DECIDES}
    for make in CASES.values():
        decided.clear()
        make().plan(tf.TensorSpec([ROWS, 12], tf.float64)).check()
        assert {name for name, _ in decided} == set(DECIDES)
        for name, fields in decided:
            assert fields <= DECIDES[name], f"{name} decides {fields - DECIDES[name]}"
            seen[name] |= fields
    assert seen == DECIDES  # each decides all of it somewhere here


def test_a_pass_can_be_left_out(monkeypatch: pytest.MonkeyPatch):
    """Without buckets a plan is another one, and computes the same."""
    x = tf.constant(np.random.default_rng(1).normal(size=(ROWS, 12)))
    expected = float(training_step()(x))
    whole = gs.parallelize(training_step(), devices=3)
    assert whole.plan(x).buckets
    monkeypatch.setattr(planner, "PASSES", tuple(p for p in planner.PASSES if p.__name__ != "fill_buckets"))
    without = gs.parallelize(training_step(), devices=3)
    assert not without.plan(x).buckets
    without.plan(x).check()
    for parallel in (whole, without):
        np.testing.assert_allclose(float(parallel(x)), expected, rtol=1e-12)


def test_turns_of_loops_are_planned_by_the_same_options():
    step = training_step()

    @tf.function
    def steps(x: tf.Tensor) -> tf.Tensor:
        loss = tf.constant(0.0, x.dtype)
        for _ in tf.range(3):
            loss = step(x)
        return loss

    parallel = gs.parallelize(steps, devices=3, strict=True, tuning={"bucket_bytes": 600})
    plan = parallel.plan(tf.TensorSpec([ROWS, 12], tf.float64))
    bodies = [body for step in plan.steps for body in step.bodies.values()]
    assert bodies
    assert all(body.asked == dataclasses.replace(plan.asked, strict=False) for body in bodies)


def test_a_plan_is_printed_between_passes():
    plan = gs.parallelize(training_step(1), devices=2).plan(tf.TensorSpec([ROWS, 12], tf.float64))
    texts = {decide.__name__: planner.text_after(plan, decide.__name__) for decide in planner.PASSES}
    [before] = [line for line in texts["choose_default_device"].splitlines() if line.endswith("# matmul: not decided")]
    [after] = [line for line in texts["propagate"].splitlines() if "# matmul:" in line]
    assert after == before.replace("not decided", "shards: (shard(0), replicated) -> shard(0)")
    assert re.search(r"^  reduce of %\d+: partial\(sum\) -> whole on CPU:0$", texts["propagate"], re.MULTILINE)


def test_a_plan_along_another_axis_is_printed():
    w = tf.Variable(np.ones((12, 4)))
    single = gs.parallelize(lambda x: tf.reduce_sum(tf.matmul(x, w, name="product")), devices=1)
    program = single.plan(tf.TensorSpec([ROWS, 12], tf.float64)).program
    [handle] = [program.ops[i].name for i in program.captures]
    plan = planned_along(program, "model", 2, {handle: Shard(0, partition=EvenCut(12))})
    text = planner.steps_text(plan)
    assert re.search(r"# product: shards: .* -> partial\(sum\)$", text, re.MULTILINE)
    assert re.search(r"^  reduce of %\d+: partial\(sum\) -> whole on COLUMN:0$", text, re.MULTILINE)
