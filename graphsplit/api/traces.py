"""What a function was traced to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphsplit.core import structures
from graphsplit.runtime.differentiable import Differentiable

MOST_COVERED = 1000


class Signature(NamedTuple):
    """What a trace is valid for.

    Attributes:
      arguments: their structure.
      scopes: what the scopes say in which it was traced, see `open_scopes`.
    """

    arguments: structures.Branch
    scopes: Hashable


@dataclass(eq=False)
class Traces:
    """What a function was traced to, by signature: one for each function, and for each instance of a method.

    Attributes:
      compiled: the compiled forms of each signature; several if they captured tensors of different graphs.
      covered: arguments of calls that run as wider ones.
      lock: held while tracing.
      told_of_graph: whether the user was told what a call over workers is in a graph that somebody else runs.
      told_of_scope: whether the user was told that a call in a stateless scope runs on one device.
      bound: the method bound to the instance, as long as somebody holds it.
    """

    compiled: dict[Signature, list[Differentiable]] = field(default_factory=dict)
    covered: dict[structures.Branch, structures.Branch] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]  # a function until 3.13
    told_of_graph: bool = False
    told_of_scope: bool = False
    bound: weakref.ref[Any] | None = None

    def remember_covered(self, arguments: structures.Branch, wider: structures.Branch) -> None:
        """Note under which wider arguments a call runs, for the last so many sizes: there may be any number of them."""
        if len(self.covered) >= MOST_COVERED:
            self.covered.pop(next(iter(self.covered)), None)
        self.covered[arguments] = wider

    def ran_most(self) -> Differentiable | None:
        """Return the compiled form that ran most of those that are valid now; None if none has run."""
        ran = [c for group in list(self.compiled.values()) for c in group if c.runs and c.is_current]
        return max(ran, key=lambda compiled: compiled.runs, default=None)
