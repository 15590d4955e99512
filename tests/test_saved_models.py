"""Transpiled SavedModels against the originals, in processes that know nothing of graphsplit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import Shard
from graphsplit.core.storage.stored_models import read_saved_model
from graphsplit.emission import emit
from tests.helpers.processes import python
from tests.helpers.saved_model_cases import CASES, Requests

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-6
DEVICES = (1, 3, 4)
MOST = ("dense", "text", "transformer", "tensorflow_1")  # on all of them; the others on 3


@dataclass
class Made:
    """One model in its forms: the original, transpiled for several numbers of devices, and what was reported."""

    original: str
    requests: Requests
    transpiled: dict[int, str]
    reports: dict[int, gs.serving.TranspileReport]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that makes a case once."""
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            original = str(folder / "original")
            tf.keras.utils.set_random_seed(0)
            requests = CASES[name](original)
            transpiled = {n: str(folder / f"on_{n}") for n in (DEVICES if name in MOST else (3,))}
            reports = {n: gs.serving.transpile_saved_model(original, path, n) for n, path in transpiled.items()}
            made[name] = Made(original, requests, transpiled, reports)
        return made[name]

    return get


def compare(folder: Path, jobs: list[tuple[Made, list[str]]], devices: int = 4) -> list[dict]:
    """Run every model's requests through it and its transpiled forms in a fresh process; return what that says."""
    arguments: list[object] = [devices]
    for i, (made, transpiled) in enumerate(jobs):
        stored = folder / f"requests_{i}.npz"
        requests = made.requests.items()
        np.savez(stored, **{f"{key}/{name}": value for key, own in requests for name, value in own.items()})
        arguments += [made.original, stored, ",".join(transpiled)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = python(ROOT / "tests" / "helpers" / "saved_model_worker.py", *arguments, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same(found: list[dict], models: int) -> None:
    assert len({line["model"] for line in found}) == models
    wrong = [line for line in found if line["largest"] > TOLERANCE or not line["same"]]
    assert not wrong, wrong


def assert_sharded(report: gs.serving.TranspileReport, key: str, devices: int) -> None:
    """Require that a signature really is split over the devices, and that what it computes with runs on all."""
    assert key in report.plans, str(report)
    plan = report.plans[key]
    plan.check()
    emit(plan).check()
    assert len(plan.devices) == devices
    assert any(isinstance(layout, Shard) for layout in plan.input_layouts)
    assert {op.type for op in plan.sharded_ops} - {"Const", "Identity"}, str(plan)


OTHERS = [name for name in CASES if name not in ("dense", "lstm")]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["dense", "lstm"], id="dense, lstm"),
        *[
            pytest.param(OTHERS[k : k + 2], marks=pytest.mark.long, id=", ".join(OTHERS[k : k + 2]))
            for k in range(0, len(OTHERS), 2)
        ],
    ],
)
def test_every_model_on_every_number_of_devices_and_rows(names: list[str], make, tmp_path: Path):
    for name in names:
        for devices, report in make(name).reports.items():
            assert_sharded(report, "fixed", devices)
    jobs = [(make(name), list(make(name).transpiled.values())) for name in names]
    found = compare(tmp_path, jobs)
    assert_same(found, sum(len(transpiled) for _, transpiled in jobs))
    for name in names:
        rows = {line["rows"] for line in found if line["model"] in make(name).transpiled.values()}
        assert rows >= set(range(name == "conv", 10))


