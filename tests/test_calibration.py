"""Calibration: what is measured here, how it is used, and how predictions and measurements are compared."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import prediction, prediction_worker
from benchmarks.prediction import ranked, regrets, summary, table
from benchmarks.processes import NoAnswerError, in_a_process
from graphsplit.inspect.recorded import OpEvent
from graphsplit.planning.costs.families import FAMILIES
from graphsplit.planning.costs.machine import Host
from graphsplit.planning.costs.machine_files import machine_text, read_machine
from graphsplit.planning.costs.work import Work
from graphsplit.simulate import calibration
from graphsplit.simulate.measuring import sampling, timing
from tests.helpers.calibration import rough
from tests.helpers.messages import raises

WEIGHTS = tf.Variable(tf.ones([64, 64]) / 64, name="weights")


def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.tanh(x @ WEIGHTS)))
    WEIGHTS.assign_sub(1e-6 * tape.gradient(loss, WEIGHTS))
    return loss


@pytest.mark.long
def test_operations_of_a_function_are_measured(tmp_path: Path):
    before = WEIGHTS.numpy()
    found = calibration.measure_function(rough(), step, [tf.ones([256, 64])])
    assert (WEIGHTS.numpy() == before).all()
    types = {key.partition(" ")[0] for key in found.device.samples}
    assert {"MatMul", "Tanh", "TanhGrad", "Square", "Sum"} <= types
    alone = gs.predict(step, tf.ones([256, 64]), machine=replace(found, calibrated=True), devices=1)
    sampled = next(line for line in alone.assumptions if "as measured" in line)
    assert sampled.endswith(" kinds of operations as measured, 0 estimated from others")
    halves = gs.predict(step, tf.ones([256, 64]), machine=found, devices=2)
    assert any("as measured, " in line and not line.endswith(" 0 estimated from others") for line in halves.assumptions)
    path = tmp_path / "here.toml"
    path.write_text(machine_text(replace(found, sources=dict.fromkeys(("device", "link", "host"), "here"))))
    assert read_machine(str(path)).device.samples.keys() == found.device.samples.keys()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_on_one_device_is_predicted_as_measured(monkeypatch: pytest.MonkeyPatch, threads: int):
    """With as many threads as it had: a process with two runs operations of one device two at a time."""
    monkeypatch.setattr(timing, "usual_seconds_of_calls", lambda calls, _: [0.5] * len(calls))
    monkeypatch.setattr(calibration, "threads_of_process", lambda: threads)
    found = calibration.measure_function(rough(), step, [tf.ones([256, 64])])
    alike = replace(found, host=replace(found.host, threads_per_device=threads))
    assert gs.predict(step, tf.ones([256, 64]), machine=alike, devices=1).step_s == pytest.approx(0.5, rel=0.01)
    alone = gs.predict(step, tf.ones([256, 64]), machine=found, devices=1)
    assert alone.step_s > 0.51 or threads == 1


@pytest.mark.long
def test_operations_are_measured_as_large_as_those_of_micro_batches():
    """What more devices run is then not told estimated from others; more micro-batches than rows are left out."""
    x = tf.ones([6, 64])
    found = calibration.measure_function(rough(), step, [x], micro_batches=(1, 2, 8))
    products = {key for key in found.device.samples if key.startswith("MatMul")}
    assert any("float32[3,64]" in key for key in products)
    assert not any("float32[1,64]" in key for key in products)
    halves = gs.predict(step, x, machine=found, devices=2)
    assert any(
        line.endswith(" kinds of operations as measured, 0 estimated from others") for line in halves.assumptions
    )
    with pytest.raises(gs.errors.ArgumentError, match="micro_batches must be a whole number"):
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
        gs.errors.UnsupportedError,
        "calibrate measures operations one by one, and jit_compile=True makes XLA fuse them. Measure the "
        "function without jit_compile; predictions of the compiled one are made of the same operations.",
    ):
        calibration.measure_function(rough(), tf.function(step, jit_compile=True), [tf.ones([256, 64])])


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
        ("products = [1.0]", "host.slowdown_of.products is not known; there are matmul, "),
    ):
        path.write_text(machine_text(slowed).replace("elementwise = [\n    1.0,\n    2.0,\n]", wrong))
        with pytest.raises(gs.errors.ArgumentError, match=re.escape(what)):
            read_machine(str(path))


def test_a_call_takes_longer_for_each_tensor_that_the_graph_is_given():
    """The handles of variables are: of each copy of a mirrored one, too."""
    machine = replace(rough(), host=Host(threads=2, argument_s=0.5))
    for devices in (1, 2, 3):  # the variable is on one of them
        found = gs.predict(step, tf.ones([256, 64]), machine=machine, devices=devices)
        assert found.step_s == pytest.approx(0.5 * 2, abs=0.05)
    weights = tf.Variable(tf.ones([64, 64]), name="replicated")
    gs.set_variable_layout([weights], "replicated", devices=2)
    found = gs.predict(lambda x: x @ weights, tf.ones([256, 64]), machine=machine, devices=2)
    assert found.step_s == pytest.approx(0.5 * 3, abs=0.05)
    assert "each call also costs 0 us, 5e+05 us for each tensor that is passed in;" in str(found)


@pytest.mark.long
def test_calibrate_measures_every_family():
    found = gs.simulate.calibrate(name="here")
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


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (int, "x", "its process ended with 1: ValueError: invalid literal for int() with base 10: 'x'"),
        (sys.exit, "no such network", "its process ended with 1: no such network"),
        (os._exit, 3, "its process ended with 3"),
        (signal.raise_signal, signal.SIGKILL, "its process was ended by SIGKILL, for memory as a rule"),
        (time.sleep, 600, "no answer within 1 s"),
    ],
)
def test_what_fails_is_said_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, function: Any, argument: Any, said: str
):
    monkeypatch.setattr(prediction, "_LIMIT_S", 1.0 if function is time.sleep else 60.0)
    assert prediction._answer(function, argument) == {"error": said}
    assert not multiprocessing.active_children()


def test_what_a_process_answers(capsys: pytest.CaptureFixture[str]):
    assert in_a_process(divmod, 7, 2, limit_s=60.0) == (3, 1)
    with pytest.raises(NoAnswerError):
        in_a_process(divmod, 7, 0)
    assert "Traceback" in capsys.readouterr().err  # where it was raised is shown


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
    with raises(gs.errors.ArgumentError, f"machine={str(path)!r}: there is no such file in {str(Path.cwd())!r}."):
        gs.predict(step, tf.ones([4, 64]), machine=path)
