"""What is merged before a graph is read, and what must not be."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import constant_node, make_node
from graphsplit.tracing.graph_to_program import drop_idle_waits, merge
from tests.helpers.law import assert_close, rows, sharded_types

pytestmark = pytest.mark.sampled(quick=4)


def graph() -> list:
    """Return `x`, two constants, two squares of `x` and their sum."""
    return [
        make_node("x", "Placeholder", [], dtype=tf.float32),
        constant_node("one", np.float32(1), tf.float32),
        constant_node("also_one", np.float32(1), tf.float32),
        make_node("square", "Mul", ["x", "one"], T=tf.float32),
        make_node("also_square", "Mul", ["x", "also_one"], T=tf.float32),
        make_node("sum", "AddV2", ["square", "also_square:0", "^also_square"], T=tf.float32),
    ]


def test_equal_nodes_become_one():
    nodes, references = merge(graph(), ["sum:0", "also_square:0", "^also_one"], ())
    assert [node.name for node in nodes] == ["x", "one", "square", "sum"]
    assert list(nodes[-1].input) == ["square", "square:0", "^square"]
    assert references == ["sum:0", "square:0", "^one"]


def test_nodes_that_others_name_stay():
    nodes, _ = merge(graph(), ["sum:0"], {"also_one"})
    assert {"one", "also_one", "also_square"} <= {node.name for node in nodes}


def test_what_differs_stays():
    other = graph()
    other[2].attr["value"].tensor.float_val[:] = [2.0]
    assert len(merge(other, [], ())[0]) == len(other)
    later = graph()
    later[4].input.append("^square")
    assert "also_square" in {node.name for node in merge(later, [], ())[0]}


def test_waits_that_order_nothing_are_dropped():
    nodes = [
        make_node("x", "Placeholder", [], dtype=tf.float32),
        make_node("idle", "Neg", ["x"], T=tf.float32),
        make_node("check", "EnsureShape", ["x"], T=tf.float32, shape=tf.compat.v1.AttrValue()),
        make_node("draw", "RandomStandardNormal", ["x"], T=tf.int32, dtype=tf.float32),
        make_node("behind", "Neg", ["draw"], T=tf.float32),
        make_node("waits", "Exp", ["x", "^idle", "^check", "^draw", "^behind"], T=tf.float32),
        make_node("happens", "Assert", ["x", "x", "^idle"]),
    ]
    drop_idle_waits(nodes)
    assert list(nodes[-2].input) == ["x", "^check", "^draw", "^behind"]
    assert list(nodes[-1].input) == ["x", "x", "^idle"]


def test_reads_between_writes_stay_apart():
    v = tf.Variable(1.0, dtype=tf.float64)

    def f(x):
        first = v * x + v * x
        v.assign_add(tf.reduce_sum(x))
        second = v * x + v * x
        v.assign(3.0)
        return first, second, v * x

    parallel, x = gs.parallelize(f, devices=3), rows(7)
    expected = f(x)
    v.assign(1.0)
    assert_close(parallel(x), expected)
    assert sum(op.type == "ReadVariableOp" for op in parallel.plan(x).program.ops) == 3
    assert {"Mul", "AddV2"} <= sharded_types(parallel, x)


def test_equal_stateful_ops_stay_apart():
    def f(x):
        return x + tf.random.uniform([7], seed=1) + tf.random.uniform([7], seed=1)

    program = gs.parallelize(f, devices=3).plan(tf.range(7.0)).program
    assert sum(op.type == "RngReadAndSkip" for op in program.ops) == 2


def test_an_optimizer_computes_what_is_common_once():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    parallel, x = gs.parallelize(step, devices=3), tf.ones([7, 3])
    parallel(x)
    nodes = parallel.graph_def(x).node
    assert sum(node.op == "Pow" for node in nodes) == 2  # not two for each of four variables
    constants = [
        (n.device, n.name.startswith("shard_"), n.attr["value"].SerializeToString()) for n in nodes if n.op == "Const"
    ]
    assert len(constants) == len(set(constants))
    assert "MatMul" in {op.type for op in parallel.plan(x).sharded_ops}
