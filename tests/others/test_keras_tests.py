"""Keras' own tests through graphsplit; and that what is wrong there is seen.

`python -m tests.others keras` runs all of them; so do the long tests, folder by folder.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import pages
from graphsplit.core.storage import forms
from graphsplit.rules import registry
from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, UNSTABLE
from tests.others import __main__ as main
from tests.others import processes
from tests.others.__main__ import keras as keras_command
from tests.others.__main__ import parse
from tests.others.comparison import Through
from tests.others.keras_calls import before_test, routed
from tests.others.not_ours import NOT_OURS, reason_against
from tests.others.processes import DIED, GROUPS, Options, chunks, files_of, keras_folder, run
from tests.others.records import GRAPH_DIFFERS, Calls
from tests.others.summary import Row, by_file, row, rows_by, table

# A part of each kind of tests: files, and every how many of their tests. By default two processes, which import as much
# as they run: variables in parts, and copies with micro-batches.
SHORT = {
    "a few of each": (
        [
            "layers/core/dense_test.py",
            "layers/reshaping/flatten_test.py",  # fits
            "layers/normalization/layer_normalization_test.py",
            "losses/losses_test.py",
            "metrics/regression_metrics_test.py",
            "optimizers/adam_test.py",
        ],
        Options(layout="sharded", every=15),
    ),
    "copies and micro-batches": (
        ["layers/core/einsum_dense_test.py", "layers/reshaping/flatten_test.py"],
        Options(layout="replicated", micro_batches=2, every=40),
    ),
}
PARTS = {
    **SHORT,
    "layers": (["layers/core/dense_test.py", "layers/attention/attention_test.py"], Options(every=5)),
    "losses, metrics, optimizers": (
        ["losses/losses_test.py", "metrics/regression_metrics_test.py", "optimizers/adam_test.py"],
        Options(every=7),
    ),
    "fit": (["callbacks/early_stopping_test.py", "layers/reshaping/flatten_test.py"], Options(every=3)),
    "replicated": (["layers/core/einsum_dense_test.py"], Options(layout="replicated", every=12)),
    "sharded": (["layers/normalization/layer_normalization_test.py"], Options(layout="sharded", every=3)),
    "micro-batches": (["layers/core/einsum_dense_test.py"], Options(micro_batches=2, every=13)),
}


def assert_right(found: list[dict]) -> Row:
    """Assert that tests pass through graphsplit, that their calls are equal, and that most were sharded."""
    whole = row("all", found)
    said = [f"{line['test']}: {line['message'][-800:]}" for line in found if line.get("through") in ("failed", DIED)]
    assert not whole.wrong, "\n".join([whole.wrong, *said, *whole.calls.broken()])
    return whole


@pytest.mark.long
@pytest.mark.timeout(600)  # a process each, on a machine with other work
@pytest.mark.parametrize("part", [pytest.param(p, marks=() if p in SHORT else pytest.mark.long) for p in PARTS])
def test_a_part(part: str):
    names, options = PARTS[part]
    whole = assert_right(run(files_of(names), options))
    assert whole.calls.kinds[EQUAL] > 0
    assert whole.calls.sharded > 0, whole.calls.not_routed


def folders() -> list[str]:
    """Return all folders of Keras that have tests."""
    every = [folder for group in GROUPS.values() for folder in group]
    return [str(files[0].relative_to(keras_folder()).parent) for files in chunks(files_of(every))]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("folder", dict.fromkeys(folders()))
def test_all(folder: str):
    files = [file for file in files_of([folder]) if file.parent == keras_folder() / folder]
    lines = [line for some in chunks(files) for line in run(some, Options())]
    if not row("", lines).tests:
        pytest.skip(f"no file could be imported: {sorted({line['why'] for line in lines if 'why' in line})}")
    assert_right(lines)


def test_every_folder_of_tests_is_in_a_group():
    files = {file.relative_to(keras_folder()).parts[0] for file in keras_folder().rglob("*_test.py")}
    assert files == {folder for group in GROUPS.values() for folder in group}


def through_graphsplit(use, **options) -> Calls:
    """Return what became of the calls that a function makes."""
    through = Through(**options)
    with routed(through), through.on() as calls:
        before_test(through)
        use()
    return calls


def ones(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_calls_are_compared_and_sharded():
    def use():
        layer = keras.layers.Dense(4, activity_regularizer="l2")
        assert layer(ones(7, 3)).shape == (7, 4)
        keras.layers.BatchNormalization()(layer(ones(7, 3)), training=True)
        keras.layers.Dropout(0.5)(ones(7, 3), training=True)
        keras.losses.MeanSquaredError()(ones(7, 3), ones(7, 3))
        keras.metrics.MeanSquaredError().update_state(ones(7, 3), ones(7, 3))
        keras.ops.matmul(ones(7, 3), ones(3, 2))
        assert float(layer.losses[0]) > 0  # (an eager tensor, though the layer was traced)

    calls = through_graphsplit(use)
    assert calls.kinds == {EQUAL: 7}
    assert calls.sharded == calls.with_rows == 7
    assert not calls.not_routed, calls.not_routed


def test_masks_go_through():
    def use():
        masked = keras.layers.Masking()(np.array([[[1.0], [0.0]], [[2.0], [1.0]]], "float32"))
        assert keras.src.backend.get_keras_mask(masked).numpy().tolist() == [[True, False], [True, True]]
        keras.layers.LSTM(2)(masked)

    assert through_graphsplit(use).kinds == {EQUAL: 2}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"layout": "sharded"},
        pytest.param({"layout": "replicated"}, marks=pytest.mark.long),
        {"micro_batches": 2},
    ],
    ids=str,
)
def test_steps_of_fit_evaluate_and_predict_are_compared(options: dict[str, Any]):
    def use():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])  # built by its first batch
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        model.fit(ones(7, 3), ones(7, 1), batch_size=4, verbose=0)
        model.evaluate(ones(7, 3), ones(7, 1), batch_size=4, verbose=0)
        assert model.predict(ones(7, 3), verbose=0).shape == (7, 1)

    calls = through_graphsplit(use, **options)
    assert calls.kinds == {EQUAL: 5}, calls.messages
    assert calls.sharded == 5


def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch):
    """A sum along the batch, and a product, that shards make for themselves."""

    def use():
        keras.ops.cumsum(ones(7, 3), axis=0)
        model = keras.Sequential([keras.layers.Lambda(lambda x: keras.ops.cumsum(x, axis=0)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(ones(7, 3), ones(7, 1), verbose=0)

    assert through_graphsplit(use).kinds == {EQUAL: 2}
    monkeypatch.setitem(registry._RULES, "Cumsum", registry._RULES["Tanh"])
    calls = through_graphsplit(use)
    assert calls.kinds == {DIFFERENT: 2}
    assert row("", [{"test": "a", "plain": "passed", "through": "passed", **calls.as_json()}]).wrong


def test_what_raises_is_counted_as_whose_it_is(monkeypatch: pytest.MonkeyPatch):
    class Reads(keras.layers.Layer):
        def call(self, x):
            return x * float(np.asarray(x)[0, 0])

    assert through_graphsplit(lambda: Reads()(ones(7, 3))).kinds == {NOT_TRACEABLE: 1}
    monkeypatch.setitem(registry._RULES, "Relu", object())
    found = through_graphsplit(lambda: keras.ops.relu(ones(7, 3)))
    assert found.kinds == {RAISED: 1}
    assert "AttributeError" in found.broken()[0]


def test_graphs_that_differ_from_eager_code_are_tensorflows():
    class Differs(keras.layers.Layer):
        def call(self, x):
            return x * (2.0 if tf.executing_eagerly() else 3.0)

    layer = Differs()
    results = []
    assert through_graphsplit(lambda: results.append(layer(ones(7, 3)))).kinds == {GRAPH_DIFFERS: 1}
    np.testing.assert_allclose(results[0], 2 * ones(7, 3))


def test_what_runs_without_graphsplit_is_counted():
    def use():
        keras.ops.relu([1.0, 2.0])
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(ones(7, 3), ones(7, 1), verbose=0)

    calls = through_graphsplit(use)
    assert calls.not_routed["its arguments are scalars, or lists of Python"] >= 1
    assert calls.not_routed["compiled with run_eagerly=True"] == 1


def test_all_on_one_device_is_a_failure():
    def use():
        for _ in range(25):
            keras.ops.relu(ones(7, 3))

    calls = through_graphsplit(use, devices=1)
    assert (calls.with_rows, calls.sharded) == (25, 0)
    assert "only 0 of 25" in row("", [{"test": "a", "plain": "passed", "through": "passed", **calls.as_json()}]).wrong
    assert not row("", []).wrong


def test_keras_is_what_it_was():
    before = keras.layers.Layer.__call__, keras.ops.relu, keras.src.ops.nn.relu, keras.Model.fit
    with routed(Through()):
        assert keras.ops.relu is not before[1]
    assert (keras.layers.Layer.__call__, keras.ops.relu, keras.src.ops.nn.relu, keras.Model.fit) == before


TESTS = """
import os, sys
import keras, numpy as np
from conftest import skip_if_backend

