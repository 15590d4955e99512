"""Calibration: what is measured here, how it is used, and how predictions and measurements are compared."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import prediction, prediction_worker
from benchmarks.prediction import ranked, regrets, summary, table
from graphsplit.api import calibration, fitting
from graphsplit.costs.families import FAMILIES
from graphsplit.costs.machine import Device, Host, Link, Machine, slower
from graphsplit.costs.machine_files import machine_text, read_machine
from graphsplit.costs.work import Work
from graphsplit.placement.profiles import OpEvent
from graphsplit.prediction import microbenchmarks, probes, rates, sampling, timing
from tests.helpers.messages import raises

WEIGHTS = tf.Variable(tf.ones([64, 64]) / 64, name="weights")


def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.tanh(x @ WEIGHTS)))
    WEIGHTS.assign_sub(1e-6 * tape.gradient(loss, WEIGHTS))
    return loss


def rough() -> Machine:
    device = Device("core", "CPU", {"float32": 1e10}, {"float32": 1e9}, 1e10, 1e10, overhead_s=1e-6)
    host = Host(threads=2, call_s=1e-5)
    return Machine("rough", device, 8, Link("memory", float("inf"), 1e-6, shared=True, copies=False), host=host)


def test_operations_of_a_function_are_measured(tmp_path: Path):
    before = WEIGHTS.numpy()
    found = calibration.measure_function(rough(), step, [tf.ones([256, 64])])
    assert (WEIGHTS.numpy() == before).all()
    types = {key.partition(" ")[0] for key in found.device.samples}
    assert {"MatMul", "Tanh", "TanhGrad", "Square", "Sum"} <= types
    alone = gs.predict(step, tf.ones([256, 64]), machine=replace(found, calibrated=True), devices=1)
    sampled = next(line for line in alone.assumptions if "as measured" in line)
    assert sampled.endswith(" kinds of operations as measured, 0 by what others took")
    halves = gs.predict(step, tf.ones([256, 64]), machine=found, devices=2)
    assert any("as measured, " in line and not line.endswith(" 0 by what others took") for line in halves.assumptions)
    path = tmp_path / "here.toml"
    path.write_text(machine_text(replace(found, sources=dict.fromkeys(("device", "link", "host"), "here"))))
    assert read_machine(str(path)).device.samples.keys() == found.device.samples.keys()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_on_one_device_is_predicted_as_measured(monkeypatch: pytest.MonkeyPatch, threads: int):
    """With as many threads as it had: a process with two runs operations of one device two at a time."""
    monkeypatch.setattr(timing, "usual_seconds_of_calls", lambda calls, _: ([0.5] * len(calls), 0.1))
    monkeypatch.setattr(fitting, "threads_of_process", lambda: threads)
    found = calibration.measure_function(rough(), step, [tf.ones([256, 64])])
    alike = replace(found, host=replace(found.host, threads_per_device=threads))
    assert gs.predict(step, tf.ones([256, 64]), machine=alike, devices=1).step_s == pytest.approx(0.5, rel=0.01)
    alone = gs.predict(step, tf.ones([256, 64]), machine=found, devices=1)
    assert alone.step_s > 0.51 or threads == 1


def test_operations_are_measured_as_large_as_those_of_micro_batches():
    """What more devices run is then not told by what others took; more micro-batches than rows are left out."""
    x = tf.ones([6, 64])
    found = calibration.measure_function(rough(), step, [x], micro_batches=(1, 2, 8))
    products = {key for key in found.device.samples if key.startswith("MatMul")}
    assert any("float32[3,64]" in key for key in products)
    assert not any("float32[1,64]" in key for key in products)
    halves = gs.predict(step, x, machine=found, devices=2)
    assert any(line.endswith(" kinds of operations as measured, 0 by what others took") for line in halves.assumptions)
    assert found.host.reference_s > 0
    with pytest.raises(gs.ArgumentError, match="micro_batches=0"):
        calibration.measure_function(rough(), step, [x], micro_batches=(1, 0))


def test_operations_of_loops_are_measured_at_the_sizes_of_shards():
    """TensorFlow does not know the sizes in a loop's body: the plan does."""

    def loops(x):
        with tf.GradientTape() as tape:
            y = x
            for _ in tf.range(3):
                y = tf.nn.tanh(y @ WEIGHTS)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, WEIGHTS)

    found = calibration.measure_function(rough(), loops, [tf.ones([8, 64])], micro_batches=(1, 2))
    keys = set(found.device.samples)
    for rows in (8, 4):
        assert f"Tanh float32[{rows},64] -> float32[{rows},64]" in keys
        assert f"TanhGrad float32[{rows},64] float32[{rows},64] -> float32[{rows},64]" in keys
    assert not any("..." in key or "?" in key for key in keys)


