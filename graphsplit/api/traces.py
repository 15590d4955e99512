"""What a function was traced to."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from graphsplit.core import structures
from graphsplit.runtime.differentiable import Differentiable
from graphsplit.runtime.trial_compilations import Trials


@dataclass(eq=False)
class Traces:
    """What a function was traced to, by signature: one for each function, and for each instance of a method.

    Attributes:
      compiled: the compiled forms of each signature; several if they captured tensors of different graphs.
      covered: signatures of calls that run as a wider one.
      trials: what XLA was asked, if it was.
      lock: held while tracing.
      told_of_graph: whether the user was told what a call over workers is in a graph that somebody else runs.
      bound: the method bound to the instance, as long as somebody holds it.
    """

    compiled: dict[structures.Branch, list[Differentiable]] = field(default_factory=dict)
    covered: dict[structures.Branch, structures.Branch] = field(default_factory=dict)
    trials: Trials | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]  # a function until 3.13
    told_of_graph: bool = False
    bound: weakref.ref[Any] | None = None

    def trials_of(self, name: str) -> Trials:
        """Return what XLA is asked with, for all signatures; `name` is the function's."""
        self.trials = self.trials or Trials(name)
        return self.trials

    def ran_most(self) -> Differentiable | None:
        """Return the compiled form that ran most of those that are valid now; None if none has run."""
        ran = [c for group in list(self.compiled.values()) for c in group if c.runs and c.is_current]
        return max(ran, key=lambda compiled: compiled.runs, default=None)
