"""What notebooks show of things that print as text: what matters at first sight, and the rest to be opened."""

from __future__ import annotations

import html

_GOOD, _OPEN = "#1a7f37", "#9a6700"


def text_html(text: str, title: str = "", good: bool | None = None) -> str:
    """Return a text as HTML: its first line, and the others behind it.

    Args:
      text: of any number of lines.
      title: what the lines behind the first are called.
      good: whether the first line is good news, None if it is neither.

    >>> text_html("PASS: equal bit by bit")
    '<div style="font-weight:600">PASS: equal bit by bit</div>'
    """
    first, _, other_lines = text.partition("\n")
    color = "" if good is None else f";color:{_GOOD if good else _OPEN}"
    head = f'<div style="font-weight:600{color}">{html.escape(first.strip())}</div>'
    if not other_lines:
        return head
    lines = f'<pre style="margin:.4em 0;overflow-x:auto">{html.escape(other_lines)}</pre>'
    return f"{head}<details><summary>{html.escape(title or 'more')}</summary>{lines}</details>"
