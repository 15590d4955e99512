"""What `tests/durations.txt` says after a run, and what a test is counted for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import durations

READ, SAMPLED = "test_durations.py::test_a_number_changes_if_it_is_far_off", "test_rules.py::test_made_in_pieces"
GONE = "test_rules.py::test_that_was_renamed"


@pytest.mark.parametrize(
    ("before", "measured", "after"), [(7, 5.1, 7), (7, 10.1, 7), (7, 4.1, 5), (7, 11, 20), (7, 0.4, None), (0, 5.1, 7)]
)
def test_a_number_changes_if_it_is_far_off(before: float, measured: float, after: float | None):
    updated = durations.updated({READ: before, SAMPLED: 3, GONE: 9} if before else {SAMPLED: 3}, {READ: measured})
    assert updated == {SAMPLED: 3} | ({READ: after} if after else {})


def test_numbers_are_few():
    rounded = {seconds: durations.rounded(seconds) for seconds in (0.2, 4.9, 5.1, 10, 12, 31, 70, 230)}
    assert list(rounded.values()) == [1, 5, 7, 10, 20, 40, 70, 300]


@pytest.mark.parametrize(
    "nodeid", ["tests/test_rules.py::test_made_in_pieces[7-[a::b]]", "tests/test_rules.py::test_made_in_pieces"]
)
def test_the_function_of_a_case(nodeid: str):
    assert durations.function_of(nodeid) == SAMPLED


def test_work_of_processes_counts():
    before = durations.processor_s()
    subprocess.run([sys.executable, "-S", "-c", "sum(range(20_000_000))"], check=True)
    assert durations.processor_s() > before
