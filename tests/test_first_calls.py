"""Between a plan and the first call, which moves variables: whatever happens in between, results are one device's."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import compilation, plan_requests
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_variables import layout_changes
from graphsplit.emission import check_emitted, emit
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import Optimizer, X, Y, adam, numbers

DEVICES = 3
Step = Callable[..., Any]


def planned(layout: str = "sharded") -> tuple[Optimizer, Step, gs.inspect.Plan]:
    """Return an optimizer, its step, whose first call lays all out, and the plan of that."""
    own = Optimizer(adam)
    step = gs.parallelize(own.step, devices=DEVICES, variables=layout)
    return own, step, step.plan(X, Y)


def assert_trained(own: Optimizer, losses: list[Any], layout: str = "sharded") -> None:
    """Compare losses and all variables with as many steps on one device; the weights lie as they should."""
    plain = Optimizer(adam)
    assert_close(losses, [plain.step(X, Y) for _ in losses])
    for variable, expected in zip(own.variables, plain.variables, strict=True):
        np.testing.assert_allclose(variable, expected, 1e-4, 1e-5)
    assert lying_now(own.weights[0]).named == layout


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Return what functions return, each called in a thread of its own, all at the same time."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def run(k: int) -> None:
        barrier.wait()
        results[k] = works[k]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_traced_and_planned_once(monkeypatch: pytest.MonkeyPatch):
    """For the question and the calls together, and each variable moves once."""
    counts = {"trace_function": 0, "plan_program": 0}
    for module, name in ((compilation, "trace_function"), (plan_requests, "plan_program")):
        inner = getattr(module, name)

        def counted(*given: Any, inner: Callable[..., Any] = inner, name: str = name, **options: Any) -> Any:
            counts[name] += 1
            return inner(*given, **options)

        monkeypatch.setattr(module, name, counted)
    own, step, plan = planned()
    changes = layout_changes()
    losses = [step(X, Y)]
    moved, held = layout_changes() - changes, [variable for variable in own.variables if lying_now(variable).division]
    assert_trained(own, [*losses, step(X, Y)])
    assert counts == {"trace_function": 1, "plan_program": 1}
    assert moved == len(held) == plan.first_move.variables
    assert plan.sharded_fraction > 0.8
    check_emitted(plan, emit(plan))
    assert step.plan(X, Y).steps is plan.steps


def test_another_layout_in_between_stays():
    own, step, _ = planned()
    gs.set_variable_layout(own.variables, "replicated", DEVICES)
    assert step.plan(X, Y).first_move is None
    assert_trained(own, [step(X, Y), step(X, Y)], "replicated")


def test_the_same_layout_in_between():
    own, step, plan = planned()
    gs.set_variable_layout(own.variables, "sharded", DEVICES)
    left = step.plan(X, Y).first_move  # (a slot whose name says nothing may lie elsewhere than its weight)
    assert left is None or left.variables < plan.first_move.variables
    assert_trained(own, [step(X, Y), step(X, Y)])


def test_of_two_functions_the_one_that_is_called_first_decides():
    own, step, _ = planned()
    other = gs.parallelize(own.step, devices=DEVICES, variables="replicated")
    other.plan(X, Y)
    assert_trained(own, [other(X, Y), step(X, Y), other(X, Y)], "replicated")


def test_map():
    own, step, _ = planned()
    assert_trained(own, list(step.map([(X, Y)] * 3)))


@pytest.mark.parametrize("order", [1, 2])
def test_tapes_around_the_call(order: int):
    weight = tf.Variable(0.3 * numbers(7, 150))
    plain = tf.Variable(weight)

    def gradient(fn: Step, by: tf.Variable, times: int) -> tf.Tensor:
        if times == 0:
            return tf.reduce_sum(fn(X) ** 2)
        with tf.GradientTape() as tape:
            inner = gradient(fn, by, times - 1)
            inner = tf.reduce_sum(inner**2)
        return tape.gradient(inner, by)

    step = gs.parallelize(lambda x: tf.tanh(x @ weight), devices=DEVICES, variables="sharded")
    asked = step.gradient_plan(X)
    assert asked.first_move is not None
    assert lying_now(weight).division is None
    expected = gradient(lambda x: tf.tanh(x @ plain), plain, order)
    np.testing.assert_allclose(gradient(step, weight, order), expected, 1e-3, 1e-3)
    assert lying_now(weight).division is not None
    assert step.gradient_plan(X).steps is asked.steps


@pytest.mark.parametrize("layouts", [["sharded"], ["sharded", "replicated"]])
def test_first_calls_in_several_threads(layouts: list[str]):
    """Of one function, and of several that decided otherwise."""
    weight = tf.Variable(0.3 * numbers(7, 150))
    expected = tf.tanh(X @ weight)
    steps = [gs.parallelize(lambda x: tf.tanh(x @ weight), devices=DEVICES, variables=layout) for layout in layouts]
    for step in steps:
        step.plan(X)
    for found in at_once(*[lambda step=step: [step(X) for _ in range(3)] for step in steps * 3]):
        assert_close(found, [expected] * 3)
    assert lying_now(weight).named in layouts


def test_a_checkpoint_in_between(tmp_path: pathlib.Path):
    own, step, _ = planned()
    checkpoint = tf.train.Checkpoint(variables=own.variables)
    path = checkpoint.save(tmp_path / "before")
    step(X, Y)
    checkpoint.restore(path)
    assert_trained(own, [step(X, Y)])


def test_an_export_in_between(tmp_path: pathlib.Path):
    """A file has whole variables, and nothing moves for it."""
    module = tf.Module()
    module.weight = tf.Variable(0.3 * numbers(7, 150))
    module.run = tf.function(lambda x: tf.tanh(x @ module.weight), input_signature=[tf.TensorSpec((None, 7))])
    expected = module.run(X)
    step = gs.parallelize(lambda x: module.run(x), devices=DEVICES, variables="sharded")
    step.plan(X)
    for name in ("before", "after"):
        tf.saved_model.save(module, str(tmp_path / name))
        assert (lying_now(module.weight).division is None) == (name == "before")
        loaded = tf.saved_model.load(str(tmp_path / name))
        assert_close(loaded.run(X), expected)
        assert_close(step(X), expected)


def test_a_first_call_inside_of_a_function():
    """In a graph nothing can move: the error says what to do, and after one call outside of it it runs."""
    own, step, _ = planned()
    inside = tf.function(lambda x, y: step(x, y))
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"variables='sharded' lays variables .*Call the function once"
    ):
        inside(X, Y)
    assert all(lying_now(variable).division is None for variable in own.variables)
    assert_trained(own, [step(X, Y), tf.function(lambda x, y: step(x, y))(X, Y)])


@pytest.mark.usefixtures("copies_take_time")
def test_what_does_not_fit_is_decided_twice_and_moved_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation, "gpu_memory_bytes", lambda _: 1000.0)
    own = Optimizer(adam)
    step = gs.parallelize(own.step, devices=DEVICES, variables="auto")
    changes = layout_changes()
    losses = [step(X, Y)]
    moved = layout_changes() - changes
    assert all(lying_now(variable).reshards for variable in own.variables if lying_now(variable).division)
    assert moved == sum(lying_now(variable).division is not None for variable in own.variables)
    assert_trained(own, losses)
