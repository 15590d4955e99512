"""`python -m benchmarks.all`: what it runs, what it refuses, and what it writes. Nothing is measured here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import all as everything
from benchmarks import beside, report
from benchmarks.__main__ import choose_cells, contestants_of
from benchmarks.pages import with_printed
from benchmarks.results import CONTESTANTS, Record, Results
from benchmarks.runner import Cell

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
ENVIRONMENT = {
    "date": "2026-11-28T20:00:00+00:00",
    "graphsplit": "1.0.0rc1",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "jax": "0.10.2",
    "cores": 2,
    "processor": "AMD EPYC",
    "commit": "abc",
    "load_average": 0.1,
    "gpus": [],
}
WHERE = "2026-11-28, graphsplit 1.0.0rc1, TensorFlow 2.21.0, Keras 3.15.1, JAX 0.10.2, 2 cores of AMD EPYC"
SETTINGS = {"kind": "cpu", "form": "full", "small": False, "rounds": 2, "round_s": 0.3, "fit_round_s": 3.0}
BATCH_S = {"plain": 0.2, "graphsplit": 0.1, "mirrored": 0.4, "towers": 0.3, "jax": 0.5}
NOT_TIMES = (
    "stages",
    "chains",
    "many_devices",
    "updates",
    "coverage",
    "mesh_search",
)  # what these print is counted, not timed
BY_HAND = ("compiled", "overlap", "choices", "operations", "fitting", "keras_fit", "report")  # no times of CPUs


def results() -> Results:
    """Of `fit` on four devices, in which JAX fails on ResNet50, and of a step on one and two."""
    fits = [
        Record(network, "fit", 4, name, 8, 1, [s, s], {"total": 10 * s}, 0, int(s * 1e10))
        for network in beside.WORKLOADS
        for name, s in BATCH_S.items()
    ]
    fits[-1].skipped = "no module named jax"
    steps = [
        Record("mlp", "training", n, name, 8, 1, [s, s], {"total": s}, 1, 1)
        for n in (1, 2)
        for name, s in (("plain", 0.2), ("mirrored", 0.4), ("towers", 0.1), ("graphsplit", 0.15))
    ]
    return Results(ENVIRONMENT, SETTINGS, [*fits, *steps])


def test_it_refuses_to_run_beside_other_work():
    everything.check_idle(0.4, False)
    everything.check_idle(3.0, True)
    with pytest.raises(SystemExit, match=r"Other work runs here: 3\.00 processes .* below 0\.5\. .* --beside-others"):
        everything.check_idle(3.0, False)


def test_parts_are_chosen_by_name():
    assert [part.name for part in everything.chosen_parts("serving,steps")] == ["serving", "steps"]
    with pytest.raises(SystemExit, match="There is no part sevring; there are fit, steps, "):
        everything.chosen_parts("sevring")
    names = [part.name for part in everything.PARTS]
    assert len(set(names)) == len(names)


def test_all_times_that_guides_quote_are_measured():
    """And each block of a page that is written has its mark there."""
    quoted = {name for page in PAGES for name in re.findall(r"python -m benchmarks\.(\w+)", page.read_text())}
    measured = {command for part in everything.PARTS for command in re.findall(r"^benchmarks\.(\w+)", part.command)}
    assert quoted - {*NOT_TIMES, *BY_HAND, "all"} <= measured
    for part in everything.PARTS:
        if part.page:
            assert with_printed((ROOT / "docs" / part.page).read_text(), part.name, "new")
    assert with_printed((ROOT / "docs" / "performance.md").read_text(), "answers", "new")
    assert with_printed((ROOT / "README.md").read_text(), "beside", "new")


def test_a_part_that_takes_too_long_is_ended():
    begin = "import time; time.sleep(60)"
    lines, trouble = everything.ended(["timeit", "-n", "1", "-r", "1", begin], 0.3)
    assert (lines, trouble) == ([], "ended: it takes longer than 0 minutes")
    lines, trouble = everything.ended(["timeit", "-n", "1", "raise ValueError('why')"], 20)
    assert (lines, trouble) == ([], "failed with 1: ValueError: why")
    lines, trouble = everything.ended(["platform", "--terse"], 20)
    assert (len(lines), trouble) == (1, "")


def test_what_is_printed_is_kept_and_no_part_begins_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(everything, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(everything, "ended", lambda arguments, limit_s: (["| a |", arguments[-1]], ""))
    monkeypatch.setattr(everything.time, "monotonic", lambda: 100.0)
    parts = everything.chosen_parts("serving,pipelines")
    everything.measure(parts[:1], tmp_path, False, end=101.0)
    everything.measure(parts[1:], tmp_path, False, end=99.0)
    assert [path.name for path in tmp_path.iterdir()] == ["serving.printed.json"]
    output = everything.read_printed(tmp_path / "serving.printed.json")
    assert output is not None
    command = "benchmarks.serving --rows 1,8,64,256,1024 --growth 1,8,64"
    assert (output.command, output.lines) == (command, ["| a |", "1,8,64"])
    assert everything.read_printed(tmp_path / "pipelines.printed.json") is None
    assert "pipelines: no time is left; --only pipelines measures it" in capsys.readouterr().out


def test_what_pages_show_of_what_was_printed():
    printed = everything.Printed("benchmarks.x --a", 1.0, ["first", "  | a |", "  |---|", "end", "more"], ENVIRONMENT)
    head = "`python -m benchmarks.x --a`, 2026-11-28, graphsplit 1.0.0rc1, TensorFlow 2.21.0, 2 cores of AMD EPYC:\n\n"
    assert everything.table_or_block(printed) == head + "| a |\n|---|\n\nend\n\nmore"
    printed.lines = ["first", "  second"]
    assert everything.table_or_block(printed) == head + "```\nfirst\n  second\n```"
    page = "a\n<!-- measured: x -->\nold\n<!-- end of x -->\nb\n"
    assert with_printed(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no <!-- measured: y -->"):
        with_printed(page, "y", "new")


def test_fit_is_measured_first_and_by_all():
    cells = choose_cells("full", [], [], [])
    assert cells[:3] == [Cell("mlp", "fit", 4), Cell("resnet50", "fit", 4), Cell("transformer", "fit", 4)]
    assert contestants_of(cells[0], list(CONTESTANTS)) == list(CONTESTANTS)
    assert contestants_of(cells[3], list(CONTESTANTS)) == ["plain", "towers", "mirrored", "graphsplit"]


def test_the_page_says_when_and_where_and_compares_fit():
    text = report.page(results(), "`here`", "rows.md", [])
    assert text.startswith(f"# Measurements\n\n{WHERE}; 0.1 processes wanted to run in the minute before. ")
    assert "| mlp | 200 ms | **100 ms** | 400 ms | 300 ms | 500 ms |" in text
    assert "| resnet50 | 2.0 s | **1.0 s** | 4.0 s | 3.0 s | - |" in text
    assert "Left out: resnet50, Keras on JAX, DataParallel: no module named jax." in text
    assert "| mlp | training | 150 / 100: **1.50** | 150 / 100: **1.50** |" in text
    assert "* mlp training on 2 devices: step as a multiple of towers's: 1.50, goal 1.02 or less" in text
    assert "**ResNet50 in `fit`, on logical CPU devices.**" in text
    assert "rounds of\nabout 3.0 s" in text


def test_a_fit_that_loses_is_said():
    slow = results()
    for record in slow.records:
        if (record.mode, record.contestant, record.workload) == ("fit", "graphsplit", "resnet50"):
            record.step_s, record.first_s = [0.25, 0.25], {"total": 3.5}
    text = report.page(slow, "`here`", "rows.md", [])
    assert "* resnet50 fit on 4 devices: step as a multiple of plain's: 1.25, goal 1 or less" in text
    assert "* resnet50 fit on 4 devices: first batch as a multiple of towers's: 1.17, goal 1 or less" in text
    assert "first batch as a multiple of mirrored's" not in text


def test_the_answers_of_the_page_on_performance():
    table = report.answers(results())
    assert "| nothing: 0.75 to 0.75 of the time of the plain `tf.function`, over 1 programs in training |" in table
    assert "| no slower in 0 of 2 rows, slower in 2, by at most 50 per cent |" in table
    assert "| 0.37 to 0.37 of its time |" in table


def test_the_chart(tmp_path: Path):
    bars = beside.heights(results(), "resnet50", 4)
    assert bars["a batch"]["mirrored"] == (pytest.approx(2.0), "400 ms")
    assert "jax" not in bars["a batch"]
    path = tmp_path / "beside.png"
    beside.draw(results(), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_pages_are_written_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    docs, folder = tmp_path / "docs", tmp_path / "measured"
    (docs / "generated").mkdir(parents=True)
    folder.mkdir()
    monkeypatch.setattr(everything, "DOCS", docs)
    monkeypatch.setattr(everything, "ROWS", tmp_path / "rows.md")
    monkeypatch.setattr(everything, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("<!-- measured: beside -->\n<!-- end of beside -->\n")
    (docs / "performance.md").write_text("<!-- measured: answers -->\n<!-- end of answers -->\n")
    (docs / "serving.md").write_text("<!-- measured: serving -->\n<!-- end of serving -->\n")
    shown = results()
    shown.records = [record for record in shown.records if record.contestant != "graphsplit" or record.mode == "fit"]
    fits, steps = shown.of("fit"), shown.of("training", "forward")
    steps.environment = {**ENVIRONMENT, "load_average": 2.0}  # of the part before
    fits.save(folder / "fit.json")
    steps.save(folder / "steps.json")
    for name in ("serving", "pipelines"):
        printed = {"command": f"benchmarks.{name}", "seconds": 1.0, "lines": [name], "environment": ENVIRONMENT}
        (folder / f"{name}.printed.json").write_text(json.dumps(printed))
    everything.write_pages(folder)
    assert "```\nserving\n```" in (docs / "serving.md").read_text()
    text = (docs / "generated" / "measurements.md").read_text()
    assert f"{WHERE}; 0.1 processes wanted to run in the minute before." in text
    assert "| mlp | 200 ms | **100 ms** | 400 ms | 300 ms | 500 ms |" in text
    assert "## What guides quote\n\n### Pipelines\n\n`python -m benchmarks.pipelines`, 2026-11-28, " in text
    assert (docs / "beside.png").stat().st_size > 1000
    assert (tmp_path / "rows.md").exists()
    readme = (tmp_path / "README.md").read_text()
    assert f"](docs/beside.png)\n\n*Keras' `fit` on 4 logical devices, {WHERE}.\n" in readme
    assert len(readme.splitlines()) == 6  # as many as stand there today: the README has 120 at most
