"""Calls that run, and moves of variables' values, which wait for those that use the variable.

Any number of calls run at once. A value moves, and a layout changes, while no call runs that uses the variable; a call
begins with all its values where it reads them, and none of them moves until it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from graphsplit.errors import UnsupportedError

ReadsT = TypeVar("ReadsT")

_PATIENCE_S = 10.0  # of Python code that TensorFlow runs, perhaps in the very call that it waits for


class RunningCalls:
    """The calls that run in this process.

    Attributes:
      lock: held by whoever asks where values are, or moves them.
      moves: how often a value moved.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.moves = 0
        self._waits = 0  # how often somebody began to wait
        self._waiting = 0  # how many wait
        self._ended = threading.Condition(self.lock)
        self._running: dict[object, tuple[Sequence[Any], int]] = {}  # by call: captured handles, and the thread

    def begin(
        self,
        call: object,
        handles: Sequence[Any],
        find: Callable[[], ReadsT],
        ask: Callable[[Callable[[], tuple[ReadsT, int]]], tuple[ReadsT, int]],
    ) -> ReadsT:
        """Return what a call reads; until its `end` no value behind the handles moves.

        Args:
          call: anything that is this call.
          handles: of the variables that it uses.
          find: returns what it reads, and moves values to where it reads them.
          ask: runs a function, perhaps in another thread.
        """

        def settled() -> tuple[ReadsT, int]:
            with self.lock:
                while True:
                    waits = self._waits
                    reads = find()
                    if waits == self._waits:  # (else other threads may have moved what was found before the wait)
                        return reads, self.moves

        while True:
            needed, moves = ask(settled)
            with self.lock:
                if moves == self.moves:
                    self._running[call] = handles, threading.get_ident()
                    return needed

    def end(self, call: object) -> None:
        """Let values move that a call used, if it has begun."""
        with self.lock:
            self._running.pop(call, None)
            if self._waiting:
                self._ended.notify_all()

    def wait_for(self, handles: Sequence[Any], name: str) -> None:
        """Wait until no call runs that uses variables; the lock is held, so no other one begins.

        Args:
          handles: of the variables.
          name: what users call them.

        Raises:
          UnsupportedError: in Python code that such a call may wait for.
        """
        handle_ids, this_thread = set(map(id, handles)), threading.current_thread()
        is_of_tensorflow = type(this_thread).__name__ == "_DummyThread"  # Python did not begin it
        begin = time.monotonic()
        while users := [thread for used, thread in self._running.values() if not handle_ids.isdisjoint(map(id, used))]:
            seconds_left = begin + _PATIENCE_S - time.monotonic() if is_of_tensorflow else None
            if this_thread.ident in users or (seconds_left is not None and seconds_left <= 0):
                raise UnsupportedError(
                    f"{name} would have to move while a call runs that uses it, for Python code inside of a graph "
                    "(tf.py_function, a generator of a tf.data.Dataset). Read it there with .numpy(), which moves "
                    "nothing, or give its value to the code as an argument."
                )
            self._waits += 1
            self._waiting += 1
            try:
                self._ended.wait(seconds_left)
            finally:
                self._waiting -= 1


calls = RunningCalls()
