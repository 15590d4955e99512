"""Predictions: the emitted graph on a machine whose figures make its schedule easy to compute by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import emit
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.inspect.placements import placement_of_plan
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.costs.machine import Device, Host, Link, Machine
from graphsplit.planning.costs.work import bytes_of
from tests.helpers.messages import raises
from tests.helpers.predictions import WEIGHTS, X, boxed, product

BIAS = tf.Variable(tf.zeros([64]), name="bias")


def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.relu(tf.linalg.matmul(x, WEIGHTS) + BIAS)))
    for gradient, variable in zip(tape.gradient(loss, [WEIGHTS, BIAS]), [WEIGHTS, BIAS], strict=True):
        variable.assign_sub(1e-6 * gradient)
    return loss


FLOPS = 2 * 128 * 64 * 64


def test_one_device_takes_its_flops():
    found, rows = gs.predict(product, X, machine=boxed(), devices=1), 128 * 64 * 4
    assert found.step_s == pytest.approx(rows / 1e9 + FLOPS / 1e9)  # the rows come from the host first
    assert found.memory_bytes == {"GPU:0": 64 * 64 * 4 + 2 * rows, "CPU:0": rows}
    assert found.shares["/device:GPU:0"].computing == pytest.approx(FLOPS / 1e9 / found.step_s)
    assert found.sent_bytes == rows
    assert not found.unknown


def test_two_devices_send_and_compute():
    found = gs.predict(product, X, machine=boxed(), devices=2)
    piece, weights = 64 * 64 * 4, 64 * 64 * 4
    assert found.sent_bytes == 2 * piece + weights + piece  # rows and weights there, results back
    # the second has half of the rows and gets weights first, or last: it computes when both are there, and sends back
    assert found.step_s == pytest.approx((piece + weights) / 1e9 + FLOPS / 2e9 + piece / 1e9)
    compute = FLOPS / 2e9 / found.step_s
    assert found.limit == f"computing on GPU:1: {100 * compute:.0f} % of the step"


@pytest.mark.parametrize("machine", [None, "8xA100-SXM4-80GB"])
def test_what_takes_a_step_adds_up(machine: str | None):
    """Computing, bytes, latency, launches and waiting are all of a step, in percent that add up to 100."""
    found = gs.predict(product, X, machine=machine or boxed(), devices=2)
    assert sum(found.chain.values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.chain.values())
    [line] = [line for line in str(found).splitlines() if line.startswith("  limited by ")]
    shares = [int(share) for share in re.findall(r" (\d+) %[,;]", line.partition("; most by")[0] + ";")]
    assert sum(shares) == 100, line
    assert line.endswith(f"; most by {found.limit}")
    assert machine or found.chain["computing"] == pytest.approx(FLOPS / 2e9)
    assert (found.chain["latency of links"] > 0) == (found.chain["launching operations"] > 0) == (machine is not None)


def test_what_waits_for_a_link_is_limited_by_it():
    wide = tf.TensorSpec([8192, 64])
    found = gs.predict(product, wide, machine=boxed(rate=1e15, link=1e6, count=8), devices=8)
    assert found.limit == "sending to GPU:0: 87 % of the step"  # its rows, and the results of all others


def test_faster_links_and_devices_are_not_slower():
    steps = [gs.predict(train, X, machine=boxed(link=link), devices=2).step_s for link in (1e8, 1e9, 1e10)]
    assert steps == sorted(steps, reverse=True)
    steps = [gs.predict(train, X, machine=boxed(rate=rate), devices=2).step_s for rate in (1e8, 1e9, 1e10)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_memory_is_at_least_the_state(layout: str):
    found = gs.predict(train, X, machine=boxed(), devices=4, variables=layout)
    state = {device: memory.state_bytes for device, memory in found.memory.items()}
    whole, bias = 64 * 64 * 4, 64 * 4
    expected = {"home": whole + bias, "replicated": 4 * (whole + bias), "sharded": whole + bias}[layout]
    assert sum(state.values()) == expected
    assert max(state.values()) == (whole // 4 + bias if layout == "sharded" else whole + bias)
    assert all(memory.peak_bytes >= memory.state_bytes for memory in found.memory.values())
    assert found.layout == layout


@pytest.mark.long
def test_sizes_are_those_that_tensorflow_infers():
    """Of every node that is emitted, whatever moves or cuts: as when the graph is imported."""
    for layout in ("home", "sharded", "replicated"):
        split = gs.parallelize(train, devices=3)
        x = tf.ones([10, 64])
        gs.set_variable_layout([WEIGHTS, BIAS], layout, devices=3)
        try:
            planned = split._planned((x,), {}, runs=True)
            graph = emit(planned.plan)
            order = [node.name for node in graph.nodes]
            sizes = sizes_of(planned.plan, graph)
            placement = placement_of_plan(planned, False)
            for name in order:
                expected = list(zip(placement.ops[name].shapes, placement.ops[name].dtypes, strict=True))
                made = [(shape, dtype.name) for shape, dtype in sizes[name]]
                if "resource" not in placement.ops[name].dtypes:
                    assert made == expected, name
                    assert sum(map(bytes_of, sizes[name])) == placement.ops[name].output_bytes
        finally:
            gs.set_variable_layout([WEIGHTS, BIAS], "home", devices=3)


def test_arguments_may_be_tensors_and_nothing_runs():
    before = WEIGHTS.numpy().copy()
    found = gs.predict(train, tf.ones([128, 64]), machine="8xA100-SXM4-80GB", devices=8)
    assert (WEIGHTS.numpy() == before).all()
    assert len(found.memory_bytes) == 8 + 1  # (the host's)
    assert found.step_s == gs.predict(train, X, machine="8xA100-SXM4-80GB", devices=8).step_s


def test_a_parallelized_function_has_its_options():
    split = gs.parallelize(train, devices=3, micro_batches=2)
    found = gs.predict(split, X, machine=boxed())
    assert found.plan.mesh.shards == 6
    assert len(found.memory_bytes) == 3 + 1  # (the host's)
    assert gs.predict(split, X, machine=boxed(), micro_batches=1).plan.mesh.shards == 3


def test_micro_batches_need_less_memory():
    def deep(x):
        with tf.GradientTape() as tape:
            for _ in range(8):
                x = tf.nn.tanh(tf.linalg.matmul(x, WEIGHTS))
            loss = tf.reduce_sum(x)
        WEIGHTS.assign_sub(1e-6 * tape.gradient(loss, WEIGHTS))
        return loss

    wide = tf.TensorSpec([4096, 64])
    whole, parts = (gs.predict(deep, wide, machine=boxed(), devices=1, micro_batches=n) for n in (1, 8))
    live = [prediction.memory["/device:GPU:0"].live_bytes for prediction in (whole, parts)]
    assert live[1] < live[0] / 3


def test_hosts_are_joined_by_their_network():
    one, two = boxed(count=4), boxed(count=2).cluster(2)
    steps = [gs.predict(train, X, machine=machine, devices=4).step_s for machine in (one, two)]
    assert steps[1] > steps[0] + 1e-3
    assert len(gs.predict(train, X, machine=two, devices=4).of_devices) == 4


def test_threads_are_shared_by_logical_devices():
    device = Device("core", "CPU", {"float32": 1e6}, {"float32": 1e30}, 1e30, 1e9)
    link = Link("memory", float("inf"), 0.0, shared=True, copies=False)
    steps = {
        (threads, count): gs.predict(
            product, X, machine=Machine("cpu", device, 8, link, host=Host(threads=threads)), devices=count
        ).step_s
        for threads in (1, 2)
        for count in (1, 4)
    }
    assert steps[1, 4] == pytest.approx(steps[1, 1])  # one thread does the work of all
    assert steps[2, 4] == pytest.approx(steps[1, 1] / 2)
    assert steps[2, 1] == pytest.approx(steps[1, 1])  # one device has one thread


def test_threads_send_signals_as_they_send_tensors():
    """What a mirrored variable waits for on its other devices is sent by threads, too: as often as TensorFlow sends."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(4)])
    gs.set_variable_layout(model, "replicated", devices=3)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        for gradient, variable in zip(tape.gradient(loss, model.variables), model.variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    device = Device("core", "CPU", {"float32": 1e9}, {"float32": 1e9}, 1e9, 1e9)
    link = Link("memory", float("inf"), 1e-3, shared=True, copies=False)
    split, x = gs.parallelize(step, devices=3), tf.ones([12, 16])
    found = gs.predict(split, x, machine=Machine("cpu", device, 8, link, host=Host(threads=2)), devices=3)
    sent = [event for event in found.events if "->" in event.place]
    signals = [event for event in sent if event.type == "signal"]
    assert signals
    assert all(event.end_s - event.start_s == pytest.approx(1e-3) and not event.bytes for event in signals)
    assert len(sent) == sum(event.type == "_Send" for event in gs.inspect.timeline(split, x).events)


def test_a_placement_of_variables_in_parts_knows_their_sizes():
    split = gs.parallelize(train, devices=2)
    gs.set_variable_layout([WEIGHTS], "sharded", devices=2)
    try:
        held = [op for op in split.placement(tf.ones([8, 64])).ops.values() if op.variable == "weights"]
    finally:
        gs.set_variable_layout([WEIGHTS], "home", devices=2)
    assert [(op.device, op.parameter_bytes) for op in held] == [
        ("/device:CPU:0", 32 * 64 * 4),
        ("/device:CPU:1", 32 * 64 * 4),
    ]


def test_loops_count_their_turns():
    def loop(x):
        return tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, tf.linalg.matmul(y, WEIGHTS)), [0, x])[1]

    found = gs.predict(loop, X, machine=boxed(), devices=1)
    assert found.step_s == pytest.approx(5 * FLOPS / 1e9, rel=0.01)
    assert not found.unknown


