"""Models of other packages: installing, running, and the table."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.others.environments import Environment

PACKAGES = ("keras_hub", "transformers", "gpflow", "probability")
EQUAL = {"float64": 1e-9, "float32": 1e-4}  # relative to the largest entry, after three steps


@dataclass(frozen=True)
class Options:
    """Which models run (all but those that are done, if none is named), on how many devices, how long at most."""

    names: Sequence[str] = ()
    done: Sequence[str] = ()
    devices: Sequence[int] = (2, 3)
    seconds: int = 1200


def run(package: str, options: Options, environment: Environment) -> Iterator[dict[str, Any]]:
    """Yield a line for each model of a package; one line if it cannot be installed or started."""
    why = environment.install(requirements_of(package))
    if why:
        yield {"package": package, "name": "all", "not_run": f"could not be installed: {why}"}
        return
    try:
        for line in environment.run("tests.others.model_worker", package, json.dumps(asdict(options))):
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


def document(lines: Sequence[dict[str, Any]], before: str = "") -> str:
    """Return the section of the page; what it said before of models that are not in these lines stays."""
    found = dict(_said_before(before)) | {(line["package"], line["name"]): _line(line) for line in lines}
    order = {package: i for i, package in enumerate(PACKAGES)}
    said = [found[key] for key in sorted(found, key=lambda key: order.get(key[0], len(order)))]  # (packages together)
    rows = [line for line in said if line.startswith("|")]
    others = [line for line in said if line.startswith("*")]
    others += [f"* {package}: {', '.join(names)}" for package, names in _missing(list(found)).items() if names]
    return _SECTION.format(rows="\n".join(rows), others="\n".join(others) or "* nothing.")


def _line(line: dict[str, Any]) -> str:
    if "difference" not in line:
        return f"* {line['package']}, {line['name']}: {_reason(line)}"
    devices = ", ".join(map(str, line["devices"]))
    rounding = f" (rounding: {line['rounding']:.0e})" if line.get("rounding") else ""
    return (
        f"| {line['package']} | {line['name']} | {devices} | {line['difference']:.0e}{rounding} | {line['dtype']} | "
        f"{100 * line['share']:.1f} % | {_at_home(line)} | {_first_call(line)} |"
    )


def _said_before(section: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield what a section of the page says of each model, by package and name."""
    for line in section.splitlines():
        named = re.match(r"\| (\w+) \| (.+?) \| |\* (\w+), (.+?): ", line)
        if named and "package" not in named.groups():
            package, name = filter(None, named.groups())
            yield (package, name), line


def _missing(seen: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the models of each package of which nothing is said."""
    return {
        package: [
            name
            for name in importlib.import_module(f"tests.others.packages.{package}").models()
            if (package, name) not in seen and (package, "all") not in seen
        ]
        for package in PACKAGES
        if any(package == of for of, _ in seen)
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
Small models of other packages, three training steps on 7 rows. They run on several devices, with variables `"home"` and
`"sharded"`, and are compared with the same steps on one device.

The columns are those of the first table. *difference* is the largest over all numbers of devices and both layouts.
*rounding*, where it is given, is what a change of every variable in its last place makes on one device. *dtype* is the
coarsest in which a step computes. First calls were measured while the machine had other work.

| package | model | devices | difference | dtype | FLOPs sharded | on one device, and why | first call |
|---|---|---|---|---|---|---|---|
{rows}

Models that did not run when this page was made:

{others}

`python -m tests.others models --page` makes this table; name models to run only these.
"""
