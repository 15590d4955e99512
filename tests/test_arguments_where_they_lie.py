"""Arguments are cut where they lie: each device gets its own rows, and what the host has passes through no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close, assert_law

DEVICES = ["CPU:1", "CPU:2", "CPU:3", "CPU:4"]  # CPU:0 is the host, and nothing else
HOST = "CPU:0"


def rows(count: int, width: int = 6, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def arguments_sent(graphs: Sequence[Any]) -> set[tuple[str, str, str]]:
    """Return what TensorFlow's own partitions send of arguments and pieces of these: from where, to where, which."""
    found = set()
    for graph in graphs:
        by_name = {node.name: node for node in graph.node}
        for node in [node for node in graph.node if node.op in ("_Send", "_HostSend")]:
            source, target = (node.attr[n].s.decode().rpartition("device:")[2] for n in ("send_device", "recv_device"))
            name = node.input[0].split(":")[0]
            while by_name[name].op in ("SplitV", "Switch"):  # pieces, of shards that may have no rows
                name = by_name[name].input[0].split(":")[0]
            if source != target and by_name[name].op == "_Arg":
                found.add((source, target, node.input[0]))
    return found


def sent_in(call: Callable[[], Any]) -> tuple[set[tuple[str, str, str]], Any]:
    with partition_graphs() as graphs:
        result = call()
    return arguments_sent(graphs), result