def test_what_never_ran_takes_no_time():
    """TensorFlow computes constants before a step; what is in a branch may run another time."""
    work = Work("elementwise", "float32", 1.0, 4.0)
    kinds = {name: sampling.Kind(name, work, name == "branch") for name in ("ran", "folded", "branch")}
    event = OpEvent("ran", "Mul", "/device:CPU:0", 0.0, 0.5, 1)
    found = sampling.samples_of(SimpleNamespace(events=[event, replace(event, duration_s=0.7)]), kinds)
    assert {key: sample.seconds for key, sample in found.items()} == {"ran": 0.6, "folded": 0.0}


def test_a_call_takes_longer_on_more_devices():
    """The devices of a step of micro-batches on one device are one."""
    machine = replace(rough(), host=Host(threads=2, call_s=1.0, device_call_s=0.25))
    for devices, micro_batches, seconds in ((1, 4, 1.0), (2, 1, 1.25), (4, 2, 1.75)):
        found = gs.predict(step, tf.ones([256, 64]), machine=machine, devices=devices, micro_batches=micro_batches)
        assert found.step_s == pytest.approx(seconds, abs=0.05)
        assert f"on {devices} of rough" in str(found)
    assert "for each more device" in str(found)


def test_what_xla_compiles_is_not_measured():
    with raises(
        gs.UnsupportedError,
        "calibrate measures operations one by one, and jit_compile=True lets XLA make other ones of them. Measure the "
        "function without jit_compile; predictions of the compiled one are made of the same operations.",
    ):
        calibration.measure_function(rough(), tf.function(step, jit_compile=True), [tf.ones([256, 64])])


def test_what_is_smaller_takes_no_longer():
    curve = rates._curve([(1.0, 0.1), (10.0, 10.0), (100.0, 20.0)])
    assert curve == ((1.0, 1.0), (10.0, 10.0), (100.0, 20.0))


def test_what_memory_takes_is_measured_with_operands_that_no_cache_has():
    assert len(rates.operands_of(1_000_000)) == 64  # 256 MB
    few = rates.operands_of(1000)
    assert len(few) == 400  # each of the longest chain its own
    read: dict[int, tf.Tensor] = {}
    step = rates._of_others(lambda value: read.setdefault(id(value), value), few)
    for _ in few:
        step(few[0])
    assert len(read) == len(few)


def test_threads_are_slowed_by_each_other_at_most_as_if_they_took_turns():
    """One is not slowed by itself; three at once take no longer than three times one, and no less than one."""
    ratios = {("slowdown", "matmul", 2.0): 1.6, ("slowdown", "matmul", 3.0): 18.0, ("slowdown", "matmul", 4.0): 0.9}
    found = microbenchmarks._slowdowns({**ratios, ("call", "", 0.0): 1.0})
    assert found["matmul"] == (1.0, 1.6, 3.0, 1.0)
    assert found["movement"] == (1.0,)


def test_all_that_is_slowed_is_measured_by_family(monkeypatch: pytest.MonkeyPatch):
    """As many chains as threads, none of which waits for another one."""
    made: list[int] = []
    monkeypatch.setattr(rates, "_POOL_BYTES", 20_000_000)
    monkeypatch.setattr(microbenchmarks, "chains", lambda devices, count, *rest: made.append(count))
    found = microbenchmarks._slowdown_probes(["/device:CPU:0", "/device:CPU:1"], 2)
    families = [family for _, family, _ in found]
    assert {"matmul", "convolution", "filter gradient", "elementwise", "movement"} < set(families) <= set(FAMILIES)
    assert made == [1, 2] * len(found)
    assert next(iter(found.values())).figure([2.0, 3.0]) == 1.5
    assert not microbenchmarks._slowdown_probes(["/device:GPU:0"], 0)


def products(x):
    return x @ tf.ones([2000, 8])