def positive(x):
    return tf.linalg.matmul(tf.boolean_mask(x, x[:, 0] > 0), WEIGHTS)


def test_sizes_that_follow_from_data_count_as_is_said():
    found = gs.predict(positive, X, machine=boxed(), devices=1)
    copy_s = 128 * 64 * 4 / 1e9  # of the rows, from the host
    assert found.step_s == pytest.approx(copy_s + FLOPS / 128 / 1e9)
    assert "  a step takes at least 0.04 ms; 32.8 kB are sent between devices" in str(found)
    for size in (32, 128):
        given = gs.predict(positive, X, machine=boxed(), devices=1, unknown_size=size)
        assert not given.unknown
        assert given.step_s == pytest.approx(copy_s + FLOPS * size / 128 / 1e9)
        assert bool(given.over(80_000)) == (size == 128), given.memory_bytes


def test_where_nothing_says_how_large_sizes_are_that_is_said():
    def repeated(x):
        count = tf.cast(tf.reduce_sum(x), tf.int32)
        return tf.linalg.matmul(tf.tile(x[:1], [count, 1]), WEIGHTS)

    found = gs.predict(repeated, X, machine=boxed(), devices=1)
    assert found.unknown
    assert "  a step takes at least " in str(found)
    assert re.search(r"  known only when it runs: the sizes of .*; unknown_size=\.\.\. says how large\n", str(found))
    assert not gs.predict(repeated, X, machine=boxed(), devices=1, unknown_size=128).unknown


