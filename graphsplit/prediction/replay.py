"""Replay: tasks on streams, links and thread pools, event by event.

A list schedule (Graham 1966): what is ready and finds all that it uses free starts at once; of several, what was ready
first; threads choose as TensorFlow's do (`threads`). A thread without work sleeps, and takes a while to wake up: what
others can do by then they do. Plain Python, no TensorFlow: it can be checked by hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.core.errors import CheckError
from graphsplit.graph.walks import readers_of
from graphsplit.prediction.threads import SHORT_S, Threads, WaitingTasks


@dataclass(frozen=True)
class Resource:
    """What serves one task at a time, first come, first served: a device's stream, one direction of a link."""


class Task(NamedTuple):
    """An operation, or a copy from device to device.

    Attributes:
      name: for people.
      uses: the resources that it occupies while it runs, all of them at the same time, or a thread of a pool; none for
        what takes no time.
      seconds: how long it runs.
      after: the positions of the tasks whose results it needs, or for which it was told to wait.
      delay_s: how long after its end those that come after it may start: the latency of a link.
      rank: of tasks that became ready at the same time the lowest is first.
      slowdown: how many times as long it takes while 1, 2, ... threads work.
      hands_on: whether a thread that has run it leaves to all what it has made ready: something was sent.
    """

    name: str
    uses: tuple[str, ...] = ()
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    rank: int = 0
    slowdown: tuple[float, ...] = (1.0,)
    hands_on: bool = False


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
        found = []
        while at is not None:
            found.append(at)
            at = self.last[at]
        return found[::-1]


def replay(tasks: Sequence[Task], resources: Mapping[str, Resource | Threads]) -> TaskTimes:
    """Return when every task runs.

    Raises:
      CheckError: if tasks wait for each other, use what is not there, or a thread and something else.

    >>> replay([Task("a", ("gpu",), 2.0), Task("b", ("gpu",), 1.0, (0,))], {"gpu": Resource()}).seconds
    3.0
    """
    missing = {name for task in tasks for name in task.uses} - set(resources)
    if missing:
        raise CheckError(f"Tasks use {sorted(missing)}, which the machine does not have.")
    pools = {name for name, resource in resources.items() if isinstance(resource, Threads)}
    both = [task.name for task in tasks if len(task.uses) > 1 and pools.intersection(task.uses)]
    if both:
        raise CheckError(f"{len(both)} tasks use threads and something else, {both[0]!r} among them.")
    return _Replay(tasks, resources).run()


_ENDS, _ARRIVES, _WAKES = range(3)
"""What happens: a task ends, what it makes has arrived elsewhere, a thread has woken up."""

_NOBODY = -1


