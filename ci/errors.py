"""`python ci/errors.py` writes `docs/errors.md`: public errors and warnings by their docstrings, and what they say."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
REFUSALS = ("UnsupportedError", "CannotBeSplitError")
ABOUT = {  # what the files of a folder are about, in the order of the page; others follow by their names
    "api": "Calls, plans and predictions",
    "runtime": "Gradients from outside",
    "keras_models": "Keras models",
    "core": "Variables, arguments, SavedModels that are read",
    "saved_models": "Transpiling",
    "clusters": "Several machines",
    "placement": "Placements and timelines",
    "demos": "Demonstrations",
}
HEAD = """\
# Errors and warnings

Written by `python ci/errors.py` from docstrings, whose examples are run by tests. (Messages are wrapped here; `...` in
them is a path, a port or a line.)

A message says what was asked, on which argument, what clashes, and what to write instead. Errors of your own function
keep their type and arrive with your lines alone (all lines: `tf.debugging.disable_traceback_filtering()`). What fails
while a graph runs keeps TensorFlow's type, and says first where: `GPU:2, rows 12-15, train.py:14: ...`."""


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    kinds = public_kinds()
    rows = [f"| [{kind.__name__}](#{kind.__name__.lower()}) | {_also(kind)} | {_summary(kind)} |" for kind in kinds]
    parts = [HEAD, "\n".join(["| kind | is also a | means |", "|---|---|---|", *rows])]
    for kind in kinds:
        parts += [f"## {kind.__name__}", *_sections(kind)]
    parts.append("## Everything that is refused")
    parts.append("Every `UnsupportedError` in the code, for you to find the words of one; `…` is filled in.")
    parts += _listed(_messages(_is_refusal))
    parts.append("## Everything that is warned of")
    parts.append("Besides `RetracingWarning` these are Python's `UserWarning`.")
    parts += _listed(_messages(_is_warning))
    return "\n\n".join(parts) + "\n"


def public_kinds() -> list[type[BaseException]]:
    """Return the public errors and warnings: the base first, warnings last, as their files have them."""
    import graphsplit

    public = [getattr(graphsplit, name) for name in graphsplit.__all__]
    kinds = [own for own in public if isinstance(own, type) and issubclass(own, BaseException)]
    return sorted(kinds, key=lambda kind: (issubclass(kind, Warning), inspect.getsourcelines(kind)[1]))


def _also(kind: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins")


def _summary(kind: type) -> str:
    return " ".join(_docstring(kind).split("\n\n")[0].split())


def _docstring(kind: type) -> str:
    return inspect.getdoc(kind) or ""


def _sections(kind: type) -> Iterator[str]:
    """Yield the paragraphs of a docstring as Markdown: attributes as a list, the example as one block."""
    prose, _, example = _docstring(kind).partition(">>> ")
    for paragraph in prose.strip().split("\n\n"):
        if paragraph.startswith("Attributes:"):
            yield "\n".join(_attributes(paragraph))
        else:
            yield paragraph
    yield f"```pycon\n{_shown('>>> ' + example)}\n```"


def _attributes(paragraph: str) -> Iterator[str]:
    for line in paragraph.splitlines()[1:]:
        name, colon, said = line.partition(": ")
        yield f"* `{name.strip()}`: {said}" if colon and not line.startswith("   ") else f"  {line.strip()}"


def _shown(example: str) -> str:
    """Return an example as a session shows it, without directives, and errors by their own names."""
    example = re.sub(r"\s*# doctest: .*$", "", example, flags=re.MULTILINE)
    example = re.sub(r"^Traceback \(most recent call last\):\n(graphsplit\.[\w.]*\.)?", "", example, flags=re.MULTILINE)
    return example.strip()


def _messages(wanted: Any) -> dict[str, list[str]]:
    """Return the messages of calls in the code, by the folder that they are in."""
    found: dict[str, list[str]] = {folder: [] for folder in ABOUT}
    for path in sorted((ROOT / "graphsplit").glob("*/**/*.py")):
        folder = path.relative_to(ROOT / "graphsplit").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and wanted(node):
                found.setdefault(folder, []).append(_said(node.args[0]))
    return found


def _is_refusal(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in REFUSALS


def _is_warning(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and ast.unparse(function) == "warnings.warn"


def _said(node: ast.expr) -> str:
    """Return what an expression says, as far as it is written there."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _said(node.left) + _said(node.right)
    return "…"


def _listed(messages: dict[str, list[str]]) -> Iterator[str]:
    for folder, said in messages.items():
        if said:
            yield f"### {ABOUT.get(folder, folder.capitalize())}"
            yield "\n".join(f"* {_escaped(message)}" for message in dict.fromkeys(said))


def _escaped(message: str) -> str:
    """Return a message as Markdown that reads like it, on one line."""
    return re.sub(r"([*_<\[\]#|])", r"\\\1", " ".join(message.split()))


if __name__ == "__main__":
    main()