@pytest.mark.parametrize("size", [-1, (1, 128), "many", True])
def test_bad_unknown_sizes(size):
    with raises(
        gs.errors.ArgumentError,
        f"unknown_size must be the number to assume for sizes that depend on data, 128, got {size!r}.",
    ):
        gs.predict(positive, X, machine=boxed(), devices=1, unknown_size=size)


def test_what_does_not_fit_is_said():
    found = gs.predict(train, X, machine=boxed(memory=20e3), devices=2)
    assert "  does not fit: GPU:0 " in str(found)
    assert "and each has 20.0 kB" in str(found)
    assert list(found.over()) == ["GPU:0", "GPU:1"]
    assert found.over(1e9) == {}


def test_what_is_saved(tmp_path: Path):
    found = gs.predict(train, X, machine=boxed(), devices=2)
    found.save(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["otherData"]["predicted"] is True
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found.step_s * 1e6)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    counted = [event for event in trace["traceEvents"] if event["ph"] == "C" and names[event["pid"]] == "GPU:0"]
    alive = [event["args"]["bytes"] for event in counted]
    assert max(alive) == found.memory["/device:GPU:0"].live_bytes
    with raises(gs.errors.ArgumentError, "'step.html': a prediction is written as .json, which ui.perfetto.dev opens."):
        found.save("step.html")


