"""Lookups in tables that one device has: rows are sent where they are fewer bytes, and the table stays where it is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import emit
from graphsplit.inspect.plans.plan_text import run_for_rows
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close, assert_law
from tests.helpers.layout_cases import numbers

WORDS, WIDTH = 600, 8  # 38 kB
TABLE = WORDS * WIDTH * 8
Rows = Callable[[Any, tf.Tensor], tf.Tensor]


def ids(rows: int) -> tf.Tensor:
    """Return ids, the first and the last row among them, and some twice."""
    found = np.random.default_rng(rows).integers(0, WORDS, rows)
    found[:2], found[-1] = (0, WORDS - 1), 0
    return tf.constant(found)


def weights(*shape: int) -> tf.Tensor:
    return tf.cast(numbers(*shape), tf.float64)


def flat(table: Any, words: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, words)


def several(table: Any, words: tf.Tensor) -> tf.Tensor:
    """Two lookups, one of as many rows for each; the ids follow from others."""
    near = tf.stack([words, (words + 1) % WORDS], 1)
    return tf.gather(table, (words + 3) % WORDS) + tf.reduce_sum(tf.nn.embedding_lookup(table, near), 1)


def by_places(table: Any, words: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(table, words[:, None])


def columns(table: Any, words: tf.Tensor) -> tf.Tensor:
    return tf.transpose(tf.gather(tf.transpose(table), words, axis=1))


def training(
    rows: Rows, kind: str, words: int = WORDS
) -> Callable[[], tuple[Callable[..., Any], Sequence[tf.Variable]]]:
    """Return a training step over rows of a table: a constant, a variable, or one whose gradient is made dense."""

    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        table = tf.Variable(weights(words, WIDTH), name="table", trainable=kind != "frozen")
        held = tf.constant(table) if kind == "constant" else table
        w = tf.Variable(weights(WIDTH, 5), name="w")

        def step(words: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = held.read_value() if kind == "dense" else held
                loss = tf.reduce_mean(tf.tanh(rows(value, words) @ w) ** 2)
            gradient, *of_table = tape.gradient(loss, [w] if kind in ("constant", "frozen") else [w, table])
            w.assign_sub(0.1 * gradient)
            for found in of_table:
                if isinstance(found, tf.IndexedSlices):
                    table.scatter_sub(tf.IndexedSlices(0.1 * found.values, found.indices))
                else:
                    table.assign_sub(0.1 * found)
            return loss

        return step, [table, w]

    return make


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("rows", "kind", "options"),
    [
        (flat, "trained", {}),
        (several, "constant", {}),
        (several, "trained", {"micro_batches": 2}),
        (several, "dense", {}),
        (by_places, "frozen", {"strict": True}),
        (by_places, "dense", {}),
        (columns, "dense", {}),
    ],
)
def test_rows_are_sent_and_not_their_table(rows: Rows, kind: str, options: dict[str, Any]):
    plan = assert_law(
        training(rows, kind), [(ids(7),), (ids(11),)], sharded=["MatMul", "Tanh"], at_home=None, **options
    )
    assert not [op for op, _ in plan.unsharded_ops if "Scatter" not in op.type], str(plan)
    assert sum(traffic(plan).sent.values()) < TABLE / 3, str(plan)
    assert {op.type.removeprefix("Resource") for op, _ in run_for_rows(plan)} & {"Gather", "GatherNd", "GatherV2"}
    text = str(plan)
    assert "lookups that run once, on the device of the table, to send less" in text
    assert "all other work on the batch is sharded" in text or plan.unsharded_ops
    assert "\n  all work on the batch is sharded" not in text


def tied(table: Any, words: tf.Tensor) -> tf.Tensor:
    return tf.gather(table, words) @ tf.transpose(table) @ table


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rows", "batch", "layout"), [(tied, 7, ""), (flat, 2500, ""), (flat, 7, "replicated")])
def test_tables_are_sent_where_that_is_less(rows: Rows, batch: int, layout: str):
    """A table that every device reads anyway, or has; and rows that are more bytes than a table for each device."""
    make = training(rows, "trained" if rows is flat else "dense")
    laid = itertools.cycle(["", layout])

    def make_laid() -> Any:
        step, variables = make()
        if own := next(laid):
            gs.set_variable_layout(variables, own, devices=3)
        return step, variables

    plan = assert_law(make_laid, [(ids(batch),)], sharded=["ResourceGather" if layout else "GatherV2"], at_home=None)
    assert not [op for op, _ in run_for_rows(plan) if "Gather" in op.type], str(plan)


def test_sums_of_many_rows_are_added_up_where_these_are():
    x, segments = weights(5000, 9), tf.range(5000) % WORDS
    plan = assert_law(
        lambda: (lambda x, k: tf.math.unsorted_segment_sum(x, k, WORDS), []),
        [(x, segments)],
        sharded=["UnsortedSegmentSum"],
    )
    assert not run_for_rows(plan)


def test_any_number_of_rows():
    signature = [tf.TensorSpec((None,), tf.int64)]
    make = training(flat, "trained", words=20_000)
    (step, variables), (plain, expected) = make(), make()
    parallel = gs.parallelize(tf.function(step, input_signature=signature), devices=3)
    for rows in (8, 4, 3):
        assert_close(parallel(ids(rows)), plain(ids(rows)))
    for own, other in zip(variables, expected, strict=True):
        assert_close(tf.convert_to_tensor(own), tf.convert_to_tensor(other))
    assert "64 B a row of rows sent instead of 1.3 MB to each device" in str(parallel.plan(*signature))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[.*\] = .* is not in \[0, "):
        parallel(tf.fill((4,), tf.constant(2**40)))


@pytest.mark.parametrize("options", [{"devices": 3}, {"mesh": {"batch": 2, "model": 2}}])
def test_gradients_from_outside(options: dict[str, Any]):
    table, w = tf.Variable(weights(WORDS, WIDTH), name="table"), tf.Variable(weights(WIDTH, 6), name="w")
    f = lambda words: tf.tanh(tf.gather(table, words) @ w)  # noqa: E731

    def loss_and_gradients(function: Callable[..., Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(ids(7)) ** 3)
        found = tape.gradient(loss, [table, w])
        return loss, *map(tf.convert_to_tensor, found)

    expected = loss_and_gradients(f)
    if "mesh" in options:
        gs.set_variable_layout(w, (None, "model"), mesh=options["mesh"])
    parallel = gs.parallelize(f, **options)
    assert_close(loss_and_gradients(parallel), expected)
    assert run_for_rows(parallel.plan(ids(7)))


def in_turn(table: tf.Variable, words: tf.Tensor) -> tf.Tensor:
    """Rows that are read, added to, read again, replaced and changed, and read again; by one id and by places, too."""
    first = tf.gather(table, words)
    table.scatter_add(tf.IndexedSlices(0.5 * first, words))
    second = tf.gather(table, words + 0) + tf.gather_nd(table, words[:, None])
    table.assign(tf.fill((WORDS, WIDTH), tf.reduce_sum(first)))
    table.scatter_sub(tf.IndexedSlices(second, words))
    return tf.tanh(first * second + tf.gather(table, words) - tf.gather(table, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("home", {}),
        ("replicated", {}),
        ("replicated", {"micro_batches": 2}),
        ("sharded", {}),
        ("replicated", {"devices": 2}),
        ("home", {"jit_compile": True}),
    ],
)
def test_lookups_read_rows_and_not_the_variable(layout: str, options: dict[str, Any]):
    """As a read copies all of a variable that was read by rows before."""
    layouts = itertools.cycle(["home", layout])

    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        table = tf.Variable(weights(WORDS, WIDTH), name="table")
        if (own := next(layouts)) != "home":
            gs.set_variable_layout([table], own, devices=options.get("devices", 3))
        return lambda words: in_turn(table, words), [table]

    plan = assert_law(make, [(ids(7),), (ids(11),)], at_home=None, **options)
    kinds = Counter(node.op for node in emit(plan).nodes)
    assert kinds["ResourceGather"] >= 3
    assert kinds["ResourceGatherNd"] or layout == "sharded"
    assert not kinds["ReadVariableOp"] or layout == "sharded"
