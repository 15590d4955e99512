"""How much of a processor each test takes, as `tests/durations.txt` has it: what takes long runs with `-m long` only.

As a plugin of pytest it records that: `ci/durations.py` runs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FILE = TESTS / "durations.txt"
LONG_S = 5
"""What takes more seconds of a processor is long, if its function does not say how many cases run by default."""

HEAD = f"""\
# Seconds of a processor that the slowest case of a test function takes, if that is more than one, with all processes
# that it starts. What takes more than {LONG_S} is long (see CONTRIBUTING.md). Written by `python ci/durations.py`.
"""
STEPS = (1, 2, 3, 4, 5, 7, 10)
NOTED = "processor_s"


def read() -> dict[str, float]:
    """Return the seconds of each function, by its file and its name: `fuzzing/test_seeds.py::test_seed`."""
    lines = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {function: float(seconds) for function, seconds in lines}


def text(seconds: Mapping[str, float]) -> str:
    """Return the file."""
    return HEAD + "".join(f"{function} {seconds[function]:g}\n" for function in sorted(seconds))


def updated(before: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return what stands in the file after a run.

    A number that the run differs from by less than a half stays, so that most lines do.

    Args:
      before: what stands there.
      seconds: of the functions that ran; what did not run stays as it was, if there still is a test of that name.
    """
    after = {function: stands for function, stands in before.items() if function not in seconds and exists(function)}
    for function, measured in seconds.items():
        stands = before.get(function, 0)
        after[function] = stands if stands / 1.5 <= measured <= stands * 1.5 else rounded(measured)
    return {function: kept for function, kept in after.items() if kept > 1}


def rounded(seconds: float) -> float:
    """Return the next of 1, 2, 3, 4, 5, 7, 10, 20, 30, ..."""
    tens = 1
    while seconds > 10 * tens:
        tens *= 10
    return next(float(step * tens) for step in STEPS if seconds <= step * tens)


def exists(function: str) -> bool:
    """Return whether there is a test function of this name."""
    file, _, name = function.partition("::")
    path = TESTS / file
    return path.is_file() and f"def {name}(" in path.read_text()


def function_of(nodeid: str) -> str:
    """Return what names the function of a case, `tests/test_rules.py::test_made_in_pieces[7-Cumsum]`, in the file."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def processor_s() -> float:
    """Return the seconds that this process, and all that it started, have had of a processor so far.

    A process that ended is counted where its parent waited for it. (What starts processes of Python for tests waits,
    and goes on: see `processes.py`.)
    """
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended just now, and its parent has waited for it
            continue
        process = int(path.parent.name)
        parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_ours(parents[process]))

    return sum(ticks[process] for process in ticks if is_ours(process)) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note what a case takes, without its fixtures, of which other cases may have the same."""
    before = processor_s()
    try:
        return (yield)
    finally:
        item.user_properties.append((NOTED, processor_s() - before))


def pytest_configure(config: pytest.Config) -> None:
    """Collect what is noted."""
    config.pluginmanager.register(Record())


class Record:
    """The seconds of the slowest case of each function, of those that pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect a case that has run, here or in a process of pytest-xdist."""
        if report.when == "call" and report.passed:
            function = function_of(report.nodeid)
            self.seconds[function] = max(self.seconds.get(function, 0), dict(report.user_properties)[NOTED])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the file, and say what becomes long, and what is no longer."""
        before = read()
        after = updated(before, self.seconds)
        FILE.write_text(text(after), encoding="utf-8")
        for function in sorted({*before, *after}):
            was, takes = (seconds.get(function, 0) for seconds in (before, after))
            if (was > LONG_S) != (takes > LONG_S):
                terminalreporter.write_line(f"{function}: {was:g} s before, {takes:g} s now")
