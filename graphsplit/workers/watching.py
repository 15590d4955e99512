"""Calls that end although a worker does not answer.

A call of TensorFlow's runtime waits for a frozen worker as long as that is frozen, and nothing in the process can end
it. So it waits in a thread of its own, and who called asks the workers from outside how they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from graphsplit.runtime.connected_workers import Call
from graphsplit.workers.cluster import Cluster
from graphsplit.workers.status import ask_all

_PATIENCE_S = 2.0  # a call that takes less asks nobody
_BETWEEN_S = 1.0
_AFTER_S = 10.0  # what a call takes to end once the process that it waits for has ended
_TIMES = 10
_USUAL_S = 60.0


class Frozen(Exception):  # noqa: N818  (it is caught by those who know what to say)
    """Some workers do not answer a call.

    Attributes:
      tasks: their numbers.
      since_s: for how long they have not, in seconds.
      ended: whether the call has ended since.
    """

    def __init__(self, tasks: Sequence[int], since_s: float, ended: bool):
        super().__init__(tasks)
        self.tasks = tuple(tasks)
        self.since_s = since_s
        self.ended = ended


class Watch:
    """Waits for calls, and for how long the longest took.

    Args:
      cluster: whose workers are asked.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._longest_s = 0.0

    @property
    def deadline_s(self) -> float:
        """How long a worker may not answer."""
        given = self._cluster.deadline_s
        return given if given is not None else max(_USUAL_S, _TIMES * self._longest_s)

    def wait(self, call: Call[Any], tasks: Sequence[int]) -> None:
        """Return when a call has ended.

        Raises:
          Frozen: if workers that it needs do not answer for the deadline.
        """
        begin = time.monotonic()
        if call.has_ended(min(_PATIENCE_S, self.deadline_s)):
            self._longest_s = max(self._longest_s, time.monotonic() - begin)
            return
        answered = dict.fromkeys(tasks, begin)
        while not call.has_ended(_BETWEEN_S):
            addresses = [self._cluster.workers[task] for task in tasks]
            statuses = ask_all(addresses, min(_BETWEEN_S, self.deadline_s))
            now = time.monotonic()
            answered |= {task: now for task, status in zip(tasks, statuses, strict=True) if status is not None}
            silent = [task for task in tasks if now - answered[task] > self.deadline_s]
            if silent and not call.has_ended():
                self._give_up(call, silent, now - min(answered[task] for task in silent))
        self._longest_s = max(self._longest_s, time.monotonic() - begin)

    def _give_up(self, call: Call[Any], tasks: Sequence[int], since_s: float) -> None:
        if self._cluster.on_lost is not None:
            for task in tasks:
                self._cluster.on_lost(task, self._cluster.workers[task])
            call.has_ended(_AFTER_S)
        raise Frozen(tasks, since_s, call.has_ended())
