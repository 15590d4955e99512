"""Input that workers read themselves, and recordings of what they do."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.hosts import host_name
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.workers.profiling import recorded
from tests.helpers.worker_scene import Network, all_well, case, rows, same, until

# The profilers of older servers write what they record on their disks, and do not send it.
SENDS_RECORDINGS = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 21)
HERE = "map(dataset_fn()), with the parentheses, lets this process read, and send each device its rows."


def shuffled(batch: int, count: int = 17):
    """Return a function that makes a pipeline: it shuffles and draws, by seeds, and its last batch is uneven."""

    def make():
        data = tf.data.Dataset.from_tensor_slices(rows(count)).shuffle(9, seed=3)
        drawn = tf.data.Dataset.random(seed=4).map(lambda n: tf.cast(n, tf.float64) / 2.0**63)
        return tf.data.Dataset.zip((data, drawn)).batch(batch)

    return make


def hosts_that_send(graphs) -> dict[tuple[str, str], list[str]]:
    """Return what TensorFlow's partitions send between hosts, by these."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in (node for graph in graphs for node in graph.node if node.op == "_Send"):
        ends = [host_name(node.attr[f"{end}_device"].s.decode()) for end in ("send", "recv")]
        if ends[0] != ends[1]:
            found.setdefault((ends[0], ends[1]), []).append(node.input[0])
    return found


@case("calls")
def batches_read_on_workers(workers, cluster) -> None:
    def f(x, y):
        return tf.cumsum(x, axis=1) * y[:, None], tf.reduce_mean(x)

    mixed = ["CPU:1", "worker:1/CPU:0"]  # of this process, which reads, too
    host, retraced = {"tuning": {"default_device": "CPU:0"}}, {"tuning": {"reduce_retracing": True}}
    ways = [(4, {}), (5, host), (20, {}), (5, {"devices": mixed}), (16, retraced)]
    for batch, options in ways:
        make = shuffled(batch)
        found, expected = list(gs.parallelize(f, **options).map(make)), [f(*own) for own in make()]
        same(tf.nest.flatten(found), tf.nest.flatten(expected), f"{batch} {options}")


@case("calls")
def training_on_what_workers_read(workers, cluster) -> None:
    def make():
        return tf.data.Dataset.from_tensor_slices(rows(23)).shuffle(9, seed=5).batch(5).repeat(2)

    expected, found = Network(), Network()
    losses = [expected.train(x) for x in make()]
    same(list(gs.parallelize(found.train).map(make, prefetch=2)), losses)
    same(found.values(), expected.values())


@case("calls")
def structures_read_on_workers(workers, cluster) -> None:
    def make():
        data = {"words": tf.constant(["a", "bcd", "", "ef", "g"]), "ids": tf.range(5)}
        return tf.data.Dataset.from_tensor_slices(data).batch(3)

    def f(batch):
        return {"lengths": tf.strings.length(batch["words"]), "ids": batch["ids"] * 2}

    found, expected = list(gs.parallelize(f).map(make)), [f(batch) for batch in make()]
    same(tf.nest.flatten(found), tf.nest.flatten(expected), exact=True)


@case("calls")
def no_rows_pass_between_hosts(workers, cluster) -> None:
    """What one worker gives to the other's home are results; if this process reads, each gets its rows from it."""
    sent = {}
    for name, batches in {"workers": shuffled(8), "client": shuffled(8)()}.items():
        f = gs.parallelize(lambda x, y: tf.tanh(x) * y[:, None])
        with partition_graphs() as graphs:
            list(f.map(batches))
        sent[name] = hosts_that_send(graphs)
    zero, one = (host_name(cluster.devices_of(task)[0]) for task in range(2))
    results = {(one, zero): ["shard_2/Identity_1", "shard_3/Identity_1"]}
    assert sent["workers"] == results, sent
    here = "/job:client/replica:0/task:0"
    assert set(sent["client"]) == {(here, zero), (here, one), (one, zero)}, sent
    for host, shards, last in ((zero, ("", ":1"), ["a0", "a1"]), (one, (":2", ":3"), [])):  # the last batch: one row
        own = [f"graphsplit/scatter_{k}/{name}{shard}" for k, name in enumerate("xy") for shard in shards]
        assert sent["client"][here, host] == own + last, sent
    assert sent["client"][one, zero] == results[one, zero], sent


