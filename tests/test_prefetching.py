"""`ParallelFunction.map`: the results of one call per batch, with the next batch's rows on their devices beforehand."""

from __future__ import annotations

import threading
from typing import NamedTuple

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from tests.helpers.law import assert_close

pytestmark = pytest.mark.sampled(quick=7)

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def rows(count, width=4, seed=1):
    return tf.random.stateless_normal([count, width], [count, seed], dtype=tf.float64)


def network():
    w = tf.Variable(rows(4, 6))
    return lambda x: {"y": tf.tanh(x @ w), "mean": tf.reduce_mean(tf.square(x))}  # (which cannot cancel)


def pieces_of(parallel, *args):
    """Return the pieces of a batch, as they lie on their devices, and the compiled function that takes them."""
    tensors, tree = parallel._flatten(args, {})
    compiled = parallel._get(tree)
    return compiled.send(tensors), compiled


def places(pieces):
    return [(piece.backing_device.rsplit("device:", 1)[-1], tuple(piece.shape)) for piece in pieces]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_results_are_those_of_one_call_per_batch(batch, prefetch):
    plain = network()
    parallel = gs.parallelize(plain, devices=DEVICES)
    dataset = tf.data.Dataset.from_tensor_slices(rows(17)).batch(batch)
    found = list(parallel.map(dataset, prefetch=prefetch))
    assert len(found) == -(-17 // batch)
    for actual, x in zip(found, dataset, strict=True):
        assert_close(actual, plain(x))
    assert parallel.plan(rows(batch)).rows == tuple(n for n in ((batch + 2) // 3, (batch + 1) // 3, batch // 3) if n)


def test_pieces_lie_on_their_devices_and_nothing_is_cut_afterwards():
    parallel = gs.parallelize(network(), devices=DEVICES, tuning={"default_device": "CPU:0"})
    with partition_graphs() as feeding:
        pieces, compiled = pieces_of(parallel, rows(5))
    assert places(pieces) == [("CPU:1", (2, 4)), ("CPU:2", (2, 4)), ("CPU:3", (1, 4))]
    with partition_graphs() as running:
        found = compiled.run_sent([], pieces)
    assert_close(found, list(network()(rows(5)).values()))
    cuts = [node.device.rsplit("device:", 1)[-1] for graph in feeding for node in graph.node if node.op == "SplitV"]
    assert cuts == ["CPU:0"]
    nodes = [node for graph in running for node in graph.node]
    assert not [node.name for node in nodes if node.op in ("SplitV", "Split")]
    products = {(n.name.split("/")[0], n.device.rsplit("device:", 1)[-1]) for n in nodes if "MatMul" in n.op}
    assert products == {("shard_0", "CPU:1"), ("shard_1", "CPU:2"), ("shard_2", "CPU:3")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", ["home", "replicated", "sharded"])
@pytest.mark.parametrize("then", ["home", "replicated", "sharded"])
def test_layouts_may_change_between_batches_that_were_sent(first, then):
    w = tf.Variable(rows(4, 6))
    parallel = gs.parallelize(lambda x: x @ w, devices=3)
    batches = [rows(5 + i % 2, seed=i) for i in range(8)]
    expected = [batch @ w for batch in batches]
    gs.set_variable_layout(w, first, devices=3)
    found = []
    for result in parallel.map(batches, prefetch=2):
        found.append(result)
        if len(found) in (3, 6):
            gs.set_variable_layout(w, then if len(found) == 3 else first, devices=3)
    assert_close(found, expected)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_in_a_scope_of_keras_are_sent_to_the_trace_of_that_scope(prefetch):
    class Chooses(keras.layers.Layer):
        def call(self, a, b, training=None):
            return b * 10 if training else a

    class Maps(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.split = gs.parallelize(Chooses(), devices=DEVICES)

        def call(self, a, b):
            return list(self.split.map([(a, b)] * 3, prefetch=prefetch))

    layer, a, b = Maps(), tf.ones((4, 2)), 2 * tf.ones((4, 2))
    list(layer.split.map([(a, b)] * 3))  # a trace outside of all scopes, to which a thread may send
    for training in (True, False, True):
        assert_close(layer(a, b, training=training), [b * 10 if training else a] * 3)


def test_what_is_read_whole_is_sent_whole_to_those_who_read_it():
    def fn(x, table):
        return x @ table, tf.cumsum(x, axis=0), table

    parallel = gs.parallelize(fn, devices=DEVICES[:2], tuning={"default_device": "CPU:0"}, split={"table": None})
    pieces, _ = pieces_of(parallel, rows(5), rows(4, 3))
    assert sorted(places(pieces)) == [
        ("CPU:0", (4, 3)),  # returned
        ("CPU:0", (5, 4)),  # summed up
        ("CPU:1", (3, 4)),
        ("CPU:1", (4, 3)),
        ("CPU:2", (2, 4)),
        ("CPU:2", (4, 3)),
    ]
    batches = [(rows(5), rows(4, 3)), (rows(3), rows(4, 3))]
    for actual, arguments in zip(parallel.map(batches), batches, strict=True):
        assert_close(actual, fn(*arguments))


def test_pieces_go_to_the_devices_of_the_stage_that_reads_them():
    encode = gs.on_device(tf.tanh, ["CPU:3", "CPU:4"])
    parallel = gs.parallelize(lambda x: tf.nn.elu(encode(x)), devices=["CPU:0", "CPU:1"])
    pieces, _ = pieces_of(parallel, rows(3))
    assert places(pieces) == [("CPU:3", (2, 4)), ("CPU:4", (1, 4))]
    assert_close(next(parallel.map([rows(3)])), tf.nn.elu(tf.tanh(rows(3))))


def test_arguments_of_every_kind():
    def fn(batch, scale=2.0):
        words, unused, ids = batch["words"], batch["unused"], batch["ids"]
        del unused
        return tf.strings.length(words), ids * tf.cast(scale, ids.dtype), batch["ids"], batch["name"]

    batch = {"words": tf.constant(["a", "bcd", ""]), "unused": rows(3), "ids": tf.constant([1, 2, 3]), "name": "n"}
    parallel = gs.parallelize(fn, devices=DEVICES)
    found = list(parallel.map([batch, (batch, 3.0)]))
    assert_close(found[0], fn(batch))
    assert_close(found[1], fn(batch, 3.0))


def test_a_keras_model_over_numpy_batches():
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(2)])
    x = rows(10).numpy().astype("float32")
    found = tf.concat(list(gs.parallelize(net, devices=DEVICES).map(x[i : i + 4] for i in (0, 4, 8))), 0)
    assert_close(found, tf.constant(net.predict(x, verbose=0)))


def test_training_steps_follow_each_other():
    def make():
        w, count = tf.Variable(rows(4, 1)), tf.Variable(0)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            count.assign_add(1)
            return loss

        return step, [w, count]

    (step, variables), (plain, plain_variables) = make(), make()
    dataset = tf.data.Dataset.from_tensor_slices((rows(17), rows(17, 1))).batch(5)
    for actual, batch in zip(gs.parallelize(step, devices=DEVICES).map(dataset, prefetch=2), dataset, strict=True):
        assert_close(actual, plain(*batch))
    assert_close([v.value() for v in variables], [v.value() for v in plain_variables])


def test_the_next_batches_are_sent_while_one_is_computed():
    read, threads = [threading.Event() for _ in range(6)], set()

    def batches():
        for i in range(6):
            threads.add(threading.current_thread().name.rsplit("_", 1)[0])
            read[i].set()
            yield rows(5, seed=i)

    parallel = gs.parallelize(network(), devices=DEVICES)
    iterator = parallel.map(batches(), prefetch=2)
    assert not read[0].is_set()  # nothing happens before the first result is asked for
    next(iterator)
    assert read[2].wait(30)
    assert not read[3].wait(0.05)
    iterator.close()
    assert threads == {"graphsplit_prefetch"}


def test_an_error_of_the_dataset_comes_after_the_results_before_it():
    def batches():
        yield rows(5)
        yield rows(4)
        raise OSError("no more disk")

    iterator = gs.parallelize(network(), devices=DEVICES).map(batches(), prefetch=3)
    assert next(iterator)["y"].shape == [5, 6]
    assert next(iterator)["y"].shape == [4, 6]
    with pytest.raises(OSError, match="no more disk"):
        next(iterator)
    assert list(iterator) == []


def test_the_iterator_is_free_when_the_consumer_stops():
    numbers = iter(range(100))
    batches = (rows(3, seed=i) for i in numbers)
    for _ in gs.parallelize(network(), devices=DEVICES).map(batches, prefetch=2):
        break
    assert 1 <= next(numbers) <= 4


def test_traced_by_the_users_own_thread():
    threads = []

    def fn(x):
        threads.append(threading.current_thread())
        return x * 2

    found = list(gs.parallelize(fn, devices=DEVICES).map([rows(n) for n in (5, 5, 4, 5)]))
    assert_close(found, [rows(n) * 2 for n in (5, 5, 4, 5)])
    assert threads == [threading.main_thread()] * 2


def test_no_gradients_are_recorded_and_that_is_said():
    w = tf.Variable(rows(4, 1))
    parallel = gs.parallelize(lambda x: x @ w, devices=DEVICES)
    message = (
        "<lambda>.map is called under a gradient tape or accumulator. It sends batches ahead of the call and records "
        "no gradients: put the tape inside of the function, or call the function batch by batch."
    )
    with pytest.raises(gs.errors.UnsupportedError) as error, tf.GradientTape():
        list(parallel.map([rows(3)]))
    assert str(error.value) == message
    with pytest.raises(gs.errors.UnsupportedError), tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)):
        list(parallel.map([rows(3)]))
    with tf.GradientTape(watch_accessed_variables=False):
        assert len(list(parallel.map([rows(3)]))) == 1


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, None])
def test_prefetch_is_a_number_of_batches(prefetch):
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(tf.sin, devices=DEVICES).map([rows(3)], prefetch=prefetch)
    assert str(error.value) == f"prefetch takes a number of batches, 0 or more, got {prefetch!r}."


def test_in_a_graph_it_is_refused():
    parallel = gs.parallelize(tf.sin, devices=DEVICES)
    with pytest.raises(gs.errors.UnsupportedError, match="runs batch by batch, eagerly"):
        tf.function(lambda: parallel.map([rows(3)]))()


def test_a_named_tuple_is_one_argument_as_in_dataset_map():
    class Batch(NamedTuple):
        x: tf.Tensor
        y: tf.Tensor

    parallel = gs.parallelize(lambda batch: batch.x + batch.y, devices=2)
    (result,) = parallel.map([Batch(tf.range(5), tf.range(5))])
    assert result.numpy().tolist() == [0, 2, 4, 6, 8]
