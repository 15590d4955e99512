"""What a function was traced to; a function that is a method has traces for each instance."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from graphsplit.api.calls.one_device_traces import Retracing
from graphsplit.api.calls.open_sizes import OpenSizes
from graphsplit.core import structures
from graphsplit.errors import UnsupportedError
from graphsplit.runtime.gradients.planned_functions import PlannedFunction
from graphsplit.tracing.draw_counters import DrawCounters
from graphsplit.tracing.trace import TracedFunction

MOST_COVERED = 1000


class Signature(NamedTuple):
    """What a trace is valid for: the structure of its arguments, and what the scopes said, see `open_scopes`."""

    arguments: structures.Container
    scopes: Hashable


@dataclass(eq=False)
class Choices:
    """What `memory=` and `plan=` chose for a function; `graphsplit.simulate.search` chooses.

    Attributes:
      made: a `Choice` of the search, by arguments.
      changes: how often layouts of variables had changed by then; what was chosen before counts no more.
      ran: the last one that ran.
    """

    made: dict[Hashable, Any] = field(default_factory=dict)
    changes: int = 0
    ran: Any = None


@dataclass(eq=False)
class Traces:
    """What a function was traced to, by signature: one for each function, and for each instance of a method.

    Attributes:
      planned: the planned forms of each signature; several if they captured tensors of different graphs.
      covered: arguments of calls that run as wider ones.
      choices: plans that were chosen automatically.
      functions: what TensorFlow traced without knowing all sizes, for calls that have them.
      retracing: what one device would have traced, under `reduce_retracing`.
      open_sizes: which open sizes were the same in all calls.
      draws: what counts the draws of kernels, by the signature under which one device traces.
      of_kernels: of plans whose kernels count for themselves, the signatures under which one device traces.
      lock: held while tracing.
      told_of_graph: whether the user was told what a call over workers is in a graph that somebody else runs.
      told_of_kernels: whether the user was told that kernels in loops and branches begin anew with a plan.
      told_of_scope: whether the user was told that a call in a stateless scope runs on one device.
      told_of_variables: whether the user was told that one device sends and receives for all variables.
      bound: the method bound to the instance, as long as somebody holds it.
    """

    planned: dict[Signature, list[PlannedFunction]] = field(default_factory=dict)
    covered: dict[structures.Container, structures.Container] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    functions: dict[Hashable, TracedFunction] = field(default_factory=dict)
    retracing: Retracing = field(default_factory=Retracing)
    open_sizes: OpenSizes = field(default_factory=OpenSizes)
    draws: dict[Signature, DrawCounters] = field(default_factory=dict)
    of_kernels: set[Signature] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[valid-type]  # a function until 3.13
    told_of_graph: bool = False
    told_of_kernels: bool = False
    told_of_scope: bool = False
    told_of_variables: bool = False
    bound: weakref.ref[Any] | None = None

    def remember_covered(self, arguments: structures.Container, wider: structures.Container) -> None:
        """Note under which wider arguments a call runs, for the last so many sizes: there may be any number of them."""
        if len(self.covered) >= MOST_COVERED:
            self.covered.pop(next(iter(self.covered)), None)
        self.covered[arguments] = wider

    def all(self) -> list[PlannedFunction]:
        """Return all planned forms."""
        return [form for group in list(self.planned.values()) for planned in group for form in planned.forms]

    def ran_most(self) -> PlannedFunction | None:
        """Return the planned form that ran most of those that are valid now; None if none has run."""
        ran = [planned for planned in self.all() if planned.runs and planned.is_current]
        return max(ran, key=lambda planned: planned.runs, default=None)


ValueT = TypeVar("ValueT")


class PerInstance(Generic[ValueT]):
    """One value for each instance of a class.

    Instances are told apart by identity: they need not be hashable, equal ones share nothing, and a copy has a value
    of its own. A value must not refer to its instance, or neither would ever be freed.
    """

    def __init__(self, make: Callable[[], ValueT]):
        self._make = make
        self._lock = threading.Lock()
        self._entries: dict[int, tuple[weakref.ref[Any], ValueT]] = {}

    def of(self, instance: Any, name: str) -> ValueT:
        """Return the value for `instance`; `name` is that of the method, for messages.

        Raises:
          UnsupportedError: if nothing tells when `instance` is gone.
        """
        entry = self._entries.get(id(instance))
        if entry is None or entry[0]() is not instance:
            with self._lock:  # two threads must not make two values
                entry = self._entries.get(id(instance))
                if entry is None or entry[0]() is not instance:  # (an identity may be that of one that is gone)
                    entry = self._entries[id(instance)] = self._reference(instance, name), self._make()
        return entry[1]

    def _reference(self, instance: Any, name: str) -> weakref.ref[Any]:
        entries, key = self._entries, id(instance)

        def forget(gone: weakref.ref[Any]) -> None:
            if key in entries and entries[key][0] is gone:  # else another instance has taken its place
                del entries[key]

        try:
            return weakref.ref(instance, forget)
        except TypeError as error:
            kind = type(instance).__qualname__
            raise UnsupportedError(
                f"{name} is a parallelized method of {kind}, whose traces belong to one instance and go with it, but "
                f"an instance of {kind} does not take weak references. Add '__weakref__' to its __slots__; or "
                f"parallelize the method of the instance once: f = graphsplit.parallelize(instance.{name})."
            ) from error
