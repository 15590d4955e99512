"""Stages inside of stages, loops, compiled functions and methods keep their devices."""

from __future__ import annotations

import itertools

import keras
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission.emitter import emit
from tests.helpers.law import assert_close, assert_law
from tests.helpers.stages_on_devices import (
    LEAKY,
    OUTER,
    STAGE,
    TANH,
    devices_by_type,
    expected,
    network,
    on,
    rows,
    training,
)


def test_backward_of_what_a_stage_calls_is_on_its_devices():
    @tf.custom_gradient
    def doubled(x):
        return 2 * x, lambda dy: tf.nn.selu(dy)

    called = tf.function(lambda x: tf.nn.elu(x))

    def encoder(x):
        again = tf.recompute_grad(lambda h: tf.tanh(h) ** 2)
        return doubled(again(called(x))) + tf.cond(tf.shape(x)[1] > 2, lambda: tf.nn.softsign(x), lambda: x)

    def with_gradient(encode):
        def both(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.nn.leaky_relu(encode(x)))
            return loss, tape.gradient(loss, x)

        return both

    parallel = gs.parallelize(with_gradient(gs.on_device(encoder, STAGE)), devices=OUTER)
    expectation = with_gradient(encoder)(rows())
    with partition_graphs() as graphs:
        found = parallel(rows())
    assert_close(found, expectation)
    kinds = (*TANH, "Elu", "EluGrad", "Selu", "Softsign", "SoftsignGrad")
    assert devices_by_type(graphs, kinds) == expected(kinds, STAGE)
    assert devices_by_type(graphs, LEAKY) == expected(LEAKY, OUTER)


def test_random_masks_of_a_stage_are_those_of_one_device():
    def make(place):
        keras.utils.set_random_seed(4)
        dropout = keras.layers.Dropout(0.5, seed=3)
        encode = place(lambda x: tf.tanh(dropout(x, training=True)))
        return lambda x: tf.nn.leaky_relu(encode(x)), dropout.variables

    made = itertools.cycle([make(lambda fn: fn), make(on(STAGE))])
    assert_law(lambda: next(made), [(rows(7, 6),), (rows(5, 6),)], devices=OUTER, sharded=["Tanh"], at_home=None)


def test_a_stage_inside_a_stage_has_its_own_devices():
    inner = gs.on_device(tf.tanh, "CPU:4")
    outer = gs.on_device(lambda x: tf.nn.leaky_relu(inner(x)), STAGE)
    parallel = gs.parallelize(lambda x: tf.nn.elu(outer(x)), devices=OUTER)
    expectation = tf.nn.elu(tf.nn.leaky_relu(tf.tanh(rows())))
    with partition_graphs() as graphs:
        found = parallel(rows())
    assert_close(found, expectation)
    found = devices_by_type(graphs, ["Tanh", "LeakyRelu", "Elu"])
    assert found == expected(["Tanh"], ["CPU:4"] * 2) | expected(["LeakyRelu"], STAGE) | expected(["Elu"], OUTER)


def test_a_stage_in_a_loop_around_whole_steps():
    def make(place):
        step, variables = training(place)

        def steps(x):
            return tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, step(x)), [0, tf.zeros([], x.dtype)])[1]

        return steps, variables

    made = itertools.cycle([make(lambda fn: fn), make(on(STAGE))])
    assert_law(lambda: next(made), [(rows(5),), (rows(3),)], devices=OUTER)
    steps, _ = make(on(STAGE))
    with partition_graphs() as graphs:
        gs.parallelize(steps, devices=OUTER)(rows(5))
    assert devices_by_type(graphs, TANH) == expected(TANH, STAGE)
    assert devices_by_type(graphs, LEAKY) == expected(LEAKY, OUTER)


