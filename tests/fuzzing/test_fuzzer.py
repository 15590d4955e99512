"""The fuzzer itself: it is able to find what is wrong, to make it small, and it tries every op that has a rule."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from graphsplit.core.tensorflow_internals import registered_kernels
from graphsplit.planning.variables import division
from graphsplit.program.program import Op
from graphsplit.rules import registry, ruled_types
from graphsplit.rules.factors import Factors
from tests.fuzzing.__main__ import NotStartedError, ended, main, outcomes, parse
from tests.fuzzing.catalog import CATALOG
from tests.fuzzing.generator import generate, grow
from tests.fuzzing.oracle import distance, judge
from tests.fuzzing.program import ROWS, Input, Line, Program, Setting
from tests.fuzzing.scope import Scope
from tests.fuzzing.shrinker import shrink
from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, UNSTABLE, Verdict

pytestmark = [pytest.mark.usefixtures("plain_oracle"), pytest.mark.filterwarnings("ignore")]
ENOUGH = 40  # programs with the op, of which one shows that its rule is wrong
TRIES = 60

X = Input("x0", "random.standard_normal({})", (ROWS, 3), "float64", 0)


def program(*expressions: str, **setting: object) -> Program:
    lines = tuple(Line(f"v{i}", expression) for i, expression in enumerate(expressions))
    chosen = dataclasses.replace(Setting(devices=2), **setting)  # type: ignore[arg-type]
    return Program((X,), (), lines, (lines[-1].target,), chosen)


@pytest.fixture
def broken_cumsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each shard begin its running sums at zero."""

    def all_axes(op: Op) -> Factors:
        dims = tuple(range(len(op.out_shapes[0] or ())))
        return Factors((dims, ()), (dims,))

    monkeypatch.setitem(registry._RULES, "Cumsum", registry.Rule(all_axes))


def test_a_broken_rule_is_found_and_made_small(broken_cumsum: None) -> None:
    programs = (generate(seed, "forward", ["Cumsum", "cumsum"]) for seed in range(ENOUGH))
    failing, verdict = next((p, v) for p in programs if (v := judge(p)).kind == DIFFERENT)
    small = shrink(failing, lambda candidate: judge(candidate).is_like(verdict))
    assert judge(small).kind == DIFFERENT
    assert len(small.lines) == 1
    assert "umsum" in small.lines[0].expression


