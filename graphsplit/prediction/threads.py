"""Threads: a pool that runs operations in the order in which TensorFlow's does, which is no queue.

A thread goes on with what it has made ready itself: short operations one after the other, of long ones the last; it
leaves the others, newest first for itself, oldest first for threads that have nothing left. So a thread follows one
device's operations down to where they have to wait, and what they have made is read soon: if all took turns, all
devices' tensors would be alive at a time. What is ready from the start belongs to the thread that starts, which takes
the last of it first. (TensorFlow's `executor.cc`, `ScheduleReady`, and the work stealing of Eigen's
`NonBlockingThreadPool`; `tests/test_order_of_threads.py` compares it with what is recorded.) Plain Python.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SHORT_S = 3e-6
"""Operations of less are not worth another thread: 8,000 cycles in TensorFlow."""


@dataclass(frozen=True)
class Threads:
    """A pool of threads.

    Attributes:
      capacity: how many there are.
      wake_s: how long one that found nothing to do takes from a task that waits for it to its start. The first one is
        awake when all begins.
    """

    capacity: int = 1
    wake_s: float = 0.0


class WaitingTasks:
    """The tasks that wait for a pool's threads, and which of the threads are free.

    Args:
      threads: the pool.
    """

    def __init__(self, threads: Threads):
        first = 1 if threads.wake_s else threads.capacity
        self.free = list(range(first))  # awake, and without a task
        self.asleep = list(range(threads.capacity - 1, first - 1, -1))
        self.waking = 0
        self._next: list[deque[int]] = [deque() for _ in range(threads.capacity)]
        self._long: list[int | None] = [None] * threads.capacity
        self._left: list[deque[int]] = [deque() for _ in range(threads.capacity)]
        self._waiting = 0

    def give(self, task: int) -> None:
        """Add a task that no thread has made ready: the first one had it, as it starts."""
        self.leave(task, 0)

    def add(self, task: int, thread: int, *, is_short: bool) -> None:
        """Add a task that a thread has made ready."""
        if is_short:
            self._next[thread].append(task)
            return
        before, self._long[thread] = self._long[thread], task
        if before is not None:
            self.leave(before, thread)

    def leave(self, task: int, thread: int) -> None:
        """Add a task that a thread has made ready and does not go on with."""
        self._left[thread].appendleft(task)
        self._waiting += 1

    def take(self, thread: int) -> int | None:
        """Return what a free thread does next, None if there is nothing."""
        own, long = self._next[thread], self._long[thread]
        if long is not None:
            self._long[thread] = None
            if not own:
                return long
            self.leave(long, thread)
        if own:
            return own.popleft()
        if not self._waiting:
            return None
        self._waiting -= 1
        if self._left[thread]:
            return self._left[thread].popleft()
        return max(self._left, key=len).pop()

    def asked_for(self) -> int:
        """Return how many more threads should be woken up: tasks wait, and nobody is on the way."""
        return min(self._waiting - self.waking, len(self.asleep) - self.waking)
