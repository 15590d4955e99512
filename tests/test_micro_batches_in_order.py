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
from graphsplit.planning.device_bytes import live_bytes
from tests.helpers.law import assert_law, rows
from tests.helpers.micro_batches import GIVEN, training


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

    def without(role: str) -> Any:
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

    for role in ("order", "reduce"):
        with pytest.raises(gs.errors.CheckError, match="does not wait for"):
            check_emitted(plan, without(role))


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