def test_scaling(tmp_path: Path):
    found = gs.scaling(product, X, machine=boxed(link=1e30, count=1), devices=[2, 1], variables=["home", "replicated"])
    assert [(p.kind, p.layout, p.devices, p.rows) for p in found.points] == [
        *[("strong", layout, n, 128) for layout in ("home", "replicated") for n in (1, 2)],
        *[("weak", layout, n, 128 * n) for layout in ("home", "replicated") for n in (1, 2)],
    ]
    strong, weak = found.points[1], found.points[5]
    alone, there_and_back = FLOPS / 1e9, 2 * 1e-3  # two devices are two hosts here, a millisecond apart
    assert found.efficiency(strong) == pytest.approx(alone / 2 / (alone / 2 + there_and_back))
    assert found.efficiency(weak) == pytest.approx(alone / (alone + there_and_back))
    found.save(tmp_path / "scaling.json")
    found.save(tmp_path / "scaling.png")
    assert len(json.loads((tmp_path / "scaling.json").read_text())["points"]) == 8


def test_scaling_to_more_devices_than_rows():
    found = gs.scaling(product, tf.TensorSpec([4, 64]), machine=boxed(), devices=[1, 8], kinds=["strong"])
    assert [point.devices for point in found.points] == [1]
    assert found.skipped == ("strong scaling on 8 devices: 4 rows are too few: some devices get none",)


def test_scaling_says_what_does_not_fit():
    """A row of the table that no device has room for is no speed to count on, nor one to compare with in silence."""
    spec = tf.TensorSpec([2**24, 1024])
    found = gs.scaling(mean_of_wide_rows, spec, machine="8xA100-SXM4-80GB", devices=[1, 8], kinds=["strong", "weak"])
    assert [(p.kind, p.devices) for p in found.points if p.fits] == [("strong", 8)]
    first, most = str(found).partition("\n")[0], format_bytes(found.points[0].peak_bytes)
    assert re.search(r" rows/s on 8 devices, .* times as many as on 1 if it had room there$", first), first
    assert f"strong scaling on 1 device, does not fit: {most} on the fullest, and each has 80.0 GB" in found.notes
    assert found.points[3].rows_per_s > found.points[1].rows_per_s, "the first line would name what does not fit"
    none = gs.scaling(mean_of_wide_rows, spec, machine="8xA100-SXM4-80GB", devices=[1], kinds=["strong"])
    assert str(none).startswith("Predicted scaling of mean_of_wide_rows on 8xA100-SXM4-80GB: none of these fits\n")


def mean_of_wide_rows(x):
    return tf.reduce_mean(tf.tanh(tf.tanh(x) @ tf.ones((1024, 1024))))


def test_a_wrapped_model_and_a_batch():
    template = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model = gs.multi_gpu_model(template, gpus=2)
    model.compile("adam", "mse")
    before = template.get_weights()
    x, y = np.ones((8, 4), np.float32), np.ones((8, 3), np.float32)
    step = gs.predict(model, x, y, machine="8xA100-SXM4-80GB")
    assert (step.title, sorted(step.memory_bytes)) == ("train_step", ["CPU:0", "GPU:0", "GPU:1"])
    assert gs.predict(model, x, machine="8xA100-SXM4-80GB").title == "predict_step"
    specs = tf.TensorSpec((256, 4)), tf.TensorSpec((256, 3))
    found = gs.scaling(model, *specs, machine="8xA100-SXM4-80GB", devices=[1, 8])
    assert [point.rows for point in found.points] == [256, 256, 256, 2048]
    assert all(map(np.array_equal, before, template.get_weights()))
