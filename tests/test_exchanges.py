"""What the shards need of each other goes from each to each: no device in between sees all of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import traffic
from tests.helpers.exchanges import U, W, trained
from tests.helpers.law import assert_close, assert_law, rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_shards_exchange_their_parts(devices: int) -> None:
    """(The diagonal, of no work, is taken at home: each loss is a number for each pair of rows.)"""
    plan = assert_law(lambda: (trained, []), [(rows(41, 64),), (rows(25, 64),)], devices=devices, at_home=None)
    assert {"all-gather", "all-to-all", "reduce-scatter"} <= {move.kind for move in plan.moves}, str(plan)
    assert "\n  all-to-all: 1 tensor, " in str(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 4])
def test_no_device_sees_more_than_its_share(devices: int) -> None:
    """Each sends every other one what that needs of its part: of 60 x 60 numbers a quarter of a quarter, say; twice."""
    w = tf.constant(np.ones((6, 60)))
    parallel = gs.parallelize(lambda x: tf.reduce_max(tf.nn.softmax(tf.tanh(x @ w), 0)), devices=devices)
    plan = parallel.plan(rows(60, 6))
    assert [move.kind for move in plan.moves].count("all-to-all") == 2  # to columns and back
    part = 2 * 8 * 60 * 60 // devices**2 * (devices - 1)
    rest = 8 * 60 * 6 * (devices - 1) + 8 * 60 * 6 // devices * (devices - 1)  # at home: `w`, and arguments of others
    found = traffic(plan)
    for number, device in enumerate(plan.devices):
        assert part <= found.sent[device] <= part + (rest if number == 0 else 8)
    placed = parallel.placement(rows(60, 6), actual=True)
    between = [t for t in placed.transfers if t.bytes == 8 * 60 * 60 // devices**2]
    assert len(between) == 2 * devices * (devices - 1)


ALL_ROWS = {
    "cumsum": lambda x: tf.cumsum(x, 0, exclusive=True),
    "cumprod": lambda x: tf.math.cumprod(x, 0, reverse=True),
    "reverse": lambda x: tf.reverse(x, [0]),
    "roll": lambda x: tf.roll(x, 3, 0),
    "sort": lambda x: tf.sort(x, 0),
    "softmax": lambda x: tf.nn.softmax(x, 0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_what_needs_all_rows_runs_on_columns(name: str) -> None:
    """There and back again: each shard has some columns of all rows for it, and its rows for what comes before."""

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.tanh(ALL_ROWS[name](tf.tanh(x @ W)) @ U) ** 2)
        return loss, tape.gradient(loss, x)

    plan = assert_law(lambda: (step, []), [(rows(61, 64),), (rows(47, 64),)], devices=3, sharded=["MatMul", "TanhGrad"])
    kinds = [move.kind for move in plan.moves]
    assert kinds.count("all-to-all") >= (2 if name in ("softmax", "sort") else 4), str(plan)  # forward, and backward
    assert kinds.count("gather") == 1  # the gradient that is returned


def test_few_bytes_are_gathered() -> None:
    """A copy between devices costs as much for a few bytes."""
    plan = assert_law(lambda: (lambda x: tf.cumsum(tf.tanh(x), 0), []), [(rows(13, 6),)], devices=3, at_home=1)
    assert "all-to-all" not in {move.kind for move in plan.moves}


def test_the_checker_sees_a_part_that_went_to_the_wrong_shard() -> None:
    plan = gs.parallelize(trained, devices=3).plan(rows(41, 64))
    graph = emit(plan)
    check_emitted(plan, graph)
    joins = [node for node in graph.nodes if node.op == "ConcatV2" and "all_to_all" in node.name]
    assert len(joins) >= 3
    joins[0].input[0], joins[1].input[0] = joins[1].input[0], joins[0].input[0]
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, graph)


def test_unknown_numbers_of_rows_go_through_one_device() -> None:
    """Shards may be absent then, and nobody puts anything in for them on the others."""
    x = rows(41, 64)
    parallel = gs.parallelize(tf.function(trained, input_signature=[tf.TensorSpec((None, 64), x.dtype)]), devices=3)
    for count in (41, 2, 1):
        for actual, expected in zip(parallel(x[:count]), trained(x[:count]), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-12)
    kinds = {move.kind for move in parallel.plan(x).moves}
    assert "gather" in kinds
    assert not kinds & {"all-gather", "all-to-all", "reduce-scatter"}


# Of shards that take turns on a device

EXCHANGES = ("all-gather", "all-to-all", "reduce-scatter")


def paired(x: tf.Tensor, y: tf.Tensor) -> Any:
    """A loss for which each row meets all others, and its gradients: that of what is gathered is transposed."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        a, b = tf.tanh(x @ W), tf.tanh(y @ W)
        scores = a @ tf.transpose(b) / 8
        loss = tf.reduce_mean(tf.reduce_logsumexp(scores, 1) - tf.reduce_sum(a * b, 1) / 8)
    return loss, tape.gradient(loss, [x, y])


