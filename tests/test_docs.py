"""The pages of `docs/`: their code, run from top to bottom in a fresh process; their links; what is generated."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fresh_examples import NEED_FRESH_PROCESS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GENERATED = sorted((ROOT / "docs" / "generated").glob("*.md"))  # lists that scripts and benchmarks write
STEP = """
import keras
import tensorflow as tf

import graphsplit as gs

gs.use_logical_devices(8)
layers = [keras.layers.Dense(8, "relu", name=f"block{k}_dense") for k in range(11)]
model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(1)])
variable = model.trainable_variables[0]
x, y = tf.random.normal((64, 20)), tf.zeros((64, 1))


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    for weight, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
        weight.assign_sub(0.1 * gradient)
    return loss
"""
BEFORE = {  # what pages that show pieces of code take for granted
    "architecture.md": STEP,
    "micro_batches.md": STEP + "encoder, decoder = layers[0], model.layers[-1]\n"
    "def train_step(x, y):\n"
    "    with tf.GradientTape() as tape:\n"
    "        loss = tf.reduce_mean((decoder(encoder(x)) - y) ** 2)\n"
    "    return tape.gradient(loss, variable)\n",
    "variables.md": "import graphsplit as gs\ngs.use_logical_devices(4)\n",
}
PLANNED = ("large_layers.md", "prediction.md")  # their GPUs are planned for, and run nothing
# What the code of each page prints, in part, from top to bottom in one process, on CPUs.
PRINTED: dict[str, tuple[str, ...]] = {
    "architecture.md": ("%23 = MatMul(%0, %22)", "reduce of %23: partial(sum) -> whole on CPU:0"),
    "index.md": ("PASS: ",),
    "installing.md": (", replicated",),
    "keras_distribution.md": ("PASS: ", "4,352 of 168,820 weights are trained"),
    "large_layers.md": ("along 'model' about", "in each turn of StatelessWhile 'while': 1 reduce"),
    "limits.md": ("-> leave it out if it only saves lookups",),
    "micro_batches.md": ("1f1b: 2 stages, 6 micro-batches", "stage"),
    "migration.md": ("with graphsplit", "["),
    "performance.md": ("busy", "compiled by XLA between moves: 15 of 15 operations"),
    "placement.md": ("  shard 1: CPU:1, 15 rows", "MatMul /device:CPU:1 163840", "CPU:1  32:64"),
    "prediction.md": (
        "Prediction of train_step on 8 of 8xA100-SXM4-80GB",
        "Prediction of train_step on 16 of 2x8xH100-SXM5",
    ),
    "serving.md": ("(10, 3)", "serving_default"),
    "several_machines.md": ("9.0",),
    "troubleshooting.md": (),
    "variables.md": ("'stages': 2, 'micro_batches': 4} peak of activations",),
    "what_is_exact.md": ("home and sharded: True",),
    "your_own_loop.md": ("(7, 3)",),
}
# Pages all of whose printed lines are compared: what others show is of GPUs, or rounds otherwise on another processor.
COMPARED = ("architecture.md", "installing.md", "limits.md", "performance.md", "prediction.md", "serving.md")
ANOTHER_PROCESS = "# a script of its own\n"  # what stands below cannot run where the code above has run


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert blocks
    code = "\n".join([BEFORE.get(name, ""), *blocks])
    code = code.replace("DEVICES = 512", "DEVICES = 16")  # (512 take minutes)
    code = code if name in PLANNED else code.replace('"GPU:', '"CPU:')
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    printed = ""
    for script in code.split(ANOTHER_PROCESS):
        (tmp_path / "page.py").write_text(script)
        command = [sys.executable, "page.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        printed += done.stdout
    assert [part for part in PRINTED[name] if part not in printed] == []
    assert name not in COMPARED or lines_not_printed(name, printed) == []


MEASURED = re.compile(r"Timeline of |.* busy \d+%|[\d.]+ ms  |24 blocks: ")  # others in each run, or on 512 devices


def lines_not_printed(name: str, printed: str) -> list[str]:
    """Return the lines that a page shows as printed below its code, and that are not; `...` stands for anything."""

    def plain(line: str) -> str:
        line = line if name in PLANNED else line.replace("GPU:", "CPU:")
        return re.sub(r"\w+\.py:\d+", "page.py", line).strip()

    page = (ROOT / "docs" / name).read_text()
    shown = re.findall(r"```python\n[^`]*```\n+(?:[^`#|\n]*\n+)?```\n(.*?)```", page, re.DOTALL)
    real = {plain(line) for line in printed.splitlines()}
    lines = [plain(line) for text in shown if " 512 " not in text for line in text.splitlines()]  # (it ran with 16)
    parts = [(line, line.split("...")) for line in lines if not MEASURED.match(line)]
    return [line for line, around in parts if not any(all(part.strip() in own for part in around) for own in real)]


def test_the_code_of_every_page_is_run() -> None:
    elsewhere = {
        "from_one_gpu_to_eight.md",  # by `test_keras_guide`
        "gpu.md",  # needs a GPU; `test_logical_gpus` and `test_gpu` make such devices
    }
    assert {page.name for page in PAGES if "```python" in page.read_text()} == {*PRINTED, *elsewhere}


@pytest.mark.parametrize(
    ("script", "function", "page"),
    [
        ("api", "text", "api.md"),
        ("command_line", "text", "command_line.md"),
        ("errors", "text", "errors.md"),
        ("errors", "messages", "messages.md"),
        ("notebook", "text", "five_minutes.md"),
        ("options", "text", "options.md"),
        ("pairs", "text", "pairs.md"),
    ],
)
def test_generated_pages_are_up_to_date(script: str, function: str, page: str) -> None:
    spec = importlib.util.spec_from_file_location(script, ROOT / "ci" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "generated" / page).read_text()
    assert written == getattr(module, function)(), f"python ci/{script}.py writes it"


@pytest.mark.long
def test_the_notebook_shows_what_its_cells_give(tmp_path: Path) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "ci/notebook.py", "--run", str(tmp_path / "again.ipynb")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    kept, again = [
        [given(cell) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        for path in (ROOT / "examples" / "five_minutes.ipynb", tmp_path / "again.ipynb")
    ]
    assert kept == again, "python ci/notebook.py --run writes it"
    assert any("PASS: every difference is rounding" in text for text in again)


def given(cell: dict[str, Any]) -> str:
    """Return what a cell gives, without how far rounding took what, which is another number on another processor."""
    whole = json.dumps(cell["outputs"], ensure_ascii=False)
    listed = re.sub(r"(against one,[^:]*:).*?</pre>", r"\1</pre>", whole)
    return re.sub(r"[\d.]+e-\d+", "tiny", listed)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(NEED_FRESH_PROCESS))
def test_examples_that_need_a_process_of_their_own(name: str) -> None:
    script = (
        "import doctest, graphsplit as gs\n"
        f"case, = [c for c in doctest.DocTestFinder(recurse=False).find(gs.{name}, {name!r}) if c.examples]\n"
        "raise SystemExit(doctest.DocTestRunner().run(case).failed)"
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    for file, function in re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", page.read_text()):
        assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text(), f"{file}::{function}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *GENERATED], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            # a page of the site leads to pages of the site: mkdocs warns of anything else, and is strict
            assert page.parent == ROOT or (page.parent / target).resolve().is_relative_to(ROOT / "docs"), target


def test_the_pages_can_be_read_in_a_day() -> None:
    """What scripts write is outside of this, in `docs/generated/`."""
    words = sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in PAGES)
    assert len(PAGES) <= 24
    assert words <= 30_000


def test_every_page_is_linked() -> None:
    """On the site, and in the repository."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [*PAGES, *GENERATED]
    assert {page.name for page in pages} == set(re.findall(r"(\w+\.md)$", navigation, re.MULTILINE))
    texts = {page: page.read_text() for page in [ROOT / "README.md", *pages]}
    for page in pages:
        if page.name in ("index.md", "reference.md"):  # of the site alone
            continue
        assert any(f"{page.name})" in text for other, text in texts.items() if other != page), page.name
