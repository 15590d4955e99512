"""Sparse gradients of tables in parts: rows are added up by their numbers, in branches too, and moved as sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_law

WORDS, WIDTH, EACH = 301, 16, 16  # (no number of devices below divides the words)
TABLE = WORDS * WIDTH * 8
Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def ids(rows: int, words: int = WORDS) -> tf.Tensor:
    """Return numbers of rows, many of them twice and in the rows of several shards."""
    return tf.constant(np.random.default_rng(rows).integers(0, words, (rows, EACH)))


def training(layout: str, devices: int, how: str) -> Made:
    numbers = np.random.default_rng(0).standard_normal((WORDS, WIDTH))
    table = tf.Variable(numbers, name="table")
    squares = tf.Variable(np.zeros_like(numbers), name="squares")
    if layout != "home":
        gs.set_variable_layout([table, squares], layout, devices)

    def update(gradient: tf.IndexedSlices) -> tf.Tensor:
        squares.scatter_add(tf.IndexedSlices(gradient.values**2, gradient.indices))
        rows = gradient.values / (tf.sqrt(tf.gather(squares.read_value(), gradient.indices)) + 0.1)
        table.scatter_sub(tf.IndexedSlices(0.1 * rows, gradient.indices))
        return tf.reduce_sum(table)

    def step(words: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.gather(table, words)) ** 2)
        gradient = tape.gradient(loss, table)
        if how == "plain":
            return loss, update(gradient)
        return loss, tf.cond(tf.reduce_any(words == 0), lambda: update(gradient), lambda: tf.reduce_sum(squares))

    return step, [table, squares]


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("how", ["plain", "branch"])
def test_any_numbers(how: str, layout: str):
    """Rows of all shards, of few parts only, more and fewer than the table has, of fewer samples than devices."""
    ways = itertools.cycle(["home", layout])
    calls = [ids(41), ids(40, 5), ids(41) + 100, ids(2), ids(1, 1)]
    calls = [(tf.minimum(call, WORDS - 1),) for call in calls]
    plan = assert_law(lambda: training(next(ways), 3, how), calls, devices=3, at_home=None)
    assert not plan.state.whole
    assert not any(op.type == "If" for op in plan.program.ops)


@pytest.mark.parametrize(
    "options", [{"micro_batches": 2}, pytest.param({"jit_compile": True}, marks=pytest.mark.long)], ids=str
)
def test_other_ways_to_run(options: dict[str, Any]):
    ways = itertools.cycle(["home", "sharded"])
    calls = [(ids(1, 1),), (ids(41),)]
    plan = assert_law(lambda: training(next(ways), 3, "branch"), calls, devices=3, at_home=None, **options)
    assert any(op.type == "UnsortedSegmentSum" for op in plan.sharded_ops)


def test_what_moves_is_as_large_as_the_table():
    step, _ = training("sharded", 3, "plain")
    plan = gs.parallelize(step, devices=3).plan(ids(200))
    assert not any(op.type.startswith("ResourceScatter") for op in plan.program.ops)
    # the table twice (for a lookup of squares, too), and two sums of rows; all rows are ten times as much
    assert max(traffic(plan).busiest[1:]) <= 4.2 * TABLE
    few = gs.parallelize(step, devices=3).plan(ids(5))
    assert any(op.type == "ResourceScatterSub" for op in few.program.ops)


@pytest.mark.parametrize("number", [-1, WORDS])
@pytest.mark.parametrize("how", ["plain", "branch"])
def test_numbers_of_no_row_are_refused(how: str, number: int):
    _, [table, *_] = made = training("sharded", 3, how)
    assert made

    def step(words: tf.Tensor) -> tf.Tensor:
        def write() -> tf.Tensor:
            rows = tf.ones((tf.shape(words)[0], WIDTH), tf.float64)
            table.scatter_sub(tf.IndexedSlices(rows, words))
            return tf.constant(1.0)

        return tf.cond(tf.reduce_any(words > 5), write, lambda: tf.constant(0.0)) if how == "branch" else write()

    numbers = np.arange(1000) % WORDS
    numbers[77] = number
    with pytest.raises(tf.errors.InvalidArgumentError):
        gs.parallelize(step, devices=3)(tf.constant(numbers))


def test_rows_of_an_open_number():
    def make(layout: str) -> Made:
        table = tf.Variable(np.ones((WORDS, WIDTH)), name="table")
        if layout != "home":
            gs.set_variable_layout([table], layout, 3)

        def step(words: tf.Tensor) -> tf.Tensor:
            rows = tf.gather(table, tf.reshape(words, [-1])) * 0.5
            kept = tf.cond(tf.reduce_all(words > 2), lambda: rows, lambda: tf.boolean_mask(rows, rows[:, 0] > 0.2))
            chosen = tf.range(tf.shape(kept)[0]) % WORDS
            table.scatter_add(tf.IndexedSlices(0.3 * kept, chosen))
            return tf.reduce_sum(words, 1)

        return step, [table]

    ways = itertools.cycle(["home", "sharded"])
    plan = assert_law(lambda: make(next(ways)), [(ids(40),), (tf.maximum(ids(41), 3),)], at_home=None)
    assert any(op.type == "UnsortedSegmentSum" for op in plan.program.ops)


@pytest.mark.parametrize("reduction", [tf.reduce_all, tf.reduce_any])
def test_truth_values_of_rows_are_joined_before_they_are_put_into_a_table(reduction: Callable[..., tf.Tensor]):
    """Of rows with one number the last counts."""

    def make(layout: str) -> Made:
        table = tf.Variable(np.zeros((WORDS, WIDTH)), name="table")
        if layout != "home":
            gs.set_variable_layout([table], layout, 3)

        def step(words: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
            base = tf.fill((WORDS, WIDTH), reduction is tf.reduce_all)
            put = tf.tensor_scatter_nd_update(base, words[:, None], tf.math.is_finite(tf.math.log(x)))
            table.assign_add(tf.ones_like(table))
            return reduction(put)

        return step, [table]

    x = np.ones((7, WIDTH))
    x[2, 3] = -1
    last_is_wrong = tf.constant([1, 2, 5, 7, 3, 2, 2])
    calls = [(last_is_wrong, tf.constant(x)), (tf.constant([1, 2, 5, 7, 3, 2, 5]), tf.constant(x))]
    calls += [(words, tf.constant(-np.ones_like(x))) for words, _ in calls]
    ways = itertools.cycle(["home", "sharded"])
    plan = assert_law(lambda: make(next(ways)), calls, at_home=None, sharded=["IsFinite"])
    [put] = [op for op in plan.ops_once if op.type == "TensorScatterUpdate"]
    assert put.out_shapes == ((WORDS,),)


def test_any_number_of_rows():
    """Of an unknown batch nobody knows whether it has more rows than the table: they are written one by one."""
    ways = itertools.cycle(["home", "sharded"])

    def make() -> Made:
        step, variables = training(next(ways), 3, "plain")
        return tf.function(step, input_signature=[tf.TensorSpec((None, EACH), tf.int64)]), variables

    plan = assert_law(make, [(ids(count),) for count in (41, 2, 1)], at_home=None)
    assert plan.program.batch_is_unknown
    assert any(op.type.startswith("ResourceScatter") for op in plan.program.ops)


def test_a_table_on_the_host_is_not_written_whole():
    """Of a table that is too large for other devices a branch writes a few rows, beside it."""
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    with tf.device(devices[0]):
        both = [training("home", 1, "branch"), training("home", 1, "branch")]
    gs.set_variable_layout(both[1][1], "host", devices)
    ways = iter(both)
    plan = assert_law(lambda: next(ways), [(ids(41),), (ids(5),)], devices=devices, at_home=None)
    assert any(op.type == "If" for op in plan.program.ops)
    assert "whose device has no rows of the batch" in str(plan)
