"""`python ci/pairs.py` writes `docs/generated/pairs.md`: what is equal to one device beside what, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = """\
# Options beside each other

Each pair of what a user combines: options of `parallelize`, axes of a mesh, layouts of variables, what a function does,
and how it is called. `=` is equal to one device, `x` is [refused](#refused) in a sentence that names both; of two with
an empty cell nobody can ask for both. A test runs a training step for each pair (`tests/helpers/pairs.py` has them),
and compares results and variables in float64. What more than two options do together is tested for
[some](../large_layers.md), and drawn at random by the fuzzer.

"sharded" and the like beside an axis of a mesh is `((None, "model"), "sharded")`. `python ci/pairs.py`
writes this page."""
SAID = """\
## Equal, and slower

These pairs have one device's numbers, but bring less than each alone. The plan says so:"""


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "generated" / "pairs.md").write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.pairs import FEATURES, NOTED, REFUSED, are_alternatives

    names, cells = list(FEATURES), dict[tuple[str, str], str]()
    for k, one in enumerate(names):
        for other in names[k + 1 :]:
            found = " " if are_alternatives(one, other) else "x" if (one, other) in REFUSED else "="
            cells[one, other] = cells[other, one] = found
    rows = [["", "", *[str(k + 1) for k in range(len(names))]], ["---"] * (len(names) + 2)]
    for k, one in enumerate(names):
        rows.append([str(k + 1), _code(one), *[cells.get((one, other), " ") for other in names]])
    table = "\n".join([f"| {' | '.join(row)} |" for row in rows])
    counts = [sum(found == mark for found in cells.values()) // 2 for mark in "=x"]
    count = f"{counts[0]} pairs are equal, {counts[1]} are refused."
    return "\n\n".join([HEAD, table, count, "## Refused", _listed(REFUSED), SAID, _listed(NOTED)]) + "\n"


def _listed(said: Mapping[tuple[str, str], str]) -> str:
    rows = [f"| {_code(one)} | {_code(other)} | {text} |" for (one, other), text in said.items()]
    return "\n".join(["| | beside | it says |", "|---|---|---|", *rows])


def _code(name: str) -> str:
    """Return a feature as the page has it: code, if it is written so."""
    return f"`{name}`" if any(mark in name for mark in '="_.') and " " not in name.split("=")[0] else name


if __name__ == "__main__":
    main()