def both_views(x: tf.Tensor, y: tf.Tensor) -> Any:
    """Two batches one after the other, and each row meets all of both."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = tf.tanh(tf.concat([x @ W, y @ U], 0))
        loss = tf.reduce_mean(tf.reduce_logsumexp(z @ tf.transpose(z), 1))
    return loss, tape.gradient(loss, [x, y])


def messages(plan: Any) -> Counter[str]:
    """Return how many messages the exchanges of a plan are, by their kind."""
    return Counter(move.kind for c in plan.collectives for move, _ in c.transfers() if move.kind in EXCHANGES)


TURNS = ({}, {"shares": [3, 1, 2]}, {"micro_batches": 2}, {"micro_batches": 3, "shares": [0, 1, 4]})


@pytest.mark.parametrize("options", TURNS)
def test_what_devices_send_each_other_does_not_grow_with_their_micro_batches(options: Any) -> None:
    """Neither bytes nor messages: one piece for each device, which splits it for its shards."""
    given = rows(61, 64), tf.reverse(rows(61, 64), [0])
    plan = assert_law(lambda: (paired, []), [given], devices=3, at_home=None, **options)
    alone = gs.parallelize(paired, devices=3, **{**options, "micro_batches": 1}).plan(*given)
    assert traffic(plan).busiest == traffic(alone).busiest
    assert messages(plan) == messages(alone)
    kinds = [move.kind for move in plan.moves]
    assert {*EXCHANGES} <= {*kinds}, str(plan)
    assert all(move.kind != "reduce" or plan.program.bytes(move.tensor) < 100 for move in plan.moves), "in pieces"


@pytest.mark.parametrize("options", [*TURNS, {"micro_batches": 2, "variables": "sharded", "jit_compile": True}])
def test_rows_of_two_batches_one_after_the_other_go_from_each_to_each(options: Any) -> None:
    given = rows(61, 64), tf.reverse(rows(61, 64), [0])
    plan = assert_law(lambda: (both_views, []), [given], devices=3, at_home=None, **options)
    alone = gs.parallelize(both_views, devices=3, **{**options, "micro_batches": 1}).plan(*given)
    assert {"all-gather", "reduce-scatter"} <= {*messages(plan)}, str(plan)
    assert traffic(plan).busiest == traffic(alone).busiest
    assert messages(plan) == messages(alone)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_tape_outside_of_what_is_exchanged(micro_batches: int) -> None:
    def losses(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_logsumexp(tf.tanh(x @ W) @ tf.transpose(tf.tanh(x @ U)), 1)

    x, found = rows(41, 64), []
    parallel = gs.parallelize(losses, devices=3, micro_batches=micro_batches)
    for function in (losses, parallel):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(function(x))
        found.append((loss, tape.gradient(loss, x)))
    assert_close(found[1], found[0])
    kinds = {move.kind for move in parallel.gradient_plan(x).moves}
    assert {"all-gather", "reduce-scatter"} <= kinds


def contrastive_step(seed: int = 0) -> Any:
    """Return a step of training on pairs of rows, and its weights."""
    generator = np.random.default_rng(seed)
    weights = [tf.Variable(0.1 * generator.normal(size=(64, 64))) for _ in range(2)]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            a, b = [tf.math.l2_normalize(tf.tanh(v @ weights[0]) @ weights[1], 1) for v in (x, y)]
            own = tf.range(tf.shape(a)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, a @ tf.transpose(b) / 0.1))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step, weights


@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_a_contrastive_step_on_absent_gpus_sends_no_more_in_micro_batches(layout: str) -> None:
    given = [tf.TensorSpec((4096, 64), tf.float64)] * 2
    plans = [
        gs.parallelize(
            contrastive_step()[0], devices=[f"GPU:{k}" for k in range(8)], variables=layout, micro_batches=count
        ).plan(*given)
        for count in (1, 2, 8)
    ]
    assert len({traffic(plan).busiest for plan in plans}) == 1
    assert [*messages(plans[0])] == [*messages(plans[2])]
    assert len({frozenset(messages(plan).items()) for plan in plans}) == 1


def test_tensorflow_sends_no_more_in_micro_batches() -> None:
    given = rows(60, 64), tf.reverse(rows(60, 64), [0])
    sent = []
    for count in (1, 2):
        parallel = gs.parallelize(contrastive_step()[0], devices=3, micro_batches=count)
        placed = parallel.placement(*given, actual=True)
        plan = parallel.plan(*given)
        arguments = len([move for c in plan.collectives for move, _ in c.transfers() if move.kind == "scatter"])
        large = [transfer.bytes for transfer in placed.transfers if transfer.bytes >= 10 * 64 * 8]
        sent.append((sum(large), len(large) - arguments))
        assert sum(messages(plan).values()) == 3 * 2 * len({move for move in plan.moves if move.kind in EXCHANGES})
    assert sent[0] == sent[1]


def test_what_shards_without_rows_have_is_not_joined_before_it_is_sent() -> None:
    """Rows of a table that all devices update: with fewer rows than shards there is nothing to join on some devices."""

    def make() -> Any:
        keras.utils.set_random_seed(0)
        table, last = keras.layers.Embedding(50, 8, dtype="float64"), keras.layers.Dense(3, dtype="float64")
        model = keras.Sequential([keras.Input((), dtype="int64"), table, last])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 3], tf.float64)])
        def step(i: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(i, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return step, model.variables

    indices, target = tf.constant(np.random.default_rng(0).integers(0, 50, 31)), rows(31, 3)
    calls = [(indices[:count], target[:count]) for count in (31, 7, 2, 1)]
    plan = assert_law(make, calls, devices=3, at_home=None, micro_batches=2, variables="replicated")
    assert "all-gather" in [move.kind for move in plan.moves], str(plan)


def test_what_a_stage_exchanges_stays_on_its_devices() -> None:
    def first(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.tanh(x @ W), tf.tanh(y @ W)

    def last(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.reduce_logsumexp(tf.tanh(x @ U) @ tf.transpose(tf.tanh(y @ U)), 1)

    one, two = gs.on_device(first, ["CPU:0", "CPU:1"]), gs.on_device(last, ["CPU:2", "CPU:3"])

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return two(*one(x, y))

    given = rows(60, 64), rows(60, 64)
    plan = assert_law(lambda: (step, []), [given], devices=2, at_home=None, micro_batches=2)
    assert "all-gather" in [move.kind for move in plan.moves], str(plan)
    into = {read.device[-5:] for c in plan.collectives if c.kind == "all-gather" for own in c.reads for read in own}
    assert into == {"CPU:2", "CPU:3"}
    alone = gs.parallelize(step, devices=2).plan(*given)
    assert traffic(plan).busiest == traffic(alone).busiest
    assert messages(plan) == messages(alone) == {"all-gather": 2}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_pipelines_of_stages_that_exchange(schedule: str) -> None:
    def make() -> Any:
        weights = [tf.Variable(0.1 * W), tf.Variable(0.1 * U)]

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                a, b = x, y
                for k, weight in enumerate(weights):
                    with tf.name_scope(f"block_{k}"):
                        a, b = tf.tanh(a @ weight), tf.tanh(b @ weight)
                scores = a @ tf.transpose(b) / 16
                loss = tf.reduce_mean(tf.reduce_logsumexp(scores, 1) - tf.reduce_sum(a * b, 1) / 16)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return step, weights

    given = rows(61, 64), tf.reverse(rows(61, 64), [0])
    plan = assert_law(make, [given], devices=4, stages=2, micro_batches=4, schedule=schedule, at_home=None)
    alone = gs.parallelize(make()[0], devices=4, stages=2, micro_batches=1).plan(*given)
    assert {"all-gather", "reduce-scatter"} <= {*messages(plan)}, str(plan)
    assert messages(plan) == messages(alone)
    assert sum(traffic(plan).sent.values()) == sum(traffic(alone).sent.values())
