"""Progress: what takes long says what it is doing, on a terminal in a line and in the log; what is quick does not."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core import progress
from graphsplit.simulate.measuring import microbenchmarks
from tests.helpers.emitted_programs import CORES

ROOT = Path(__file__).parent.parent
X = tf.ones([6, 4])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return what the log says, without seconds, of what then takes as long as that it is said."""
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    caplog.set_level(logging.INFO, "graphsplit")
    return lambda: [record.getMessage().rpartition(": ")[0] for record in caplog.records]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Return what makes a terminal, which then has the errors. (pytest takes them anew for the test itself.)"""

    def make() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        return found

    monkeypatch.setattr(progress, "SLOW_S", 0.05)
    monkeypatch.setattr(progress, "_STEP_S", 0.01)
    return make


def test_one_line_on_a_terminal_that_is_removed(terminal: Callable):
    shown = terminal()
    with progress.phase("step"), progress.phase("tracing"):
        time.sleep(0.3)
    lines = shown.getvalue().split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert len(lines) > 3
    assert {text.rpartition(" ... ")[0] for text in lines[1:-1]} == {"step: tracing"}
    assert not [thread for thread in threading.enumerate() if "progress" in thread.name]


def test_what_is_quick_says_nothing(terminal: Callable, caplog: pytest.LogCaptureFixture):
    shown = terminal()
    caplog.set_level(logging.INFO, "graphsplit")
    with progress.phase("step"):
        pass
    assert not shown.getvalue()
    assert not caplog.records


def test_the_loggers_level_silences_both(terminal: Callable, caplog: pytest.LogCaptureFixture):
    shown = terminal()
    caplog.set_level(logging.WARNING, "graphsplit")
    with progress.phase("step"):
        time.sleep(0.2)
    assert not shown.getvalue()
    assert not caplog.records


def test_the_log_may_be_on_the_same_terminal(terminal: Callable, caplog: pytest.LogCaptureFixture):
    shown = terminal()
    caplog.set_level(logging.INFO, "graphsplit")
    handler = logging.StreamHandler(shown)
    logging.getLogger("graphsplit").addHandler(handler)
    try:
        with progress.phase("step"), progress.phase("tracing"):
            time.sleep(0.3)
    finally:
        logging.getLogger("graphsplit").removeHandler(handler)
    logged = [text for text in shown.getvalue().split("\r\x1b[K") if text and not text.endswith(" s")]
    assert [text.rpartition(": ")[0] for text in logged] == ["step: tracing", "step"]


def test_nothing_is_written_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(progress, "SLOW_S", 0.0)
    with progress.phase("step"):
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


def test_threads_say_what_each_does(said: Callable):
    def other() -> None:
        with progress.phase("other"):
            pass

    with progress.phase("step"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert said() == ["other", "step"]


def test_what_fails_ends(said: Callable):
    def fail() -> None:
        with progress.phase("step"), progress.phases("parts") as begin:
            begin("first")
            begin("second")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    with progress.phase("next"):
        pass
    assert said() == ["step: parts: first", "step: parts: second", "step: parts", "step", "next"]


def test_a_first_call_says_its_phases_and_later_ones_nothing(said: Callable):
    def double(x):
        return 2.0 * x

    step = gs.parallelize(double, devices=2)
    for _ in range(2):
        step(X)
    first = "double: building and running it for the first time"
    assert said() == [
        *("double: tracing", "double: planning", "double"),
        *(f"{first}: writing the graph", f"{first}: handing the graph to TensorFlow", first, "double"),
    ]


def test_a_search_says_what_it_looks_at(said: Callable):
    gs.parallelize(lambda x: tf.tanh(x @ tf.ones([4, 4])), devices=2, plan=CORES).plan(X)
    looked = [text for text in said() if "choosing a plan: plan " in text]
    assert len(looked) > 1
    assert "choosing a plan: plan 1, " in looked[0]


def test_a_plan_that_was_chosen_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    w = tf.Variable(tf.ones([4, 2]))

    def halved(x):
        return 0.5 * x @ w

    step = gs.parallelize(halved, devices=2, plan=CORES, memory="1GB")
    step.plan(X)
    assert capsys.readouterr().err == "", "nothing ran"
    step(X)
    step(X)
    step(X[:1])
    line, *more = capsys.readouterr().err.splitlines()
    assert not more
    assert line.startswith(f"halved: plan='{CORES.name}' chose 1 device, variables home: ")
    monkeypatch.setattr(logging.getLogger("graphsplit"), "level", logging.WARNING)
    gs.parallelize(halved, devices=2, memory="1GB")(X)
    assert capsys.readouterr().err == ""


def test_scaling_says_each_plan_that_it_predicts(said: Callable):
    gs.scaling(tf.nn.relu, X, machine=CORES, devices=[1, 2], variables=["home", "sharded"], kinds=["strong"])
    points = [f"scaling: strong, {n}, {layout}" for n in ("1 device", "2 devices") for layout in ("home", "sharded")]
    assert [line for line in said() if line.count(": ") < 2] == [*points, "scaling"]


def test_transpiling_says_its_parts_unless_somebody_asked_for_them(said: Callable, tmp_path: Path):
    module = tf.Module()
    module.double = tf.function(lambda x: 2.0 * x, input_signature=[tf.TensorSpec([6, 2], name="x")])
    source = str(tmp_path / "one")
    tf.saved_model.save(module, source, signatures=module.double)
    gs.serving.transpile_saved_model(source, str(tmp_path / "two"), 2)
    parts = [f"transpiling {source}: {part}" for part in (f"loading {source}", "planning serving_default")]
    assert [text for text in said() if text in parts] == parts
    told: list[str] = []
    gs.serving.transpile_saved_model(source, str(tmp_path / "three"), 2, progress=told.append)
    assert told[:2] == [f"loading {source}", "planning serving_default"]


def test_calibrating_says_its_parts(
    said: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As it takes minutes, each has a line in a file, too, before it begins."""

    def measure(*_: object) -> None:
        raise RuntimeError("as far as that")

    monkeypatch.setattr(microbenchmarks, "measure", measure)
    measuring = "calibrating: measuring products, convolutions, memory, copies and launching, for about two minutes"
    with pytest.raises(RuntimeError, match="as far"):
        gs.simulate.calibrate()
    assert said() == ["calibrating", measuring, "calibrating"]  # (each line ends with what was done, or how long)
    logging.getLogger("graphsplit").setLevel(logging.NOTSET)
    with pytest.raises(RuntimeError, match="as far"):
        gs.simulate.calibrate()
    assert capsys.readouterr().err.splitlines() == [measuring]
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with pytest.raises(RuntimeError, match="as far"):
        gs.simulate.calibrate()
    assert measuring not in shown.getvalue().splitlines()


@pytest.mark.long
@pytest.mark.parametrize(("level", "is_shown"), [(None, False), ("0", True)])
def test_a_demo_prints_its_own_text_only(level: str | None, is_shown: bool):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    environment |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    command = [sys.executable, "-m", "graphsplit", "demo", "polyfit", "--devices", "2", "--steps", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "fitting on 1 and on 2 devices" in done.stdout
    assert bool(done.stderr) == is_shown, done.stderr
