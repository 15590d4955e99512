"""`python ci/api.py` writes `docs/generated/api.md`: public names with signatures, and what each is in a sentence.

The site has more: `docs/reference.md` shows whole docstrings there, and nothing where the repository is looked at.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generated" / "api.md"
KEPT = frozenset({"Decisions"})
"""Bases that classes keep for themselves."""

HEAD = """\
# Public names

Everything that you may import from graphsplit, with its signature and its first sentence. `help(gs.parallelize)` prints
the whole docstring, with examples; the documentation as a site has all of them. `python ci/api.py` writes this page
from the code."""


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    import graphsplit

    offered = {name: getattr(graphsplit, name) for name in graphsplit.__all__}
    modules = [name for name, what in offered.items() if isinstance(what, types.ModuleType)]
    parts = [HEAD, "## gs", "`import graphsplit as gs`"]
    for name, what in offered.items():
        if name not in modules:
            parts += _entry(f"gs.{name}", what)
    for name in modules:
        module = importlib.import_module(f"graphsplit.{name}")
        parts += [f"## gs.{name}", _first_paragraph(module)]
        if name == "errors":
            parts.append("[Errors and warnings](errors.md) has all of them, with examples.")
            continue
        for own in module.__all__:
            full = f"gs.{name}.{own}"
            parts += [f"`{full}` is `gs.{own}`."] if own in offered else _entry(full, getattr(module, own))
    return "\n\n".join(parts) + "\n"


def _entry(name: str, what: Any) -> Iterator[str]:
    """Yield the section of a function or class; of a class, what its instances offer as well."""
    yield f"### {name}"
    is_handed_out = inspect.isclass(what) and any(base.__name__ in KEPT for base in what.__mro__)  # (users make none)
    yield f"```python\n{name}{'' if is_handed_out else _signature(what)}\n```"
    yield _first_paragraph(what)
    if inspect.isclass(what) and (lines := list(_members(what))):
        yield "\n".join(lines)


def _members(kind: type) -> Iterator[str]:
    """Yield a line for each method and property that a class of graphsplit documents."""
    for name, member in members_of(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "func", member)
        function = getattr(function, "__func__", function)
        if not inspect.isfunction(function) or not function.__doc__:
            continue
        called = _signature(function, own=True) if inspect.isfunction(getattr(member, "__func__", member)) else ""
        yield f"* `{name}{called}`: {_first_sentence(function)}"


def members_of(kind: type) -> dict[str, Any]:
    """Return what a class of graphsplit offers, by name; of a base in `KEPT`, only what its docstring names."""
    members: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("graphsplit")]):
        documented = _attributes(kind) if base.__name__ in KEPT else vars(base)
        members |= {name: vars(base)[name] for name in documented if not name.startswith("_") and name in vars(base)}
    return members


def _attributes(kind: type) -> list[str]:
    """Return the attributes that a class documents."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    return [name for names in re.findall(r"^  ([\w, ]+):", section, re.MULTILINE) for name in names.split(", ")]


def _signature(what: Any, *, own: bool = False) -> str:
    """Return names and defaults of the parameters, on several lines where one would be long."""
    try:
        signature = inspect.signature(what)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    kept = [one.replace(annotation=empty) for one in signature.parameters.values()][1 if own else 0 :]
    line = str(signature.replace(parameters=kept, return_annotation=empty))
    line = re.sub(r"<(?:function|class|object)[^>]*>", "...", line)
    return line if own or len(line) < 90 else "(\n    " + ",\n    ".join(line[1:-1].split(", ")) + ",\n)"


def _first_paragraph(what: Any) -> str:
    return " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split())


def _first_sentence(what: Any) -> str:
    return re.split(r"(?<=[.?!]) ", _first_paragraph(what), maxsplit=1)[0]


if __name__ == "__main__":
    main()
