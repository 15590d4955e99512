"""Patterns of names with scopes, as users write them for operations and variables, and what is like a wrong one."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

_NEAR, _MOST_NEAR = 0.5, 3  # how alike names are that are suggested, of which 1 are equal ones; and how many


def fits(name: str, pattern: str) -> bool:
    """Return whether a shell pattern fits a name, from its beginning or from any `/` on; `*` stands for slashes, too.

    >>> fits("sequential/embedding/embeddings", "embedding*"), fits("sequential/embedding/embeddings", "bedding*")
    (True, False)
    """
    return any(fnmatch.fnmatchcase(name, own) for own in (pattern, f"*/{pattern}"))


def near(asked: str, names: Iterable[str], cutoff: float = _NEAR) -> list[str]:
    """Return the few names, or patterns, that are most like what was asked, if any are.

    >>> near("devises", ["devices", "split"])
    ['devices']
    """
    return difflib.get_close_matches(asked, list(dict.fromkeys(names)), n=_MOST_NEAR, cutoff=cutoff)


def scopes_and_names(names: Iterable[str]) -> list[str]:
    """Return patterns of everything in each scope of names, and the names outside of scopes.

    >>> scopes_and_names(["dense/kernel", "table"])
    ['dense/*', 'table']
    """
    found = dict[str, None]()
    for name in names:
        *scopes, last = name.split("/")
        found.update(dict.fromkeys([*[f"{scope}/*" for scope in scopes], *([] if scopes else [last])]))
    return list(found)
