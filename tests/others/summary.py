"""What ran, by file or folder of tests, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, REFUSED, UNSTABLE
from tests.others.processes import Options
from tests.others.records import GRAPH_DIFFERS, Calls

LEAST_SHARDED = 0.5  # of the programs with rows: below that, too little was tested
_ENOUGH = 20  # programs, for that to be said
_TITLES = (
    "tests",
    "failing plainly",
    "not ours",
    "failing",
    "calls",
    "equal",
    "rounding decides",
    "TensorFlow's own",
    "refused",
    "different",
    "raised",
    "with rows",
    "sharded",
)


@dataclass(frozen=True)
class Row:
    """Counts of some files' tests and calls."""

    name: str
    tests: Counter[str]
    calls: Calls

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return what `_TITLES` name."""
        kinds, tests = self.calls.kinds, self.tests
        return (
            sum(tests.values()),
            tests["plainly"],
            tests["not ours"],
            tests["failing"],
            sum(kinds.values()),
            kinds[EQUAL],
            kinds[UNSTABLE],
            kinds[NOT_TRACEABLE] + kinds[GRAPH_DIFFERS],
            kinds[REFUSED],
            kinds[DIFFERENT],
            kinds[RAISED],
            self.calls.with_rows,
            self.calls.sharded,
        )

    @property
    def wrong(self) -> str:
        """Return what makes a run a failure; nothing if it is none."""
        kinds, calls = self.calls.kinds, self.calls
        broken = self.tests["failing"] + kinds[DIFFERENT] + kinds[RAISED]
        if broken:
            return f"{broken} tests or calls fail through graphsplit"
        if calls.with_rows >= _ENOUGH and calls.sharded < LEAST_SHARDED * calls.with_rows:
            return f"only {calls.sharded} of {calls.with_rows} programs with rows ran on several devices"
        return ""


def row(name: str, lines: Iterable[dict[str, Any]]) -> Row:
    """Return the counts of tests' lines."""
    tests: Counter[str] = Counter()
    lines = [line for line in lines if "test" in line]
    for line in lines:
        tests[_kind(line)] += 1
    return Row(name, tests, Calls.total(line for line in lines if "kinds" in line))


def _kind(line: dict[str, Any]) -> str:
    if line["plain"] != "passed":
        return "not ours" if line["plain"] == "not ours" else "skipped" if line["plain"] == "skipped" else "plainly"
    return "equal" if line["through"] == "passed" else "failing"


def rows_by(lines: Sequence[dict[str, Any]], place: Callable[[dict[str, Any]], str]) -> list[Row]:
    """Return the counts of each place, with a sum at the end; `place` names that of a test's line."""
    lines = [line for line in lines if "test" in line]
    places = sorted({place(line) for line in lines})
    return [*[row(p, [line for line in lines if place(line) == p]) for p in places], row("all", lines)]


def by_file(line: dict[str, Any]) -> str:
    """Return the file of a test."""
    return str(line["test"]).split("::")[0]


def by_folder(line: dict[str, Any]) -> str:
    """Return the folder of a test, two levels deep."""
    return "/".join(by_file(line).split("/")[:-1][:2])


def by_way(line: dict[str, Any]) -> str:
    """Return how a test went through graphsplit."""
    return str(line.get("how", Options().how))


def table(rows: Sequence[Row]) -> str:
    """Return the counts as a table in Markdown; columns of zeros are left out."""
    used = [i for i in range(len(_TITLES)) if any(one.numbers[i] for one in rows)]
    head = ["", *[_TITLES[i] for i in used]]
    lines = [head, ["---"] + ["---:"] * len(used)]
    lines += [[one.name, *[f"{one.numbers[i]:,}" for i in used]] for one in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
