"""The pages of `docs/`: their code, run from top to bottom in a fresh process; their links; what is generated."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphsplit as gs
from tests.helpers import pages
from tests.helpers.fresh_examples import NEED_FRESH_PROCESS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GENERATED = sorted((ROOT / "docs" / "generated").glob("*.md"))  # lists that scripts and benchmarks write
# What the code of pages prints that they do not show, or show only in part.
PRINTED: dict[str, tuple[str, ...]] = {
    "architecture.md": ("%23 = MatMul(%0, %22)", "reduce of %23: partial(sum) -> whole on CPU:0"),
    "index.md": ("PASS: ",),
    "installing.md": (", replicated",),
    "keras_distribution.md": ("PASS: ", "4,352 of 168,820 weights are trained"),
    "large_layers.md": ("along 'model' about", "in each iteration of StatelessWhile 'while': 1 reduce"),
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


@pytest.mark.long
@pytest.mark.parametrize("name", [page.name for page in (ROOT / "README.md", *PAGES) if pages.runs(page.name)])
def test_a_page_shows_what_its_code_prints(name: str, tmp_path: Path) -> None:
    printed = pages.run(name, tmp_path)
    lines = "\n".join([line for block in printed for line in block])
    assert [part for part in PRINTED.get(name, ()) if part not in lines] == []
    text, missing = pages.written(pages.path_of(name).read_text(), printed, name)
    assert missing == []
    assert text == pages.path_of(name).read_text(), f"python ci/pages.py {name} writes it"


CODE = """Text.

```python
print(plan)
```

```
Plan: 2 of 3 operations, 1.5 kB sent
  ...
  shard 0: GPU:0, 4 rows
  loss 0.12345 (train.py:3)
  PASS: every difference is rounding; largest: 1e-7
  chosen: 4 devices, ...
```
"""


def test_what_is_written_into_a_page() -> None:
    """Numbers that changed are written, what rounding explains stays, and lines that are gone are named."""
    printed = ["Plan: 2 of 3 operations, 1.5 kB sent", "  a", "  b", "  shard 0: CPU:0, 4 rows"]
    printed += ["  loss 0.12346 (page.py:9)", "  PASS: every difference is rounding; largest: 3e-7"]
    printed += ["  chosen: 4 devices, of 8"]
    assert pages.written(CODE, [printed], "a.md") == (CODE, [])
    other = [line.replace("1.5 kB", "7 MB").replace("4 ", "5 ").replace("0.12346", "0.2") for line in printed]
    text, missing = pages.written(CODE, [[*other[:4], "  new: 1", *other[4:]]], "a.md")
    assert missing == []
    changes = {"1.5 kB": "7 MB", "4 rows": "5 rows\n  new: 1", "0.12345": "0.2", "4 devices": "5 devices"}
    for old, new in changes.items():
        text = text.replace(new, old)
    assert text == CODE
    assert pages.written(CODE, [printed[:4]], "a.md")[1] == CODE.split("\n")[10:13]


def test_what_performance_md_says_of_towers_and_strategies_is_measured() -> None:
    """Its answers are those of the tables in `docs/generated/measurements.md`."""
    measured = (ROOT / "docs" / "generated" / "measurements.md").read_text()

    def ratios(title: str, column: int = 0, mode: str = "") -> list[float]:
        table = re.search(rf"## {title}\n\n(.*?)\n\n", measured, re.DOTALL)
        assert table is not None
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.group(1).split("\n")]
        at = [k for k, name in enumerate(rows[0]) if not column or name.startswith(f"N = {column}")]
        cells = [row[k] for row in rows[2:] for k in at if mode in ("", row[1])]
        return [float(number) for cell in cells for number in re.findall(r": \*{0,2}([\d.]+)", cell)]

    one = ratios("Is a step faster than on one device\\?", 1, "training")
    towers = ratios("Is it faster than towers written by hand\\?")
    two, eight = [ratios("Is it faster than MirroredStrategy\\?", n) for n in (2, 8)]
    slower = [ratio for ratio in towers if ratio > 1]
    page = (ROOT / "docs" / "performance.md").read_text()
    for said in (
        f"nothing: {min(one):.2f} to {max(one):.2f} of the time",
        f"no slower in {len(towers) - len(slower)} of {len(towers)} rows, slower in {len(slower)}, by at most "
        f"{100 * (max(slower) - 1):.0f} per cent",
        f"| {min(two):.2f} to {max(two):.2f} of its time |",
        f"| {min(eight):.2f} to {max(eight):.2f} of its time |",
    ):
        assert said in page, said


PROSE = [*PAGES, *GENERATED, *[ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_names_that_pages_use_exist(page: Path) -> None:
    """Of this package, and of placements: `gs.placement`, `placement.assert_on`."""
    text = re.sub(r"… ?\S*|\\_", lambda found: "_" if found.group() == "\\_" else "", page.read_text())
    for name in set(re.findall(r"`gs\.(\w[\w.]*\w)", text)):
        assert operator.attrgetter(name)(gs), name
    for name in re.findall(r"`(?:placement\.)?(assert_\w+)`", text):
        assert hasattr(gs.inspect.Placement, name), name


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
