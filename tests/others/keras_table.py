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
The tests in Keras' own wheel, unchanged, with each call of a layer, an operation, a loss, a metric, an optimizer, and
each step of `fit`, `evaluate` and `predict`, going through graphsplit on logical CPU devices. Each call is run both
ways from the same state, and its results and variables are compared, besides what the test itself asserts. A test that
fails is run plainly, too, in a process of its own. To make these tables: `python -m tests.others keras --record FILE`,
for each of the options, then `python -m tests.others keras --read FILE ... --page`.

On {usual}, {said}

{folders}

* *failing plainly*: of no account here. *failing*: pass plainly, and fail through graphsplit.
* *rounding decides*: a change in the last place of what goes in does as much. *TensorFlow's own*: a `tf.function`
  raises too, or differs from the eager call as much.
* *refused*: graphsplit says that it does not do this.
* *with rows*: programs with a batch of two rows or more; *sharded*: those of them that ran on several devices.
* Columns that are zero everywhere are left out.

Those, and parts of them in other ways:

{ways}

What calls said that are not equal:

{reasons}

What did not run when this page was made:

{not_run}

What says nothing of graphsplit, and is left out:

{not_ours}
"""
