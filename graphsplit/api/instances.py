"""What a method knows of each instance: made on first use, and gone with the instance."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from graphsplit.core.errors import UnsupportedError

Value = TypeVar("Value")


class PerInstance(Generic[Value]):
    """One value for each instance of a class.

    Instances are told apart by identity: they need not be hashable, equal ones share nothing, and a copy has a value
    of its own. A value must not refer to its instance, or neither would ever be freed.

    Args:
      make: makes the value for an instance that has none yet.
    """

    def __init__(self, make: Callable[[], Value]):
        self._make = make
        self._lock = threading.Lock()
        self._found: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def of(self, instance: Any, name: str) -> Value:
        """Return the value for `instance`; `name` is that of the method, for messages.

        Raises:
          UnsupportedError: if nothing tells when `instance` is gone.
        """
        found = self._found.get(id(instance))
        if found is None or found[0]() is not instance:
            with self._lock:  # two threads must not make two values
                found = self._found.get(id(instance))
                if found is None or found[0]() is not instance:  # (an identity may be that of one that is gone)
                    found = self._found[id(instance)] = self._reference(instance, name), self._make()
        return found[1]

    def _reference(self, instance: Any, name: str) -> weakref.ref[Any]:
        found, key = self._found, id(instance)

        def forget(gone: weakref.ref[Any]) -> None:
            if key in found and found[key][0] is gone:  # else another instance has taken its place
                del found[key]

        try:
            return weakref.ref(instance, forget)
        except TypeError as error:
            kind = type(instance).__qualname__
            raise UnsupportedError(
                f"{name} is a parallelized method of {kind}, whose traces belong to one instance and go with it, but "
                f"an instance of {kind} does not take weak references. Add '__weakref__' to its __slots__; or "
                f"parallelize the method of the instance once: f = graphsplit.parallelize(instance.{name})."
            ) from error
