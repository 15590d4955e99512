"""Models of other packages: installing, running, and the table."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.others.environments import Environment

PACKAGES = ("keras_hub", "transformers", "gpflow", "probability")
EQUAL = {"float64": 1e-9, "float32": 1e-4}  # relative to the largest entry, after three steps


def run(package: str, names: Sequence[str], environment: Environment) -> Iterator[dict[str, Any]]:
    """Yield a line for each model of a package; one line if it cannot be installed or started."""
    why = environment.install(requirements_of(package))
    if why:
        yield {"package": package, "name": "all", "not_run": f"could not be installed: {why}"}
        return
    try:
        for line in environment.run("tests.others.model_worker", package, *names):
            if line.startswith("{"):
                yield {"package": package, **json.loads(line)}
    except subprocess.CalledProcessError as error:
        yield {"package": package, "name": "the rest", "raised": f"the process ended: {error}: {error.stderr}"}


def requirements_of(package: str) -> tuple[str, ...]:
    """Return what pip is asked for."""
    return importlib.import_module(f"tests.others.packages.{package}").REQUIREMENTS  # type: ignore[no-any-return]


def verdict(line: dict[str, Any]) -> str:
    """Return what is wrong with a model; nothing if it is equal, or does not run on one device."""
    if "raised" in line:
        return f"raised {line['raised']}"
    if "not_run" in line:
        return ""
    if not line["difference"] <= EQUAL[line["dtype"]]:
        return f"{line['difference']:.1e} apart"
    return "" if line["share"] > 0 else "nothing is sharded"


def brief(line: dict[str, Any]) -> str:
    """Return what became of a model in a few words."""
    equal = "" if "share" not in line else f"equal, {100 * line['share']:.1f} % of FLOPs sharded"
    return verdict(line) or str(line.get("not_run") or equal)


def document(lines: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page."""
    ran = [line for line in lines if "difference" in line]
    rows = [
        f"| {line['package']} | {line['name']} | {line['difference']:.0e} | {line['dtype']} | "
        f"{100 * line['share']:.1f} % | {_at_home(line)} | {_first_call(line)} |"
        for line in ran
    ]
    others = [f"* {line['package']}, {line['name']}: {_reason(line)}" for line in lines if "difference" not in line]
    others += [f"* {package}: {', '.join(names)}" for package, names in _missing(lines).items() if names]
    return _SECTION.format(rows="\n".join(rows), others="\n".join(others) or "* nothing.")


def _missing(lines: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the models of each package of which no line says anything."""
    seen = {(line["package"], line["name"]) for line in lines}
    return {
        package: [
            name
            for name in importlib.import_module(f"tests.others.packages.{package}").models()
            if (package, name) not in seen and (package, "all") not in seen
        ]
        for package in dict.fromkeys(line["package"] for line in lines if line["package"] in PACKAGES)
    }


def _first_call(line: dict[str, Any]) -> str:
    return f"{line['first_call']:.1f}" if line["first_call"] else "not measured"


def _at_home(line: dict[str, Any]) -> str:
    counts = Counter(line["at_home"]).most_common(3)
    return "<br>".join(f"{number} x {reason}" for reason, number in counts) or "nothing"


def _reason(line: dict[str, Any]) -> str:
    said = line.get("not_run") or f"raised {line['raised']}"
    return " ".join(said.split())[:300].replace("|", "/")


_SECTION = """
Models of other packages, tiny, in an environment of their own: three training steps on 7 rows, on 2 and 3
devices, with variables at home and sharded, against the same steps on one device. To make this table:
`python -m tests.others models --page`. Columns as in the table of programs; *difference* is the largest over all four
ways.

| package | model | difference | dtype | FLOPs sharded | rows at home, and why | first call |
|---|---|---|---|---|---|---|
{rows}

What did not run when this page was made:

{others}
"""
