"""Options of other names than a public function has: an error that says which was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from graphsplit.core.patterns import near

P = ParamSpec("P")
R = TypeVar("R")

_NEAR = 0.7  # how alike, of 1: `variables` and `devices`, which are no misspellings of each other, are 0.5
_LAYOUTS = "Where variables live is said of them: gs.set_variable_layout(model, 'sharded', devices=...)."
_ELSEWHERE = dict.fromkeys(("variables", "layout", "layouts", "variable_layout"), _LAYOUTS)
"""What others call something that is said in another way here."""


def suggesting_options(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose `TypeError` for an option that it does not have names those that it has."""
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        wrong = [name for name in kwargs if name not in known]
        if wrong:
            raise TypeError(f"{function.__name__}() has no option {_said(wrong, known)}")
        return function(*args, **kwargs)

    return call


def _said(wrong: list[str], known: list[str]) -> str:
    """Name the wrong options, and what is near them or says the same, or else all there are."""
    alike = list(dict.fromkeys(found for name in wrong for found in near(name, known, cutoff=_NEAR)[:1]))
    said = [f"Did you mean {', '.join(f'{name}=' for name in alike)}?"] if alike else []
    said += dict.fromkeys(_ELSEWHERE[name] for name in wrong if name in _ELSEWHERE)
    names = ", ".join(f"{name}=" for name in wrong)
    return f"{names}. {' '.join(said) or 'It has ' + ', '.join(f'{name}=' for name in known[1:]) + '.'}"
