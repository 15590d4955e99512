"""The order in which the shards of a device take turns, and what is alive meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from keras import layers

import graphsplit as gs
from graphsplit.core.protos import split_reference
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.communication.transfers import Sum
from graphsplit.planning.device_bytes import live_bytes
from tests.helpers.law import assert_law, rows
from tests.helpers.micro_batches import GIVEN, training

pytestmark = pytest.mark.sampled(quick=2)


def test_a_gradient_is_added_before_the_next_one_is_begun():
    step, _ = training(lambda: layers.Dense(4, "relu"))
    plan = gs.parallelize(step, devices=1, micro_batches=4).plan(*GIVEN)
    graph = emit(plan)
    check_emitted(plan, graph)
    reads = {node.name: list(node.input) for node in graph.nodes}
    sums = [node for node in graph.nodes if node.op == "AddN" and graph.origins[node.name].role == "reduce"]
    assert sums
    assert {len(node.input) for node in sums} == {2}  # never more than the sum so far and one more
    barriers = [name for name, origin in graph.origins.items() if origin.role == "order"]
    assert [graph.origins[name].shard for name in barriers] == [0, 1, 2]
    for d, name in enumerate(barriers[1:], 1):
        waits = {split_reference(r.lstrip("^"))[0] for r in reads[name]}
        assert len([n for n in waits if graph.origins[n].role == "reduce"]) == len(sums) // 3
        assert any(
            name == r.lstrip("^") for node in graph.nodes if graph.origins[node.name].shard == d + 1 for r in node.input
        )


def test_the_order_is_in_the_graph_that_runs():
    step, _ = training()
    parallel = gs.parallelize(step, devices=1, micro_batches=3)
    with partition_graphs() as graphs:
        parallel(*GIVEN)
    nodes = {node.name: node for graph in graphs for node in graph.node}

    def before(name: str) -> set[str]:
        found, pending = set(), [name]
        while pending:
            for reference in nodes[pending.pop()].input:
                source = split_reference(reference.lstrip("^"))[0]
                if source not in found:
                    found.add(source)
                    pending.append(source)
        return found

    forward = {d: [n for n in nodes if n.startswith(f"shard_{d}/") and nodes[n].op == "Tanh"] for d in range(3)}
    backward = {d: [n for n in nodes if n.startswith(f"shard_{d}/") and nodes[n].op == "TanhGrad"] for d in range(3)}
    for d in (1, 2):
        [first], [last] = forward[d], backward[d - 1]
        assert last in before(first)


def test_alive_is_a_shard_and_not_the_batch():
    def deep(x, y):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean((h - y) ** 2)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(gradient)
        return loss

    weights = [tf.Variable(rows(16, 16)) for _ in range(12)]
    given = rows(512, 16), rows(512, 16)
    [whole] = live_bytes(gs.parallelize(deep, devices=1).plan(*given)).values()
    [parts] = live_bytes(gs.parallelize(deep, devices=1, micro_batches=8).plan(*given)).values()
    assert whole > 12 * 512 * 16 * 8  # the activations
    assert parts < whole / 4


def test_a_broken_order_is_seen():
    step, _ = training(layers.BatchNormalization)
    plan = gs.parallelize(step, devices=1, micro_batches=3).plan(*GIVEN)
    first, *others = plan.phases
    with pytest.raises(gs.errors.CheckError, match="is of no phase"):
        dataclasses.replace(plan, phases=tuple(others)).check()
    with pytest.raises(gs.errors.CheckError, match="not of an earlier phase"):
        dataclasses.replace(plan, phases=(*others, first)).check()
    with pytest.raises(gs.errors.CheckError, match="begins or ends with other operations"):
        dataclasses.replace(plan, phases=(dataclasses.replace(first, ends=()), *others)).check()
    graph = emit(plan)
    for role in ("order", "reduce"):
        with pytest.raises(gs.errors.CheckError, match="does not wait for"):
            check_emitted(plan, not_waiting_for(role, graph))


def not_waiting_for(role: str, graph: Any) -> Any:
    """Return a graph in which nothing waits for nodes of a role that it does not read."""
    nodes = []
    for node in graph.nodes:
        copy = type(node)()
        copy.CopyFrom(node)
        kept = [r for r in node.input if r[0] != "^" or graph.origins[r[1:]].role != role]
        if graph.origins[node.name].role == "order":
            kept = [r for r in node.input if graph.origins[r.lstrip("^")].role != role]
        del copy.input[:]
        copy.input.extend(kept)
        nodes.append(copy)
    return dataclasses.replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-reduce"])
def test_a_shard_waits_for_what_the_one_before_it_gives_to_sums_of_all(kind: str):
    """Also where these are cut into pieces for all devices, or added up on each of them."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.reduce_logsumexp(x @ tf.transpose(tf.tanh(x @ w)), 1))
        w.assign_sub(0.1 * x_to_w(tape.gradient(loss, x)))
        return loss

    def x_to_w(gradient):
        return tf.matmul(gradient, gradient, transpose_a=True)

    w = tf.Variable(0.1 * rows(64, 64))
    parallel = gs.parallelize(step, devices=2, micro_batches=3, variables="replicated")
    plan = parallel.plan(rows(60, 64))
    plan.check()
    assert kind in {move.kind for phase in plan.phases for move in phase.sums}, str(plan)
    graph = emit(plan)
    check_emitted(plan, graph)
    with pytest.raises(gs.errors.CheckError, match="does not wait for"):
        check_emitted(plan, not_waiting_for(kind, graph))


