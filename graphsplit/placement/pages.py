"""A placement as one self-contained page: no network, nothing to install, thousands of operations."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from graphsplit.placement.graph import PlacementGraph
from graphsplit.placement.page_data import page_data


def page_html(placement: PlacementGraph) -> str:
    """Return the page."""
    title = f"Placement of {placement.title}"
    return fill_page("page", ("model.js", "view.js", "arrows.js", "panel.js"), title, page_data(placement))


def _script_data(data: Mapping[str, Any]) -> str:
    """Return data as JSON that stands in a script element, which a `</script>` or a `<!--` in a name would change."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def fill_page(
    folder: str, scripts: tuple[str, ...], title: str, data: Mapping[str, Any], texts: Mapping[str, str] | None = None
) -> str:
    """Return a page that needs nothing else.

    Args:
      folder: beside this file, with `page.html`, `page.css` and the scripts.
      scripts: in the order in which they run.
      title: of the page.
      data: what the scripts draw.
      texts: what else the page names in double braces.
    """
    files = importlib.resources.files("graphsplit.placement") / folder
    parts = {
        "title": html.escape(title),
        **{name: html.escape(text) for name, text in (texts or {}).items()},
        "style": (files / "page.css").read_text("utf-8"),
        "script": "\n".join((files / name).read_text("utf-8") for name in scripts),
        "data": _script_data(data),
    }
    page = (files / "page.html").read_text("utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def in_frame(page: str, height: int = 640) -> str:
    """Return a page in a frame, as a notebook shows it."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" '
        f'style="width:100%;height:{height}px;border:1px solid #d8dee4"></iframe>'
    )
