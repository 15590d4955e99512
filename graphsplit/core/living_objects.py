"""All objects of some classes that live in the process."""

from __future__ import annotations

import gc
from typing import Any


def living_objects(*kinds: type) -> list[Any]:
    """Return the objects of these classes, those of classes that are derived from them left out.

    An object refers to its class. `gc.get_objects` would hold, for a moment, what other threads are making as well:
    Python then refuses to resize a tuple in `tuple(generator)`, and a trace in another thread fails.
    """
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def with_derived(kind: type) -> list[type]:
    """Return a class and all that are derived from it."""
    found = [kind]
    for own in found:
        found += own.__subclasses__()
    return found
