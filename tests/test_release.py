"""What a release says of itself, wherever it says so, and that it can be read where the repository is not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    """`setup.py`, of which nothing is set up."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_say_the_same_version_and_day():
    changes = (ROOT / "CHANGELOG.md").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    version, day = re.findall(r"^## (\d\S*) - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)[0]
    assert gs.__version__ == version
    assert re.findall(r"^(?:version|date-released): (.*)$", citation, re.MULTILINE) == [version, day]
    assert re.findall(r"^## (.*)$", changes, re.MULTILINE)[0] == "Unreleased"
    output = {command: CliRunner().invoke(app, [command]).output for command in ("--version", "doctor")}
    assert all(text.startswith(f"graphsplit {version}") for text in output.values()), output


@pytest.mark.parametrize("address", ["", "https://example.org/graphsplit/"])
def test_the_readme_can_be_read_without_the_repository(setup_script: ModuleType, address: str):
    """No link leads to a file that is not there, nothing but links changes, and code stays as it is."""
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"!\[[^\]]*\]\(docs/", readme)
    text = setup_script.readable_alone(readme, address)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []
    assert len(targets) == (len(re.findall(r"\]\(([^)]*)\)", readme)) if address else 0)
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(text) == blocks.findall(readme)


def test_what_becomes_of_links(setup_script: ModuleType):
    text = "![A plan](plan.svg)\n\nSee [limits](docs/limits.md#rules), [a part](#part), [TensorFlow](https://tf.org).\n"
    assert setup_script.readable_alone(text, "") == "See limits, [a part](#part), [TensorFlow](https://tf.org).\n"
    absolute = text.replace("(plan", "(https://a.org/plan").replace("(docs", "(https://a.org/docs")
    assert setup_script.readable_alone(text, "https://a.org/") == absolute


def test_what_the_readme_says_of_exchanges_is_counted():
    readme, page = [(ROOT / name).read_text() for name in ("README.md", "docs/generated/chains.md")]
    counted = dict(re.findall(r"^\| (\w+) \| (\d+) exchanges", page, re.MULTILINE))
    sentence = re.search(r"(\d+) times in a step of\nResNet50 on 8 GPUs, (\d+) times in a transformer's", readme)
    assert sentence is not None
    assert sentence.groups() == (counted["ResNet50"], counted["transformer"])
