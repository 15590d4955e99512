"""Progress: what takes longer than some seconds says what it is doing, on a terminal and in the log.

On a terminal one line says what is being done and for how long; it is rewritten each second, and removed at the end.
In the log, `logging.getLogger("graphsplit")` at level INFO, each phase has a line with the seconds that it took. What
is quicker says nothing. A plan that was chosen is said in any case.
`logging.getLogger("graphsplit").setLevel("WARNING")` silences both.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

SLOW_S = 3.0
"""How long something takes before it is shown."""

_STEP_S = 1.0
_REMOVE_LINE = "\r\x1b[K"

_log = logging.getLogger("graphsplit")
_own = threading.local()


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Say that this is being done, where it takes long; phases inside of it are named behind it. Also a decorator.

    >>> from graphsplit.core.progress import phase
    >>> with phase("train_step"):
    ...     with phase("tracing"):
    ...         pass  # train_step: tracing ... 4 s
    """
    doing: list[str] = _own.__dict__.setdefault("doing", [])
    doing.append(text)
    start = time.monotonic()
    try:
        with _shown(doing) if len(doing) == 1 and _is_wanted() else contextlib.nullcontext():
            yield
    finally:
        seconds, path = time.monotonic() - start, ": ".join(doing)
        doing.pop()
        if seconds >= SLOW_S and _log.isEnabledFor(logging.INFO):
            if _is_wanted():
                sys.stderr.write(_REMOVE_LINE)  # (the log may be on the same terminal)
            _log.info("%s: %.1f s", path, seconds)


@contextlib.contextmanager
def phases(text: str, *, take_minutes: bool = False) -> Iterator[Callable[[str], None]]:
    """Say that this is being done, part by part; give the function that says which part begins.

    Where parts `take_minutes`, each also has a line where there is no terminal.
    """
    with phase(text), contextlib.ExitStack() as part:

        def begin(name: str) -> None:
            part.close()
            if take_minutes and not _is_wanted():
                say(name)
            part.enter_context(phase(name))

        yield begin


def say(text: str) -> None:
    """Say what was decided in the phase that runs: in the log, or where nobody reads that, on stderr."""
    if _log.level <= logging.INFO:
        line = ": ".join([*_own.__dict__.get("doing", [])[:1], text])
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", line)
        elif sys.stderr is not None:
            sys.stderr.write(f"{_REMOVE_LINE if sys.stderr.isatty() else ''}{line}\n")


def quiet(_: str) -> None:
    """Say nothing about what is being done, where nobody asked for progress."""


def _is_wanted() -> bool:
    return _log.level <= logging.INFO and sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def _shown(doing: list[str]) -> Iterator[None]:
    """Show on the terminal what is being done, from when that has taken long."""
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(doing, ended), name="graphsplit progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(doing: list[str], ended: threading.Event) -> None:
    start, wait_s, is_shown = time.monotonic(), SLOW_S, False
    while not ended.wait(wait_s):
        text, wait_s, is_shown = ": ".join(doing), _STEP_S, True
        sys.stderr.write(f"{_REMOVE_LINE}{text} ... {time.monotonic() - start:.0f} s")
        sys.stderr.flush()
    if is_shown:
        sys.stderr.write(_REMOVE_LINE)
        sys.stderr.flush()
