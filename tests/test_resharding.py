"""Sharded weights are put together for the forward pass and again for the backward pass, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import live_bytes, traffic
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import ancestors_of, bytes_sent, deep_step, numbers

LAYERS, WIDTH, ROWS = 6, 80, 8
SIZE = LAYERS * WIDTH * WIDTH * 4


def deep(layout: str, devices: int, **options: Any) -> tuple[list[tf.Variable], Callable[[tf.Tensor], tf.Tensor]]:
    """Return weights that lie so, and a training step."""
    weights = [tf.Variable(0.1 * numbers(WIDTH, WIDTH, seed=k), name=f"weight_{k}") for k in range(LAYERS)]
    if layout != "home":
        gs.set_variable_layout(weights, layout, devices, **options)
    return weights, deep_step(weights)


X = numbers(ROWS, WIDTH, seed=9)


def check(plan: gs.inspect.Plan) -> None:
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))


def most_at_a_time(plan: gs.inspect.Plan, graphs: Sequence[Any]) -> int:
    """Return how many weights a device may have whole at a time, whatever is quick and whatever is slow."""
    ops, before, graph = plan.program.ops, ancestors_of(graphs), emit(plan)
    name_of = {(origin.op, origin.shard): name for name, origin in graph.origins.items() if origin.role == "op"}
    wholes = [op.index for op in plan.sharded_ops if op.divides and op.type == "ConcatV2"]
    readers = {whole: [op.index for op in ops if any(t.op == whole for t in op.inputs)] for whole in wholes}

    def ends_before(a: int, b: int, d: int) -> bool:
        return {name_of[i, d] for i in readers[a]} <= before[name_of[b, d]]

    def most(together: Sequence[int], others: Sequence[int], d: int) -> int:
        found = [len(together)]
        for k, one in enumerate(others):
            if not any(ends_before(a, one, d) or ends_before(one, a, d) for a in together):
                found.append(most([*together, one], others[k + 1 :], d))
        return max(found)

    return max(most([], wholes, d) for d in range(plan.mesh.shards))


@pytest.mark.long
def test_two_weights_at_a_time():
    home, step = deep("home", 3)
    gs.parallelize(step, devices=3)(X)
    found = {}
    for again in (True, False):
        weights, step = deep("sharded", 3, reshard_after_forward=again)
        parallel = gs.parallelize(step, devices=3)
        plan = parallel.plan(X)
        check(plan)
        with partition_graphs() as graphs:
            parallel(X)
        for a, b in zip(weights, home, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        found[again] = most_at_a_time(plan, graphs)
        sent = bytes_sent(graphs, plan)
        most = 1.05 * (3 if again else 2) * 2 / 3 * SIZE
        assert max(traffic(plan).busiest[1:]) <= most
        for device in plan.devices:
            assert sum(count for (a, _), count in sent.items() if a == device) <= most
            assert sum(count for (_, b), count in sent.items() if b == device) <= most
        alive = max(live_bytes(plan).values())
        assert alive < SIZE if again else alive >= SIZE
        assert "peak of activations: " in str(plan)
    assert found == {True: 2, False: LAYERS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["unknown rows", "micro-batches", "owned whole"])
def test_wherever_it_is_put_together_again(kind: str):
    plain, plain_step = deep("home", 3)
    weights, step = deep("sharded", 3)
    if kind == "owned whole":  # many weights, none of which is cut
        gs.set_variable_layout([weights, [tf.Variable(tf.zeros((400, 400))) for _ in range(2)]], "home")
        gs.set_variable_layout([weights, [tf.Variable(tf.zeros((400, 400))) for _ in range(2)]], "sharded", 3)
    function: Any = step
    if kind == "unknown rows":
        function = tf.function(step, input_signature=[tf.TensorSpec((None, WIDTH))])
    parallel = gs.parallelize(function, devices=3, micro_batches=2 if kind == "micro-batches" else 1)
    for rows in (8, 2):
        assert_close(parallel(X[:rows]), plain_step(X[:rows]))
    for a, b in zip(weights, plain, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    plan = parallel.plan(X)
    check(plan)
    assert gates(plan)


def gates(plan: gs.inspect.Plan) -> list[str]:
    """Return what puts weights together again, one after the other."""
    return [op.name for op in plan.ops_once if op.name.startswith("gate_")]


def alive(plan: gs.inspect.Plan) -> int:
    return max(live_bytes(plan).values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parts", [2, 3])
def test_micro_batches_of_few_rows_meet_before_each_weight(parts: int):
    plain, plain_step = deep("home", 3)
    weights, step = deep("sharded", 3)
    parallel = gs.parallelize(step, devices=3, micro_batches=parts)
    for rows in (8, 5, 2, 1):
        assert_close(parallel(X[:rows]), plain_step(X[:rows]))
    for a, b in zip(weights, plain, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    plan = parallel.plan(X)
    check(plan)
    assert plan.mesh.has_turns
    assert gates(plan)
    assert "MatMul" in {op.type for op in plan.sharded_ops}
    _, keeping = deep("sharded", 3, reshard_after_forward=False)
    assert alive(plan) < 0.6 * alive(gs.parallelize(keeping, devices=3, micro_batches=parts).plan(X))
    told = [line for line in str(plan).splitlines() if "note: sharded variables" in line]
    assert len(told) == 1
    assert "gathered again for each use, for which all micro-batches wait: " in told[0]


def test_micro_batches_of_many_rows_keep_weights():
    given = numbers(3001, WIDTH, seed=9)
    plain, plain_step = deep("home", 3)
    weights, step = deep("sharded", 3)
    parallel = gs.parallelize(step, devices=3, micro_batches=4)
    assert_close(parallel(given), plain_step(given))
    for a, b in zip(weights, plain, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    plan = parallel.plan(given)
    check(plan)
    assert not gates(plan)
    assert alive(plan) < alive(gs.parallelize(step, devices=3).plan(given))
    assert "gathered once, and kept for all micro-batches: " in str(plan)


def test_micro_batches_of_variables_that_are_to_be_kept():
    _, step = deep("sharded", 3, reshard_after_forward=False)
    plan = gs.parallelize(step, devices=3, micro_batches=2).plan(X)
    assert not gates(plan)
    assert "note: sharded variables" not in str(plan)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tape_outside(parts: int):
    weights, _ = deep("sharded", 3)
    values = [tf.constant(weight.numpy()) for weight in weights]

    def forward(x: tf.Tensor, weights: Sequence[Any]) -> tf.Tensor:
        for weight in weights:
            x = tf.nn.tanh(x @ weight)
        return x

    apply = gs.parallelize(lambda x: forward(x, weights), devices=3, micro_batches=parts)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(apply(X))
    found = tape.gradient(loss, weights)
    with tf.GradientTape() as tape:
        tape.watch(values)
        loss = tf.reduce_sum(forward(X, values))
    assert_close(found, tape.gradient(loss, values))
    plan = apply.gradient_plan(X)
    check(plan)
    assert gates(plan)
    assert str(plan).count("note: sharded variables") == parts - 1