@case("calls")
def pipelines_that_differ(workers, cluster) -> None:
    def double(x):
        return 2 * x

    def message(number: int) -> str:
        return (
            f"double.map: batch {number} of worker:1 is not that of worker:0. Each host runs the pipeline and takes "
            "its rows of each batch, so all must read the same data in the same order. Pass seed= to shuffle() and "
            "everything that draws random numbers (tf.random.set_seed is not enough: its seeds depend on what was made "
            f"before), do not use deterministic=False, and use the same files everywhere. Or {HERE}"
        )

    def unseeded():
        return tf.data.Dataset.range(100).shuffle(100).batch(50)

    made = []

    def longer():
        made.append(1)
        return tf.data.Dataset.range(4 * len(made)).batch(4)

    for make, results in ((unseeded, 0), (longer, 1)):
        found = []
        with pytest.raises(gs.errors.UnsupportedError) as raised:
            found.extend(gs.parallelize(double).map(make))  # (what was before is there)
        assert str(raised.value) == message(results), raised.value
    assert len(list(gs.parallelize(double).map(unseeded()))) == 2


@case("calls")
def pipelines_that_workers_cannot_run(workers, cluster) -> None:
    f = gs.parallelize(lambda x: 2 * x)
    with pytest.raises(gs.errors.ArgumentError) as raised:
        list(f.map(lambda: [rows(3)]))
    assert str(raised.value).startswith(
        "<lambda>.map(function): where devices are on workers, the function has to return a tf.data.Dataset, which "
        "they can run; it returned [<tf.Tensor"
    )
    assert str(raised.value).endswith(HERE)

    missing = tempfile.mktemp()  # (nothing is made)
    with pytest.raises(tf.errors.NotFoundError) as raised:
        list(f.map(lambda: tf.data.TextLineDataset(missing).map(tf.strings.to_number).batch(3)))
    words = str(raised.value)
    assert re.match(r"worker:[01] could not read batch 0 of <lambda>\.map: .*" + re.escape(missing), words, re.S), words
    assert words.endswith(f"(The pipeline runs there, and needs its files there. {HERE})"), words


@case("calls")
def what_a_pipeline_has_of_this_process(workers, cluster) -> None:
    """Python functions, tables and variables are asked here, by each host."""
    seen = []
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(6), tf.range(6) ** 2), -1)
    offset = tf.Variable(100)

    def double(number):
        seen.append(os.getpid())
        return np.int32(2 * number)

    def prepared(number):
        return tf.numpy_function(double, [number], tf.int32), table.lookup(number), number + offset

    found = list(
        gs.parallelize(lambda *x: x).map(lambda: tf.data.Dataset.range(6, output_type=tf.int32).map(prepared).batch(4))
    )
    expected = [[[2 * n for n in own], [n * n for n in own], [n + 100 for n in own]] for own in (range(4), (4, 5))]
    assert [[part.numpy().tolist() for part in batch] for batch in found] == expected, found
    assert seen == 12 * [os.getpid()]

    def generated():
        return tf.data.Dataset.from_generator(
            lambda: iter(range(6)), output_signature=tf.TensorSpec((), tf.int32)
        ).batch(4)

    found = [batch.numpy().tolist() for batch in gs.parallelize(lambda x: x * 2).map(generated)]
    assert found == [[0, 2, 4, 6], [8, 10]], found


@case("calls")
def a_function_of_a_dataset_in_this_process(workers, cluster) -> None:
    f = gs.parallelize(lambda x, y: x * y[:, None], devices=["CPU:0", "CPU:1"])
    make = shuffled(5)
    same(list(f.map(make)), [x * y[:, None] for x, y in make()])


@case("lost")
def what_workers_read_goes_on(workers, cluster) -> None:
    """One is killed, one comes back, one stands still: batches are those of one pipeline."""

    def make():
        return tf.data.Dataset.from_tensor_slices(rows(57)).shuffle(20, seed=5).batch(7)

    expected, network = Network(), Network()
    losses = [expected.train(x) for x in make()]
    step, found = gs.workers.resilient(gs.parallelize(network.train)), []
    cluster.deadline_s = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loss in step.map(make):
            found.append(loss.numpy())
            print(f"step {len(found)} on {len(step.devices)} devices", file=sys.stderr, flush=True)
            if len(found) == 2:
                workers.kill(1)
            elif len(found) == 4:
                assert len(step.devices) == 2
                workers.restart(1)
                until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
                time.sleep(1.1)  # it is asked for once a second
            elif len(found) == 6:
                assert len(step.devices) == 4
                workers.freeze(0)
    same(found, losses)
    same(network.values(), expected.values())


