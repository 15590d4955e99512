"""Contention: copies of a step at once, and how much slower they say that threads make each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api import calibration, contention
from graphsplit.api.contention import contended, copies_at_once
from graphsplit.costs.machine import Device, Host, Link, Machine
from graphsplit.costs.seconds import Costs
from graphsplit.prediction import timing
from graphsplit.prediction.replay import replay
from graphsplit.prediction.task_writing import tasks_of

DEVICES = ["/device:CPU:0", "/device:CPU:1"]
SLOWDOWN_OF = {"matmul": (1.0, 1.2), "elementwise": (1.0, 1.5)}


def machine(**host: object) -> Machine:
    """Two threads; a product of 64 x 64 by 64 takes half a millisecond."""
    device = Device("core", "CPU", {"float32": 1e9}, {"float32": 1e9}, 1e9, 1e10)
    described = Host(threads=2, slowdown=(1.0, 1.2), slowdown_of=SLOWDOWN_OF, **host)  # type: ignore[arg-type]
    return Machine("made up", device, 8, Link("memory", float("inf"), 0.0, shared=True, copies=False), host=described)


def predicted_s(copies: contention.Copies, on: Machine) -> float:
    tasks = tasks_of(copies.plan, copies.graph, on, Costs(on.device))
    return on.call_s(copies.devices, tasks.given) + replay(tasks.tasks, tasks.resources).seconds


def test_copies_do_what_the_step_does_each_on_its_device():
    weights = tf.Variable(tf.ones([4, 3]))
    count = tf.Variable(0)

    def step(x):
        count.assign_add(1)
        return tf.nn.tanh(x @ weights), tf.shape(x)[0]

    x = tf.random.stateless_normal([5, 4], [1, 2])
    copies = copies_at_once(step, DEVICES, 2, [x], {})
    found = copies.run()
    expected = tf.tanh(x @ weights)
    assert [tensor.shape.as_list() for tensor in found] == [[5, 3], [], [5, 3], []]
    for k in (0, 2):
        tf.debugging.assert_near(found[k], expected)
    assert int(count) == 2
    products = [node.device for node in copies.graph.nodes if node.op == "MatMul"]
    assert products == [DEVICES[0]] * 2 + [DEVICES[1]] * 2
    copies.graph.check()


def test_copies_take_as_long_as_one_where_threads_do_not_slow_each_other_down():
    x = tf.ones([64, 64])
    one, two = (copies_at_once(lambda x: x @ x, DEVICES[:n], 1, [x], {}) for n in (1, 2))
    alone_s = predicted_s(one, machine())
    assert predicted_s(two, machine()) == pytest.approx(1.2 * alone_s)
    free = replace(machine(), host=replace(machine().host, slowdown_of={}, slowdown=(1.0, 1.0)))
    assert predicted_s(two, free) == pytest.approx(alone_s)


@pytest.mark.parametrize(
    ("times", "slowdown", "others"), [(1.1, 1.1, 1.375), (1.5, 1.5, 1.875), (1.9, 1.9, 2), (2.5, 2, 2), (0.7, 1, 1)]
)
def test_threads_slow_each_other_down_as_copies_say(times: float, slowdown: float, others: float):
    """At least not at all, at most as if they took turns; of all families as many times more."""
    x = tf.ones([64, 64])
    copies = [copies_at_once(lambda x: x @ x, DEVICES, count, [x], {}) for count in (1, 2)]
    on = machine(call_s=1e-4)
    seconds = [1e-4 + times * (predicted_s(each, on) - 1e-4) / 1.2 for each in copies]
    found = contended(on, copies, seconds).host
    assert found.slowdown_of["matmul"] == found.slowdown == pytest.approx((1.0, slowdown), rel=0.01)
    assert found.slowdown_of["elementwise"] == pytest.approx((1.0, others), rel=0.01)
    assert found.call_s == 1e-4


@pytest.mark.parametrize("threads", [1, 2])
def test_calibrate_runs_as_many_copies_as_threads(monkeypatch: pytest.MonkeyPatch, threads: int):
    timed: list[int] = []

    def seconds_of(calls, _):
        timed.append(len(calls))
        return [0.5] * len(calls), 0.1

    monkeypatch.setattr(timing, "usual_seconds_of_calls", seconds_of)
    monkeypatch.setattr(calibration, "threads_of_process", lambda: threads)
    weights = tf.Variable(tf.ones([64, 64]))

    def step(x):
        weights.assign_sub(x @ weights)
        return x @ weights

    found = calibration.measure_function(machine(), step, [tf.ones([64, 64])], micro_batches=(1, 2))
    assert timed == [2 * threads]
    assert (weights.numpy() == 1).all()
    if threads == 1:
        assert found.host.slowdown_of == SLOWDOWN_OF
    else:
        assert found.host.slowdown == (1.0, 1.0)  # two take as long as one
    assert gs.predict(step, tf.ones([64, 64]), machine=found, devices=1).step_s > 0
