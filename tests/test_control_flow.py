"""Loops and branches: on the shards where their bodies keep rows apart, at home otherwise, equal either way."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.tasks import tasks_of
from tests.helpers.law import assert_close, assert_law

pytestmark = pytest.mark.sampled(quick=4)

DOUBLE = tf.float64


def rows(*shape: int, seed: int = 7) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [shape[0], seed], dtype=DOUBLE)


def check(fn: Any, *args: Any, sharded: set[str], at_home: int = 0, devices: int = 3) -> gs.inspect.Plan:
    parallel = gs.parallelize(fn, devices=devices)
    assert_close(parallel(*args), tf.function(fn)(*args))
    plan = parallel.plan(*args)
    plan.check()
    kinds = {op.type for op in plan.sharded_ops}
    assert sharded <= kinds, f"{sharded - kinds}\n{plan}"
    assert len(plan.unsharded_ops) == at_home, str(plan)
    return plan


def with_gradient(fn: Any) -> Any:
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    return both


@pytest.mark.parametrize("count", [1, 2, 7])
def test_while_loop(count: int):
    def powers(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, tf.tanh(y) * x), [0, x])[1]

    check(powers, rows(count, 3), sharded={"StatelessWhile"})
    check(with_gradient(powers), rows(count, 3), sharded={"StatelessWhile"})


def test_autograph_loops_and_branches():
    def steps(x, n):
        for _ in tf.range(n):
            x = tf.sin(x) if n > 2 else tf.cos(x)
            if tf.equal(n, 3):
                x = x * 2
        while tf.less(n, 5):
            x, n = x + 1, n + 1
        return x

    for n in (2, 3):
        check(lambda x, k: steps(x, k), rows(7, 3), tf.constant(n), sharded={"StatelessWhile"})


def test_a_condition_on_all_rows_keeps_one_loop():
    def until_small(x):
        return tf.while_loop(lambda y: tf.reduce_max(y) > 0.1, lambda y: (y * 0.5,), [tf.abs(x)])[0]

    plan = check(until_small, rows(7, 3), sharded={"Abs"})
    (loop,) = [step for step in plan.steps if step.bodies]
    assert {"Max", "Mul"} <= {op.type for body in loop.bodies.values() for op in body.sharded_ops}


def test_rows_that_couple_inside_are_exchanged_in_every_turn():
    def centre(x):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y - tf.reduce_mean(y, 0)), [0, x])[1]

    plan = check(centre, rows(7, 3), sharded=set())
    (loop,) = [step for step in plan.steps if step.bodies]
    assert "Mean" in {op.type for body in loop.bodies.values() for op in body.sharded_ops}


@pytest.mark.parametrize("parallel_rows", [True, False])
def test_map_fn(parallel_rows: bool):
    def mapped(x):
        if parallel_rows:  # over time, the batch on axis 1
            return tf.map_fn(lambda v: tf.cumsum(v, 1) * 2, x)
        return tf.map_fn(lambda v: v * tf.reduce_sum(v), x)

    if parallel_rows:
        parallel = gs.parallelize(mapped, devices=3, split=1)
        x = rows(4, 7, 3)
        assert_close(parallel(x), mapped(x))
        assert "StatelessWhile" in {op.type for op in parallel.plan(x).sharded_ops}
    else:
        check(mapped, rows(7, 3), sharded={"StatelessWhile", "TensorListStack"})


def test_scan_over_time():
    def scanned(x):
        steps = tf.transpose(x, [1, 0, 2])
        return tf.scan(lambda carry, v: 0.5 * carry + tf.tanh(v), steps, tf.zeros_like(x[:, 0]))

    check(scanned, rows(7, 4, 3), sharded={"StatelessWhile"})
    check(with_gradient(scanned), rows(7, 4, 3), sharded={"StatelessWhile"})


def test_cond_and_switch_case_with_variables():
    v = tf.Variable(3.0, dtype=DOUBLE)

    def branches(x, flag, index):
        y = tf.cond(flag, lambda: x * v, lambda: x + 1.0)
        return tf.switch_case(index, [lambda: y, lambda: -y, lambda: tf.zeros_like(y)])

    for flag in (True, False):
        for index in range(3):
            arguments = rows(7, 3), tf.constant(flag), tf.constant(index)
            check(branches, *arguments, sharded={"StatelessIf", "StatelessCase"})


def test_a_branch_on_the_batch_and_an_assignment_in_a_branch_stay_at_home():
    v = tf.Variable(0.0, dtype=DOUBLE)

    def branches(x):
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x)
        tf.cond(tf.reduce_sum(y) > 0, lambda: v.assign(1.0), lambda: v.assign(2.0))
        return tf.square(x)

    parallel = gs.parallelize(branches, devices=3)
    x = rows(7)
    assert_close(parallel(x), branches(x))
    after = float(v)
    branches(x)
    assert float(v) == after
    assert "Square" in {op.type for op in parallel.plan(x).sharded_ops}


def test_nested_loops_with_a_variable():
    w = tf.Variable(tf.eye(3, dtype=DOUBLE) * 0.5)

    def nested(x):
        def outer(i, y):
            inner = tf.while_loop(lambda j, z: j < 2, lambda j, z: (j + 1, tf.tanh(z @ w)), [0, y])[1]
            return i + 1, inner + x

        return tf.while_loop(lambda i, y: i < 3, outer, [0, x])[1]

    plan = check(nested, rows(7, 3), sharded={"StatelessWhile"})
    reads = [op for op in plan.program.ops if op.type == "ReadVariableOp"]
    assert len(reads) == 1  # outside of both loops


def test_several_steps_in_one_function():
    def make():
        w = tf.Variable(tf.ones((3, 2), DOUBLE))

        def steps(x, y):
            loss = tf.constant(0.0, DOUBLE)
            for _ in tf.range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((tf.tanh(x @ w) - y) ** 2)
                w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return steps, [w]

    plan = assert_law(make, [(rows(7, 3), rows(7, 2))] * 2)
    (loop,) = [step for step in plan.steps if step.bodies]
    kinds = [op.type for body in loop.bodies.values() for op in body.sharded_ops]
    assert kinds.count("MatMul") == 2  # forward and backward, in each turn


RECURRENT = {
    "lstm": lambda **k: [keras.layers.LSTM(4, **k)],
    "gru": lambda **k: [keras.layers.GRU(4, **k)],
    "gru, reset before": lambda **k: [keras.layers.GRU(4, reset_after=False, **k)],
    "simple": lambda **k: [keras.layers.SimpleRNN(4, **k)],
    "bidirectional": lambda **k: [keras.layers.Bidirectional(keras.layers.LSTM(4, **k))],
    "stacked": lambda **k: [keras.layers.LSTM(4, return_sequences=True, **k), keras.layers.LSTM(3, **k)],
    "masked": lambda **k: [keras.layers.Masking(0.0, **k), keras.layers.LSTM(4, **k)],
    "unrolled": lambda **k: [keras.layers.LSTM(4, unroll=True, **k)],
}


ALIKE = ("gru, reset before", "simple", "unrolled")  # the others have what these have


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.long) if k in ALIKE else k for k in RECURRENT])
def test_recurrent_networks_train_on_the_shards(kind: str):
    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((5, 3)), *RECURRENT[kind](dtype="float64"), keras.layers.Dense(1, dtype="float64")]
        net = keras.Sequential(layers)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, net.trainable_variables)
            for v, g in zip(net.trainable_variables, gradients, strict=True):
                v.assign_sub(0.1 * g)
            return loss

        return step, net.variables

    x = rows(7, 5, 3)
    x = tf.where(tf.range(5)[None, :, None] < tf.range(1, 8)[:, None, None], x, 0.0) if kind == "masked" else x
    loop = [] if kind == "unrolled" else ["StatelessWhile"]
    assert_law(make, [(x, rows(7, 1))] * 2, sharded=["MatMul", *loop], tolerance=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("inside", ["the step", "a function of its own"])
def test_one_lstm_encodes_two_inputs(inside: str):
    def make():
        keras.utils.set_random_seed(1)
        shared = keras.layers.LSTM(4, dtype="float64")
        shared.build((None, 5, 3))
        encode = shared if inside == "the step" else tf.function(lambda x: shared(x))

        def step(a, b):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((encode(a) - encode(b)) ** 2)
            gradients = tape.gradient(loss, shared.trainable_variables)
            for v, g in zip(shared.trainable_variables, gradients, strict=True):
                v.assign_sub(0.1 * g)
            return loss

        return step, shared.variables

    assert_law(make, [(rows(7, 5, 3), rows(7, 5, 3, seed=8))] * 2, sharded=["StatelessWhile"], tolerance=1e-11)


def test_gradient_from_outside_through_a_loop():
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4, dtype="float64")])
    sharded = gs.parallelize(net, devices=3)

    def gradients(call):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(rows(7, 5, 3)) ** 2)
        return tape.gradient(loss, net.trainable_variables)

    assert_close(gradients(sharded), gradients(net))
    plan = sharded.gradient_plan(rows(7, 5, 3))
    assert [op.type for op in plan.sharded_ops].count("StatelessWhile") == 2
    assert not plan.unsharded_ops


def test_loops_run_where_they_were_asked_to():
    from graphsplit.core.tensorflow_internals import partition_graphs

    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4, dtype="float64")])
    sharded = gs.parallelize(net, devices=3)
    with partition_graphs() as graphs:
        sharded(rows(7, 5, 3))
    places = {}
    for graph in graphs:
        for node in graph.node:
            if "MatMul" in node.op and "while" in node.name:
                places.setdefault(node.name.split("shard_")[1][0], set()).add(node.device.rsplit(":", 2)[-2:][-1])
    assert places == {"0": {"0"}, "1": {"1"}, "2": {"2"}}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_what_a_turn_reads_whole_and_in_pieces(count: int):
    """Each shard makes both for itself."""

    def filled(x):
        def turn(i, y, level):
            filling = tf.fill(y.shape, level)
            return i + 1, y * filling, level * 0.5 + tf.reduce_max(filling)

        return tf.while_loop(lambda i, *_: i < 3, turn, [0, x, tf.constant(1.5, DOUBLE)])

    plan = check(filled, rows(count, 3), sharded={"StatelessWhile"})
    [body] = [plan for name, plan in bodies_on_shards(plan).items() if "body" in name]
    assert {op.type for op, step in zip(body.program.ops, body.steps, strict=True) if step.once} == {"Fill"}
    check_emitted(plan, emit(plan))


def bodies_on_shards(plan: gs.inspect.Plan) -> dict[str, gs.inspect.Plan]:
    return {name: body for step in plan.steps if step.shards for name, body in step.shards.bodies.items()}


def test_the_plan_of_a_body_that_each_shard_runs_by_itself():
    """It lists what each shard runs, where that runs the loop, and sends nothing."""

    def powers(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, tf.tanh(y) * x), [0, x])[1]

    plan = check(powers, rows(7, 3), sharded={"StatelessWhile"})
    [body] = [plan for name, plan in bodies_on_shards(plan).items() if "body" in name]
    tasks = tasks_of(body).tasks
    assert {(task.kind, task.device) for task in tasks} == {("op", "")}
    tanh = next(op.index for op in body.program.ops if op.type == "Tanh")
    assert [(task.shard, task.bytes) for task in tasks if task.op == tanh] == [(0, (72,)), (1, (48,)), (2, (48,))]