def test_operations_slow_each_other_down_by_their_family(tmp_path: Path):
    """Two devices' sums take twice as long together, their products do not."""
    machine = rough()
    host = replace(machine.host, slowdown_of={"elementwise": (1.0, 2.0)})
    slowed = replace(machine, host=host, sources=dict.fromkeys(("device", "link", "host"), "here"))
    path = tmp_path / "slowed.toml"
    path.write_text(machine_text(slowed))
    assert read_machine(str(path)).host == host
    x = tf.TensorSpec([4000, 2000])
    for function, kind, times in ((tf.nn.tanh, "Tanh", 2.0), (products, "MatMul", 1.0)):
        found = [gs.predict(function, x, machine=m, devices=2) for m in (machine, read_machine(str(path)))]
        plain_s, slowed_s = ([e.end_s - e.start_s for e in f.events if e.type == kind] for f in found)
        assert slowed_s == pytest.approx([times * seconds for seconds in plain_s], rel=0.01)
    for wrong, what in (
        ("elementwise = [0]", "host.slowdown_of.elementwise is a list of positive numbers, got [0]"),
        ("products = [1.0]", "host.slowdown_of.products is no family; there are matmul, "),
    ):
        path.write_text(machine_text(slowed).replace("elementwise = [1, 2]", wrong))
        with pytest.raises(gs.ArgumentError, match=re.escape(what)):
            read_machine(str(path))


def test_the_optimizer_is_turned_off_once_for_all_calls_that_are_timed(monkeypatch: pytest.MonkeyPatch):
    """What a call takes besides its operations is otherwise mostly that."""
    probe = microbenchmarks.Probe((lambda: tf.constant(1.0),), sum)
    turned: list[dict[str, bool]] = []
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", turned.append)
    probes.figures({"call": probe}, lambda: tf.constant(1.0), 0.0)
    assert [options["disable_meta_optimizer"] for options in turned] == [True, False]


def test_a_figure_is_of_one_turn_and_the_median_of_all(monkeypatch: pytest.MonkeyPatch):
    """What lies next to each other in time is compared, and a slow turn is one of several."""
    turns = [[1.0, 1.0, 9.0], [3.0, 5.0, 11.0], [2.0, 2.0, 2.0]]
    monkeypatch.setattr(probes, "relative_seconds_of_calls", lambda calls, beside, _: (turns, 0.5))
    difference = probes.Probe((str, str), lambda seconds: seconds[1] - seconds[0])
    found = probes.figures({"difference": difference, "third": probes.Probe((str,), sum)}, str, 1.0)
    assert found == ({"difference": 1.0, "third": 1.0}, 0.5)


def test_an_operation_is_the_slope_between_chains_of_two_lengths(monkeypatch: pytest.MonkeyPatch):
    """As long as takes 10 ms; a slope that is nearly nothing is noise."""
    lengths: list[int] = []
    monkeypatch.setattr(probes, "chain", lambda step, x, devices: lengths.append(len(devices)) or str)
    monkeypatch.setattr(probes, "seconds_of_warm_call", lambda call: 2e-3)
    probe = probes.operation(tf.identity, tf.ones([1]), "/device:CPU:0")
    assert lengths == [2, 10]
    assert probe.figure([1.0, 5.0]) == 0.5
    assert probe.figure([1.0, 1.0]) == 0.025


def test_what_is_measured_besides_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    """An operation's start; of what is given its operands, what that takes; of what wakes a thread, a second device."""
    seconds = {"overhead": 1e-6, "argument": 3e-6, "call": 1e-4, "latency": -1.0, "device call": 5e-5, "wake": 2e-4}

    def figures(made, beside, least_s):
        return {key: seconds.get(key[0], 2e-5) for key in made}, 0.25

    monkeypatch.setattr(microbenchmarks, "figures", figures)
    for module in (microbenchmarks, rates):
        monkeypatch.setattr(module, "operation", lambda *_: probes.Probe((str,), sum))
    monkeypatch.setattr(rates, "_POOL_BYTES", 20_000_000)
    found = microbenchmarks.measure(["/device:CPU:0", "/device:CPU:1"], 2)
    assert (found.reference_s, found.call_s, found.argument_s, found.latency_s) == (0.25, 1e-4, 3e-6, 1e-7)
    assert (found.device_call_s, found.wake_s) == pytest.approx((5e-5, 1.5e-4))
    entries, rate = found.curves["elementwise"][-1]
    assert rate == pytest.approx(entries / 1.6e-5)
    assert found.matrix_flops_per_s["float64"] == pytest.approx(2 * 512**3 / 1.9e-5)
    alone = microbenchmarks.measure(["/device:CPU:0"], 1)
    assert alone.device_call_s == alone.wake_s == alone.latency_s == 0.0
    assert set(alone.slowdown_of.values()) == {(1.0,)}
    apart = microbenchmarks.measure(["/device:GPU:0", "/device:GPU:1"], 0)
    assert apart.link_bytes_per_s > 0
    assert found.link_bytes_per_s == 0.0


