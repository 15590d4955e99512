"""Buckets of small gradients: full ones are reduced while the backward pass goes on, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.tasks import OPERATION, SEND
from graphsplit.planning.waits import ordered_tasks_of
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import ancestors_of, numbers

LAYERS, WIDTH, DEVICES = 16, 70, 2
EACH = 4 * WIDTH * 4  # four biases
X = numbers(7, WIDTH, seed=9)


def deep(layout: str) -> tuple[list[tf.Variable], Callable[[tf.Tensor], tf.Tensor]]:
    """Return weights and biases that lie so, and a training step of layers that follow each other."""
    weights = [tf.Variable(0.1 * numbers(WIDTH, WIDTH, seed=k), name=f"weight_{k}") for k in range(LAYERS)]
    biases = [tf.Variable(tf.zeros(WIDTH), name=f"bias_{k}") for k in range(LAYERS)]
    if layout != "home":
        gs.set_variable_layout([*weights, *biases], layout, DEVICES)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight, bias in zip(weights, biases, strict=True):
                x = tf.nn.tanh(tf.nn.bias_add(x @ weight, bias))
            loss = tf.reduce_sum(x)
        for variable, gradient in zip([*weights, *biases], tape.gradient(loss, [*weights, *biases]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return [*weights, *biases], step


def sums_of(plan: gs.inspect.Plan) -> list[tuple[str, list[int]]]:
    """Return for each bucket of gradients the node that adds them up, and the operations that made them."""
    graph, found = emit(plan), []
    sums = [n.name for n in graph.nodes if n.op == "AddN" and graph.origins[n.name] == (None, None, "reduce")]
    for k, bucket in enumerate(plan.collectives):
        if bucket.is_bucket and bucket.kind == "reduce":
            [name] = [name for name in sums if name.startswith(f"{graph.scope}/reduce_{k}/")]
            found.append((name, [move.tensor.op for move in bucket.moves]))
    return found


def products(plan: gs.inspect.Plan, shard: int) -> set[str]:
    """Return the nodes that are a shard's products: for each layer one forward and two backward."""
    graph = emit(plan)
    found = [name for name, origin in graph.origins.items() if origin.role == "op" and origin.shard == shard]
    return {name for name in found if plan.program.ops[graph.origins[name].op or 0].type == "MatMul"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "home", "replicated"])
def test_a_full_bucket_is_reduced_while_the_backward_pass_goes_on(layout: str):
    variables, step = deep(layout)
    parallel = gs.parallelize(step, devices=DEVICES, tuning={"bucket_bytes": EACH})
    with partition_graphs() as graphs:
        result = parallel(X)
    plan, before = parallel.plan(X), ancestors_of(graphs)
    plan.check()
    check_emitted(plan, emit(plan))
    sums, all_products = sums_of(plan), products(plan, 1)
    assert [len(made) for _, made in sums] == [4] * (LAYERS // 4)  # of each owner, four by four
    assert len(all_products) == 3 * LAYERS - 1
    waits = [len(all_products & before[name]) for name, _ in sums]
    if layout == "home":  # for the forward pass, and so many layers of the backward pass
        assert waits == [LAYERS + 4 * (k + 1) - 1 for k in range(LAYERS // 4)]
    else:
        assert len([count for count in waits if count < LAYERS + LAYERS // 2]) == DEVICES  # one of each owner
    plain, plain_step = deep("home")
    assert_close(result, plain_step(X))
    for a, b in zip(variables, plain, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b))


def test_large_gradients_are_sent_while_the_backward_pass_goes_on():
    """On GPUs that need not be here: each gradient waits for the layers behind its own, and for no other."""
    _, step = deep("home")
    plan = gs.parallelize(step, devices=["GPU:0", "GPU:1"], variables="auto").plan(X)
    found, all_products = ordered_tasks_of(plan), {op.index for op in plan.program.ops if op.type == "MatMul"}
    before: dict[int, set[int]] = {}  # of each task, the products that it comes after, itself among them
    for n in found.positions_in_order:
        task = found.tasks[n]
        own = {task.op} & all_products if task.kind == OPERATION else set()
        before[n] = own.union(*[before[source] for source in found.sources[n]])
    sums = [
        n for n, task in enumerate(found.tasks) if task.kind == SEND and task.sent_for in ("reduce", "reduce-scatter")
    ]
    waits = sorted(
        {len(before[n]) for n in sums if plan.program.ops[found.tasks[n].op or 0].type in ("MatMul", "SplitV")}
    )
    assert waits == [LAYERS + k + 1 for k in range(LAYERS)], "forward, of k inputs the gradient, and its own"


def test_the_size_of_a_bucket():
    _, step = deep("home")
    found = {}
    for size in (0, EACH - 1, 2 * EACH, 1 << 20):
        plan = gs.parallelize(step, devices=DEVICES, tuning={"bucket_bytes": size}).plan(X)
        found[size] = [len(made) for _, made in sums_of(plan)]
    assert found == {0: [], EACH - 1: [], 2 * EACH: [8, 8], 1 << 20: [16]}


@pytest.mark.parametrize("size", [-1, True, 1.5, "1 MB"])
def test_what_is_no_size(size: Any):
    with pytest.raises(gs.errors.ArgumentError) as found:
        gs.parallelize(lambda x: x, devices=2, tuning={"bucket_bytes": size})
    assert str(found.value) == (
        f"bucket_bytes must be a number of bytes, at least 0, got {size!r}. Small gradients are sent together in "
        "buckets of at most that size; 0 sends each alone, None chooses."
    )


@pytest.mark.parametrize("first", ["shards", "another device"])
def test_what_another_device_reads_too_is_in_no_bucket(first: str):
    devices = [f"CPU:{d}" for d in range(3)]
    with tf.device(devices[0]):
        biases = [tf.Variable(numbers(4, seed=k), name=f"bias_{k}") for k in range(6)]
    with tf.device(devices[1]):
        kept = [tf.Variable(tf.zeros(4), name=f"kept_{k}") for k in range(6)]

    def step(x: tf.Tensor) -> tf.Tensor:
        read = [tf.convert_to_tensor(bias) for bias in biases]
        if first == "shards":
            for bias in read:
                x = tf.tanh(x + bias)
        for bias, variable in zip(read[:5], kept, strict=False):
            variable.assign_add(bias)
        return x if first == "shards" else tf.add_n([tf.tanh(x + bias) for bias in read])

    x = tf.constant(numbers(5, 4))
    expected = step(x)
    values = [tf.identity(variable) for variable in kept]
    for variable in kept:
        variable.assign(tf.zeros(4))
    parallel = gs.parallelize(step, devices=devices)
    plan = parallel.plan(x)
    plan.check()
    check_emitted(plan, emit(plan))
    assert sorted(len(c.moves) for c in plan.collectives if not c.is_bucket) == [1, 1, 1, *[2] * 5]
    assert_close(parallel(x), expected)
    assert_close([tf.identity(variable) for variable in kept], values)