@skip_if_backend("openvino", "not supported there")
def test_passes():
    keras.ops.relu(np.ones((5, 2)))

def test_fails_plainly():
    assert False

def test_counts_traces():
    calls = []
    keras.layers.Lambda(lambda x: calls.append(1) or x)(np.ones((5, 2)))
    assert len(calls) == 1

@skip_if_backend("tensorflow", "not supported here")
def test_is_skipped():
    assert False

def test_dies():
    os._exit(3)

def test_comes_after_it():
    keras.ops.relu(np.ones((5, 2)))
"""


@pytest.mark.long  # four processes
@pytest.mark.parametrize("most", [400, 4])
def test_a_process_that_dies_is_a_line_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int):
    monkeypatch.setattr(processes, "_TESTS_PER_PROCESS", most)
    file = tmp_path / "some_test.py"
    file.write_text(TESTS)
    lines = run([file], Options())
    found = {line["test"].split("::")[1]: (line["plain"], line["through"]) for line in lines if "test" in line}
    assert found == {
        "test_passes": ("passed", "passed"),
        "test_fails_plainly": ("failed", None),
        "test_counts_traces": ("passed", "failed"),
        "test_is_skipped": ("skipped", None),
        "test_dies": (DIED, None),
        "test_comes_after_it": ("passed", "passed"),
    }
    finished = [number for line in lines for number in line.get("collected", {}).values()]
    assert finished == ([6] if most == 400 else [6, 6])


def test_rows_of_the_table():
    line = {"plain": "passed", "kinds": {EQUAL: 3, UNSTABLE: 1}, "messages": [], "not_routed": {}, "at_home": {}}
    lines = [
        {"test": "layers/core/a_test.py::A::b", "through": "passed", **line, "with_rows": 4, "sharded": 4},
        {"test": "layers/b_test.py::A::b", "through": "failed", **line, "with_rows": 1, "sharded": 0},
        {"test": "layers/b_test.py::A::c", "through": None, "plain": "failed"},
    ]
    rows = rows_by(lines, by_file)
    assert [one.name for one in rows] == ["layers/b_test.py", "layers/core/a_test.py", "all"]
    assert rows[-1].tests == Counter({"plainly": 1, "failing": 1, "equal": 1})
    assert "1 tests or calls" in rows[-1].wrong
    assert "| all | 3 | 1 | 1 | 8 | 6 | 2 | 5 | 4 |" in table(rows)


def test_sections_of_a_page():
    text = pages.with_section("# Page\n\nWords.\n", "One", "1")
    text = pages.with_section(text, "Two", "2")
    text = pages.with_section(text, "One", "one")
    assert pages.section_of(text, "One").strip() == "## One\n\none"
    assert not pages.section_of(text, "Three")
    assert text == "# Page\n\nWords.\n\n## One\n\none\n\n## Two\n\n2\n"
    assert pages.sections(f"{text}<!-- {forms.MARK} -->\n") == "## One\n\none\n\n## Two\n\n2"
    assert pages.sections("# Page\n") == ""


def test_what_is_in_the_record_does_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def each(files, options, log, done):
        asked.append(list(done))
        yield {"test": "layers/core/a_test.py::A::c", "plain": "skipped", "through": None}

    monkeypatch.setattr(main, "each", each)
    record = tmp_path / "record.jsonl"
    words = ["keras", "--record", str(record), "--resume", "layers/core/dense_test.py"]
    assert keras_command(parse(words)) == 0
    assert keras_command(parse(words)) == 0
    assert asked == [[], ["layers/core/a_test.py::A::c"]]
    assert len(record.read_text().splitlines()) == 2


def test_what_is_not_ours_exists_and_has_a_reason():
    for pattern, reason in NOT_OURS.items():
        assert len(reason) > 20
        path, _, test = pattern.partition("::")
        files = list(keras_folder().glob(path))
        assert files, pattern
        assert any(test.split("::")[0] in file.read_text() for file in files), pattern
        name = test.rpartition("::")[2].partition("*")[0].rstrip("_")  # (absl numbers cases, or names them)
        assert any(name in file.read_text() for file in files), pattern
        assert reason_against(pattern.replace("*", "x")) == reason
    assert not reason_against("layers/core/dense_test.py::DenseTest::test_dense_basics")


def test_no_such_tests():
    with pytest.raises(FileNotFoundError, match="nonsense"):
        files_of(["nonsense"])
    assert gs.available_devices()


def test_records_are_read_and_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    line = {"plain": "passed", "through": "passed", "kinds": {EQUAL: 3}, "messages": [], "not_routed": {}}
    line |= {"at_home": {"Sum: why": 1}, "with_rows": 30, "sharded": 30, "message": ""}
    [listed] = [pattern.replace("*", "x") for pattern in NOT_OURS][:1]
    lines = [
        {"test": "layers/core/a_test.py::A::b", **line, "through": "failed"},
        {"test": "layers/core/a_test.py::A::b", **line},
        {"test": listed, **line, "through": "failed"},
        {"test": "layers/core/a_test.py::A::b", **line, "how": Options(2, "sharded").how},
        {"not_collected": "layers/b_test.py", "why": "ModuleNotFoundError: No module named 'jax'"},
        {"collected": {"layers/core/a_test.py": 7}},
    ]
    lines[1]["messages"] = [f"{NOT_TRACEABLE}: Dense: it reads {number}" for number in (1, 2.5)]
    record, written = tmp_path / "record.jsonl", tmp_path / "page.md"
    record.write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.setattr(pages, "COVERAGE", written)
    assert keras_command(parse(["keras", "--read", str(record), "--page"])) == 0
    text = written.read_text()
    assert "| layers/core | 1 | 0 | 3 | 3 | 30 | 30 |" in text
    assert "| 2 devices, variables sharded | 1 | 0 | 3 | 3 | 30 | 30 |" in text
    assert "2 tests of 2 files made 3 calls that went through graphsplit: 3 equal, 0 different or raised, 0 ref" in text
    assert "* `layers/b_test.py`: ModuleNotFoundError: No module named 'jax'." in text
    assert "* 6 of 7 tests in `layers`." in text
    assert "`layers/core/dense_test.py`" in text
    assert "* 2 x not traceable: Dense: it reads N." in text
    record.write_text(json.dumps({"test": "layers/core/a_test.py::A::b", **line, "sharded": 0}) + "\n")
    assert keras_command(parse(["keras", "--read", str(record)])) == 1
    assert "only 0 of 30 programs" in capsys.readouterr().out
