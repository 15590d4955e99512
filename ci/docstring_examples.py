"""What griffe, which reads docstrings for the site, is to do with examples: they are code, and no quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
_DIRECTIVE = re.compile(r"\s*# doctest: .*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences the examples of all docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence those of one."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return a docstring with its examples as blocks of code, each up to an empty line."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{_DIRECTIVE.sub('', found[0])}\n```", docstring)
