"""What long commands say while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Show what is being done, on standard error: on a terminal in one line, elsewhere line by line."""
    console = rich.console.Console(stderr=True, soft_wrap=True)
    with console.status("reading ...") as status:

        def show(text: str) -> None:
            status.update(f"{text} ...")
            if not console.is_terminal:
                console.print(f"{text} ...", highlight=False)

        yield show
