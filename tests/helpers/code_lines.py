"""How many lines of code the package has: no blank line, comment, docstring or import; JavaScript counts too."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

HEART = ("core", "program", "tracing", "rules", "planning", "emission", "axes", "runtime", "api")
"""Folders that turn a function into one for several devices. The others read what these made, or call them."""

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines on which a statement stands."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def python_lines(source: str) -> int:
    """Count the lines on which a token stands that is code, without docstrings and imports."""
    without: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            without.update(lines_of(node.body[0]))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            without.update(lines_of(node))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - without)


def javascript_lines(source: str) -> int:
    """Count the lines that are neither blank nor only a comment."""
    without_blocks = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    return sum(not line.strip().startswith("//") for line in without_blocks.splitlines() if line.strip())


def code_lines(package: Path) -> dict[str, int]:
    """Return the lines of code of the heart (`HEART`), of what is around it, and of both."""
    counted = {"total": 0, "heart": 0, "around": 0}
    for path in [*package.rglob("*.py"), *package.rglob("*.js")]:
        count = (python_lines if path.suffix == ".py" else javascript_lines)(path.read_text(encoding="utf-8"))
        part = "heart" if path.relative_to(package).parts[0] in HEART else "around"
        counted[part] += count
        counted["total"] += count
    return counted
