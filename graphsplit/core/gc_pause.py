"""Pausing Python's garbage collector while a large program is read, planned and written."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector; also a decorator.

    A program of 10^5 operations is millions of small objects, none of them garbage. The collector walks them again and
    again, for most of the time that planning takes. The graph that TensorFlow traces is as large.

    Afterwards all of these count as old, so that the next allocation does not walk them either (a fifth of the time in
    which a graph for 64 devices is written). What a user has frozen stays frozen: then they stay young.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