class _Replay:
    def __init__(self, tasks: Sequence[Task], resources: Mapping[str, Resource | Threads]):
        self._tasks = tasks
        self._pools = {name: WaitingTasks(r) for name, r in resources.items() if isinstance(r, Threads)}
        self._wake_s = {name: r.wake_s for name, r in resources.items() if isinstance(r, Threads)}
        self._busy = dict.fromkeys(resources, 0)
        self._names = tuple(resources)
        self._number = {name: k for k, name in enumerate(resources)}
        self._queues: dict[str, list[tuple[float, int, int]]] = {name: [] for name in resources}
        self._users: dict[str, int] = {}  # the task that left a resource last
        self._readers = readers_of(set(task.after) for task in tasks)
        self._missing = [len(set(task.after)) for task in tasks]
        self._starts, self._ends = [0.0] * len(tasks), [-1.0] * len(tasks)
        self._ready_s = [0.0] * len(tasks)
        self._threads: list[tuple[str, int]] = [("", _NOBODY)] * len(tasks)  # that ran it, or what it waited for last
        self._last: list[int | None] = [None] * len(tasks)
        self._events: list[tuple[float, int, int]] = []  # time, what happens, to which task or resource
        self._seconds = 0.0

    def run(self) -> TaskTimes:
        touched: dict[str, None] = {}
        first = [i for i, missing in enumerate(self._missing) if not missing]
        for i in sorted(first, key=lambda i: self._tasks[i].rank):
            self._ready(0.0, i, None, touched)
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
        return TaskTimes(tuple(self._starts), tuple(self._ends), self._seconds, tuple(self._last))

    def _ready(self, now: float, i: int, maker: int | None, touched: dict[str, None]) -> None:
        task, by = self._tasks[i], ("", _NOBODY) if maker is None else self._threads[maker]
        self._ready_s[i] = now
        if not task.uses:
            self._threads[i] = by
            self._begin(now, i)
            return
        name = task.uses[0]
        touched[name] = None
        pool, thread = self._pools.get(name), by[1] if by[0] == name else _NOBODY
        if pool is None:
            heapq.heappush(self._queues[name], (now, task.rank, i))
        elif thread == _NOBODY:
            pool.give(i)
        elif maker is not None and self._tasks[maker].hands_on:
            pool.leave(i, thread)
        else:
            pool.add(i, thread, is_short=task.seconds < SHORT_S)

    def _begin(self, now: float, i: int) -> None:
        task, working = self._tasks[i], 1
        for name in task.uses:
            self._busy[name] += 1
            working = max(working, self._busy[name])
        self._starts[i] = now
        self._ends[i] = now + task.seconds * task.slowdown[min(working, len(task.slowdown)) - 1]
        heapq.heappush(self._events, (self._ends[i], _ENDS, i))

    def _leave(self, now: float, i: int, touched: dict[str, None]) -> None:
        task = self._tasks[i]
        for name in task.uses:
            self._busy[name] -= 1
            self._users[name] = i
            touched[name] = None
            if name in self._pools:
                self._pools[name].free.append(self._threads[i][1])
        if task.delay_s:
            heapq.heappush(self._events, (now + task.delay_s, _ARRIVES, i))

    def _arrive(self, now: float, i: int, touched: dict[str, None]) -> None:
        self._seconds = max(self._seconds, now)
        if self._tasks[i].delay_s:
            self._threads[i] = ("", _NOBODY)  # (who receives it is no thread that waits for it)
        for reader in self._readers[i]:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._last[reader] = i
                self._ready(now, reader, i, touched)

    def _dispatch(self, now: float, touched: dict[str, None]) -> None:
        """Start what can on resources that were left or are asked for. What finds another one busy waits there."""
        for name in touched:
            if name in self._pools:
                self._dispatch_pool(now, name, self._pools[name])
                continue
            queue = self._queues[name]
            while queue and not self._busy[name]:
                ready, rank, i = heapq.heappop(queue)
                busy = next((other for other in self._tasks[i].uses if self._busy[other]), None)
                if busy is not None:
                    heapq.heappush(self._queues[busy], (ready, rank, i))
                    continue
                self._start(now, i, name)

    def _start(self, now: float, i: int, name: str) -> None:
        if self._ready_s[i] < now:
            self._last[i] = self._users.get(name, self._last[i])
        self._begin(now, i)

    def _dispatch_pool(self, now: float, name: str, pool: WaitingTasks) -> None:
        """Let free threads take what they do next; those that find nothing sleep. Wake as many as tasks wait for."""
        idle, taken = pool.free, True
        while taken and idle:  # (who takes something may leave something else)
            found = [(thread, pool.take(thread)) for thread in idle]
            idle, taken = [thread for thread, i in found if i is None], any(i is not None for _, i in found)
            for thread, i in found:
                if i is not None:
                    self._threads[i] = (name, thread)
                    self._start(now, i, name)
        pool.free = idle
        if not self._wake_s[name]:
            return
        pool.asleep, pool.free = pool.asleep + idle, []
        for _ in range(pool.asked_for()):
            pool.waking += 1
            heapq.heappush(self._events, (now + self._wake_s[name], _WAKES, self._number[name]))

    def _wake(self, name: str, touched: dict[str, None]) -> None:
        pool = self._pools[name]
        pool.waking -= 1
        pool.free.append(pool.asleep.pop())
        touched[name] = None
