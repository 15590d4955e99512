"""Predictions for hundreds of devices: some of them stand for all, and agree with all of them where both can be had."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api import many_devices
from graphsplit.api.many_devices import ManyDevices, counts_of
from graphsplit.api.predicted_calls import predicted_call
from graphsplit.api.predictions import predict_call
from graphsplit.costs.machine import Device, Host, Link, Machine
from graphsplit.prediction.graph_tasks import GraphTasks, Placed
from graphsplit.prediction.growth import Counts, grown
from graphsplit.prediction.replay import Resource, Task, replay
from tests.helpers.messages import raises

FIRST = tf.Variable(tf.ones([64, 96]) / 64, name="first")
SECOND = tf.Variable(tf.ones([96, 64]) / 96, name="second")


def machine_of(link: float = 1e9, hosts: int = 1, devices: int = 64, launch_s: float = 1e-6) -> Machine:
    device = Device("unit", "GPU", {"float32": 1e12}, {"float32": 1e11}, 1e11, 1e12, launch_s=launch_s)
    network = Link("net", link / 4, 3e-5)
    one = Machine("unit box", device, devices, Link("cable", link, 1e-5), network=network, host=Host(threads=8))
    return one.cluster(hosts) if hosts > 1 else one


def forward(x):
    return tf.nn.tanh(tf.linalg.matmul(tf.nn.tanh(tf.linalg.matmul(x, FIRST)), SECOND))


def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(forward(x) - 1.0))
    for gradient, variable in zip(tape.gradient(loss, [FIRST, SECOND]), [FIRST, SECOND], strict=True):
        variable.assign_sub(0.1 * gradient)
    return loss


def both(fn, count: int, machine: Machine, layout: str, rows: int = 32):
    """Return the prediction in which some devices stand for all, and that of all."""
    x = tf.TensorSpec([rows * count, 64])
    call = predicted_call(fn, [x], {})
    some = ManyDevices(fn, [x], {}, call, None).predict(machine, count, rows * count, layout)
    return some, predict_call(call, machine, count, layout)


def scatter_and_gather(count: int, size: int, ends_s: float = 1.0) -> GraphTasks:
    """Home cuts what it has, sends each device its part, and gets it back."""
    tasks = [Task("cut", ("d0",), 1.0)]
    placed = [Placed("d0", "compute", "SplitV", key=("cut",))]
    parts = []
    for d in range(1, count):
        tasks.append(Task(f"cut:{d}", ("from d0", f"to d{d}"), float(size), (0,), rank=10 * d))
        placed.append(Placed("d0", "send", "scatter", size, f"d{d}", ("cut", d)))
        tasks.append(Task(f"work_{d}", (f"d{d}",), ends_s, (len(tasks) - 1,)))
        placed.append(Placed(f"d{d}", "compute", "Tanh", key=("work", d)))
        tasks.append(Task(f"work_{d}:0", (f"from d{d}", "to d0"), float(size), (len(tasks) - 1,), rank=10 * d))
        placed.append(Placed(f"d{d}", "send", "gather", size, "d0", ("sent", d)))
        parts.append(len(tasks) - 1)
    tasks.append(Task("join", ("d0",), float(count), tuple(parts)))
    placed.append(Placed("d0", "compute", "ConcatV2", key=("join",)))
    names = [name for d in range(count) for name in (f"d{d}", f"from d{d}", f"to d{d}")]
    sent = sum(one.bytes for one in placed)
    return GraphTasks(tuple(tasks), tuple(placed), (), dict.fromkeys(names, Resource()), {}, sent, 10)


@pytest.mark.parametrize("many", [4, 6, 8, 64])
@pytest.mark.parametrize("ends_s", [0.5, 10.0])
def test_home_serves_one_after_the_other_exactly(many: int, ends_s: float):
    """By hand: what is cut goes out part by part; what comes back does, while others still get theirs."""
    few, more, whole = (scatter_and_gather(n, 3, ends_s) for n in (4, 6, many))
    found = grown(few, more, Counts(4, 6, many, (4, 6, many)), str)
    assert found.matched == 1.0
    expected = replay(whole.tasks, whole.resources).seconds
    assert replay(found.tasks.tasks, found.tasks.resources).seconds == pytest.approx(expected)
    assert found.tasks.sent_bytes == whole.sent_bytes


def test_what_shrinks_with_more_devices_is_fitted_exactly():
    counts = Counts(4, 6, 48, (4, 6, 48))
    assert counts.fitted(5 + 240 / 4, 5 + 240 / 6) == pytest.approx(5 + 240 / 48)
    assert counts.fitted(5 + 3 * 4, 5 + 3 * 6) == pytest.approx(5 + 3 * 48)
    assert counts.times(3, 5) == pytest.approx(47 / 3)


@pytest.mark.parametrize("layout", ["home", "mirrored", "sharded"])
@pytest.mark.parametrize("fn", [forward, train])
def test_some_devices_stand_for_all_of_a_host(fn, layout: str):
    """Of what is sent everything; of time and memory within 8 %: copies meet on links in another order."""
    some, whole = both(fn, 12, machine_of(), layout)
    assert some.used == whole.used == 12
    assert some.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert some.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.001)
    fullest, expected = (max(one.memory_bytes.values()) for one in (some, whole))
    assert fullest == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("layout", "off"), [("home", 0.001), ("mirrored", 0.12), ("sharded", 0.1)])
def test_some_hosts_stand_for_all(layout: str, off: float):
    """Exactly, where home serves all; where all send to all, the order on the links differs."""
    some, whole = both(train, 12, machine_of(hosts=6, devices=2), layout)
    assert some.step_s == pytest.approx(whole.step_s, rel=off)
    assert some.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.001)


def test_with_as_many_devices_as_there_are_it_is_the_prediction_of_all():
    counts = counts_of(machine_of(), 4)
    assert (counts.few, counts.more) == (4, 6)
    some, whole = both(train, 4, machine_of(), "home")
    assert some.step_s == pytest.approx(whole.step_s)
    assert some.memory_bytes == whole.memory_bytes


def test_a_thousand_devices_are_told_by_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(many_devices, "ENOUGH_NODES", 500)
    machine = machine_of(hosts=128, devices=8)
    found = gs.predict(train, tf.TensorSpec([1024 * 8, 64]), machine=machine, devices=1024)
    assert str(found).splitlines()[0].startswith("Prediction of train on 1024 of 128x8xunit: ")
    assert len(found.memory) == 16
    assert "  ... and 1016 more devices" in str(found)
    assert any(text.startswith("16 of 1024 devices stand for all: ") for text in found.assumptions)
    table = gs.scaling(train, tf.TensorSpec([8, 64]), machine=machine_of(devices=8), devices=[1, 1024], kinds=["weak"])
    assert [(point.devices, point.rows) for point in table.points] == [(1, 8), (1024, 8192)]
    assert table.points[1].step_s == pytest.approx(found.step_s)


def test_where_they_cannot_stand_for_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(many_devices, "ENOUGH_NODES", 100)
    monkeypatch.setattr(many_devices, "MOST_NODES", 200)
    split = gs.parallelize(train, devices=2, weights=[1, 3])
    with raises(
        gs.UnsupportedError,
        "train on 64 devices would be a graph of about 1,920 nodes, and some devices cannot stand for all with unequal "
        "shares; then a prediction replays at most 200. Choose fewer devices.",
    ):
        gs.predict(split, tf.TensorSpec([128, 64]), machine=machine_of(), devices=64)