def ways(sent: set[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return sorted((source, target) for source, target, _ in sent)


def from_host(count: int = 1) -> list[tuple[str, str]]:
    return sorted([(HOST, device) for device in DEVICES] * count)


def rowwise(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(tf.tanh(x) * 2.0, -1)


@pytest.mark.parametrize("of", [np.asarray, tf.constant], ids=["an array", "a tensor of the host"])
def test_each_device_gets_its_own_rows(of: Callable[[Any], Any]):
    x, parallel = of(rows(13)), gs.parallelize(rowwise, devices=DEVICES)
    sent, result = sent_in(lambda: parallel(x))
    assert_close(result, rowwise(x))
    pieces = {("CPU:1", ""), ("CPU:2", ":1"), ("CPU:3", ":2"), ("CPU:4", ":3")}
    assert sent == {(HOST, device, f"graphsplit/scatter_0/x{number}") for device, number in pieces}
    plan = parallel.plan(x)
    moved, width = traffic(plan), 6 * 4
    assert moved.sent[f"/device:{HOST}"] == 13 * width
    assert [moved.received[device] for device in plan.devices[1:]] == [3 * width] * 3
    assert moved.busiest[0] == "/device:CPU:1"  # where the results are put together; the host's memory is no device
    text = str(plan)
    assert "argument x: float32[13, 6] shard(0), from CPU:0" in text
    assert f"scatter: 1 tensor, {13 * width} B, {13 * width} B sent" in text
    [held] = [line.split() for line in text.splitlines() if line.strip().startswith(HOST)]
    assert held[5:7] == [str(13 * width), "B"]  # arguments


def test_rows_of_any_number_are_counted_and_cut_on_the_host():
    signature = [tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.string)]

    @tf.function(input_signature=signature)
    def both(x: tf.Tensor, words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return rowwise(x), tf.strings.length(words)

    parallel = gs.parallelize(both, devices=DEVICES)
    words = np.array(["", "a", "bcd"] * 5)
    sent, result = sent_in(lambda: parallel(rows(13), words[:13]))
    assert_close(result, both(rows(13), words[:13]))
    assert ways(sent) == from_host(2)
    for count in (1, 3, 4):
        assert_close(parallel(rows(count), words[:count]), both(rows(count), words[:count]))
    with tf.device("CPU:3"):
        x = tf.constant(rows(13))
    sent, result = sent_in(lambda: parallel(x, words[:13]))
    assert_close(result, both(x, words[:13]))
    assert ways(sent) == sorted([*[("CPU:3", device) for device in DEVICES if device != "CPU:3"], *from_host()])


def test_what_lies_on_a_device_is_cut_there():
    traced = []

    def fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        traced.append(1)
        return rowwise(x) + rowwise(y)

    parallel, x, y = gs.parallelize(fn, devices=DEVICES), rows(13), rows(13, seed=2)
    with tf.device("CPU:2"):
        there = tf.constant(x)
    sent, result = sent_in(lambda: parallel(there, y))
    assert_close(result, rowwise(x) + rowwise(y))
    assert ways(sent) == sorted([("CPU:2", device) for device in DEVICES if device != "CPU:2"] + from_host())
    assert "argument x: float32[13, 6] shard(0), from CPU:2" in str(parallel.plan(there, y))
    assert "argument x: float32[13, 6] shard(0), from CPU:2" in str(parallel.plan())  # which ran most
    assert "argument x: float32[13, 6] shard(0), from CPU:0" in str(parallel.plan(tf.TensorSpec([13, 6]), y))
    sent, _ = sent_in(lambda: parallel(x, y))
    assert ways(sent) == from_host(2)
    with tf.device("CPU:4"):
        elsewhere = tf.constant(x)  # of a third place: right, by one of the two plans
    assert_close(parallel(elsewhere, y), rowwise(x) + rowwise(y))
    assert len(parallel._traces.all()) == 2
    assert len(traced) == 1
    with tf.GradientTape() as tape:
        tape.watch(there)
        total = tf.reduce_sum(parallel(there, y))
    with tf.GradientTape() as single:
        single.watch(there)
        expected = tf.reduce_sum(fn(there, y))
    assert_close(tape.gradient(total, there), single.gradient(expected, there))


def test_whole_arguments_go_straight_to_the_devices_that_read_them():
    def fn(x: tf.Tensor, table: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        return rate * tf.reduce_sum(tf.tanh(x @ table), -1)

    parallel = gs.parallelize(fn, devices=DEVICES, split={"table": None, "rate": None})
    x, table, rate = rows(13), rows(6, 5), np.float32(0.3)
    sent, result = sent_in(lambda: parallel(x, table, rate))
    assert_close(result, fn(x, table, rate))
    assert ways(sent) == from_host(3)


class Step:
    """A training step whose variable is on the first device."""

    def __init__(self) -> None:
        with tf.device("CPU:1"):
            self.w, self.v = tf.Variable(rows(6, 4)), tf.Variable(rows(4, 4))

    def __call__(self, x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(tf.tanh(x @ self.w) @ self.v) - y) ** 2)
        for variable, gradient in zip((self.w, self.v), tape.gradient(loss, [self.w, self.v]), strict=True):
            variable.assign_sub(rate * gradient)
        return loss


OPTIONS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "in micro-batches": {"micro_batches": 3},
    "in stages": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
    "compiled": {"jit_compile": True},
    "home elsewhere": {"tuning": {"default_device": "CPU:3"}},
    "of one device": {"devices": ["CPU:2"]},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_device_sends_arguments_to_another(name: str):
    def make() -> tuple[Any, Sequence[tf.Variable]]:
        step = Step()
        return step, [step.w, step.v]

    calls = [(rows(count), rows(count, 4), np.float32(0.1)) for count in (13, 5)]
    options = {"devices": DEVICES, **OPTIONS[name]}
    assert_law(make, calls, **options)
    step, _ = make()
    sent, _ = sent_in(lambda: gs.parallelize(step, **options)(*calls[0]))
    assert sent
    assert {source for source, *_ in sent} == {HOST}


def test_columns_of_a_mesh_get_their_rows_from_the_host():
    def make() -> tuple[Any, Sequence[tf.Variable]]:
        step = Step()
        gs.set_variable_layout([step.w], (None, "model"), DEVICES, mesh={"batch": 2, "model": 2})
        return step, [step.w, step.v]

    mesh = {"batch": 2, "model": 2}
    calls = [(rows(count), rows(count, 4), np.float32(0.1)) for count in (13, 5)]
    assert_law(make, calls, devices=DEVICES, mesh=mesh)
    step, _ = make()
    sent, _ = sent_in(lambda: gs.parallelize(step, devices=DEVICES, mesh=mesh)(*calls[0]))
    assert {source for source, *_ in sent} == {HOST}


def test_composite_arguments():
    weight = tf.constant(rows(6, 3))

    def fn(ragged: tf.RaggedTensor, sparse: tf.SparseTensor) -> tf.Tensor:
        return rowwise(ragged.to_tensor(shape=[5, 6])) + rowwise(tf.sparse.to_dense(sparse) @ weight)

    ragged = tf.RaggedTensor.from_row_lengths(rows(1, 12)[0], [3, 0, 6, 2, 1])
    sparse = tf.sparse.from_dense(np.where(rows(5) > 0, rows(5), 0))
    parallel = gs.parallelize(fn, devices=DEVICES)
    assert_close(parallel(ragged, sparse), fn(ragged, sparse))


def test_batches_that_are_sent_ahead():
    parallel = gs.parallelize(rowwise, devices=DEVICES)
    batches = tf.data.Dataset.from_tensor_slices(rows(17)).batch(5)
    sent, found = sent_in(lambda: list(parallel.map(batches)))
    for actual, x in zip(found, batches, strict=True):
        assert_close(actual, rowwise(x))
    assert {source for source, *_ in sent} == {HOST}
    assert {target for _, target, _ in sent} == set(DEVICES)
    with tf.device("CPU:2"):
        lying = [tf.constant(rows(5, seed=seed)) for seed in range(3)]
    other = gs.parallelize(rowwise, devices=DEVICES)
    sent, found = sent_in(lambda: list(other.map(lying)))
    for actual, x in zip(found, lying, strict=True):
        assert_close(actual, rowwise(x))
    assert {source for source, *_ in sent} == {"CPU:2"}


def test_calls_in_a_graph_are_the_hosts():
    parallel = gs.parallelize(rowwise, devices=DEVICES)
    outer = tf.function(lambda x: parallel(x) + 1.0)
    with tf.device("CPU:2"):
        x = tf.constant(rows(13))
    assert_close(outer(x), rowwise(x) + 1.0)
    [form] = parallel._traces.all()
    assert form.plan.input_devices == ("/device:CPU:0",)


def test_fit_and_predict():
    keras.utils.set_random_seed(1)
    template = keras.Sequential([keras.Input([6]), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    single = keras.models.clone_model(template)
    single.set_weights(template.get_weights())
    model = gs.multi_gpu_model(template, gpus=DEVICES)
    x, y = rows(29), rows(29, 1)
    for one in (single, model):
        one.compile(keras.optimizers.SGD(0.1), "mse")
    single.fit(x, y, batch_size=13, shuffle=False, verbose=0)
    sent, _ = sent_in(lambda: model.fit(x, y, batch_size=13, shuffle=False, verbose=0))
    assert {source for source, *_ in sent} == {HOST}
    sent, found = sent_in(lambda: model.predict(x, batch_size=13, verbose=0))
    assert {source for source, *_ in sent} == {HOST}
    np.testing.assert_allclose(found, single.predict(x, verbose=0), atol=1e-5)


def test_graphs_for_other_machines_cut_on_their_host():
    gpus = [f"GPU:{i}" for i in range(4)]
    graph = gs.parallelize(rowwise, devices=gpus).graph_def(tf.TensorSpec([None, 6], tf.float32))
    for type_name in ("SplitV", "Shape", "Placeholder"):
        assert {node.device for node in graph.node if node.op == type_name} == {"/device:CPU:0"}
    assert {node.device for node in graph.node if node.op == "Tanh"} == {f"/device:{gpu}" for gpu in gpus}
