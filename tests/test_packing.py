"""Communication that is saved: packs, means that divide once, reductions before a reshape, and loops that stay put."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import make_node
from graphsplit.emission import Origin, emit
from graphsplit.emission.emitted_graph import Draft
from graphsplit.emission.shards.shard_copies import bring_loop_inputs
from graphsplit.planning.communication.bucketing import check_buckets
from graphsplit.planning.communication.collectives import bucketed, find_collectives
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.steps import Move
from graphsplit.program.program import Tensor
from graphsplit.runtime.executable import optimizer_config
from tests.helpers.law import assert_close, assert_law, rows
from tests.helpers.regression import regression_step

pytestmark = pytest.mark.sampled(quick=6)

# Packs


def dense_training(normalized: bool = False):
    """Return a training step of five dense layers, so of five biases, and its variables."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,))]
    for _ in range(4):
        layers.append(keras.layers.Dense(5, "tanh"))
        layers += [keras.layers.BatchNormalization()] if normalized else []
    return regression_step(keras.Sequential([*layers, keras.layers.Dense(2)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("batch", [7, 6])
def test_biases_and_their_gradients_travel_as_one(normalized: bool, batch: int):
    x, y = (tf.cast(rows(batch, width), tf.float32) for width in (6, 2))
    plan = assert_law(lambda: dense_training(normalized), [(x, y), (x, y)], sharded=["MatMul", "BiasAdd"])
    buckets = {bucket.kind: [plan.program.ops[m.tensor.op].name for m in bucket.moves] for bucket in plan.buckets}
    assert len(buckets["broadcast"]) >= 5
    assert sum("BiasAddGrad" in name for name in buckets["reduce"]) == 5
    assert "bucketed reduce: " in str(plan)


def transfers(plan: gs.inspect.Plan) -> int:
    nodes = emit(plan).nodes
    device_of = {node.name: node.device for node in nodes}
    read = {(r, node.device) for node in nodes for r in node.input if r[0] != "^"}
    return sum(device_of[r.split(":")[0]] != device for r, device in read)


def test_a_pack_is_one_transfer_to_and_from_each_device():
    x, y = (tf.cast(rows(6, width), tf.float32) for width in (6, 2))
    plan = gs.parallelize(dense_training()[0], devices=3).plan(x, y)
    apart = with_buckets(plan, [])
    assert [len(bucket.moves) for bucket in plan.buckets] == [5, 5]
    assert transfers(apart) - transfers(plan) == 2 * (10 - 2)  # two devices are not home


def test_what_waits_for_each_other_is_not_packed():
    """Each sum is needed on the shards for the next one."""
    w = tf.Variable(tf.ones(3, tf.float64))

    def f(x):
        for _ in range(6):
            x = tf.tanh(x - tf.reduce_sum(x, 0) * w)
        return x

    parallel = gs.parallelize(f, devices=3)
    x = rows(7, 3)
    assert_close(parallel(x), f(x))
    plan = parallel.plan(x)
    assert sum(move.kind == "reduce" for move in plan.moves) == 6
    assert plan.buckets == ()


def test_sums_read_at_home_are_packed_whatever_is_done_with_them_there():
    def f(x):
        sums = [tf.reduce_sum(x**k, 0) for k in range(2, 7)]
        return x, tf.linalg.norm(tf.stack(sums)), sums[0] / sums[1]

    parallel = gs.parallelize(f, devices=4)
    for batch in (9, 4, 3):
        x = rows(batch, 3)
        assert_close(parallel(x), f(x))
    [bucket] = parallel.plan(rows(9, 3)).buckets
    assert (bucket.kind, len(bucket.moves)) == ("reduce", 5)


def test_large_tensors_and_other_dtypes_travel_alone():
    def f(x):
        wide = [tf.reduce_sum(x * k, 0) for k in range(5)]
        narrow = [tf.reduce_sum(tf.cast(x[:, :2], tf.float32) * k, 0) for k in range(3)]
        return wide, narrow

    parallel = gs.parallelize(f, devices=2)
    x = rows(5, 4000)  # 32 kB a sum
    assert_close(parallel(x), f(x))
    assert parallel.plan(x).buckets == ()


def with_buckets(plan: gs.inspect.Plan, buckets: Sequence[Sequence[Move]]) -> gs.inspect.Plan:
    """Return a plan in which other moves are made as one."""
    made = bucketed(plan.program, find_collectives(plan.program, plan.places, plan.moves), buckets)
    return dataclasses.replace(plan, collectives=tuple(made))


def test_a_broken_pack_is_seen():
    w = tf.Variable(tf.ones(3, tf.float64))

    def f(x):
        first = tf.reduce_sum(x, 0)
        return tf.reduce_sum(tf.tanh(x - first * w), 0), first

    plan = gs.parallelize(f, devices=2).plan(rows(4, 3))
    sums = tuple(move for move in plan.moves if move.kind == "reduce")
    [product] = [op.index for op in plan.program.ops if op.type == "Mul"]
    sent = tuple(move for move in plan.moves if move.kind == "broadcast")
    later = tuple(Move(Tensor(op.index, 0), m.source, m.target) for m in sent for op in plan.program.ops[-1:])
    assert len(sums) == 2
    assert [move.tensor.op for move in sent] == [product]
    for moves in (sums, (*sent, *later)):
        with pytest.raises(gs.errors.CheckError, match="wait for each other"):
            check_buckets(plan.program, plan.steps, [Collective(moves, (), ())])
    with pytest.raises(gs.errors.CheckError, match="wait for each other"):
        with_buckets(plan, [sums]).check()


# Means


def kinds_on_shards(function, *arguments) -> Counter[str]:
    """Return how often each op type runs on the second shard."""
    return Counter(n.op for n in function.graph_def(*arguments).node if n.name.startswith("shard_1/"))


def test_a_mean_that_is_reduced_at_once_divides_once():
    parallel = gs.parallelize(lambda x: (x, tf.reduce_mean(x, 0)), devices=3)
    x = rows(7, 3)
    assert_close(parallel(x)[1], tf.reduce_mean(x, 0))
    assert kinds_on_shards(parallel, x)["Sum"] == 1
    assert not {"Mean", "Mul"} & set(kinds_on_shards(parallel, x))


def test_a_mean_of_half_precision_is_never_a_sum():
    x = tf.constant(np.full((300, 2), 600), tf.float16)  # whose sum is beyond float16
    parallel = gs.parallelize(lambda x: (x, tf.reduce_mean(x, 0)), devices=2)
    assert_close(parallel(x)[1], tf.reduce_mean(x, 0))
    assert kinds_on_shards(parallel, x)["Mean"] == 1


def test_a_partial_sum_is_reduced_before_it_is_reshaped():
    parallel = gs.parallelize(lambda x: (x, tf.reshape(tf.reduce_sum(x, 0), (3, 2))), devices=3)
    x = rows(7, 6)
    assert_close(parallel(x)[1], tf.reshape(tf.reduce_sum(x, 0), (3, 2)))
    assert not kinds_on_shards(parallel, x)["Reshape"]


def test_partial_sums_that_are_added_are_reduced_once():
    def f(x):
        return x, tf.reshape(tf.reduce_sum(x, 0), (3, 2)) + tf.reshape(tf.reduce_sum(x * x, 0), (3, 2))

    parallel = gs.parallelize(f, devices=3)
    x = rows(7, 6)
    assert_close(parallel(x)[1], f(x)[1])
    assert sum(move.kind == "reduce" for move in parallel.plan(x).moves) == 1


# Loops


def test_loops_read_copies_on_their_own_device():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(3), keras.layers.Dense(1)])
    parallel = gs.parallelize(model, devices=3)
    x = tf.cast(rows(7, 5, 4), tf.float32)
    assert_close(parallel(x), model(x))
    graph = parallel.graph_def(x)
    device_of = {node.name: node.device for node in graph.node}
    loops = [node for node in graph.node if "While" in node.op]
    assert len({node.device for node in loops}) == 3
    for node in loops:
        assert {device_of[r.lstrip("^").split(":")[0]] for r in node.input} == {node.device}


def test_only_what_comes_from_elsewhere_is_copied():
    own = make_node("own", "Const", [], "/CPU:1", dtype=tf.float32)
    other = make_node("other", "Const", [], "/CPU:0", dtype=tf.float32)
    loop = make_node("loop", "While", ["own", "other"], "/CPU:1")
    loop.attr["T"].list.type.extend([tf.float32.as_datatype_enum] * 2)
    draft = Draft(gs.parallelize(tf.identity, devices=1).plan(tf.zeros(2)).program, 2)
    for node, shard in ((own, 1), (other, 0), (loop, 1)):
        draft.add(node, Origin(None, shard, "op"))
    bring_loop_inputs(loop, draft, ())
    nodes = draft.nodes
    assert list(loop.input) == ["own", "loop/graphsplit_input_1"]
    assert (nodes[-1].op, nodes[-1].device, list(nodes[-1].input)) == ("Identity", "/CPU:1", ["other"])
    assert draft.origins["loop/graphsplit_input_1"] == Origin(None, 1, "part")


def test_how_much_of_the_optimizer_runs():
    library = tf.compat.v1.GraphDef().library
    config = tf.compat.v1.ConfigProto()
    config.ParseFromString(optimizer_config([make_node("a", "NoOp", [], "/CPU:0")], library) or b"")
    assert config.graph_options.rewrite_options.disable_meta_optimizer
    config.ParseFromString(optimizer_config([make_node("a", "While", [], "/CPU:0")], library) or b"")
    rewrites = config.graph_options.rewrite_options
    assert not rewrites.disable_meta_optimizer
    assert rewrites.constant_folding == rewrites.OFF
    assert rewrites.function_optimization != rewrites.OFF
    assert optimizer_config([make_node("a", "NoOp", [], "/device:GPU:0")], library) is None


# Any mixture


def random_step(seed: int):
    """Return a function of rows in which vectors become rows and rows vectors, and its variables, which it changes."""
    random = np.random.default_rng(seed)
    variables = [tf.Variable(tf.cast(rows(1, 3)[0], tf.float64) * (i + 1) / 9) for i in range(6)]
    choices = random.integers(0, 6, 32)
    picks = random.integers(0, 1 << 30, (32, 2))

    def step(x):
        wide, narrow = [x], [variable.read_value() for variable in variables]
        for choice, (i, j) in zip(choices, picks, strict=True):
            if choice == 0:
                narrow.append(tf.reduce_sum(wide[i % len(wide)], 0))
            elif choice == 1:
                narrow.append(tf.reduce_mean(tf.tanh(wide[i % len(wide)]), 0))
            elif choice == 2:
                narrow.append(tf.tanh(narrow[i % len(narrow)]) + narrow[j % len(narrow)])
            elif choice == 3:
                variables[j % 6].assign_add(0.1 * tf.tanh(narrow[i % len(narrow)]))
                narrow.append(variables[j % 6].read_value())
            else:
                wide.append(tf.tanh(wide[i % len(wide)] * narrow[j % len(narrow)] + narrow[i % len(narrow)]))
        return wide[-1], narrow[-4:], [tf.reduce_sum(rows_, 0) for rows_ in wide[-5:]]

    return step, variables


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(24))
def test_any_mixture_of_rows_and_vectors(seed: int):
    calls = [(rows(batch, 3),) for batch in (7, 7, 2)]
    assert_law(lambda: random_step(seed), calls, devices=3, sharded=["Tanh"], at_home=None)


def test_mixtures_have_packs_of_both_kinds():
    kinds: set[str] = set()
    for seed in range(24):
        kinds.update(bucket.kind for bucket in gs.parallelize(random_step(seed)[0], devices=3).plan(rows(7, 3)).buckets)
        if kinds == {"broadcast", "reduce"}:
            return
    raise AssertionError(kinds)