def test_a_call_takes_longer_for_each_tensor_that_the_graph_is_given():
    """The handles of variables are: of each copy of a mirrored one, too."""
    machine = replace(rough(), host=Host(threads=2, argument_s=0.5))
    for devices in (1, 2, 3):  # the variable is on one of them
        found = gs.predict(step, tf.ones([256, 64]), machine=machine, devices=devices)
        assert found.step_s == pytest.approx(0.5 * 2, abs=0.05)
    weights = tf.Variable(tf.ones([64, 64]), name="mirrored")
    gs.set_variable_layout([weights], "mirrored", devices=2)
    found = gs.predict(lambda x: x @ weights, tf.ones([256, 64]), machine=machine, devices=2)
    assert found.step_s == pytest.approx(0.5 * 3, abs=0.05)

    assert "a call takes 0 us besides, 5e+05 us for each tensor that the graph is given;" in str(found)


@pytest.mark.long
def test_calibrate_measures_every_family():
    found = gs.calibrate(name="here")
    assert set(found.device.curves) <= set(FAMILIES)
    assert all(rate > 0 for curve in found.device.curves.values() for _, rate in curve)
    assert found.calibrated
    assert found.host.call_s > found.device.overhead_s > 0
    assert found.host.call_s > found.host.device_call_s


