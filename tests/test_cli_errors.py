"""What the command line says when something is wrong: one whole message, exit code 2, no traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from tests.helpers.broken_models import broken, model, said
from tests.helpers.messages import message

__all__ = ["broken", "model"]

ROOT = Path(__file__).parent.parent
HERE = "tests.test_cli_errors"
WEIGHTS = tf.ones([3, 2])
NUMBER = 3


def product(x):
    """What `graphsplit inspect` looks at below."""
    return tf.nn.relu(x @ WEIGHTS)


def failing(x):
    raise RuntimeError("no weights today")


def constant():
    return 3


NO_TARGET = "is neither the directory of a SavedModel nor of the form module:function."
BEFORE_TENSORFLOW = [
    (
        ["inspect", "os:getcwd", "-o", "a.bmp"],
        "'a.bmp': a placement is not written as '.bmp'. There are .html, .svg, .json, .pb, .tfevents, .csv, and a "
        "directory for TensorBoard; networkx writes placement.graph in other forms.",
    ),
    (
        ["inspect", "os:getcwd", "--timeline", "a.pdf"],
        "'a.pdf': a timeline is written as .json, which ui.perfetto.dev opens.",
    ),
    (
        ["inspect", "os:getcwd", "-o", "file/a.html"],
        "Writing 'file/a.html' failed, and it was left as it was: '{cwd}/file': File exists.",
    ),
    (
        ["inspect", "os:getcwd", "-o", "mine.json"],
        "'mine.json' was not written by graphsplit, so it is not replaced. Name another place, or move it away.",
    ),
    (["calibrate", "-o", "here.json"], "-o 'here.json': a machine file ends in .toml."),
    (["calibrate", "-o", "nowhere/here.toml"], "-o 'nowhere/here.toml': there is no directory 'nowhere'."),
    (
        ["calibrate", "-o", "mine.toml"],
        "'mine.toml' was not written by graphsplit calibrate, so it is not replaced. Name another place, or move it "
        "away.",
    ),
    (
        ["transpile", "in.pb", "out.pb"],
        "Which devices? --devices GPU:0,GPU:1 names them, --devices 4 takes the first four. They need not exist on "
        "this machine; the first is the default device.",
    ),
    (
        ["transpile", "in.pb", "out", "--devices", "2"],
        "'in.pb' is a graph, so is what is written; 'out' ends neither in .pb nor .pbtxt.",
    ),
    (
        ["transpile", "model", "out", "--devices", "2", "--split", "x=0,y=1,x=1"],
        "--split 'x=0,y=1,x=1' names 'x' more than once; give one axis for each name.",
    ),
    (
        ["transpile", "model", "out", "--devices", "2", "--split", "=0"],
        "--split '=0' is not understood; write an axis, none, or name=axis,name=none.",
    ),
    (
        ["transpile", "model", "out", "--devices", "2", "--strip-devices"],
        "--strip-devices only removes requests for devices; leave the other options out.",
    ),
]
AFTER_TENSORFLOW = [
    (["inspect", ":"], f"':' {NO_TARGET}"),
    (["inspect", "f:"], f"'f:' {NO_TARGET}"),
    (["inspect", ":f"], f"':f' {NO_TARGET}"),
    (["inspect", "nowhere"], f"'nowhere' {NO_TARGET}"),
    (["inspect", "a:b.1"], f"'a:b.1' {NO_TARGET}"),
    (
        ["inspect", "no_module:f"],
        "'no_module:f': there is no module 'no_module'. It is looked for in {cwd!r} and in sys.path.",
    ),
    (
        ["inspect", "empty"],
        "'empty' is not a SavedModel: it has no saved_model.pb; it holds nothing. Keras models are written as one by "
        "model.export(directory).",
    ),
    (
        ["inspect", "os:getcwd", "--spec", "float32"],
        "--spec 'float32' is not understood; write it like 'float32[64,784]'.",
    ),
    (
        ["transpile", "nowhere", "out", "--devices", "2"],
        "'nowhere' does not exist; give the directory of a SavedModel, or a graph's .pb or .pbtxt.",
    ),
    (["transpile", "no.pb", "o.pb", "--devices", "2"], "'no.pb' does not exist; give a GraphDef as .pb or .pbtxt."),
    (["transpile", "model", "", "--devices", "2"], "The place to write is ''; name a file or directory."),
    (
        ["transpile", "model", "file", "--devices", "2"],
        "'file' exists; name another place, or allow overwriting it (overwrite=True, --overwrite).",
    ),
    (
        ["transpile", "model", "file", "--devices", "2", "--overwrite"],
        "'file' is a plain file, not a SavedModel's directory, so it is not replaced. Name another place, or move it "
        "away.",
    ),
    (
        ["transpile", "model", "/dev/null", "--devices", "2", "--overwrite"],
        "'/dev/null' is a device, not a SavedModel's directory, so it is not replaced. Name another place, or move it "
        "away.",
    ),
    (["transpile", "model", "x" * 300, "--devices", "2"], f"{'x' * 300!r} cannot be written: File name too long."),
    (
        ["transpile", "model", "model/in", "--devices", "2"],
        "'model/in' is, contains or is inside of the input 'model', which is not changed.",
    ),
]


def test_before_tensorflow_is_imported(tmp_path: Path):
    """All in one process that must not import TensorFlow, which takes seconds."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    for name, content in (
        ("file", ""),
        ("mine.json", "{}"),
        ("mine.toml", "mine = 1"),
        ("in.pb", ""),
        ("model/saved_model.pb", ""),
    ):
        (tmp_path / name).write_text(content)
    script = f"""
import sys
from typer.testing import CliRunner
from graphsplit.cli import app
for arguments in {[arguments for arguments, _ in BEFORE_TENSORFLOW]!r}:
    ran = CliRunner().invoke(app, arguments)
    print(ran.exit_code, ran.output.replace(chr(10), " "))
print("tensorflow" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment
    )
    expected = [
        f"2 Error: {text.replace('{cwd}', str(tmp_path)).replace('{cwd!r}', repr(str(tmp_path)))} "
        for _, text in BEFORE_TENSORFLOW
    ]
    assert done.stdout.splitlines() == [*expected, "False"], done.stderr
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "in.pb", "mine.json", "mine.toml", "model"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("arguments", "expected"), AFTER_TENSORFLOW, ids=lambda value: str(value)[:40])
def test_what_is_wrong_with_a_target(
    arguments: list[str], expected: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    shutil.copytree(model, "model")
    assert said(*arguments) == expected.replace("{cwd!r}", repr(str(tmp_path)))
    assert sorted(os.listdir()) == ["empty", "file", "model"]


ONE = "Give one for each tensor, in order, like --spec 'float32[64,784]'."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([f"{HERE}:nothing"], f"'{HERE}:nothing': {sys.modules[__name__]!r} has no attribute 'nothing'."),
        (
            [f"{HERE}:prodcut"],
            f"'{HERE}:prodcut': {sys.modules[__name__]!r} has no attribute 'prodcut'. Did you mean 'product'?",
        ),
        ([f"{HERE}:NUMBER"], f"'{HERE}:NUMBER' is no function: it is 3."),
        (
            [f"{HERE}:product"],
            f"'{HERE}:product' takes (x), and there are no --spec (missing a required argument: 'x'). {ONE}",
        ),
        (
            [f"{HERE}:product", "--spec", "float32[2,3]", "--spec", "float32[2]"],
            f"'{HERE}:product' takes (x), and there are 2 --spec (too many positional arguments). {ONE}",
        ),
        ([f"{HERE}:constant"], f"'{HERE}:constant' computes nothing with TensorFlow: there is nothing to place."),
        (
            [f"{HERE}:product", "--spec", "float32[?,3]", "--actual"],
            "The argument float32[?,3] has a size that is not known; name all sizes with --spec, like --spec "
            "'float32[64,784]'.",
        ),
        (
            [f"{HERE}:product", "--spec", "float31[2]"],
            "--spec 'float31[2]' is not understood; write it like 'float32[64,784]'.",
        ),
        (
            [f"{HERE}:product", "--spec", "float32[8,3]", "--devices", "7"],
            "devices=7: there are only 5 CPU devices. This process has:\n"
            + "".join(f"  - CPU:{i}\n" for i in range(5))
            + "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts.\n"
            + 'For a plan or a placement only, name them: devices=[f"GPU:{k}" for k in range(7)].\n'
            + "On the command line: --devices 7 makes so many logical CPU devices first; now there are CPU:0, CPU:1, "
            "CPU:2, CPU:3, CPU:4.",
        ),
    ],
)
def test_inspect_a_function(arguments: list[str], expected: str):
    assert said("inspect", *arguments) == expected


def test_inspect_a_function_that_fails():
    found = said("inspect", f"{HERE}:failing", "--spec", "float32[2]")
    assert found.startswith(f"Tracing '{HERE}:failing' failed: RuntimeError: in user code:")
    assert f'File "{__file__}", line ' in found
    assert "RuntimeError: no weights today" in found
    found = said("inspect", f"{HERE}:product", "--spec", "float32[8]")
    assert "Shape must be rank 2 but is rank 1" in found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys\nsys.exit(3)\n", " at {path}:2: SystemExit: 3"),
        ("def (\n", ": SyntaxError: invalid syntax (module_{number}.py, line 1)"),
        ("import no_such_module\n", " at {path}:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_inspect_a_module_that_fails(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    number = abs(hash(code))
    path = tmp_path / f"module_{number}.py"
    path.write_text(code)
    monkeypatch.chdir(tmp_path)
    found = said("inspect", f"module_{number}:f")
    assert found == f"Importing 'module_{number}' failed" + expected.format(path=path, number=number)


def test_inspect_a_signature(model: Path):
    assert said("inspect", model, "--spec", "string[3,4]") == (
        f"{str(model)!r} does not take what --spec says:\n  - texts is string[?], --spec says string[3,4]"
    )
    assert said("inspect", model, "--spec", "float32[3]") == (
        f"{str(model)!r} does not take what --spec says:\n  - texts is string[?], --spec says float32[3]"
    )
    assert said("inspect", model, "--spec", "string[3]", "--spec", "string[3]") == (
        f"{str(model)!r} takes these arguments, and there are 2 --spec; give one for each, in this order:\n"
        "  - texts: string[?]"
    )
    assert said("inspect", model, "--signature", "mine") == (
        f"The SavedModel in {str(model)!r} has no signature 'mine'; it has 'fixed', 'serving_default'."
    )


def test_devices(model: Path, tmp_path: Path):
    assert said("transpile", model, tmp_path / "out", "--devices", "99999") == (
        "devices=99999: a batch is divided over at most 1000 devices."
    )
    assert said("transpile", model, tmp_path / "out", "--devices", "GPU:0,GPU:0") == (
        "devices names a device more than once: GPU:0."
    )


def test_version():
    ran = CliRunner().invoke(app, ["--version"])
    assert ran.exit_code == 0
    assert ran.output == f"graphsplit {gs.__version__}\n"


@pytest.mark.parametrize("command", ["doctor", "inspect", "transpile", "demo"])
def test_help(command: str):
    ran = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert ran.exit_code == 0
    assert f"graphsplit {command}" in ran.output or f" {command} " in ran.output


WRONG_TYPES: list[tuple[Any, str]] = [
    (
        lambda: gs.serving.transpile_graph_def(3, "x", "y", 2),
        "transpile_graph_def takes a GraphDef, got 3. For a tf.Graph pass graph.as_graph_def(); for a function, "
        "graphsplit.parallelize(fn).graph_def(*args) returns the graph for several devices.",
    ),
    (lambda: gs.serving.transpile_graph_def(GRAPH, 3, "y", 2), "inputs takes names of tensors, got 3."),
    (
        lambda: gs.serving.transpile_graph_def(GRAPH, "x", [3], 2),
        "outputs takes names of tensors and operations, got [3].",
    ),
    (
        lambda: gs.serving.transpile_graph_def(GRAPH, "x:y", "x", 2),
        "'x:y': that is no name of a tensor; write it like 'x' or 'x:0'.",
    ),
    (
        lambda: gs.serving.transpile_graph_def(GRAPH, "x", "x:4", 2),
        "Operations of the graph do not have these outputs:\n  - outputs 'x:4': 'x' has 1 output",
    ),
    (
        lambda: gs.serving.transpile_graph_def(GRAPH, "x", "x", 2.5),
        "devices takes a number or a list of device names, got 2.5.",
    ),
    (lambda: gs.serving.transpile_saved_model(3, "out"), "in_dir takes a path, got 3."),
    (lambda: gs.serving.transpile_saved_model("in", b"out"), "out_dir takes a path, got b'out'."),
    (
        lambda: gs.serving.transpile_saved_model("in", "out", overwrite="no"),
        "overwrite must be True or False, got 'no'.",
    ),
    (
        lambda: gs.serving.transpile_saved_model("in", "out", replicate_weights=1),
        "replicate_weights must be True or False, got 1.",
    ),
    (
        lambda: gs.serving.transpile_saved_model("in", "out", signatures=3),
        "signatures takes names of signatures, got 3.",
    ),
    (lambda: gs.serving.transpile_saved_model("in", "out", progress=3), "progress takes a function of a text, got 3."),
    (lambda: gs.serving.strip_devices(None, "out"), "in_path takes a path, got None."),
    (lambda: gs.serving.strip_devices("in", "out", overwrite=1), "overwrite must be True or False, got 1."),
]
GRAPH = tf.compat.v1.GraphDef()
GRAPH.node.add(name="x", op="Placeholder").attr["dtype"].type = 1


@pytest.mark.parametrize(("call", "expected"), WRONG_TYPES, ids=[expected for _, expected in WRONG_TYPES])
def test_wrong_types(call: Any, expected: str):
    assert message(gs.errors.ArgumentError, call) == expected
