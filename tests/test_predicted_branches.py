"""Branches whose operations are the program's: a prediction takes the side of each that takes longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.tasks import SEND, tasks_of
from graphsplit.program.program import Tensor
from graphsplit.program.sides import EVERYWHERE, MERGE
from graphsplit.simulate.prediction.predictions import Prediction
from graphsplit.simulate.prediction.replay import Resource, Task
from graphsplit.simulate.prediction.taken_sides import longer_sides, other_choices
from tests.helpers.predictions import X, boxed

WEIGHTS, OTHER = (tf.Variable(tf.ones([64, 64]), name=name) for name in ("weights", "other"))
COUNT = tf.Variable(0, name="count")
PRODUCT_S = 2 * 64 * 64 * 64 / 1e9


def predicted(function: Callable[[tf.Tensor], tf.Tensor]) -> Prediction:
    """Return what is predicted where products take time, and nothing else does, with variables in parts."""
    prediction = gs.predict(function, X, machine=boxed(link=1e30), devices=2, variables="sharded")
    types = {op.type for op in prediction.plan.program.ops}
    assert MERGE in types
    assert not types & {"If", "StatelessIf", "Case", "StatelessCase"}
    return prediction


def products(count: int) -> Callable[[], None]:
    """Return a side that writes so many products, one after the other; for none it writes a sum."""

    def side() -> None:
        made = WEIGHTS + OTHER
        for _ in range(count):
            made = made @ OTHER
        WEIGHTS.assign(made)

    return side


def branch(then: Callable[[], None], otherwise: Callable[[], None], period: int = 2) -> None:
    tf.cond(COUNT % period == 0, then, otherwise)


@pytest.mark.parametrize(("then", "otherwise"), [(2, 0), (0, 2), (2, 1), (1, 2), (2, 2)])
def test_a_branch_takes_its_longer_side(then: int, otherwise: int):
    def step(x: tf.Tensor) -> tf.Tensor:
        branch(products(then), products(otherwise))
        return tf.reduce_sum(x)

    prediction = predicted(step)
    assert prediction.step_s == pytest.approx(2 * PRODUCT_S)
    assert sum(event.type == "MatMul" for event in prediction.events) == 2


@pytest.mark.parametrize("period", [2, 3])
def test_of_two_branches_each_takes_its_longer_side(period: int):
    """Those of one predicate take the same side: the one that takes longer in both together."""

    def step(x: tf.Tensor) -> tf.Tensor:
        is_even, is_other = COUNT % 2 == 0, COUNT % period == 0
        tf.cond(is_even, products(2), products(0))
        tf.cond(is_other, products(1), products(3))
        return tf.reduce_sum(x)

    # with one predicate 2 + 1, or 0 + 3, which is as much
    assert predicted(step).step_s == pytest.approx((3 if period == 2 else 5) * PRODUCT_S)


@pytest.mark.parametrize(("otherwise", "longest"), [(2, 4), (5, 5)])
def test_branches_in_branches(otherwise: int, longest: int):
    def step(x: tf.Tensor) -> tf.Tensor:
        def then() -> None:
            products(1)()
            branch(products(0), products(3), 3)

        branch(then, products(otherwise))
        return tf.reduce_sum(x)

    assert predicted(step).step_s == pytest.approx(longest * PRODUCT_S)


def test_of_several_sides_the_longest_counts():
    def step(x: tf.Tensor) -> tf.Tensor:
        tf.switch_case(COUNT % 4, [products(count) for count in (1, 3, 0, 2)])
        return tf.reduce_sum(x)

    assert predicted(step).step_s == pytest.approx(3 * PRODUCT_S)


def test_memory_is_enough_for_either_side():
    """The side that takes longer makes one product, and the other one a tensor that is sixteen times as large."""

    def large() -> None:
        WEIGHTS.assign(WEIGHTS + tf.reduce_max(tf.sort(tf.tile(OTHER, [4, 4])) ** 2.0))

    def step_of(then: Callable[[], None]) -> Callable[[tf.Tensor], tf.Tensor]:
        def step(x: tf.Tensor) -> tf.Tensor:
            branch(then, large)
            return tf.reduce_sum(x)

        return step

    held, held_by_large = (predicted(step_of(products(count))).memory["/device:GPU:0"].live_bytes for count in (1, 0))
    assert held >= held_by_large >= 16 * 64 * 64 * 4


def test_what_is_not_taken_is_neither_run_nor_sent():
    def step(x: tf.Tensor) -> tf.Tensor:
        branch(products(2), products(1))
        return tf.reduce_sum(x)

    prediction = predicted(step)
    planned = {op.name for op in prediction.plan.program.ops}
    assert any("cond/else/" in name for name in planned)
    assert not [event for event in prediction.events if "cond/else/" in event.name]
    assert prediction.sent_bytes == sum(event.bytes for event in prediction.events)
    assert prediction.sent_bytes < sum(task.bytes[0] for task in tasks_of(prediction.plan).tasks if task.kind == SEND)


OUTER, INNER = Tensor(1, 0), Tensor(2, 0)


def test_sides_run_on_several_devices_at_a_time():
    """Three seconds on three devices are one second, and less than two on one device."""
    tasks = [Task(f"a{k}", (f"gpu{k}",), 1.0, device=f"gpu{k}") for k in range(3)] + [Task("b", ("gpu0",), 2.0)]
    sides = [*[frozenset([(OUTER, 1)])] * 3, frozenset([(OUTER, 0)])]
    assert longer_sides(tasks, sides, {f"gpu{k}": Resource() for k in range(3)}) == {OUTER: 0}


def test_each_side_is_taken_by_a_choice():
    sides = [EVERYWHERE] + [frozenset(side) for side in ([(OUTER, 0)], [(OUTER, 1)])]
    sides += [frozenset([(OUTER, 1), (INNER, number)]) for number in (0, 1)]
    tasks = [Task("task", ("gpu",), seconds) for seconds in (9.0, 4.0, 1.0, 2.0, 5.0)]
    choice = longer_sides(tasks, sides, {"gpu": Resource()})
    assert choice == {OUTER: 1, INNER: 1}
    choices = [choice, *other_choices(sides, choice)]
    assert all(any(side <= {*taken.items()} for taken in choices) for side in sides)
    assert len(choices) == 3
    assert other_choices(sides[:1], {}) == []
