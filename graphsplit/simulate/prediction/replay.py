"""Replay: tasks on streams, links and threads, event by event.

A list schedule (Graham 1966): what is ready and finds all that it uses free starts at once; of several, on a stream or
a link what was ready first, on threads what was ready last. Plain Python, no TensorFlow: it can be checked by hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.errors import CheckError
from graphsplit.program.graph.graph import readers_of


@dataclass(frozen=True)
class Resource:
    """What serves tasks: a device's stream, one direction of a link, the threads of a host.

    Attributes:
      capacity: how many it serves at a time.
      newest_first: whether what was ready last is served first. A thread goes on with what it has made ready itself, so
        that what it has made is read soon: if all devices took turns, all their tensors would be alive at a time.
    """

    capacity: int = 1
    newest_first: bool = False


class Task(NamedTuple):
    """An operation, or a copy from device to device.

    Attributes:
      name: for people.
      uses: the resources that it occupies while it runs, all of them at the same time; none for what takes no time.
      seconds: how long it runs.
      after: the positions of the tasks whose results it needs, or for which it was told to wait.
      delay_s: how long after its end those that come after it may start: the latency of a link.
      rank: of tasks that became ready at the same time the lowest is first.
      slowdown: how many times as long it takes while 1, 2, ... tasks use the same threads.
      device: where it runs; of something sent, where it comes from.
      kind: `"compute"`, `"send"` or `"wait"` (what takes no time).
      type: of the operation; the kind of move that something sent belongs to.
      bytes: that are sent.
      target: where they are sent.
      family: of its work.
      latency_s: how much of all its time a link's latency is: what it takes however few bytes are sent.
    """

    name: str
    uses: tuple[str, ...] = ()
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    rank: int = 0
    slowdown: tuple[float, ...] = (1.0,)
    device: str = ""
    kind: str = "compute"
    type: str = ""
    bytes: int = 0
    target: str = ""
    family: str = ""
    latency_s: float = 0.0


@dataclass(frozen=True)
class TaskTimes:
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
        tasks_from_last = []
        while at is not None:
            tasks_from_last.append(at)
            at = self.last[at]
        return tasks_from_last[::-1]


def replay(tasks: Sequence[Task], resources: Mapping[str, Resource]) -> TaskTimes:
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


_ENDS, _ARRIVES = range(2)
"""What happens: a task ends, what it makes has arrived elsewhere."""


class _Replay:
    def __init__(self, tasks: Sequence[Task], resources: Mapping[str, Resource]):
        self._tasks = tasks
        self._sign = {name: -1 if resource.newest_first else 1 for name, resource in resources.items()}
        self._free = {name: resource.capacity for name, resource in resources.items()}
        self._capacity = dict(self._free)
        self._queues: dict[str, list[tuple[float, int, int]]] = {name: [] for name in resources}
        self._users: dict[str, int] = {}  # the task that left a resource last
        self._readers = readers_of(set(task.after) for task in tasks)
        self._missing = [len(set(task.after)) for task in tasks]
        self._starts, self._ends = [0.0] * len(tasks), [-1.0] * len(tasks)
        self._ready_s = [0.0] * len(tasks)
        self._last: list[int | None] = [None] * len(tasks)
        self._events: list[tuple[float, int, int]] = []  # time, what happens, to which task
        self._seconds = 0.0

    def run(self) -> TaskTimes:
        touched: dict[str, None] = {}
        first = [i for i, missing in enumerate(self._missing) if not missing]
        for i in sorted(first, key=lambda i: self._tasks[i].rank):
            self._ready(0.0, i, touched)
        self._dispatch(0.0, touched)
        while self._events:
            now_s, touched = self._events[0][0], {}
            while self._events and self._events[0][0] == now_s:
                _, what, i = heapq.heappop(self._events)
                if what == _ENDS:
                    self._leave(now_s, i, touched)
                if what == _ARRIVES or not self._tasks[i].delay_s:
                    self._arrive(now_s, i, touched)
            self._dispatch(now_s, touched)
        stuck_names = [task.name for task, missing in zip(self._tasks, self._missing, strict=True) if missing]
        if stuck_names:
            raise CheckError(f"{len(stuck_names)} tasks wait for each other, {stuck_names[0]!r} among them.")
        return TaskTimes(tuple(self._starts), tuple(self._ends), self._seconds, tuple(self._last))

    def _ready(self, now_s: float, i: int, touched: dict[str, None]) -> None:
        self._ready_s[i] = now_s
        if not self._tasks[i].uses:
            self._begin(now_s, i)
            return
        name = self._tasks[i].uses[0]
        touched[name] = None
        self._wait_for(name, i)

    def _wait_for(self, name: str, i: int) -> None:
        sign = self._sign[name]
        heapq.heappush(self._queues[name], (sign * self._ready_s[i], sign * self._tasks[i].rank, sign * i))

    def _begin(self, now_s: float, i: int) -> None:
        task, working = self._tasks[i], 1
        for name in task.uses:
            self._free[name] -= 1
            working = max(working, self._capacity[name] - self._free[name])
        self._starts[i] = now_s
        self._ends[i] = now_s + task.seconds * task.slowdown[min(working, len(task.slowdown)) - 1]
        heapq.heappush(self._events, (self._ends[i], _ENDS, i))

    def _leave(self, now_s: float, i: int, touched: dict[str, None]) -> None:
        for name in self._tasks[i].uses:
            self._free[name] += 1
            self._users[name] = i
            touched[name] = None
        if self._tasks[i].delay_s:
            heapq.heappush(self._events, (now_s + self._tasks[i].delay_s, _ARRIVES, i))

    def _arrive(self, now_s: float, i: int, touched: dict[str, None]) -> None:
        self._seconds = max(self._seconds, now_s)
        for reader in self._readers[i]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._last[reader] = i
                self._ready(now_s, reader, touched)

    def _dispatch(self, now_s: float, touched: dict[str, None]) -> None:
        """Start what can on resources that were left or are asked for. What finds another one busy waits there."""
        for name in touched:
            while self._queues[name] and self._free[name]:
                i = abs(heapq.heappop(self._queues[name])[-1])
                busy = next((other for other in self._tasks[i].uses if not self._free[other]), None)
                if busy is not None:
                    self._wait_for(busy, i)
                    continue
                if self._ready_s[i] < now_s:
                    self._last[i] = self._users.get(name, self._last[i])
                self._begin(now_s, i)
