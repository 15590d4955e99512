"""Locals say what they hold, and the name of a type means one thing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "graphsplit"
WITHOUT_CONTENT = frozenset(
    {"own", "found", "given", "made", "asked", "said", "told", "others", "there", "here", "one", "some"}
)
"""Words that say of a value what was done with it, or where it is, and not what it is."""

MOST = 60  # bindings of such words that the package may have


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the variables, parameters and fields that a file binds, each with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def types_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes and of the aliases of types that a file makes, without a first underscore."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case _:
                continue
        name = name.lstrip("_")
        if name[0].isupper() and not name.isupper():
            yield name


def test_locals_say_what_they_hold():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = [
            f"{path.relative_to(PACKAGE)}:{line}: {name}" for name, line in bindings(tree) if name in WITHOUT_CONTENT
        ]
        found += lines
    assert len(found) <= MOST, "\n".join(["Name these by what they hold:", *found])


def test_the_name_of_a_type_stands_in_one_file():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    count = Counter(name for tree in trees.values() for name in set(types_of(tree)))
    assert sorted(name for name, files in count.items() if files > 1) == []


@pytest.mark.parametrize(
    ("source", "names"),
    {
        "own = 1": ["own"],
        "def f(found, *given, **made): pass": ["found", "given", "made"],
        "[one for one in x if (there := one)]": ["one", "there"],
        "class A:\n    asked: int = 0": ["asked"],
        "lambda said: told": ["said"],
        "x.own = others(here)": [],
    }.items(),
)
def test_bindings_are_found(source: str, names: list[str]):
    assert [name for name, _ in bindings(ast.parse(source)) if name in WITHOUT_CONTENT] == names