def test_a_loop_and_a_compiled_function_inside_a_stage():
    compiled = tf.function(lambda x: tf.nn.elu(x) * 2, jit_compile=True)

    def encoder(x):
        def turn(i, y):
            return i + 1, tf.tanh(y) - tf.reduce_mean(y, axis=0)  # rows meet in every iteration

        return compiled(tf.while_loop(lambda i, _: i < 3, turn, [0, x])[1])

    encode = gs.on_device(encoder, STAGE)
    parallel = gs.parallelize(lambda x: tf.nn.leaky_relu(encode(x)), devices=OUTER)
    expectation = tf.nn.leaky_relu(encoder(rows()))
    with partition_graphs() as graphs:
        found = parallel(rows())
    assert_close(found, expectation)
    assert devices_by_type(graphs, ["Tanh"]) == expected(["Tanh"], STAGE)
    emitted = {node.name: node for node in parallel.graph_def(rows()).node}
    whole = {n.op: n.device for n in emitted.values() if n.op in ("StatelessWhile", "While", "LeakyRelu")}
    assert whole == {"StatelessWhile": "/device:CPU:2", "LeakyRelu": "/device:CPU:0"}
    calls = [node.device for node in emitted.values() if "Call" in node.op]
    assert calls == ["/device:CPU:2"]


def test_a_stage_in_a_loop_of_every_shard_stays_there_and_the_plan_says_so():
    encode = gs.on_device(tf.tanh, STAGE)

    def repeated(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, encode(y) + x), [0, x])[1]

    def plain(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, tf.tanh(y) + x), [0, x])[1]

    parallel = gs.parallelize(repeated, devices=OUTER)
    assert_close(parallel(rows()), plain(rows()))
    notes = str(parallel.plan(rows())).split("note: ")[1:]
    assert len(notes) == 1
    assert notes[0].startswith("tanh on CPU:2, CPU:3 is called inside StatelessWhile 'while'")


def test_a_batch_of_unknown_size():
    made = [training(), training(on(STAGE))]
    (plain, variables), (step, own_variables) = made
    parallel = gs.parallelize(lambda x: step(x), devices=OUTER)
    for_any_size = tf.function(parallel, input_signature=[tf.TensorSpec([None, 6], tf.float64)])
    for count in (5, 1, 8):
        assert_close(for_any_size(rows(count)), plain(rows(count)))
    assert_close([v.value() for v in own_variables], [v.value() for v in variables])
    (compiled,) = (compiled for found in parallel._traces.planned.values() for compiled in found)
    graph = emit(compiled.plan).graph_def()
    assert devices_by_type([graph], TANH) == expected(TANH, STAGE)
    assert devices_by_type([graph], LEAKY) == expected(LEAKY, OUTER)


def test_shards_without_rows_take_no_device_of_a_stage():
    parallel = gs.parallelize(network(on(["CPU:2", "CPU:3", "CPU:4"]))[0], devices=3, shares=[1, 0, 1])
    expectation = network()[0](rows(5))
    with partition_graphs() as graphs:
        found = parallel(rows(5))
    assert_close(found, expectation)
    assert devices_by_type(graphs, ["Tanh"]) == expected(["Tanh"], ["CPU:2", "CPU:4"])


def test_a_parallelized_stage_and_a_method_keep_their_devices():
    class Encoder:
        def __init__(self, factor):
            self.factor = factor

        def encode(self, x):
            return tf.tanh(x) * self.factor

    Encoder.placed = gs.on_device(Encoder.encode, "CPU:3")
    Encoder.placed.__set_name__(Encoder, "placed")
    encoder = Encoder(2.0)
    for fn in (encoder.placed, lambda x: encoder.placed(x)):
        parallel = gs.parallelize(fn, devices=OUTER)
        expectation = tf.tanh(rows()) * 2
        with partition_graphs() as graphs:
            found = parallel(rows())
        assert_close(found, expectation)
        assert devices_by_type(graphs, ["Tanh"]) == expected(["Tanh"], ["CPU:3"] * 2)