@case("lost")
def a_worker_that_reads_is_lost(workers, cluster) -> None:
    """Whether it reads ahead or computes: the steps that have happened are those of one device."""

    def make():
        return tf.data.Dataset.from_tensor_slices(rows(40)).batch(4)

    for how in (workers.kill, workers.freeze):
        expected, network, losses = Network(), Network(), []
        cluster.deadline_s = 3.0
        steps = gs.parallelize(network.train).map(make, prefetch=2)
        losses += [next(steps), next(steps)]
        how(1)
        with pytest.raises(gs.errors.WorkerLostError) as raised:
            losses.extend(steps)
        assert raised.value.tasks == (1,)
        assert raised.value.undone
        same(losses, [expected.train(x) for x in make().take(len(losses))])
        same(network.values(), expected.values())
        all_well(workers, cluster)


@case("lost")
def what_workers_read_is_read_again(workers, cluster) -> None:
    """State that was lost comes from a checkpoint, and the batches since then are used again."""

    def make():
        return tf.data.Dataset.from_tensor_slices(rows(40)).shuffle(20, seed=5).batch(7)

    expected, network = Network(), Network(device="/job:worker/task:0/device:CPU:0")
    losses = [expected.train(x) for x in make()]
    gs.set_variable_layout(network, "sharded")
    cluster.deadline_s, found = 3.0, []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(network), folder, 2)
        step = gs.workers.resilient(gs.parallelize(network.train), checkpoint=manager)
        step.save()
        for loss in step.map(make):
            found.append(loss.numpy())
            if len(found) == 3:
                workers.kill(1)
    assert len(step.devices) == 2
    same(found, losses)
    same(network.values(), expected.values())


@case("calls")
def timelines_have_the_workers(workers, cluster) -> None:
    w = tf.Variable(rows(6, 3))
    timeline = gs.inspect.timeline(gs.parallelize(lambda x: tf.tanh(x @ w)), rows(8))
    assert list(Path.cwd().glob("graphsplit_*")) == []  # what servers record they send, or nothing
    if not SENDS_RECORDINGS:
        lacks = [f"worker:{task} has sent no recording: its TensorFlow sends no recordings" for task in (0, 1)]
        assert timeline.note.startswith("; ".join(lacks)), timeline.note
        return
    assert {e.device for e in timeline.events if "MatMul" in e.type} == set(cluster.devices), timeline.events
    assert set(timeline.busy) >= set(cluster.devices)
    assert timeline.note == "", timeline.note
    assert 0 < timeline.duration_s < 60
    assert timeline.moved_bytes["/device:CPU:0", cluster.devices[0]] == (2 * 6 + 6 * 3) * 8  # rows, and the weight
    assert timeline.moved_bytes[cluster.devices[3], "/device:CPU:0"] == 2 * 3 * 8
    assert "  worker:1/CPU:1  busy " in str(timeline)
    trace = timeline.chrome_trace()["traceEvents"]
    assert {"worker:0/CPU:1", "worker:1/CPU:0"} <= {e["args"]["name"] for e in trace if e["ph"] == "M"}


@case("calls")
def timelines_say_what_they_lack(workers, cluster) -> None:
    """A worker whose profiler is in use has no times."""
    if not SENDS_RECORDINGS:
        return
    w = tf.Variable(rows(6, 3))
    with recorded({1: cluster.workers[1]}, 1, 0) as other:
        timeline = gs.inspect.timeline(gs.parallelize(lambda x: tf.tanh(x @ w)), rows(8))
    assert other[1].space, other[1].why_not
    assert {e.device for e in timeline.events if "MatMul" in e.type} == set(cluster.devices_of(0))
    assert timeline.note.startswith("worker:1 has sent no recording: "), timeline.note
    assert timeline.note.endswith("; no times of worker:1/CPU:0, worker:1/CPU:1"), timeline.note


@case("calls")
def a_step_inside_of_a_function(workers, cluster) -> None:
    network = Network()
    step = gs.parallelize(network.train)
    outer = tf.function(lambda x: step(x))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outer(rows(5))
        outer(rows(6))
        gs.parallelize(network.train, devices=["CPU:0", "CPU:1"])(rows(5))
    assert [str(each.message) for each in found if each.category is UserWarning] == [
        "train is called inside of a tf.function, and runs on workers 0, 1. TensorFlow runs the graph of that "
        "function by itself: while a worker hangs, the call does not end, and when a worker is lost, variables keep "
        "what the call has written so far. Call train outside of tf.function, or parallelize the whole function: then "
        "a step happens completely or not at all."
    ]
    assert np.array_equal(network.count, 3)
