"""Replay: tasks on streams, links and thread pools, event by event, in the order in which they become ready.

A list schedule (Graham 1966), as TensorFlow's executor makes one: what is ready and finds all that it uses free starts
at once; of several, what was ready first. A thread without work sleeps, and takes a while to wake up: what others can
do by then they do. Plain Python, no TensorFlow: it can be checked by hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphsplit.core.errors import CheckError


@dataclass(frozen=True)
class Resource:
    """What tasks use: a device's stream, one direction of a link, a pool of threads.

    Attributes:
      capacity: how many tasks it serves at a time.
      wake_s: of threads, how long one that found nothing to do takes from a task that waits for it to its start. The
        first one is awake when all begins.
    """

    capacity: int = 1
    wake_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """An operation, or a copy from device to device.

    Attributes:
      name: for people.
      uses: the resources that it occupies while it runs, all of them at the same time; none for what takes no time.
      seconds: how long it runs.
      after: the positions of the tasks whose results it needs, or for which it was told to wait.
      delay_s: how long after its end those that come after it may start: the latency of a link.
      rank: of tasks that became ready at the same time the lowest is first.
      slowdown: how many times as long it takes while what it uses serves 1, 2, ... tasks.
    """

    name: str
    uses: tuple[str, ...] = ()
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    rank: int = 0
    slowdown: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Schedule:
    """When every task ran.

    Attributes:
      starts, ends: of each task, in seconds.
      seconds: until all have ended and all has arrived.
      last: the task of which each waited longest, None for those that could start at once: a critical path backwards.
    """

    starts: tuple[float, ...] = field(repr=False)
    ends: tuple[float, ...] = field(repr=False)
    seconds: float
    last: tuple[int | None, ...] = field(default=(), repr=False)

    def critical_path(self) -> list[int]:
        """Return the tasks, first to last, of which each could not have started before the one before it had ended."""
        if not self.ends:
            return []
        at: int | None = max(range(len(self.ends)), key=lambda i: self.ends[i])
        found = []
        while at is not None:
            found.append(at)
            at = self.last[at]
        return found[::-1]


def replay(tasks: Sequence[Task], resources: Mapping[str, Resource]) -> Schedule:
    """Return when every task runs.

    Raises:
      CheckError: if tasks wait for each other, or use what is not there.

    >>> replay([Task("a", ("gpu",), 2.0), Task("b", ("gpu",), 1.0, (0,))], {"gpu": Resource()}).seconds
    3.0
    """
    missing = {name for task in tasks for name in task.uses} - set(resources)
    if missing:
        raise CheckError(f"Tasks use {sorted(missing)}, which the machine does not have.")
    return _Replay(tasks, resources).run()


_ENDS, _ARRIVES, _WAKES = range(3)
"""What happens: a task ends, what it makes has arrived elsewhere, a thread has woken up."""


class _Replay:
    def __init__(self, tasks: Sequence[Task], resources: Mapping[str, Resource]):
        self._tasks = tasks
        self._resources = resources
        self._awake = {name: 1 if resource.wake_s else resource.capacity for name, resource in resources.items()}
        self._waking = dict.fromkeys(resources, 0)
        self._free = dict(self._awake)  # of those that are awake
        self._names = tuple(resources)
        self._number = {name: k for k, name in enumerate(resources)}
        self._queues: dict[str, list[tuple[float, int, int]]] = {name: [] for name in resources}
        self._users: dict[str, int] = {}  # the task that left a resource last
        self._readers: list[list[int]] = [[] for _ in tasks]
        self._missing = [len(set(task.after)) for task in tasks]
        for i, task in enumerate(tasks):
            for source in set(task.after):
                self._readers[source].append(i)
        self._starts, self._ends = [0.0] * len(tasks), [-1.0] * len(tasks)
        self._last: list[int | None] = [None] * len(tasks)
        self._events: list[tuple[float, int, int]] = []  # time, what happens, to which task or resource
        self._seconds = 0.0

    def run(self) -> Schedule:
        touched: dict[str, None] = {}
        for i, missing in enumerate(self._missing):
            if not missing:
                self._ready(0.0, i, touched)
        self._dispatch(0.0, touched)
        while self._events:
            now, touched = self._events[0][0], {}
            while self._events and self._events[0][0] == now:
                _, what, i = heapq.heappop(self._events)
                if what == _WAKES:
                    self._wake(self._names[i], touched)
                    continue
                if what == _ENDS:
                    self._leave(now, i, touched)
                if what == _ARRIVES or not self._tasks[i].delay_s:
                    self._arrive(now, i, touched)
            self._dispatch(now, touched)
        left = [task.name for task, missing in zip(self._tasks, self._missing, strict=True) if missing]
        if left:
            raise CheckError(f"{len(left)} tasks wait for each other, {left[0]!r} among them.")
        return Schedule(tuple(self._starts), tuple(self._ends), self._seconds, tuple(self._last))

    def _ready(self, now: float, i: int, touched: dict[str, None]) -> None:
        task = self._tasks[i]
        if not task.uses:
            self._begin(now, i)
            return
        heapq.heappush(self._queues[task.uses[0]], (now, task.rank, i))
        touched[task.uses[0]] = None

    def _begin(self, now: float, i: int) -> None:
        task, working = self._tasks[i], 1
        for name in task.uses:
            self._free[name] -= 1
            working = max(working, self._awake[name] - self._free[name])
        self._starts[i] = now
        self._ends[i] = now + task.seconds * task.slowdown[min(working, len(task.slowdown)) - 1]
        heapq.heappush(self._events, (self._ends[i], _ENDS, i))

    def _leave(self, now: float, i: int, touched: dict[str, None]) -> None:
        task = self._tasks[i]
        for name in task.uses:
            self._free[name] += 1
            self._users[name] = i
            touched[name] = None
        if task.delay_s:
            heapq.heappush(self._events, (now + task.delay_s, _ARRIVES, i))

    def _arrive(self, now: float, i: int, touched: dict[str, None]) -> None:
        self._seconds = max(self._seconds, now)
        for reader in self._readers[i]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._last[reader] = i
                self._ready(now, reader, touched)

    def _dispatch(self, now: float, touched: dict[str, None]) -> None:
        """Start what can on resources that were left or are asked for. What finds another one busy waits there."""
        for name in touched:
            queue = self._queues[name]
            while queue and self._free[name]:
                ready, rank, i = heapq.heappop(queue)
                busy = next((other for other in self._tasks[i].uses if not self._free[other]), None)
                if busy is not None:
                    heapq.heappush(self._queues[busy], (ready, rank, i))
                    continue
                if ready < now:
                    self._last[i] = self._users.get(name, self._last[i])
                self._begin(now, i)
            if self._resources[name].wake_s:
                self._sleep_or_wake(now, name)

    def _wake(self, name: str, touched: dict[str, None]) -> None:
        self._waking[name] -= 1
        self._awake[name] += 1
        self._free[name] += 1
        touched[name] = None

    def _sleep_or_wake(self, now: float, name: str) -> None:
        """Let threads sleep that have nothing to do; wake as many as tasks wait, if so many sleep."""
        resource = self._resources[name]
        self._awake[name] -= self._free[name]
        self._free[name] = 0
        asleep = resource.capacity - self._awake[name] - self._waking[name]
        for _ in range(min(len(self._queues[name]) - self._waking[name], asleep)):
            self._waking[name] += 1
            heapq.heappush(self._events, (now + resource.wake_s, _WAKES, self._number[name]))
