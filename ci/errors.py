"""`python ci/errors.py` writes `docs/generated/errors.md`, kinds of errors by their docstrings, and `messages.md`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REFUSALS = ("UnsupportedError", "CannotBeSplitError")
TOPICS = {  # what files are about, by how their paths begin, in the order of the page
    "Calls": ("api", "core/structures", "core/devices"),
    "Layouts and meshes": ("api/layouts", "core/variables", "core/device_mesh"),
    "Gradients": ("runtime", "planning"),
    "Keras models": ("keras",),
    "Predictions": ("simulate", "api/options"),
    "SavedModels and graphs": ("serving", "core/storage", "core/protos"),
    "Several machines": ("workers", "api/input_pipelines"),
    "Pictures, timelines, demonstrations": ("inspect", "cli", "core/requirements"),
}
HEAD = """\
# Errors and warnings

A message says what was asked, on which argument, what clashes, and what to write instead. [Messages](messages.md)
lists those that refuse or warn.

Errors of your own function keep their type. Their traceback shows your lines only;
`tf.debugging.disable_traceback_filtering()` shows all. An error while a graph runs keeps TensorFlow's type and
begins with the place: `GPU:2, rows 12-15, train.py:14: ...`.

`python ci/errors.py` writes this page from docstrings, whose examples are run by tests. Messages are wrapped here;
`...` in them is a path, a port or a line."""
MESSAGES = """\
# Messages

What graphsplit refuses with an `UnsupportedError`, and what it warns of, by topic. `…` stands for what is filled in:
a name, a number, a list. Search this page for the words that you see. [Errors and warnings](errors.md) has the
kinds, with examples, and [what is not supported](../limits.md) the reasons. `python ci/errors.py` writes this page
from the code."""


def main() -> None:
    """Write the pages."""
    sys.path.insert(0, str(ROOT))
    for name, page in (("errors", text()), ("messages", messages())):
        (ROOT / "docs" / "generated" / f"{name}.md").write_text(page, encoding="utf-8")


def text() -> str:
    """Return the page of the kinds."""
    kinds = public_kinds()
    rows = [f"| [{kind.__name__}](#{kind.__name__.lower()}) | {_also(kind)} | {_summary(kind)} |" for kind in kinds]
    parts = [HEAD, "\n".join(["| kind | is also a | means |", "|---|---|---|", *rows])]
    for kind in kinds:
        parts += [f"## {kind.__name__}", *_sections(kind)]
    return "\n\n".join(parts) + "\n"


def messages() -> str:
    """Return the page of the messages."""
    parts = [MESSAGES]
    refused, warned = _messages(_is_refusal), _messages(_is_warning)
    for topic in TOPICS:
        parts += [f"## {topic}", "\n".join(_listed(refused[topic]))]
        if warned[topic]:
            parts += ["Warnings:", "\n".join(_listed(warned[topic]))]
    return "\n\n".join(parts) + "\n"


def public_kinds() -> list[type[BaseException]]:
    """Return the public errors and warnings: the base first, warnings last, as their files have them."""
    from graphsplit import errors

    kinds = [getattr(errors, name) for name in errors.__all__]
    return sorted(kinds, key=lambda kind: (issubclass(kind, Warning), inspect.getsourcelines(kind)[1]))


def _also(kind: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins")


def _summary(kind: type) -> str:
    return " ".join(_docstring(kind).split("\n\n")[0].split())


def _docstring(kind: type) -> str:
    """Return a docstring; its links, `docs/limits.md`, lead from where the page is."""
    said = inspect.getdoc(kind) or ""
    return said.replace("](docs/generated/", "](").replace("](docs/", "](../")


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
    """Return the messages of calls in the code, by topic."""
    found: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for path in sorted((ROOT / "graphsplit").glob("*/**/*.py")):
        topic = _topic(path.relative_to(ROOT / "graphsplit").as_posix())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and wanted(node):
                found[topic].append(_said(node.args[0]))
    return found


def _topic(path: str) -> str:
    """Return what a file is about: that of the longest beginning of its path, "Calls" if there is none."""
    pairs = [(len(start), topic) for topic, starts in TOPICS.items() for start in starts if path.startswith(start)]
    return max(pairs, default=(0, "Calls"))[1]


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


def _listed(messages: list[str]) -> Iterator[str]:
    """Yield messages as a list in the order of their words, each with its first sentence in bold."""
    for message in sorted({_escaped(message) for message in messages}, key=lambda text: text.lstrip("….:, ").lower()):
        first, *rest = re.split(r"(?<=[.…]) (?=[A-Z])", message, maxsplit=1)
        yield " ".join([f"* **{first}**", *rest])


def _escaped(message: str) -> str:
    """Return a message as Markdown that reads like it, on one line."""
    return re.sub(r"([*_<\[\]#|])", r"\\\1", " ".join(message.split()))


if __name__ == "__main__":
    main()
