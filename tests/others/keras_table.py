"""What became of Keras' tests, as a section of the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.fuzzing.verdicts import EQUAL, NOT_TRACEABLE, REFUSED
from tests.others.not_ours import NOT_OURS
from tests.others.processes import GROUPS, Options, files_of, keras_folder
from tests.others.records import GRAPH_DIFFERS, Calls
from tests.others.summary import Row, by_file, by_folder, by_way, row, rows_by, table

_SHOWN, _LETTERS = 12, 160


def document(lines: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page; the first table is of those with the usual options."""
    usual = [line for line in lines if line.get("how", Options().how) == Options().how]
    return _SECTION.format(
        usual=Options().how,
        said=said(usual),
        folders=table(rows_by(usual, by_folder)),
        ways=table(rows_by(lines, by_way)[:-1]),
        reasons=_listed(_reasons(lines)),
        not_run=_listed(not_run(usual)),
        not_ours=_listed(f"`{pattern}`: {reason}" for pattern, reason in NOT_OURS.items()),
    )


def said(lines: Sequence[dict[str, Any]]) -> str:
    """Return the counts in words."""
    whole = row("all", lines)
    files, kinds = len({by_file(line) for line in lines if "test" in line}), whole.calls.kinds
    return (
        f"{sum(whole.tests.values()):,} tests of {files} files made {sum(kinds.values()):,} calls that went through "
        f"graphsplit: {kinds[EQUAL]:,} equal, {_broken(whole)} different or raised, {kinds[REFUSED]} refused. "
        f"{whole.calls.sharded:,} of the {whole.calls.with_rows:,} calls with rows ran on several devices."
    )


def _broken(whole: Row) -> int:
    return sum(number for kind, number in whole.calls.kinds.items() if kind in Calls.OURS)


def _reasons(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return what calls said that were not equal, with how many said it."""
    messages = Counter(
        _short(message)
        for line in lines
        for message in line.get("messages", ())
        if message.split(":")[0] in (REFUSED, NOT_TRACEABLE, GRAPH_DIFFERS, *Calls.OURS)
    )
    found = [f"{number} x {message}" for message, number in messages.most_common(_SHOWN)]
    rest = sum(messages.values()) - sum(number for _, number in messages.most_common(_SHOWN))
    return [*found, *([f"{rest} x others"] if rest else [])]


def _short(message: str) -> str:
    """Return a message without what differs from call to call."""
    words = " ".join(re.sub(r"\x1b\[\d*m|0x[0-9a-f]+", "", message).split())
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", words)[:_LETTERS].replace("|", "/").replace("`", "")


def not_run(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many tests of each folder did not run, and which files were not read, or could not be, and why."""
    known = {file: number for line in lines for file, number in line.get("collected", {}).items()}
    ran = Counter(by_file(line) for line in lines if "test" in line)
    unread = {line["not_collected"].rpartition("keras/src/")[2]: line["why"] for line in lines if "why" in line}
    left, whole = Counter[str](), Counter[str]()
    for file, number in known.items():
        folder = file.split("/")[0]
        whole[folder] += number
        left[folder] += max(number - ran[file], 0)
    found = [
        f"{number:,} of {whole[folder]:,} tests in `{folder}`" for folder, number in sorted(left.items()) if number
    ]
    files = [str(path.relative_to(keras_folder())) for path in files_of(f for group in GROUPS.values() for f in group)]
    missing = [file for file in files if file not in ran and file not in known and file not in unread]
    found += [f"all of {', '.join(f'`{file}`' for file in missing)}"] if missing else []
    reasons = {
        why: sorted(f"`{file}`" for file in unread if unread[file] == why) for why in sorted(set(unread.values()))
    }
    return [*found, *[f"{', '.join(group)}: {why}" for why, group in reasons.items()]]


def _listed(items: Any) -> str:
    return "\n".join(f"* {item.rstrip('.')}." for item in items) or "* nothing."


_SECTION = """
These are the tests of the Keras package, unchanged. Each call of a layer, operation, loss, metric or optimizer, and
each step of `fit`, `evaluate` and `predict`, runs twice from the same state: plainly, and through graphsplit. Results
and variables are compared, and the test's assertions are checked as well.

On {usual}, {said}

{folders}

| column | meaning |
|---|---|
| failing plainly | tests that also fail without graphsplit, and so do not count |
| failing | tests that pass plainly, and fail through graphsplit |
| not ours | tests that are left out; the reasons are [below](#left-out) |
| rounding decides | calls whose results change as much if their arguments change in the last place |
| TensorFlow's own | calls for which a `tf.function` raises an error, too, or differs as much from the eager call |
| refused | calls for which graphsplit says that it does not support them |
| with rows, sharded | calls with a batch of two rows or more, and those of them that ran on several devices |

Columns that are zero everywhere are left out.

Some of the tests ran with other options as well:

{ways}

Messages of the calls that are not equal:

{reasons}

Files that did not run when this page was made:

{not_run}

### Left out

These tests say nothing about graphsplit:

{not_ours}

`python -m tests.others keras --record FILE` for each set of options, and then
`python -m tests.others keras --read FILE ... --page`, make these tables. A test that fails also runs plainly, in a
separate process.
"""
