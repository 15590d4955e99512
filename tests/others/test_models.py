"""What runs models of other packages: what is wrong there is seen. (`python -m tests.others models` runs them.)"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from benchmarks.coverage_models import Training, integers, numbers, supervised
from graphsplit.rules import registry
from tests.helpers.float64 import float64  # noqa: F401 (a fixture)
from tests.others import model_table
from tests.others.__main__ import parse
from tests.others.environments import Environment
from tests.others.model_table import Options
from tests.others.model_worker import outcomes


def dense() -> Training:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(5)])
    return supervised(model, lambda rows: (numbers(rows, 3), integers(5, rows)))


def running_sums() -> Training:
    weight = tf.Variable(tf.ones((3, 2), tf.float64))

    def step(x: tf.Tensor) -> tf.Tensor:
        weight.assign_sub(0.1 * tf.matmul(tf.cumsum(x), tf.tanh(x)[:, :2], transpose_a=True))
        return tf.reduce_mean(x @ weight)

    return Training(step, [weight], lambda rows: (numbers(rows, 3),))


def whole() -> Training:
    return Training(lambda x: tf.unique(tf.reshape(x, [-1]))[0], [], lambda rows: (numbers(rows, 3),))


def in_float32_inside() -> Training:
    return Training(lambda x: tf.cast(tf.tanh(tf.cast(x, tf.float32)), x.dtype), [], lambda rows: (numbers(rows, 3),))


def endless() -> Training:
    while True:
        time.sleep(0.01)


def missing() -> Training:
    raise AttributeError("no such model in this version")


PACKAGE = SimpleNamespace(
    PRECISION="float64",
    models=lambda: (
        {"dense": dense, "running sums": running_sums, "whole": whole, "missing": missing}
        | {"in float32 inside": in_float32_inside, "endless": endless}
    ),
)


def found(*names: str, **options) -> dict[str, dict]:
    """Return the lines of models by their names, as they come from the process that runs them."""
    lines = outcomes(PACKAGE, Options(names, **options))
    return {one["name"]: json.loads(json.dumps({"package": "p", **one})) for one in lines}


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_models_are_compared_and_counted(monkeypatch: pytest.MonkeyPatch):
    lines = found("dense", "running sums", "whole", "missing", "in float32 inside")
    assert lines["dense"]["difference"] < 1e-12
    assert lines["dense"]["dtype"] == "float64"
    assert lines["in float32 inside"]["dtype"] == "float32"
    assert lines["dense"]["share"] > 0.9
    assert not model_table.verdict(lines["dense"])
    assert not model_table.verdict(lines["running sums"])
    assert lines["running sums"]["at_home"] == ["Cumsum: it needs all rows at once"]
    assert model_table.verdict(lines["whole"]) == "nothing is sharded"
    assert model_table.brief(lines["missing"]) == "AttributeError: no such model in this version"
    page = model_table.document(list(lines.values()))
    assert "| p | dense | " in page
    assert "* p, missing: AttributeError: no such model" in page
    assert lines["dense"]["rounding"] is None
    monkeypatch.setitem(registry._RULES, "Cumsum", registry._RULES["Tanh"])
    wrong = found("running sums")["running sums"]
    assert "apart" in model_table.verdict(wrong)
    assert 0 < wrong["rounding"] < 1e-12
    assert " (rounding: " in model_table.document([wrong])
    monkeypatch.setitem(registry._RULES, "Tanh", object())
    raised = found("dense")["dense"]
    assert model_table.verdict(raised).startswith("raised AttributeError")
    assert "* p, dense: raised AttributeError" in model_table.document([raised])


@pytest.mark.usefixtures("float64")
def test_models_that_take_too_long_or_are_done_are_left():
    lines = found(done=["whole", "dense", "running sums", "in float32 inside", "endless"])
    assert list(lines) == ["missing"]
    assert found("whole", devices=(2,))["whole"]["devices"] == [2]
    assert model_table.brief(found("endless", seconds=1)["endless"]) == "it took longer than 1 s"


def test_the_page_keeps_what_is_said_of_models_that_did_not_run():
    line = {"package": "gpflow", "devices": [2, 3], "difference": 1e-16, "dtype": "float64", "share": 1.0}
    line |= {"at_home": [], "first_call": 1.0}
    before = model_table.document(
        [{**line, "name": "SVGP, Gaussian"}, {"package": "gpflow", "name": "SVGP, Bernoulli", "raised": "A: b"}]
    )
    assert "* gpflow: SVGP, Student's t, not whitened, SVGP, two outputs, SVGP, shared kernel" in before
    other = {"package": "p", "name": "other", "not_run": "c"}
    page = model_table.document([{**line, "name": "SVGP, Bernoulli", "difference": 2e-16}, other], before)
    assert "| gpflow | SVGP, Gaussian | 2, 3 | 1e-16 |" in page
    assert "| gpflow | SVGP, Bernoulli | 2, 3 | 2e-16 |" in page
    assert "* p, other: c" in page
    assert "Bernoulli: raised" not in page
    assert model_table.document([], page) == page


def test_every_package_says_what_it_needs():
    for package in model_table.PACKAGES:
        assert all(model_table.requirements_of(package))
    assert parse(["models", "--package", "gpflow", "SVGP, Gaussian"]).names == ["SVGP, Gaussian"]


@pytest.mark.long
def test_an_environment_of_its_own(tmp_path: Path):
    """It sees what is here, and says what could not be installed."""
    environment = Environment(tmp_path / "environment")
    assert "nowhere" in environment.install([str(tmp_path / "nowhere")])
    assert "usage" in next(environment.run("tests.others", "--help"))
    with pytest.raises(subprocess.CalledProcessError):
        list(environment.run("tests.others.nowhere"))
    assert Path(environment.python).is_relative_to(tmp_path)
