"""The package stays small: `budget.txt` has the most lines of code that it may have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.code_lines import HEART, code_lines, javascript_lines, python_lines

ROOT = Path(__file__).parent.parent
SLACK = 200  # a budget that is higher than needed by more than this is no budget


def read_budget(text: str) -> dict[str, int]:
    """Return the numbers of `budget.txt` by name."""
    return {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def complaints(budget: dict[str, int], counted: dict[str, int]) -> list[str]:
    """Return what is over its budget, and whose budget could be lowered."""
    over = [f"{name}: {counted[name]} lines of code, {budget[name]} allowed" for name in budget]
    low = [f"{name}: {counted[name]} lines of code; lower the budget of {budget[name]}" for name in budget]
    too_many = [text for name, text in zip(budget, over, strict=True) if counted[name] > budget[name]]
    too_few = [text for name, text in zip(budget, low, strict=True) if counted[name] < budget[name] - SLACK]
    return too_many + too_few


def test_the_package_is_within_its_budget():
    """A commit that raises a number of `budget.txt` says what for."""
    budget = read_budget((ROOT / "tests" / "budget.txt").read_text())
    assert list(budget) == ["total", "heart", "around"]
    assert complaints(budget, code_lines(ROOT / "graphsplit")) == []


def test_a_budget_that_does_not_fit_is_found():
    counted = {"total": 30, "heart": 20, "around": 10}
    assert complaints(counted, counted) == []
    assert complaints({**counted, "heart": 19}, counted) == ["heart: 20 lines of code, 19 allowed"]
    assert complaints({**counted, "total": 30 + SLACK}, counted) == []
    assert complaints({**counted, "total": 31 + SLACK}, counted) == ["total: 30 lines of code; lower the budget of 231"]


@pytest.mark.parametrize(
    ("source", "lines"),
    {
        '"""Module."""\n\nimport os\nfrom a import (\n    b,\n)\n': 0,
        'def f(x):\n    """Doc\n    string."""\n    # why\n    return (\n        x\n    )\n': 4,
        'class A:\n    """Only a docstring."""\n': 1,
        'text = """\n\nlines of a value\n"""\n': 4,
        "x = 1  # a comment\n": 1,
    }.items(),
)
def test_lines_of_python(source: str, lines: int):
    assert python_lines(source) == lines


def test_lines_of_javascript():
    assert javascript_lines("// a\n/* b\nc */\n\nlet x = 1; // d\n  // e\n") == 1


def test_the_heart_is_in_the_package():
    assert [name for name in HEART if not (ROOT / "graphsplit" / name).is_dir()] == []
