"""Predictions on the command line, and what cannot be predicted: whole messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.cli.predict_commands import machines_like
from graphsplit.planning.costs.machine_files import known_machines, machine
from graphsplit.planning.state import devices_of_handles
from graphsplit.simulate import calls as predictions
from tests.helpers.messages import raises
from tests.helpers.predictions import HERE, X, boxed, product

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices must be how many of the machine's devices to use, at least 1, got 0."),
        (
            {"devices": 9},
            "devices=9: the machine 'unit box' has 8. Choose fewer, or a cluster of 2 hosts: 2x8xunit.",
        ),
        ({"variables": "split"}, "Unknown layout 'split'. Layouts: 'home', 'replicated', 'sharded', 'host'."),
        (
            {"micro_batches": 0},
            "micro_batches must be a whole number of at least 1, got 0. Each device splits its rows into so many parts "
            "and computes one after the other; 1 computes all rows at once.",
        ),
        (
            {"stages": 0},
            "stages must be the number of pipeline stages, at least 1; or patterns of names of the layers at which new "
            "stages begin, ['block4_*', 'block9_*']; or None for no stages. Got 0.",
        ),
    ],
)
def test_bad_options(options, message: str):
    with raises(gs.errors.ArgumentError, message):
        gs.predict(product, X, machine=boxed(), **options)


def test_sizes_of_arguments_are_known():
    with raises(
        gs.errors.ArgumentError,
        "predict needs the shapes of all arguments, and these have unknown sizes:\n"
        "  - x: float32[?,64]\n"
        "Give tensors, or a tf.TensorSpec with every size, like tf.TensorSpec([256, 224, 224, 3]).",
    ):
        gs.predict(product, tf.TensorSpec([None, 64]), machine=boxed())


def test_no_function():
    with raises(gs.errors.ArgumentError, "predict takes a function and its arguments, got 3 for the function."):
        gs.predict(3, X, machine=boxed())  # type: ignore[arg-type]


def test_a_plain_model_is_called_with_its_inputs():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(3)], name="plain")
    model.compile("sgd", "mse")
    y = tf.zeros((X.shape[0], 3))
    expected = (
        "'plain' is a Keras model, which is called with its inputs, and there are 2 arguments. For its training step, "
        "wrap it with multi_gpu_model, or pass model.train_step and (x, y)."
    )
    with raises(gs.errors.ArgumentError, expected):
        gs.predict(model, X, y, machine=boxed())
    with raises(gs.errors.ArgumentError, expected):
        gs.placement(model, X, y)
    assert gs.predict(model, X, machine=boxed()).step_s > 0
    assert gs.predict(model.train_step, (X, y), machine=boxed()).step_s > 0


def test_bad_scaling():
    with raises(gs.errors.ArgumentError, "devices must be numbers of devices, each at least 1, [1, 2, 4, 8], got [0]."):
        gs.scaling(product, X, machine=boxed(), devices=[0])
    with raises(gs.errors.ArgumentError, "kinds must be some of 'strong', 'weak', got ['square']."):
        gs.scaling(product, X, machine=boxed(), devices=[1], kinds=["square"])
    with raises(gs.errors.ArgumentError, "Weak scaling of product: no argument is split, so there are no rows to add."):
        gs.scaling(gs.parallelize(product, split=None), X, machine=boxed(), devices=[1, 2], kinds=["weak"])


def test_graphs_that_are_too_large(monkeypatch: pytest.MonkeyPatch):
    """`predict` raises; a table has the other points, and says which it lacks."""
    monkeypatch.setattr(predictions, "MOST_TASKS", 20)
    why = "the step has about 56 operations and transfers, and a prediction replays at most 20"
    with raises(gs.errors.UnsupportedError, f"product on 8 devices: {why}. Choose fewer devices."):
        gs.predict(product, X, machine=boxed(), devices=8)
    found = gs.scaling(product, X, machine=boxed(), devices=[1, 8], kinds=["weak"])
    assert [(point.devices, point.rows) for point in found.points] == [(1, 128)]
    assert found.skipped == (f"weak scaling on 8 devices: {why}",)


def test_on_the_command_line(tmp_path: Path):
    run = CliRunner().invoke
    call = [f"{HERE}:product", "--spec", "float32[128,64]", "--machine", "8xH100-SXM5"]
    one = run(app, ["predict", *call, "--devices", "2", "-o", str(tmp_path / "p.json")])
    assert one.exit_code == 0, one.output
    assert one.stdout.startswith("Prediction of product on 2 of 8xH100-SXM5: ")
    head, second = one.stdout.splitlines()[:2]
    assert second.startswith(f"  a step takes {head.removesuffix(' a step').rpartition(': ')[2]}; ")
    assert (tmp_path / "p.json").exists()
    table = run(app, ["predict", *call, "--devices", "1,2", "--layout", "home,sharded"])
    headline = r"Predicted scaling of product on 8xH100-SXM5: \S+ rows/s on \d devices?, \w+(, \S+ times those of 1)?\n"
    assert re.match(headline, table.stdout), table.stdout
    assert len(re.findall(r"^  strong ", table.stdout, re.MULTILINE)) == 4


def test_machines_on_the_command_line():
    shown = CliRunner().invoke(app, ["machines"])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert len(lines) == len(known_machines()) + 3  # what the columns are; how to see one; how to name a cluster
    assert re.fullmatch(r"dgx-h200 +8 H200-SXM +141 GB +494 T +989 T +450 GB/s", lines[4]), shown.stdout
    assert "no copies" in next(line for line in lines if line.startswith("cpu"))


def test_one_machine_on_the_command_line(tmp_path: Path):
    shown = CliRunner().invoke(app, ["machines", "dgx-h200"])
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "mine.toml"
    path.write_text(shown.stdout)
    own, named = machine(path), machine("dgx-h200")
    assert replace(own, file="") == replace(named, file="")
    assert sum(line.startswith("source = ") for line in shown.stdout.splitlines()) == 5  # device, links, network, host
    done = CliRunner().invoke(app, ["machines", "dgx-h2000"])
    assert done.exit_code == 2
    assert "There is no machine 'dgx-h2000'. Nearest are 'dgx-h200'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["predict", f"{HERE}:product", "--machine", "t4-box", "--devices", "two"],
            "Error: --devices 'two' is not understood; write numbers of at least 1, with commas: 1,2,4,8.",
        ),
        (
            ["predict", f"{HERE}:product", "--machine", "t4-box", "--spec", "float32[?,64]"],
            "Error: predict needs the shapes of all arguments, and these have unknown sizes:\n  - x: float32[?,64]\n"
            "Give tensors, or a tf.TensorSpec with every size, like tf.TensorSpec([256, 224, 224, 3]).",
        ),
        (["calibrate", "-o", "here.json"], "Error: -o 'here.json': a machine file ends in .toml."),
    ],
)
def test_bad_commands(arguments: list[str], message: str):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.strip() == message


def test_names_of_machines_are_completed(tmp_path: Path):
    """As shells ask for it; nothing of TensorFlow is imported, which takes seconds."""
    (tmp_path / "8xA.toml").write_text('name = "mine"\n[device]\n')
    (tmp_path / "8xA_other.toml").write_text("[tool]\n")
    (tmp_path / "8xA_folder.toml").mkdir()
    words = {"COMP_WORDS": "graphsplit predict a:b --machine 8xA", "COMP_CWORD": "4"}
    environment = {**os.environ, **words, "_GRAPHSPLIT_COMPLETE": "complete_bash", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-c", "from graphsplit.cli import app; app(prog_name='graphsplit')"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["8xA.toml", "8xA100-SXM4-40GB", "8xA100-SXM4-80GB"]
    imported = re.findall(r"\| *(\w+)$", done.stderr, re.MULTILINE)
    assert "typer" in imported
    assert "tensorflow" not in imported
    known = machines_like("")
    assert set(known_machines()) < set(known)
    assert [machine(name) for name in known]  # each of them is one


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_variables_that_lie_on_fewer_devices_are_told_of(layout: str):
    weights = [tf.Variable(tf.ones((64, 64))) for _ in range(8)]
    gs.set_variable_layout(weights, layout, devices=4)

    def step(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = x @ weight
        return x

    x, asked = tf.TensorSpec((64, 64)), {"machine": "8xA100-SXM4-80GB"}
    told = gs.predict(step, x, devices=8, **asked)
    note = (
        f'variables are {layout} over 4 devices, as they are here, and 4 of 8 have none; variables="{layout}" predicts '
        "them over all"
    )
    assert told.notes == (note,)
    assert f"\n  note: {note}\n" in str(told)
    held = devices_of_handles(told.plan.program, told.plan.state)
    assert (min(held), max(held)) == ("/device:GPU:0", "/device:GPU:3")
    assert gs.predict(step, x, devices=8, variables=layout, **asked).notes == ()
    assert gs.predict(step, x, devices=4, **asked).notes == ()
    found = gs.scaling(step, x, devices=[4, 8], kinds=["strong"], **asked)
    assert found.notes == (note,)


@pytest.mark.parametrize("old", ["layout", "layouts"])
def test_the_old_name_of_variables_says_the_new_one(old: str):
    x, model = tf.ones([4, 4]), keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    for fn in (tf.nn.relu, gs.parallelize(tf.nn.relu, devices=2), gs.multi_gpu_model(model, 2)):
        for predict, devices in ((gs.predict, 2), (gs.scaling, [1, 2])):
            with pytest.raises(TypeError, match=f"^{old}= is now variables='sharded'.$"):
                predict(fn, x, machine="8xA100-SXM4-80GB", devices=devices, **{old: "sharded"})
    own = gs.predict(lambda x, layout: x, x, machine="8xA100-SXM4-80GB", devices=2, layout="a function's own")
    assert own.step_s >= 0
