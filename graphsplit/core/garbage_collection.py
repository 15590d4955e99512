"""Python's garbage collector: paused while a large program is read, planned and written, and asked what is alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from itertools import chain, compress, repeat
from typing import Any


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector; also a decorator.

    A program of 10^5 operations is millions of small objects, none of them garbage. The collector walks them again and
    again, for most of the time that planning takes. The graph that TensorFlow traces is as large.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@collection_paused()
def living_objects(*kinds: type) -> list[Any]:
    """Return the objects of these classes, those of classes that are derived from them left out.

    `gc.get_objects` holds, for a moment, what other threads are making as well: Python then refuses to resize a tuple
    in `tuple(generator)`, and a trace in another thread fails. So its list is made, read and dropped within one call of
    a builtin, while no other thread runs. (`gc.get_referrers` visits what objects hold, of which extensions have some
    that are half made: it ended the process by SIGSEGV, once in a run of all tests.)
    """
    objects = chain.from_iterable(map(gc.get_objects, (None,)))
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))  # (`tee` would hold the last ones until it is dropped)
    return list(compress(twice, map(frozenset(kinds).__contains__, map(type, twice))))


def with_derived(kind: type) -> list[type]:
    """Return a class and all that are derived from it."""
    classes = [kind]
    for parent in classes:
        classes += parent.__subclasses__()
    return classes
