"""What cannot be transpiled is refused clearly; the input is untouched, and the output the old or the new one whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.core.storage import files
from graphsplit.core.storage.stored_models import read_saved_model
from tests.helpers.messages import message
from tests.helpers.saved_folders import contents, save
from tests.helpers.saved_model_cases import tensorflow_1

pytestmark = pytest.mark.sampled(quick=3)

v1 = tf.compat.v1


def anything(path: Path) -> str:
    """Recognize whatever is there."""
    return ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model") / "original")


def test_what_is_no_saved_model(tmp_path: Path):
    out = tmp_path / "out"
    assert "does not exist" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, tmp_path / "nothing", out, 2
    )
    (tmp_path / "weights.h5").write_bytes(b"")
    found = message(gs.errors.ArgumentError, gs.serving.transpile_saved_model, tmp_path, out, 2)
    assert "is not a SavedModel: it has no saved_model.pb; it holds weights.h5" in found
    (tmp_path / "saved_model.pb").write_bytes(b"\xff\xff garbage")
    assert "cannot be read as a SavedModel" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, tmp_path, out, 2
    )
    (tmp_path / "saved_model.pb").write_bytes(b"")
    assert "holds no graph: " in message(gs.errors.ArgumentError, gs.serving.transpile_saved_model, tmp_path, out, 2)
    assert not out.exists()


def test_a_missing_signature_lists_those_there_are(model: str, tmp_path: Path):
    found = message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, signatures=["scael"]
    )
    assert "no signature 'scael'. It has:\n  - count\n  - scale\n  - unique" in found


def test_a_model_without_signatures(tmp_path: Path):
    tf.saved_model.save(tf.Module(), str(tmp_path / "empty"))
    assert "has no signatures" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, tmp_path / "empty", tmp_path / "o"
    )


def test_arguments_that_do_not_exist(model: str, tmp_path: Path):
    found = message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, split={"z": 0}
    )
    assert "split names 'z', which no signature takes. They take:\n  - " in found
    assert "no axis 7" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, split={"x": 7}
    )
    assert "got '0'" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, split="0"
    )
    assert "at least one" in message(
        gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, tmp_path / "out", 0
    )


def test_split_is_followed(model: str, tmp_path: Path):
    report = gs.serving.transpile_saved_model(model, tmp_path / "out", 2, split={"x": 1}, signatures=["scale"])
    assert [str(layout) for layout in report.plans["scale"].input_layouts] == ["shard(1)"]
    assert "count: kept as it is: not asked for" in str(report)
    report = gs.serving.transpile_saved_model(model, tmp_path / "whole", 2, split=None)
    assert not report.plans


def test_strict(model: str, tmp_path: Path):
    found = message(gs.errors.StrictError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, strict=True)
    assert "Unique" in found
    assert not (tmp_path / "out").exists()
    gs.serving.transpile_saved_model(model, tmp_path / "out", 2, strict=True, signatures=["scale"])


@pytest.mark.long
def test_strict_on_the_command_line_has_no_dataset(tmp_path: Path):
    module = tf.Module()

    def serve(x):
        tf.print(x)
        return {"y": tf.tanh(x)}

    module.serve = tf.function(serve, input_signature=[tf.TensorSpec([6], tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=module.serve)
    arguments = ["transpile", str(tmp_path / "one"), str(tmp_path / "two"), "--devices", "2"]
    ran = CliRunner().invoke(app, [*arguments, "--strict"])
    assert ran.exit_code == 2
    assert re.sub(r"\.py:\d+", ".py:N", ran.output).splitlines()[-5:] == [
        "Error: strict=True, but these operations work on rows of the batch and would run on one device:",
        "  - StringFormat 'StringFormat' at test_saved_models_errors.py:N: nothing gathered; no rule for StringFormat",
        "    -> save the model without it",
        "Or drop strict=True, and assert how evenly devices work: step.plan(x).balance > 0.9.",
        "On the command line: leave out --strict.",
    ]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "runs on one device: no rule for StringFormat; save the model without it" in ran.output
    assert ran.output.splitlines()[-2:] == [
        "  note: this machine has no GPU, so the model asks for CPU:0, CPU:1 from now on, wherever it is loaded; for a "
        "server with GPUs name them: --devices GPU:0,GPU:1",
        f"Written: {tmp_path / 'two'}",
    ]
    ran = CliRunner().invoke(app, [*arguments[:-1], "GPU:0,GPU:1", "--overwrite"])
    assert ran.exit_code == 0, ran.output
    assert "this machine" not in ran.output


def test_old_control_flow_is_kept_whole(tmp_path: Path):
    source = str(tmp_path / "in")
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 2])
            y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2.0), [0, x])[1]
            v1.saved_model.simple_save(session, source, {"x": x}, {"y": y})
    finally:
        v1.enable_control_flow_v2()
    report = gs.serving.transpile_saved_model(source, tmp_path / "out", 2)
    assert "kept as it is: The outputs depend on TensorFlow 1 control flow" in str(report)
    found = message(
        gs.errors.UnsupportedError, gs.serving.transpile_saved_model, source, tmp_path / "strict", 2, strict=True
    )
    assert "enable_control_flow_v2" in found
    assert not (tmp_path / "strict").exists()
    loaded = tf.saved_model.load(tmp_path / "out")
    tf.saved_model.save(loaded, str(tmp_path / "new"), signatures=loaded.signatures)  # in a function of TensorFlow 2's
    report = gs.serving.transpile_saved_model(tmp_path / "new", tmp_path / "newer", 2)
    assert "kept as it is: The outputs depend on TensorFlow 1 control flow" in str(report)
    result = tf.saved_model.load(tmp_path / "newer").signatures["serving_default"](x=tf.ones([3, 2]))
    assert float(tf.reduce_sum(result["y"])) == 48.0


def test_copies_of_weights_that_change(model: str, tmp_path: Path):
    found = message(
        gs.errors.UnsupportedError, gs.serving.transpile_saved_model, model, tmp_path / "out", 2, replicate_weights=True
    )
    assert "the signature 'count' changes variables, so copies would go stale:\n  - factor" in found
    gs.serving.transpile_saved_model(model, tmp_path / "out", 2, replicate_weights=True, signatures=["scale"])


def test_copies_of_variables_of_the_old_kind(tmp_path: Path):
    tensorflow_1(str(tmp_path / "old"))
    found = message(
        gs.errors.UnsupportedError,
        gs.serving.transpile_saved_model,
        tmp_path / "old",
        tmp_path / "out",
        2,
        replicate_weights=True,
    )
    assert "variables of the old kind (use_resource=False)" in found


def test_an_operation_that_is_not_registered(model: str, tmp_path: Path):
    proto = read_saved_model(model)
    proto.meta_graphs[0].graph_def.node.add(name="mine", op="MyOwnOp")
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "saved_model.pb").write_bytes(proto.SerializeToString())
    found = message(
        gs.errors.UnsupportedError, gs.serving.transpile_saved_model, tmp_path / "custom", tmp_path / "out", 2
    )
    assert "not registered in this process:\n  - MyOwnOp (node 'mine')\n" in found
    assert "tf.load_op_library" in found


def test_several_sets_of_tags(model: str, tmp_path: Path):
    proto = read_saved_model(model)
    proto.meta_graphs.add().meta_info_def.tags.extend(["serve", "gpu"])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "saved_model.pb").write_bytes(proto.SerializeToString())
    found = message(gs.errors.UnsupportedError, gs.serving.transpile_saved_model, tmp_path / "two", tmp_path / "out", 2)
    assert "holds 2 graphs, one for each set of tags:\n  - serve\n  - serve, gpu" in found


def test_what_exists_is_not_replaced_unless_asked(model: str, tmp_path: Path):
    before = contents(Path(model))
    out = tmp_path / "out"
    save(out, 3.0)
    old = contents(out)
    assert message(gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, out, 2) == (
        f"{str(out)!r} exists; name another place, or allow overwriting it (overwrite=True, --overwrite)."
    )
    assert contents(out) == old
    gs.serving.transpile_saved_model(model, out, 2, overwrite=True)
    assert tf.saved_model.load(out).signatures["scale"](x=tf.ones([5, 2]))["y"][0, 0] == 2.0
    assert os.listdir(tmp_path) == ["out"]
    assert contents(Path(model)) == before


def test_the_input_is_never_the_output(model: str, tmp_path: Path):
    for target in (model, f"{model}/inside", str(Path(model).parent)):
        found = message(gs.errors.ArgumentError, gs.serving.transpile_saved_model, model, target, 2, overwrite=True)
        assert "is, contains or is inside of the input" in found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), tf.errors.ResourceExhaustedError(None, None, "full")]
)
def test_a_disk_that_is_full(error: Exception, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    gs.serving.transpile_saved_model(save(tmp_path / "other", 3.0), out, 2)
    old, original = contents(out), contents(Path(model))

    def fail_midway(module: Any, folder: str, **options: Any) -> None:
        os.makedirs(f"{folder}/variables")
        Path(folder, "saved_model.pb").write_bytes(b"half")
        raise error

    monkeypatch.setattr(tf.saved_model, "save", fail_midway)
    found = message(gs.errors.StorageError, gs.serving.transpile_saved_model, model, out, 2, overwrite=True)
    assert "failed, and it was left as it was" in found
    assert ("No space left" in found) or ("full" in found)
    assert contents(out) == old
    assert contents(Path(model)) == original
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_a_place_that_may_not_be_written(model: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = message(gs.errors.StorageError, gs.serving.transpile_saved_model, model, tmp_path / "file" / "out", 2)
    assert found == (
        f"Writing {str(tmp_path / 'file' / 'out')!r} failed, and it was left as it was: {str(tmp_path / 'file')!r}: "
        "File exists."
    )


@pytest.mark.parametrize("exchange", [True, False])
def test_an_interruption_leaves_one_of_both_whole(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "out"
    for name in ("old", "new"):
        with files.replacing(str(target), anything) as made:
            os.mkdir(made)
            Path(made, name).write_text(name)
        assert contents(target) == {name: name.encode()}
    with pytest.raises(KeyboardInterrupt), files.replacing(str(target), anything) as made:  # noqa: PT012
        os.mkdir(made)
        raise KeyboardInterrupt
    assert contents(target) == {"new": b"new"}
    assert os.listdir(tmp_path) == ["out"]


def test_a_kill_at_any_moment_leaves_one_of_both_whole(tmp_path: Path):
    script = """
