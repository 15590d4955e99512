"""What long commands say while they run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import typer

from graphsplit.core.progress import phases


@contextlib.contextmanager
def shown_progress(command: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done, on standard error: on a terminal in one line, elsewhere line by line.

    Args:
      command: what is done as a whole.
    """
    with phases(command) as begin:

        def show(text: str) -> None:
            begin(text)
            if not sys.stderr.isatty():
                typer.echo(f"{text} ...", err=True)

        yield show
