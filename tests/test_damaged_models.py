"""Damaged SavedModels: a byte flipped anywhere, a file cut short. An error of ours, or the right model; nothing else.

Everything runs in processes of its own, bounded in time: a damaged file may end the process that reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.saved_model_cases import tensorflow_1, text

ROOT = Path(__file__).parent.parent
FORMS = {"tf2": text, "tf1": tensorflow_1}
FILES = ["saved_model.pb", "variables.index", "variables.data-00000-of-00001", "assets", "fingerprint.pb"]
GOOD = {"refused", "same", "same failure"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the models once; return where they are."""
    found = {}
    for name, make in FORMS.items():
        folder = tmp_path_factory.mktemp(name) / "original"
        make(str(folder))
        found[name] = folder
    return found


def damage(source: Path, folder: Path, part: str, seed: int, count: int, *options: str) -> list[dict]:
    """Damage one file of a model `count` times, and return what a process of its own says of each time."""
    worker = ROOT / "tests" / "helpers" / "damage_worker.py"
    command = [sys.executable, worker, source, folder, part, seed, count, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60 + 3 * count, env=environment
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"after {said[-1:]}: {done.stderr[-3000:]}"
    assert len(said) == count
    return said


def assert_good(said: list[dict]) -> None:
    wrong = [one for one in said if one["result"] not in GOOD]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("part", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_damage(form: str, part: str, models, tmp_path: Path):
    if form == "tf1" and part == "fingerprint.pb":
        pytest.skip("TensorFlow 1 writes no fingerprint")
    said = damage(models[form], tmp_path, part, 0, 12)
    assert_good(said)
    if (part == "saved_model.pb" and form == "tf2") or part.startswith("variables"):
        assert "refused" in {one["result"] for one in said}


def test_a_graph_without_a_fingerprint_is_what_tensorflow_reads(models, tmp_path: Path):
    said = damage(models["tf2"], tmp_path, "saved_model.pb", 1, 25, "--without-fingerprint")
    assert_good(said)
    assert {one["result"] for one in said} >= {"refused", "same"}


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("options", [(), ("--without-fingerprint",)], ids=["as saved", "without fingerprint"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", FILES[:-1])
def test_much_damage(form: str, part: str, options: tuple[str, ...], models, tmp_path: Path):
    assert_good(damage(models[form], tmp_path, part, 2, 300, *options))


def test_every_damage_is_seen_by_the_fingerprint(models, tmp_path: Path):
    """What is not refused has the same content: unused bits of a number or a truth value."""
    said = damage(models["tf2"], tmp_path, "saved_model.pb", 0, 200, "--only-check")
    assert {one["result"] for one in said} <= {"refused", "same"}
    assert sum(one["result"] == "refused" for one in said) > 150


@pytest.mark.parametrize("part", ["saved_model.pb", "variables.data-00000-of-00001"])
def test_on_the_command_line(part: str, models, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(models["tf2"], broken)
    [path] = broken.rglob(part)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    program = Path(sys.executable).parent / "graphsplit"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [program, "transpile", broken, tmp_path / "out", "--devices", "2"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
