"""What is said where TensorFlow, or a package that not everybody needs, is missing; what the metadata say."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.requirements import explained
from graphsplit.planning.schedule.schedules import KINDS
from tests.helpers.law import rows

ROOT = Path(__file__).parent.parent
HOW = (
    "pip install tensorflow, or tensorflow[and-cuda] for GPUs of NVIDIA. Distributions of other names, such as "
    "tensorflow-cpu, do as well; pip install --no-deps then installs graphsplit beside them."
)


def without_tensorflow(script: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['tensorflow'] = None\n{script}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


def test_without_tensorflow():
    done = without_tensorflow(
        "import graphsplit as gs\ntry: gs.parallelize\nexcept ImportError as error: print(error)\nprint(gs.__version__)"
    )
    assert done.stdout.splitlines() == [
        f"graphsplit runs on TensorFlow, which this Python does not have: {HOW}",
        gs.__version__,
    ], done.stderr


def test_the_command_line_without_tensorflow():
    done = without_tensorflow("from graphsplit.cli import app\napp(['doctor'])")
    assert done.returncode == 2
    assert done.stderr == f"Error: graphsplit runs on TensorFlow, which this Python does not have: {HOW}\n"


def test_with_another_tensorflow(monkeypatch: pytest.MonkeyPatch):
    error = ImportError("cannot import name 'record'")
    assert explained(error) is error
    monkeypatch.setattr(tf, "__version__", "2.15.1")
    assert str(explained(error)) == (
        "graphsplit runs on TensorFlow 2.16.2 to 2.22, and this is 2.15.1, in which something is missing that it needs "
        f"(cannot import name 'record'). {HOW}"
    )


def test_extras_are_named_by_what_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    stage = gs.on_device(tf.tanh, "CPU:0")
    plan = gs.parallelize(lambda x: stage(x) + 1, devices=1, micro_batches=2, schedule=next(iter(KINDS))).plan(
        rows(4, 3)
    )
    with pytest.raises(gs.errors.UnsupportedError) as error:
        plan.schedule.save(str(tmp_path / "chart.png"))
    assert str(error.value) == (
        "Saving a schedule needs matplotlib: pip install matplotlib, or, in a clone of graphsplit, pip install "
        "'.[plots]'."
    )
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    named = re.findall(r"(?:how_to_install|needed)\(['\"][\w.]+['\"], ['\"](\w+)['\"]", "".join(_sources()))
    assert named
    assert set(named) <= set(extras["options.extras_require"])


def _sources() -> list[str]:
    return [path.read_text() for path in (ROOT / "graphsplit").rglob("*.py")]


def test_the_continuous_integration_runs_on_the_oldest_and_the_newest():
    runs = re.findall(r"^ci/contract_on (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    asked = re.search(r"^    tensorflow >= ([\d.]+), < (\d+)\.(\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert asked
    assert runs[0] == asked[1]
    assert runs[1].startswith(f"{asked[2]}.{int(asked[3]) - 1}.")
    assert f'"{asked[1]}"' in (ROOT / ".github/workflows/tests.yml").read_text()


@pytest.mark.long
def test_the_contract():
    command = [sys.executable, "-W", "error::UserWarning", "ci/contract.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^(\d+) of \1 checks hold$", done.stdout, re.MULTILINE)


def test_metadata():
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    assert found["metadata"]["author"] == "The graphsplit maintainers"
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## ([\w.]+) - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    dates = [date for _, date in released]
    assert released[0][0] == gs.__version__
    assert dates == sorted(dates, reverse=True)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {gs.__version__}\ndate-released: {dates[0]}\n" in citation
