"""From a program that fails to a small one that fails alike."""

from __future__ import annotations

import ast
import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.fuzzing.program import ROWS, Input, Line, Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, most_seconds: float = 60.0) -> Program:
    """Return a smaller program for which `fails` still holds; the first smaller one is always taken.

    Args:
      fails: whether a program fails in the way that is looked for.
      most_seconds: stop after this time with what is smallest so far.
    """
    end = time.monotonic() + most_seconds
    smaller: Program | None = program
    while smaller is not None:
        program = smaller
        tried = (candidate for candidate in _candidates(program) if candidate.size < program.size)
        smaller = next((c for c in tried if time.monotonic() < end and fails(c)), None)
    return program


def _candidates(program: Program) -> Iterator[Program]:
    """Yield simpler programs, those that save most first."""
    yield from _fewer_outputs(program)
    yield from _cut_off(program)
    yield from _simpler_settings(program)
    for i, line in enumerate(program.lines):
        for expression in _simpler(line.expression):
            lines = (*program.lines[:i], Line(line.target, expression), *program.lines[i + 1 :])
            yield dataclasses.replace(program, lines=lines).tidied()


def _fewer_outputs(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield dataclasses.replace(program, outputs=(output,)).tidied()
        for output in program.outputs:
            rest = tuple(o for o in program.outputs if o != output)
            yield dataclasses.replace(program, outputs=rest).tidied()
    elif not program.lines or program.outputs[0] != program.lines[-1].target:
        return
    else:
        for name in sorted(program.lines[-1].reads):
            yield dataclasses.replace(program, outputs=(name,)).tidied()
        for i in range(3):
            yield dataclasses.replace(program, outputs=(f"{program.outputs[0]}[{i}]",)).tidied()


def _cut_off(program: Program) -> Iterator[Program]:
    """Yield programs without one line, an argument or another line in place of what it made."""
    for i, line in enumerate(program.lines):
        rest = (*program.lines[:i], *program.lines[i + 1 :])
        before = [entry.target for entry in program.lines[:i]]
        for name in [*before[::-1], *[x.name for x in (*program.arguments, *program.variables)]]:
            yield _renamed(program, rest, line.target, name)
    for x in (*program.arguments, *program.variables):
        for y in (*program.arguments, *program.variables):
            if x.name != y.name and x.dims == y.dims and x.dtype == y.dtype:
                yield _renamed(program, program.lines, x.name, y.name)


def _renamed(program: Program, lines: tuple[Line, ...], old: str, new: str) -> Program:
    changed = tuple(Line(line.target, _rename(line.expression, old, new)) for line in lines)
    outputs = tuple(_rename(output, old, new) for output in program.outputs)
    return dataclasses.replace(program, lines=changed, outputs=outputs).tidied()


def _rename(expression: str, old: str, new: str) -> str:
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)


def _simpler_settings(program: Program) -> Iterator[Program]:
    setting = program.setting
    simpler = [
        dataclasses.replace(setting, sizes="known", rows=setting.rows[:1]),
        *[dataclasses.replace(setting, rows=setting.rows[:i]) for i in range(1, len(setting.rows))],
        dataclasses.replace(setting, in_graph=False),
        dataclasses.replace(setting, inside=max(setting.inside - 1, 0)),
        dataclasses.replace(setting, outside=max(setting.outside - 1, 0)),
        dataclasses.replace(setting, inside=0, outside=0),
        dataclasses.replace(setting, shares=None),
        dataclasses.replace(setting, shares=None, devices=2),
        dataclasses.replace(setting, default_device=None),
        dataclasses.replace(setting, at_once=False),
        dataclasses.replace(setting, by_default=True),
        dataclasses.replace(setting, schedule=None),
        dataclasses.replace(setting, schedule=None, micro_batches=1),
    ]
    yield from (dataclasses.replace(program, setting=s) for s in simpler)
    if setting.mesh:
        whole = tuple(w if isinstance(w.layout, str) else dataclasses.replace(w, layout="") for w in program.variables)
        yield dataclasses.replace(
            program, setting=dataclasses.replace(setting, mesh=(), schedule=None), variables=whole
        )
    for i, w in enumerate(program.variables):
        if w.layout:
            rest = dataclasses.replace(w, layout="")
            yield dataclasses.replace(program, variables=(*program.variables[:i], rest, *program.variables[i + 1 :]))
    for x in (*program.arguments, *program.variables):
        for i in range(len(x.dims)):
            yield _reshaped(program, x, (*x.dims[:i], *x.dims[i + 1 :]))


def _reshaped(program: Program, old: Input, dims: tuple[int | str, ...]) -> Program:
    new = dataclasses.replace(old, dims=dims).split_along(dims.index(ROWS) if ROWS in dims else None)
    arguments = tuple(new if x is old else x for x in program.arguments)
    variables = tuple(new if x is old else x for x in program.variables)
    return dataclasses.replace(program, arguments=arguments, variables=variables)


def _simpler(expression: str) -> Iterator[str]:
    """Yield an expression with one part replaced by a part of that, or without an optional argument."""
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            entries = value if isinstance(value, list) else [value]
            for i, entry in enumerate(entries):
                for part in _parts(entry):
                    replaced = [*entries[:i], part, *entries[i + 1 :]] if isinstance(value, list) else part
                    setattr(node, field, replaced)
                    yield ast.unparse(tree)
                    setattr(node, field, value)
                if isinstance(entry, ast.keyword):
                    setattr(node, field, [*entries[:i], *entries[i + 1 :]])
                    yield ast.unparse(tree)
                    setattr(node, field, value)


def _parts(node: object) -> list[ast.expr]:
    """Return the expressions that a larger one is made of."""
    if not isinstance(node, (ast.Call, ast.BinOp, ast.Subscript, ast.UnaryOp, ast.Lambda, ast.Attribute, ast.Compare)):
        return []
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        return []  # of some ops, the results that a template leaves out are never written
    return [child for child in _expressions(node) if not isinstance(child, (ast.Attribute, ast.Constant))]


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, (ast.List, ast.Tuple)):
            yield from _expressions(child)
        elif isinstance(child, ast.expr):
            yield child
