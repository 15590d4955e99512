"""Locals say what they hold, and the name of a type means one thing."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
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


ENTRY = re.compile(r"  (\*{0,2}\w+(?:, \*{0,2}\w+)*):")


def entries(node: ast.AST, head: str) -> set[str]:
    """Return the names that the docstring of a function or class lists under a heading."""
    lines = (ast.get_docstring(node) or "").splitlines()  # type: ignore[arg-type]
    begin = lines.index(head) + 1 if head in lines else len(lines)
    listed = itertools.takewhile(lambda line: not line or line[0] == " ", lines[begin:])
    return {name.strip(" *") for line in listed if (entry := ENTRY.match(line)) for name in entry[1].split(",")}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def members(cls: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the attributes and methods of a class, and of those of the package from which it inherits."""
    names = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    names |= {name for name, _ in bindings(cls)} | {n.attr for n in ast.walk(cls) if isinstance(n, ast.Attribute)}
    bases = [classes[base.id] for base in cls.bases if isinstance(base, ast.Name) and base.id in classes]
    return names.union(*[members(base, classes) for base in bases])


def unknown_entries(tree: ast.AST, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[int, str]]:
    """Yield what docstrings describe and what is not there, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            unknown = entries(node, "Args:") - parameters(node)
        elif isinstance(node, ast.ClassDef):
            takes = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in ("__init__", "__new__")]
            fields = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}
            unknown = entries(node, "Args:") - fields.union(*map(parameters, takes))
            unknown |= entries(node, "Attributes:") - members(node, classes)
        else:
            continue
        yield from ((node.lineno, name) for name in sorted(unknown))


def test_docstrings_describe_what_is_there():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = {n.name: n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in unknown_entries(tree, classes)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "names"),
    {
        "def f(x, *y):\n    '''A.\n\n    Args:\n      x, *y: b.\n    '''": [],
        "def f(x):\n    '''A.\n\n    Args:\n      z: b.\n        c: d.\n\n    Raises:\n      E: f.\n    '''": ["z"],
        "class A:\n    '''A.\n\n    Attributes:\n      x: b.\n      y: c.\n    '''\n    x: int = 0": ["y"],
        "class A:\n    '''A.\n\n    Args:\n      x: b.\n    '''\n    def __init__(self, y): self.x = y": ["x"],
    }.items(),
)
def test_entries_without_a_parameter_are_found(source: str, names: list[str]):
    assert [name for _, name in unknown_entries(ast.parse(source), {})] == names


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