import os, sys
from graphsplit.core.storage.files import replacing
for turn in range(10**6):
    with replacing(sys.argv[1], lambda path: "") as made:
        os.mkdir(made)
        for part in "ab":
            open(f"{made}/{part}", "w").write(str(turn))
    if turn == 0:
        print("started", flush=True)
"""
    target = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(gs.__file__).parent.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen([sys.executable, "-c", script, target], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    written = contents(target)
    assert set(written) == {"a", "b"}
    assert written["a"] == written["b"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["a name that leads out", "an absolute name", "a link", "a link among the extra files"])
def test_assets_from_outside_of_the_model_are_refused(tmp_path: Path, how: str):
    words, secret = tmp_path / "vocab.txt", tmp_path / "secret.txt"
    words.write_text("a\nb\n")
    secret.write_text("not part of the model\n")
    module = tf.Module()
    module.asset = tf.saved_model.Asset(str(words))
    values = tf.lookup.TextFileInitializer(
        module.asset.asset_path,
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    module.table = tf.lookup.StaticHashTable(values, -1)
    module.find = tf.function(
        lambda s: {"i": module.table.lookup(s)}, input_signature=[tf.TensorSpec([None], tf.string, "s")]
    )
    model = tmp_path / "model"
    tf.saved_model.save(module, str(model), signatures=module.find)
    if how == "a link":
        (model / "assets" / "vocab.txt").unlink()
        (model / "assets" / "vocab.txt").symlink_to(secret)
    elif how == "a link among the extra files":
        (model / "assets.extra").mkdir()
        (model / "assets.extra" / "more.txt").symlink_to(secret)
    else:
        stored = read_saved_model(str(model))
        stored.meta_graphs[0].asset_file_def[0].filename = str(secret) if "absolute" in how else "../../secret.txt"
        (model / "saved_model.pb").write_bytes(stored.SerializeToString())
        (model / "fingerprint.pb").unlink(missing_ok=True)
    with pytest.raises(gs.errors.ArgumentError, match="has assets that lie outside of it, by their names or as links"):
        gs.serving.transpile_saved_model(model, tmp_path / "out", ["CPU:0", "CPU:1"])
    assert not (tmp_path / "out").exists()
