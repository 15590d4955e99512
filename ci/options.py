"""`python ci/options.py` writes `docs/generated/options.md`: the options of `parallelize`, and who else has them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generated" / "options.md"
HEAD = """\
# Options

`gs.parallelize` has these options, each with a name. `gs.multi_gpu_model` has those with a **K**, which say the same
there; it calls `devices` `gpus`, and `compile(jit_compile=True)` compiles its shards. `gs.predict` has those with a
**P**, instead of those of the function. Old names are an error that prints the new spelling.

`python ci/options.py` writes this page from docstrings."""
TUNING = """\
## Tuning

`tuning={"bucket_bytes": 0}` sets what few need. An unknown key is an error."""


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    import graphsplit as gs
    from graphsplit.api.options import USUAL, Tuning

    signature, docs = inspect.signature(gs.parallelize), entries(gs.parallelize, "Args")
    others = {"K": inspect.signature(gs.multi_gpu_model), "P": inspect.signature(gs.predict)}
    rows = ["| option | default | also of | meaning |", "|---|---|---|---|"]
    for name in brief():
        usual = signature.parameters[name].default
        had = {letter: own.parameters[name].default for letter, own in others.items() if name in own.parameters}
        also = ", ".join(f"{k}: `{own!r}`" if k == "K" and own != usual else k for k, own in had.items())
        rows.append(_row(name, f"`{usual!r}`", also, docs[name]))
    keys = ["| key | default | meaning |", "|---|---|---|"]
    keys += [_row(key, f"`{USUAL[key]!r}`", told) for key, told in entries(Tuning, "Attributes").items()]
    return "\n\n".join([HEAD, "\n".join(rows), TUNING, "\n".join(keys)]) + "\n"


def brief() -> dict[str, str]:
    """Return the options of `parallelize` in order, each with a line: the fields of the dataclass, by its docstring."""
    from graphsplit.api.options import Options

    told = entries(Options, "Attributes")
    return {own.name: told[own.name] for own in dataclasses.fields(Options) if own.name not in INNER}


INNER = ("lays_out", "on_mesh", "devices_argument")  # fields that no user gives


def entries(owner: Any, section: str) -> dict[str, str]:
    """Return the entries of a section of a docstring, each on one line."""
    lines = inspect.getdoc(owner).partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    found = re.split(r"(?m)^ {2}(?=[a-z_]+: )", lines)[1:]
    return {name: " ".join(told.split()) for name, _, told in (entry.partition(": ") for entry in found)}


def _row(name: str, *cells: str) -> str:
    return f"| {' | '.join([f'`{name}`', *[cell.replace('|', chr(92) + '|') for cell in cells]])} |"


if __name__ == "__main__":
    main()
