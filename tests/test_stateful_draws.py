"""Kernels that remember what they drew go on as on one device, whatever plan runs; shards draw their rows' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import assert_close

ROWS = [(8, 4), (6, 4), (6, 4), (9, 3), (1, 5), (8, 4)]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    tf.random.set_seed(3)
    yield
    tf.random.set_seed(None)


def draws(x: tf.Tensor) -> list[tf.Tensor]:
    shape = tf.shape(x)
    numbers = [
        tf.nn.dropout(x, 0.5),
        tf.random.uniform(shape),
        tf.random.uniform(shape, 0, 99, tf.int32, seed=4),
        tf.random.normal(shape, dtype=tf.float64, seed=4),
        tf.random.truncated_normal(shape, seed=5, dtype=tf.bfloat16),
    ]
    return [own + tf.cast(x, own.dtype) for own in numbers]


def training(**ways: Any) -> tuple[Callable[..., Any], tf.Variable]:
    """A step of rows and of something else, of any sizes, whose dropout is a kernel's; parallelized if `ways` are."""
    w = tf.Variable(tf.random.stateless_normal((64, 64), [1, 2], dtype=tf.float64))

    @tf.function(input_signature=[tf.TensorSpec((None, 64), tf.float64), tf.TensorSpec((None,), tf.float64)])
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            dropped = tf.nn.dropout(tf.tanh(x @ w), 0.5)
            loss = tf.reduce_mean(dropped**2) + tf.reduce_sum(y)
        w.assign_sub(tape.gradient(loss, w))
        return dropped, loss, y + 1

    return gs.parallelize(step, **ways) if ways else step, w


def sizes(rows: int, others: int) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.random.stateless_normal((rows, 64), [rows, 1], dtype=tf.float64), tf.ones(others, tf.float64)