@pytest.mark.long
@pytest.mark.timeout(600)
def test_calibrate_and_validate_on_the_command_line(tmp_path: Path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "graphsplit.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=280)

    call = ["tests.test_calibration:step", "--spec", "float32[256,64]"]
    path = str(tmp_path / "here.toml")
    done = run("calibrate", "-o", path, *call)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Written: {path}. Name it as the machine: ")
    done = run("validate", *call, "--machine", path, "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert "ms a step, the median of up to 50 rounds. Predicted: " in done.stdout
    assert "The machine itself takes " in done.stdout


def entry(predicted: float, measured: float, devices: int = 2, **cell: object) -> dict[str, object]:
    named = {"workload": "mlp", "mode": "training", "devices": devices, "layout": "home", "micro_batches": 1, **cell}
    return {
        "cell": named,
        "predicted_s": predicted,
        "measured_s": measured,
        "predicted_bytes": 90,
        "measured_bytes": 100,
        "predict_s": 1.0,
        "plan_s": 2.0,
    }


def test_regret_is_of_the_plan_that_seems_fastest():
    cells = [entry(1.0, 1.2), entry(1.1, 1.0, layout="sharded"), entry(3.0, 3.0, 1), entry(9.0, 9.0, workload="alone")]
    assert regrets(cells) == [pytest.approx(0.2)]


def test_the_table_of_the_benchmark():
    alone = [entry(7.0, 1.0, 1), entry(1.0, 1.0, 1, micro_batches=4)]  # the first is what the others are timed by
    cells = [*alone, entry(0.9, 1.0), entry(1.3, 1.0, layout="sharded"), {"cell": {}, "error": "killed"}]
    text = table({"cells": cells, "load": 0.25})
    assert text.splitlines()[:3] == [
        "| network | step | N = 1 | N = 2 | peak memory |",
        "|---|---|---|---|---|",
        "| mlp | training | 0%, 0% | 20%, 30% | 10%, 10% |",
    ]
    assert "Step time: median error 10.0%, worst 30.0%. Goals: 5 %, 15 %." in text
    assert "From one device to two: median 20.0%. Goal: 10 %." in text
    slower = "slower than the fastest by 0.0% in median of 1 steps, 0.0% at most. Goals: 2 %, 10 %."
    assert slower in text
    assert "Predicting takes 0.50 of the time of planning in median, 0.50 at most. Goal: 2." in text
    assert summary([], {}) == ["Nothing was measured."]


def test_what_fails_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prediction.sys, "executable", "/bin/false")
    assert prediction._answer("machine", "there.toml") == {"error": "ended with 1: "}


def test_the_memory_of_a_step_is_what_tensorflows_allocator_counts():
    """Two tensors of 20 MB, and the third for the product; pieces are larger than what is asked for, by a part."""
    x = tf.ones([5_000_000])
    measured = prediction_worker.step_bytes(lambda: (x + 1.0) * (x + 2.0))
    if not measured:
        pytest.skip("the allocator of this TensorFlow does not count")
    assert 40_000_000 <= measured < 80_000_000


def test_the_simulator_of_tensorflow_knows_the_shapes_of_variables():
    split = gs.parallelize(step, devices=2)
    x = tf.ones([4096, 64])
    found = prediction_worker.grappler(split.graph_def(x), split.plan(x))
    assert found["grappler_s"] > 4e-5  # without, 64 columns count as one


def test_plans_that_are_ranked_wrongly_are_counted():
    assert ranked([entry(1.0, 1.0), entry(2.0, 2.0)]) == (1, 0)
    assert ranked([entry(2.0, 1.0), entry(1.0, 2.0)]) == (1, 1)
    assert ranked([entry(2.0, 1.0), entry(1.0, 1.05)]) == (0, 0)  # too much alike to be ranked
    assert ranked([entry(2.0, 1.0), entry(1.0, 2.0, mode="forward")]) == (0, 0)


def test_a_machine_file_that_is_not_there(tmp_path: Path):
    path = tmp_path / "no.toml"
    with raises(gs.ArgumentError, f"machine={str(path)!r}: there is no such file in {str(Path.cwd())!r}."):
        gs.predict(step, tf.ones([4, 64]), machine=path)


def test_steps_are_timed_beside_a_reference(monkeypatch: pytest.MonkeyPatch):
    """A machine that is twice as slow for a while makes no step slower than another."""
    times = {"step": 3.0, "reference": 0.1}
    speeds = iter([1.0, 1.0, 1.0, 2.0, 2.0, 2.0] * 20)
    monkeypatch.setattr(timing, "_seconds", lambda call, count: times[call()] * next(speeds))
    found, beside = timing.usual_seconds_of_calls([lambda: "step", lambda: "step"], lambda: "reference", 1e-9)
    assert beside in (0.1, 0.2)
    for seconds in found:  # the speed may change between a step and its reference
        assert 20.0 < seconds / beside < 45.0


def test_calls_take_turns_and_each_is_timed_between_two_references(monkeypatch: pytest.MonkeyPatch):
    """Short calls run several times in a turn; slow ones have a few turns, however long they take."""
    ran: list[tuple[str, int]] = []
    took = {"short": 0.004, "long": 2.0, "reference": 0.005}

    def timed(call, count):
        ran.append((call(), count))
        return took[call()]

    monkeypatch.setattr(timing, "_seconds", timed)
    calls = [lambda: "short", lambda: "long"]
    found, beside = timing.usual_seconds_of_calls(calls, lambda: "reference", 1e-9)
    assert found == pytest.approx([0.004, 2.0])
    assert beside == 0.005
    turns = ran[-28:]
    assert turns == [("short", 5), ("reference", 1), ("long", 1), ("reference", 1)] * 7
    ran.clear()
    timing.usual_seconds_of_calls(calls, lambda: "reference", 1e9, most_turns=3)
    assert ran.count(("long", 1)) == 1 + 3  # once to see how long it takes


def test_figures_of_a_machine_count_at_another_speed():
    machine = replace(rough(), host=Host(call_s=1.0, device_call_s=2.0, argument_s=5.0, wake_s=3.0, reference_s=4.0))
    curved = replace(machine, device=replace(machine.device, curves={"matmul": ((1.0, 8.0), (2.0, 16.0))}))
    found = slower(curved, 2.0)
    assert found.host == Host(call_s=2.0, device_call_s=4.0, argument_s=10.0, wake_s=6.0, reference_s=8.0)
    assert found.device.curves == {"matmul": ((1.0, 4.0), (2.0, 8.0))}
    assert found.device.overhead_s == 2e-6
    assert found.link == curved.link


def test_what_threads_and_devices_cost_is_a_difference():
    """A thread that wakes up does so once, however long it works: how much slower it is grows with that."""
    devices = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
    wake = microbenchmarks._wake(devices)
    assert wake.figure([1.0, 1.5, 4.0, 5.1]) == pytest.approx(0.3)  # 0.05 for each of 4 and 16 products
    assert microbenchmarks._device_call(devices).figure([1.0, 2.0]) == 0.5
    assert microbenchmarks._argument(devices[0]).figure([1.0, 128.0]) == 1.0
    assert microbenchmarks._latency(devices[0], devices[1], 1).figure([1.0, 451.0, 1.0, 1.0]) == 1.0
