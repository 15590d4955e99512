"""Damaged SavedModels: a byte flipped anywhere, a file cut short. An error of ours, or the right model; nothing else.

What is transpiled and run is so in processes of their own, bounded in time: a damaged file may end its reader.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import graphsplit as gs
from graphsplit.core.storage.integrity import check_fingerprint
from graphsplit.core.storage.stored_models import read_saved_model
from tests.helpers.messages import raises
from tests.helpers.processes import python
from tests.helpers.saved_model_cases import CASES, WITH_FINGERPRINTS, tensorflow_1, text

ROOT = Path(__file__).parent.parent
DATA = "variables.data-00000-of-00001"
FORMS = {
    "tf2": (text, ["saved_model.pb", "variables.index", DATA, "assets", "fingerprint.pb"]),
    "tf1": (tensorflow_1, ["saved_model.pb", "variables.index", DATA, "assets"]),
}
GOOD = {"refused", "same", "same failure"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the models once; return where they are."""
    found = {}
    for name, (make, _) in FORMS.items():
        found[name] = tmp_path_factory.mktemp(name) / "original"
        make(str(found[name]))
    return found


def damage(source: Path, folder: Path, parts: list[str], seed: int, count: int, *options: str) -> dict[str, set[str]]:
    """Damage each of some files of a model `count` times in a process of its own; return what came of it by file."""
    worker = ROOT / "tests" / "helpers" / "damage_worker.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    limit_s = 100 + 5 * count * len(parts)
    done = python(worker, source, folder, ",".join(parts), seed, count, *options, env=environment, timeout=limit_s)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"after {said[-1:]}: {done.stderr[-3000:]}"
    assert Counter(one["part"] for one in said) == dict.fromkeys(parts, count)
    wrong = [one for one in said if one["result"] not in GOOD]
    assert not wrong, "\n".join(map(str, wrong[:5]))
    return {part: {one["result"] for one in said if one["part"] == part} for part in parts}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_damage(form: str, models, tmp_path: Path):
    came = damage(models[form], tmp_path, FORMS[form][1], 0, 4)
    assert came[DATA] == {"refused"}
    assert "refused" in came["variables.index"]  # not all of it: some bytes fill it up
    assert "refused" in came["saved_model.pb"]
    assert "refused" not in came["assets"]  # which nothing tells from others


@pytest.mark.long
def test_a_graph_without_a_fingerprint_is_what_tensorflow_reads(models, tmp_path: Path):
    came = damage(models["tf2"], tmp_path, ["saved_model.pb"], 1, 12, "--without-fingerprint")
    assert came["saved_model.pb"] >= {"refused", "same"}


@pytest.mark.long
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("options", [(), ("--without-fingerprint",)], ids=["as saved", "without fingerprint"])
@pytest.mark.parametrize("form", FORMS)
def test_much_damage(form: str, options: tuple[str, ...], models, tmp_path: Path):
    damage(models[form], tmp_path, FORMS[form][1][:4], 2, 150, *options)


@WITH_FINGERPRINTS
def test_the_fingerprint_sees_every_change(models, tmp_path: Path):
    """What is not refused has the same content: bits that a truth value or a long number does not use."""
    broken = Path(shutil.copytree(models["tf2"], tmp_path / "broken"))
    path, rng, refused = broken / "saved_model.pb", random.Random(0), 0
    original = path.read_bytes()
    proto = read_saved_model(str(broken))
    for _ in range(60):
        content = bytearray(original)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            found = read_saved_model(str(broken))
            check_fingerprint(str(broken), found)
        except gs.errors.ArgumentError:
            refused += 1
        else:
            assert found == proto
    assert refused > 40


@pytest.mark.sampled(2)
@WITH_FINGERPRINTS
@pytest.mark.parametrize("name", CASES)
def test_no_model_is_refused_that_is_whole(name: str, tmp_path: Path):
    CASES[name](str(tmp_path / "model"))
    proto = read_saved_model(str(tmp_path / "model"))
    check_fingerprint(str(tmp_path / "model"), proto)
    if (tmp_path / "model" / "fingerprint.pb").exists():
        proto.meta_graphs[0].meta_info_def.tags.append("other")
        with pytest.raises(gs.errors.ArgumentError, match="is not the graph that was saved"):
            check_fingerprint(str(tmp_path / "model"), proto)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        (
            "signatures",
            "local_name",
            "others",
            "The SavedModel {source!r} is damaged: its graph lists the signatures 'fixed', 'serving_default', and its "
            "objects have no such functions. Save it again.",
        ),
        (
            "fixed",
            "local_name",
            "another",
            "The SavedModel {source!r} is damaged: its graph lists the signatures 'fixed', and its objects have no "
            "such functions. Save it again.",
        ),
        (
            "_destroy_resource",
            "node_id",
            0,
            "TensorFlow cannot save again what it loaded from {source!r}: TypeError: '_UserObject' object is not "
            "callable",
        ),
    ],
)
def test_objects_that_do_not_fit_their_graph(models, tmp_path: Path, name: str, field: str, value: Any, message: str):
    """The objects of a SavedModel, which TensorFlow finds by name, are stored beside its graph."""
    broken = Path(shutil.copytree(models["tf2"], tmp_path / "broken"))
    (broken / "fingerprint.pb").unlink(missing_ok=True)
    model = read_saved_model(str(broken))
    objects = model.meta_graphs[0].object_graph_def.nodes
    children = [child for node in objects for child in node.children if child.local_name == name]
    assert children
    for child in children:
        setattr(child, field, value)
    (broken / "saved_model.pb").write_bytes(model.SerializeToString())
    with raises(gs.errors.ArgumentError, message.format(source=str(broken))):
        gs.serving.transpile_saved_model(broken, tmp_path / "out", 2)
    assert os.listdir(tmp_path) == ["broken"]


def test_on_the_command_line(models, tmp_path: Path):
    broken = Path(shutil.copytree(models["tf2"], tmp_path / "broken"))
    path = broken / "variables" / DATA
    path.write_bytes(path.read_bytes()[:-1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python("-m", "graphsplit", "transpile", broken, tmp_path / "out", "--devices", 2, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"Error: The variables of the SavedModel {str(broken)!r} cannot be read: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert os.listdir(tmp_path) == ["broken"]