def test_what_shards_of_a_device_give_to_a_sum_is_added_up_once():
    """However many devices want the sum: each wants what the shards of a device have as one value."""
    weights = [tf.Variable(0.1 * rows(64, 64)) for _ in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ weights[0])
            h = tf.tanh((h - tf.reduce_mean(h, 0)) @ weights[1])
            loss = tf.reduce_mean(h**2)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    options = {"micro_batches": 3, "variables": "replicated", "tuning": {"exchange_bytes": 1 << 19}}
    plan = gs.parallelize(step, devices=4, **options).plan(rows(60, 64))
    found = [collective for collective in plan.collectives if collective.kind == "all-reduce"]
    assert len(found) > 2, str(plan)
    for collective in found:
        turns = [value.turn for value in collective.values if isinstance(value, Sum) and value.turn is not None]
        assert sorted(turns) == [1, 2, 4, 5, 7, 8, 10, 11]  # those behind the first of each device


def test_recomputation_waits_for_the_own_gradient():
    """`tf.recompute_grad` runs again when its shard's gradient is there, and nobody waits for all."""

    def make(again: Any = tf.recompute_grad):
        ws = [tf.Variable(rows(6, 6)) for _ in range(3)]

        def step(x):
            with tf.GradientTape() as tape:
                h = x
                for w in ws:
                    h = again(lambda h, w=w: tf.tanh(tf.tanh(h @ w) @ w))(h)
                loss = tf.reduce_mean(h**2)
            for w, gradient in zip(ws, tape.gradient(loss, ws), strict=True):
                w.assign_sub(gradient)
            return loss

        return step, ws

    plan = assert_law(make, [(rows(11, 6),)], devices=1, micro_batches=3, sharded=["TanhGrad"])
    assert len(plan.phases) == 1
    tanhs = [op for op in plan.sharded_ops if op.type == "Tanh"]
    assert len(tanhs) == 12  # six forward, six again
    steps = make()[0], make(lambda block: block)[0]
    plans = [gs.parallelize(step, devices=1, micro_batches=8).plan(rows(1024, 6)) for step in steps]
    [again], [kept] = [live_bytes(plan).values() for plan in plans]
    assert again < 0.9 * kept