SHARDED = {
    "dense": {"MatMul", "Relu", "Softmax"},
    "conv": {"Conv2D", "MaxPool", "MatMul"},
    "lstm": {"StatelessWhile", "TensorListStack", "MatMul"},
    "transformer": {"GatherV2", "BatchMatMulV2", "Softmax", "MatMul"},
    "text": {"StringLower"},
    "decoding": {"StatelessWhile", "TensorListStack", "MatMul"},
    "two_signatures": {"MatMul", "Tanh"},
    "tensorflow_1": {"MatMul", "Softmax"},
    "estimator": {"ParseExampleV2", "MatMul", "Softmax"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_an_unknown_number_of_rows_is_sharded(name: str, make):
    key = "encode" if name == "two_signatures" else "serving_default"
    for devices in [n for n in make(name).reports if n > 1]:
        report = make(name).reports[devices]
        assert_sharded(report, key, devices)
        assert {op.type for op in report.plans[key].sharded_ops} >= SHARDED[name]
        assert len(report.plans[key].unsharded_ops) == (name in ("text", "tensorflow_1")), str(report)


@pytest.mark.long
def test_other_forms_on_fewer_devices_than_asked_for(make, tmp_path: Path):
    text, old, dense, words = (make(name) for name in ("text", "tensorflow_1", "dense", "transformer"))
    stripped, again, copies = (str(tmp_path / name) for name in ("stripped", "again", "copies"))
    for made in (dense, old):
        report = gs.serving.transpile_saved_model(made.transpiled[3], again, 4, overwrite=True)
        assert not report.plans
        assert "serving_default: kept as it is: The graph was transpiled before; transpile the original" in str(report)
    assert gs.serving.strip_devices(dense.transpiled[4], stripped) > 20
    assert b"/device:CPU:3" in Path(dense.transpiled[4], "saved_model.pb").read_bytes()
    assert b"/device:CPU:" not in Path(stripped, "saved_model.pb").read_bytes()
    report = gs.serving.transpile_saved_model(words.original, copies, 4, replicate_weights=True)
    assert_sharded(report, "fixed", 4)
    _assert_weights_stay(report, words, copies)
    jobs = [
        (text, [text.transpiled[4]]),
        (old, [old.transpiled[4]]),
        (dense, [stripped]),
        (old, [again]),
        (words, [copies]),
    ]
    assert_same(compare(tmp_path, jobs, devices=2), 5)


def _assert_weights_stay(report: gs.serving.TranspileReport, made: Made, copies: str) -> None:
    sent = {s.name: s.sent_bytes for s in report.signatures}
    before = {s.name: s.sent_bytes for s in made.reports[4].signatures}
    assert before["fixed"] > 1000
    assert sent["fixed"] == 0
    assert report.mirrored_bytes > 1000
    assert "a copy on every device" in str(report)
    stored = [
        sorted(shape for name, shape in tf.train.list_variables(f"{folder}/variables/variables") if "GRAPH" not in name)
        for folder in (copies, made.original)
    ]
    assert stored[0] == stored[1]  # one copy on disk


def test_what_is_sent_together_counts(make):
    report = make("dense").reports[3]
    [signature] = [s for s in report.signatures if s.name == "fixed"]
    weights = 6 * 16 + 16 * 8 + 8 * 8 + 8 * 3 + 16 + 8 + 8 + 3
    assert signature.sent_bytes == 2 * 4 * weights  # to two devices that are not home, 4 bytes each


def test_where_copies_of_weights_are(make, tmp_path: Path):
    made = make("dense")
    gs.serving.transpile_saved_model(made.original, tmp_path / "copies", 3, replicate_weights=True)
    loaded = tf.saved_model.load(tmp_path / "copies")
    placement = gs.placement(loaded.signatures["fixed"], x=tf.constant(made.requests["fixed"]["x"][:7]), actual=True)
    reads = [op.actual for op in placement.select("ReadVariableOp")]
    assert {device.rpartition("device:")[2] for device in reads} == {"CPU:0", "CPU:1", "CPU:2"}
    assert made.reports[3].plans["fixed"].buckets
    crossing = {t.source for t in placement.transfers}
    assert not [name for name in crossing if "ReadVariableOp" in name or "packed" in name], crossing


_ONLY_THE_SIGNATURE = """
import gc, sys
import numpy as np
import tensorflow as tf
import graphsplit as gs
gs.use_logical_devices(3)
folder, original = sys.argv[1:]
x = tf.constant(np.load(folder + "/x.npy"))
model = tf.saved_model.load(folder)
signature = model.signatures["fixed"]
graph = signature.graph.as_graph_def()
bodies = [graph.node, *[function.node_def for function in graph.library.function]]
handles = [node for body in bodies for node in body if node.op == "VarHandleOp"]
names = {node.attr["shared_name"].s.decode(): node.device for node in handles}

def filled():
    count = 0
    for name, device in names.items():
        with tf.device(device):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=None, shared_name=name)
        count += int(tf.raw_ops.VarIsInitializedOp(resource=handle))
    return count

del model
gc.collect()
print("without the model", filled())
expected = tf.saved_model.load(original).signatures["fixed"](x=x)
print("equal", all(np.allclose(y, expected[key], atol=1e-6) for key, y in signature(x=x).items()))
del signature
gc.collect()
print("without the signature", filled())
"""


def test_only_the_signature_is_kept(make, tmp_path: Path):
    """Copies of weights live as long as the signature that reads them, and not longer. (In a process of its own.)"""
    made, folder = make("dense"), tmp_path / "copies"
    gs.serving.transpile_saved_model(made.original, folder, 3, replicate_weights=True)
    np.save(folder / "x.npy", made.requests["fixed"]["x"][:7])
    ran = python("-c", _ONLY_THE_SIGNATURE, folder, made.original)
    assert ran.returncode == 0, ran.stderr
    # eight variables, copied to two more devices
    assert ran.stdout.splitlines() == ["without the model 16", "equal True", "without the signature 0"]


@pytest.mark.parametrize("copies", [False, True])
def test_in_a_session(make, tmp_path: Path, copies: bool):
    """TensorFlow Serving loads the graph and runs it in a session, not the objects."""
    made = make("dense")
    folder = made.transpiled[3]
    if copies:
        folder = str(tmp_path / "copies")
        gs.serving.transpile_saved_model(made.original, folder, 3, replicate_weights=True)
    x = np.asarray(made.requests["serve"]["x"][:5])
    answers = []
    for path in (made.original, folder):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            loaded = tf.compat.v1.saved_model.load(session, ["serve"], path)
            signature = loaded.signature_def["serve"]
            outputs = {key: info.name for key, info in sorted(signature.outputs.items())}
            answers.append([session.run(outputs, {signature.inputs["x"].name: x[:rows]}) for rows in (5, 3)])
    for before, after in zip(*answers, strict=True):
        assert before.keys() == after.keys()
        for key in before:
            np.testing.assert_allclose(after[key], before[key], atol=TOLERANCE)


def test_names_types_shapes_and_assets_stay(make):
    for name in ("tensorflow_1", "estimator"):
        before, after = (read_saved_model(path) for path in (make(name).original, make(name).transpiled[3]))
        for key, signature in before.meta_graphs[0].signature_def.items():
            assert after.meta_graphs[0].signature_def[key].method_name == signature.method_name
    assert signature.method_name == "tensorflow/serving/classify"
    made = make("tensorflow_1")
    assert (Path(made.transpiled[3]) / "assets" / "original.txt").read_text() == "a\nb\nc\n"
    text = make("text")
    loaded, original = tf.saved_model.load(text.transpiled[3]), tf.saved_model.load(text.original)
    for key, function in original.signatures.items():
        own = loaded.signatures[key]
        assert own.structured_input_signature == function.structured_input_signature
        shapes = {name: (t.dtype, t.shape.as_list()) for name, t in function.structured_outputs.items()}
        assert {name: (t.dtype, t.shape.as_list()) for name, t in own.structured_outputs.items()} == shapes
    assert len(list((Path(text.transpiled[3]) / "assets").iterdir())) == 1


def test_signatures_without_a_batch_are_kept_and_that_is_said(make):
    report = make("two_signatures").reports[3]
    assert "norm" not in report.plans
    assert "norm: kept as it is: no argument has an axis to split" in str(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [1, 2])
def test_large_constants_are_stored_once(version: int, tmp_path: Path):
    weights = np.random.default_rng(0).standard_normal([128, 64]).astype(np.float32)
    source, target, copies = (str(tmp_path / name) for name in ("in", "out", "copies"))
    if version == 1:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, [None, 128])
            tf.compat.v1.saved_model.simple_save(session, source, {"x": x}, {"y": x @ weights})
    else:
        function = tf.function(lambda x: {"y": x @ weights}, input_signature=[tf.TensorSpec([None, 128], name="x")])
        tf.saved_model.save(tf.Module(), source, signatures=function)
    report = gs.serving.transpile_saved_model(source, target, 5)
    assert report.graph_bytes_after < report.graph_bytes_before + weights.nbytes
    assert report.signatures[0].sent_bytes >= 4 * weights.nbytes
    assert len({op.type for op in report.plans["serving_default"].sharded_ops} & {"MatMul"}) == 1
    report = gs.serving.transpile_saved_model(source, copies, 5, replicate_weights=True)
    assert report.graph_bytes_after > report.graph_bytes_before + 4 * weights.nbytes
    assert report.signatures[0].sent_bytes == 0
    rows = tf.constant(np.random.default_rng(1).standard_normal([7, 128]), tf.float32)
    for folder in (target, copies):
        found = tf.saved_model.load(folder).signatures["serving_default"](x=rows)["y"]
        np.testing.assert_allclose(found, rows @ weights, atol=1e-4)


@pytest.mark.long
def test_batches_that_differ(make):
    made = make("transformer")
    arguments = {name: tf.constant(value) for name, value in made.requests["serve"].items()}
    function = tf.saved_model.load(made.transpiled[3]).signatures["serve"]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        function(words=arguments["words"][:3], mask=arguments["mask"][:1])
    assert "words" in str(caught.value)
    assert "mask" in str(caught.value)


@pytest.mark.long
def test_saved_model_cli(make, tmp_path: Path):
    made = make("dense")
    rows = made.requests["serve"]["x"][:5]
    np.save(tmp_path / "x.npy", rows)
    command = ["run", "--dir", made.transpiled[3], "--tag_set", "serve", "--signature_def", "serve"]
    command += ["--inputs", f"x={tmp_path / 'x.npy'}", "--outdir", tmp_path]
    program = Path(sys.executable).parent / "saved_model_cli"
    done = subprocess.run([program, *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = tf.saved_model.load(made.original).signatures["serve"](x=tf.constant(rows))
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected["scores"], atol=TOLERANCE)
