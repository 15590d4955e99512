"""Templates: the text of a line with holes, and how they are filled.

`MatMul {f:*ab} {f:*bc} adj_x={flag}` is an op of `tf.raw_ops` with its operands in order; what has a dot or a bracket
is Python. A hole `{kind:pattern}` is an operand (`scope.KINDS`, `shapes`), any other is filled by `holes.FILLERS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tests.fuzzing.holes import FILLERS
from tests.fuzzing.program import Dim
from tests.fuzzing.scope import KINDS, Scope, UnfitError, int_of
from tests.fuzzing.shapes import Bound, Dims

_HOLE = re.compile(r"\{(\w+)(?::([^{}:]*))?(?::([^{}]*))?\}")
_DEEPEST = 2


def templates_in(table: str) -> list[str]:
    """Return the templates of a table, one a line; `A|B {f}` is two. A line that starts with spaces goes on."""
    found = []
    joined = re.sub(r"\n +", " ", re.sub(r"\(\n +", "(", table))
    for line in filter(None, joined.splitlines()):
        first, _, rest = line.partition(" ")
        is_raw = re.fullmatch(r"[A-Z][\w|]*", first) is not None
        found += [_raw(op_type, rest.split()) for op_type in first.split("|")] if is_raw else [line]
    return found


def _raw(op_type: str, operands: Sequence[str]) -> str:
    """Return the call of an op, its operands named."""
    names = iter(inspect.signature(getattr(tf.raw_ops, op_type)).parameters)
    named = [o if re.match(r"\w+=", o) else f"{next(names)}={o}" for o in operands]
    return f"tf.raw_ops.{op_type}({', '.join(named)})"


class Filling:
    """One template being filled."""

    def __init__(self, scope: Scope, templates: Sequence[str], depth: int = 0):
        self.scope = scope
        self.rng = scope.rng
        self.templates = templates
        self.depth = depth
        self.bound: Bound = {}
        self.first: Dims = ()
        self.first_expression = ""

    def fill(self, template: str) -> str:
        """Return the template with its holes filled: operands, indices into them, and then what depends on both.

        Raises:
          UnfitError: if nothing fits.
        """
        stages = ((KINDS, self._operand), ({"index"}, self._index), (FILLERS, self._other))
        for kinds, fill in stages:
            template = _HOLE.sub(
                lambda hole: fill(hole[1], hole[2], hole[3] or "") if hole[1] in kinds else hole[0],  # noqa: B023
                template,
            )
        return template

    def _other(self, kind: str, extra: str | None, more: str) -> str:
        if not self.first_expression:
            self._operand("f", None, "")
        return FILLERS[kind](self, extra or "", more)

    def _operand(self, kind: str, pattern: str | None, _: str) -> str:
        expression, dims, bound = self.scope.operand(kind, pattern, self.bound)
        self.bound = dict(bound)
        if not self.first_expression:
            self.first, self.first_expression = dims, expression
            self.bound["first"] = dims
        return expression

    def _index(self, _: str, pattern: str | None, letter: str) -> str:
        """Return numbers below the size of a letter, or below a number."""
        expression = self._operand("il"[self.rng.integers(2)], pattern or "", "")
        bound = self.bound
        below: Dim = int(letter) if letter.isdigit() else bound[letter]
        return f"{expression} % {int_of(below, self.scope.rows)}"

    def function(self, argument: str, *, row: bool, same: bool) -> str:
        """Return a lambda of one argument, as large as the first operand, or as one of its rows."""
        if self.depth >= _DEEPEST:
            return f"lambda {argument}: {argument}" if same else f"lambda {argument}: {argument} * 2"
        name = f"{argument}{self.depth}"
        values = self.scope.evaluate(self.first_expression)
        values = [value[0] for value in values] if row else values
        with self.scope.names(**{name: values}):
            for _ in range(8):
                body = self._body(name, values if same else None)
                if body is not None:
                    return f"lambda {name}: {body}"
        return f"lambda {name}: {name}"

    def _body(self, name: str, like: Sequence[Any] | None) -> str | None:
        template = self.templates[self.rng.integers(len(self.templates))]
        try:
            body = Filling(self.scope, self.templates, self.depth + 1).fill(template)
            made = self.scope.evaluate(body)
        except UnfitError:
            return None
        if name not in body or not all(isinstance(value, tf.Tensor) for value in made):
            return None
        if like is None:
            return body if made[0].dtype.is_floating else None
        fits = all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(made, like, strict=True))
        return body if fits else None