WAYS: dict[str, dict[str, Any]] = {
    "auto": {"devices": 3},
    "sharded": {"devices": 3, "variables": "sharded"},
    "replicated": {"devices": 2, "variables": "replicated"},
    "micro-batches": {"devices": 2, "micro_batches": 2},
    "a mesh": {"devices": 4, "mesh": {"batch": 2, "model": 2}},
    "unequal devices": {"devices": 2, "shares": (2, 1)},
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_kernels_go_on_over_sizes(ways: dict[str, Any]) -> None:
    """One trace on one device, with one kernel; here any number of plans."""
    (single, expected), (parallel, actual) = training(), training(**ways)
    for rows in ROWS:
        assert_close(parallel(*sizes(*rows)), single(*sizes(*rows)), f"{rows}")
        assert_close(tf.convert_to_tensor(actual), tf.convert_to_tensor(expected), f"the variable after {rows}")
    kinds = {op.type for op in parallel.plan(*sizes(8, 4)).sharded_ops}
    assert {"StatelessRandomUniformV2", "MatMul"} <= kinds


def test_kernels_go_on_when_a_layout_changes() -> None:
    (single, expected), (parallel, actual) = training(), training(devices=3)
    for layout in ("home", "sharded", "replicated", "home"):
        gs.set_variable_layout(actual, layout, devices=3)
        assert_close(parallel(*sizes(7, 3)), single(*sizes(7, 3)), layout)
        assert_close(tf.convert_to_tensor(actual), tf.convert_to_tensor(expected), layout)


@pytest.mark.parametrize("reduce_retracing", [False, True])
def test_kernels_belong_to_traces(reduce_retracing: bool) -> None:
    """One device traces each shape, or the second and all that follow: what is traced begins with the first numbers."""
    single = tf.function(draws, reduce_retracing=reduce_retracing)
    parallel = gs.parallelize(tf.function(draws, reduce_retracing=reduce_retracing), devices=3)
    for rows in (7, 7, 5, 4, 7, 5):
        assert_close(parallel(tf.ones((rows, 50))), single(tf.ones((rows, 50))), f"{rows} rows", tolerance=0)
    kinds = {op.type for op in parallel.plan(tf.ones((7, 50))).sharded_ops}
    numbers = {"UniformV2", "UniformIntV2", "NormalV2"}
    assert {f"StatelessRandom{kind}" for kind in numbers} | {"StatelessTruncatedNormalV2"} <= kinds


def test_kernels_begin_anew_where_those_of_one_device_do() -> None:
    """After `set_seed`; under a tape, whose forward part is another function; at each call in a graph around."""
    calls: list[list[Any]] = []
    for function in (tf.function(draws), gs.parallelize(tf.function(draws), devices=3)):
        tf.random.set_seed(3)
        x, results = tf.ones((5, 4)), []
        results += [function(x), function(x)]
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                results.append(function(x))
            results.append(tape.gradient(results[-1][0], x))
        results.append(function(x))
        tf.random.set_seed(3)
        results.append(function(x))
        around = tf.function(lambda x, function=function: [function(x), function(x)])
        results += [around(x), around(x), function(x)]
        assert_close(*results[-2], tolerance=0)
        calls.append(results)
    assert_close(calls[1], calls[0], tolerance=0)


def test_kernels_of_batches_sent_ahead() -> None:
    single, parallel = tf.function(draws), gs.parallelize(tf.function(draws), devices=3)
    batches = [tf.ones((rows, 3)) for rows in (5, 5, 4, 5)]
    for actual, batch in zip(parallel.map(iter(batches)), batches, strict=True):
        assert_close(actual, single(batch), tolerance=0)


def test_kernels_without_seeds_draw_other_numbers_each_time() -> None:
    tf.random.set_seed(None)
    parallel = gs.parallelize(tf.function(lambda x: tf.random.uniform(tf.shape(x)) + x), devices=2)
    found = np.stack([parallel(tf.zeros((4, 30))), parallel(tf.zeros((4, 30)))])
    assert np.unique(found).size == found.size
    assert 0 <= found.min() < found.max() < 1


def test_kernels_in_a_loop_go_on_under_one_plan() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def walk(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x += tf.random.normal(tf.shape(x), seed=2)
        return x

    parallel = gs.parallelize(walk, devices=3)
    for rows in (5, 4, 5):
        assert_close(parallel(tf.zeros((rows, 3))), walk(tf.zeros((rows, 3))))


@pytest.mark.parametrize("place", ["loop", "branch"])
def test_kernels_in_a_loop_or_branch_begin_anew_with_a_plan_and_it_is_said(place: str) -> None:
    def draw(x: tf.Tensor) -> tf.Tensor:
        return x + tf.random.normal(tf.shape(x), seed=2)

    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec((None,))])
    def walk(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if place == "branch":
            return tf.cond(tf.reduce_sum(y) < 0, lambda: x, lambda: draw(x))
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, draw(x)), (0, x))[1]

    parallel = gs.parallelize(walk, devices=3, split={"x": 0, "y": None})
    single = walk
    for rows in (5, 4, 5):
        x, y = tf.zeros((rows, 3)), tf.ones(rows + 1)
        assert_close(parallel(x, y), single(x, y))
    with pytest.warns(UserWarning, match="seeded numbers") as told:  # noqa: PT031
        for others in (0, 1, 0):  # none: planned for itself
            parallel(tf.zeros((5, 3)), tf.ones(others))
    message = str(told[0].message)
    assert len(told) == 1
    assert "under XLA or on workers: RandomStandardNormal (test_stateful_draws.py:" in message
    assert message.startswith("walk is planned once more, for other sizes or layouts, and draws seeded numbers by")
    assert "Draw by a tf.random.Generator" in message
    assert told[0].filename == __file__


@pytest.mark.parametrize("seed", [3, None])
def test_verify_begins_with_the_first_numbers_on_both_sides(seed: int | None) -> None:
    tf.random.set_seed(seed)
    parallel, x = gs.parallelize(tf.function(draws), devices=3), tf.ones((7, 5))
    single = tf.function(draws)
    if seed is not None:
        assert_close(parallel(x), single(x), tolerance=0)
    report = gs.verify(parallel, x)
    assert report.passed == (seed is not None), str(report)
    if seed is not None:
        assert report.largest == 0
        assert_close(parallel(x), single(x), "afterwards", tolerance=0)
