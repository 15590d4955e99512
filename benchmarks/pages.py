"""Sections of pages that several scripts write: each writes its own, and keeps the others."""

from __future__ import annotations

import re
from pathlib import Path

from graphsplit.core.storage import forms

COVERAGE = Path(__file__).parent.parent / "docs" / "generated" / "coverage.md"


def with_section(text: str, title: str, body: str) -> str:
    """Return a page whose section of this title has this body; a new one stands at the end."""
    text = text.replace(f"<!-- {forms.MARK} -->", "").rstrip()
    section = f"## {title}\n\n{body.strip()}\n"
    if _section(title).search(text):
        return _section(title).sub(lambda _: section + "\n", text).rstrip() + "\n"
    return f"{text}\n\n{section}"


def section_of(text: str, title: str) -> str:
    """Return the section of this title, or nothing."""
    found = _section(title).search(text)
    return found.group() if found else ""


def _section(title: str) -> re.Pattern[str]:
    return re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def sections(text: str) -> str:
    """Return all sections of a page, without what stands before the first."""
    found = re.search(r"^## .*", text, re.MULTILINE | re.DOTALL)
    return found.group().replace(f"<!-- {forms.MARK} -->", "").rstrip() if found else ""


def with_printed(text: str, name: str, block: str) -> str:
    """Return a page in which a block stands at the mark of this name, `<!-- measured: name -->`, instead of another.

    Raises:
      ValueError: if the page has no such mark, or no end of it.
    """
    begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
    before, begins, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise ValueError(f"no {begin} ... {end} on the page")
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"


def write_section(title: str, body: str) -> None:
    """Write a section of the page of coverage."""
    path = COVERAGE
    before = path.read_text() if path.exists() else ""
    forms.write(str(path), with_section(before, title, body).encode())
