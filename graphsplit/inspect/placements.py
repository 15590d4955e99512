"""`Placement`: where every operation runs, to print, save and ask."""

from __future__ import annotations

import functools
import html

from graphsplit.inspect.findings import find_warnings
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.views.exports import save
from graphsplit.inspect.views.pages import page_html
from graphsplit.inspect.views.tables import render


class Placement(PlacementGraph):
    """Where every operation of a graph runs: requested and, if it has been run, actual. Print it, save it, ask it."""

    @functools.cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is likely to disappoint, in plain sentences."""
        return tuple(find_warnings(self))

    def save(self, path: str) -> None:
        """Write the placement; the suffix chooses the form.

        `.html` a page to explore, without network; `.svg` a still picture; `.json` for other tools; `.csv` a line for
        each operation; `.pb` a `GraphDef` with devices, for Netron; a directory or `.tfevents`: an event file for
        TensorBoard.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        save(self, path)

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        page = html.escape(page_html(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:1px solid #d8dee4"></iframe>'
