"""The pages of `docs/`: their code, run from top to bottom in a fresh process; their links; what is generated."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
# What the pages that run from top to bottom print, in part. (Others show pieces of code: of a step that is not there,
# or for GPUs. `from_one_gpu_to_eight.md` is run by `test_keras_guide`.)
PRINTED = {
    "index.md": "PASS: ",
    "at_home.md": "docs/at_home.md#all-rows-at-once",
    "compiled_shards.md": "compiled by XLA between moves: 15 of 15 operations",
    "faster.md": "busy",
    "from_mirrored_strategy.md": "with graphsplit",
    "from_tensorflow_1.md": "[",
    "model_parallelism.md": "stage",
    "notebooks.md": "a copy on each device",
    "serving.md": "(10, 3)",
    "several_machines.md": "9.0",
    "testing_without_gpus.md": "CPU:3",
    "too_big_for_one_gpu.md": "'stages': 2, 'micro_batches': 4} alive at most",
    "your_own_loop.md": "(7, 3)",
}


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(blocks))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert PRINTED[name] in done.stdout


@pytest.mark.long
def test_the_code_of_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "five_minutes.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join(code))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "x float32[1002,20], cut along axis 0 over 4 devices" in done.stdout
    printed = "".join(line for cell in cells for out in cell.get("outputs", ()) for line in out.get("text", ()))
    assert "x float32[1002,20], cut along axis 0 over 4 devices" in printed, "the notebook holds no outputs"
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_the_command_line_is_the_programs_own() -> None:
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "ci" / "command_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "command_line.md").read_text() == module.text(), "python ci/command_line.py writes it"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_linked() -> None:
    """A page that nobody finds is none: on the site, or in the repository."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {page.name for page in PAGES} == set(re.findall(r"(\w+\.md)$", navigation, re.MULTILINE))
    texts = {page: page.read_text() for page in [ROOT / "README.md", *PAGES]}
    for page in PAGES:
        if page.name in ("index.md", "reference.md"):  # of the site alone
            continue
        assert any(f"{page.name})" in text for other, text in texts.items() if other != page), page.name