@pytest.mark.long
def test_a_wrong_slice_of_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: each part of a variable takes the bounds of a slice as the whole has them."""
    monkeypatch.setattr(division, "resized", lambda op, how, own: {r.operand: r.value for r in how.resize})
    programs = (generate(seed, "layouts", ["w:ab}[-", "w:ab}[:"]) for seed in range(ENOUGH))
    failing, verdict = next((p, v) for p in programs if (v := judge(p)).failed)
    small = shrink(failing, lambda candidate: judge(candidate).is_like(verdict), 20.0)
    assert any(w.layout == "sharded" for w in small.variables)


def test_the_shrinker_keeps_what_fails_and_little_else() -> None:
    """A planted defect: whatever takes a hyperbolic tangent on three devices and more."""
    long = program(
        "x0 * 2.0", "tf.cumsum(v0, 1)", "tf.tanh(v1 + x0)", "tf.concat([v2, v0], 1)", devices=5, shares=(1,) * 5
    )
    small = shrink(long, lambda p: "tf.tanh" in p.source and p.setting.devices > 2)
    assert [line.expression for line in small.lines] == ["tf.tanh(x0)"]
    assert small.setting == Setting(devices=5, by_default=True)


def test_programs_are_judged() -> None:
    assert judge(program("tf.tanh(x0)", "tf.reduce_sum(v0, 0)")) == Verdict(EQUAL)
    assert judge(program("tf.matmul(x0, x0)")).kind == NOT_TRACEABLE


def test_a_decision_that_hangs_on_roundings_is_unstable(broken_cumsum: None) -> None:
    wrong = "1e-13 * tf.cumsum(x0, 0)"
    assert judge(program(wrong, "tf.reduce_sum(x0)", "tf.reduce_sum(x0[::-1])", "v0 + v1 - v2")).kind == UNSTABLE
    assert judge(program(wrong)).kind == DIFFERENT


def test_zeros_of_a_function_that_is_differentiated_twice_are_no_gradient() -> None:
    """By the transforms of an image there is none, and TensorFlow says so in eager code."""
    images = Input("x0", "random.standard_normal({})", (ROWS, 4, 5, 2), "float64", 0)
    transforms = Input("x1", "random.standard_normal({}).astype('f')", (1, 8), "float32")
    operands = "images=x0, transforms=x1, output_shape=[3, 4], interpolation='BILINEAR'"
    line = Line("v0", f"tf.raw_ops.ImageProjectiveTransformV2({operands})")
    twice = Program((images, transforms), (), (line,), ("v0",), Setting(outside=2))
    found = twice.load()["results"](False)
    assert found[0][0][0][1][1] is not None
    assert judge(twice).kind == EQUAL


def test_what_raises_on_several_devices_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(op: Op) -> Factors:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(registry._RULES, "Tanh", registry.Rule(rule))
    assert judge(program("tf.tanh(x0)")) == Verdict(RAISED, "ZeroDivisionError: planted")


def test_a_seed_is_a_program() -> None:
    assert generate(5).source == generate(5).source
    assert len({generate(seed).source for seed in range(5)}) == 5


@pytest.mark.long
def test_a_program_is_a_script(tmp_path: Path) -> None:
    source = program("tf.tanh(x0)", inside=1).source
    path = tmp_path / "script.py"
    path.write_text(source)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    single, several = done.stdout.split("several:")
    assert single.removeprefix("one device:").strip() == several.strip()


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0),
        ([1.0], [np.nan], np.inf),
        ([3], [5], 2),
        ([b"a"], [b"b"], np.inf),
        ([], [], 0),
    ],
)
def test_distance(a: list[object], b: list[object], apart: float) -> None:
    assert distance(np.array(a), np.array(b)) == apart


@pytest.mark.long
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(parse(["--programs", "3", "--seed", "1", "--mode", "forward", "--ops", "Neg"])) == 0
    counts = capsys.readouterr().out
    assert re.search(r"^forward +3 ", counts, re.MULTILINE)
    assert re.search(r"^all +3 ", counts, re.MULTILINE)


def test_a_process_that_dies_is_an_outcome() -> None:
    at_work = {"seed": 7, "doing": "several devices"}
    assert ended(at_work, "the process ended with -11") == {
        "seed": 7,
        "mode": "?",
        "kind": RAISED,
        "message": "several devices: the process ended with -11",
        "source": "",
    }
    assert ended({"seed": 7, "doing": "one device"}, "")["kind"] == NOT_TRACEABLE


@pytest.mark.parametrize(("failures", "seeds"), [(1, [3, 4]), (2, None)])
def test_a_process_that_does_not_start_is_tried_again(
    failures: int, seeds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [{"seed": 3, "doing": "starting"}] * failures

    def process(first: int, count: int, *_: object) -> Iterator[dict[str, object]]:
        if left:
            ended(left.pop(), "the process ended with 1")
        yield from ({"seed": seed} for seed in range(first, first + count))

    monkeypatch.setattr("tests.fuzzing.__main__._process", process)
    run = outcomes(3, 2, "", "", float("inf"))
    if seeds is None:
        with pytest.raises(NotStartedError, match=r"^The worker does not start: the process ended with 1\. Run python"):
            list(run)
    else:
        assert [outcome["seed"] for outcome in run] == seeds


@pytest.mark.parametrize("times", [1, 2])
def test_what_takes_too_long_is_tried_again(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [4] * times

    def process(first: int, count: int, *_: object) -> Iterator[dict[str, object]]:
        for seed in range(first, first + count):
            if seed in left:
                left.remove(seed)
                yield {"seed": seed, "late": True}
                return
            yield {"seed": seed}

    monkeypatch.setattr("tests.fuzzing.__main__._process", process)
    found = list(outcomes(3, 3, "", "", float("inf")))
    assert [outcome["seed"] for outcome in found] == [3, 4, 5]
    assert ["late" in outcome for outcome in found] == [False, times == 2, False]


def test_a_process_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said what became of all its programs."""
    said = json.dumps({"seed": 3, "done": True, "kind": "equal", "message": "", "mode": "forward"})
    start, script = subprocess.Popen, f"import time; print({said!r}, flush=True); time.sleep(600)"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", script], **options))
    monkeypatch.setattr("tests.fuzzing.__main__.MOST_SECONDS", 0.1)
    assert [outcome["seed"] for outcome in outcomes(3, 1, "", "", float("inf"))] == [3]


def unused(templates: Sequence[str], tries: int) -> list[str]:
    """Return the templates of which no line can be made."""
    return [
        t for t in templates if not any(grow(Scope(np.random.default_rng(i), (3,), False), [t]) for i in range(tries))
    ]


def op_types(templates: Iterable[str]) -> set[str]:
    return {op for template in templates for op in re.findall(r"tf\.raw_ops\.(\w+)", template)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", CATALOG)
def test_every_template_makes_lines(family: str) -> None:
    assert unused(CATALOG[family], TRIES) == []


def test_ops() -> None:
    """Every type that has a rule is tried, and many that have none. (That their templates work is tested above.)"""
    made = op_types(template for templates in CATALOG.values() for template in templates)
    others = ruled_types() - made
    cudnn = {op_type for op_type in others if op_type.startswith("CudnnRNN")}
    assert not any("CPU" in {kernel.device_type for kernel in registered_kernels(t)} for t in cudnn)  # no oracle here
    # tf.raw_ops has it not; its conformance cases do. The others stand in programs in place of branches only.
    assert others - cudnn == {"XlaDynamicUpdateSlice", "Switch", "Merge"}
    assert len(made - ruled_types()) >= 150


def test_coverage_can_fail() -> None:
    assert unused(["tf.matmul({f:23}, {f:23})", "tf.tanh({f})"], 5) == ["tf.matmul({f:23}, {f:23})"]
    assert op_types(["tf.raw_ops.Add(x={f}, y=tf.raw_ops.Neg(x={f}))", "tf.tanh({f})"]) == {"Add", "Neg"}
