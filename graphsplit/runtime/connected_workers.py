"""The worker processes that this process is connected to, for those who run functions there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from graphsplit.core.tensorflow_internals import RuntimeFunction

R = TypeVar("R")
Make = Callable[[Sequence[Any], Sequence[str]], RuntimeFunction]
"""Registers a graph's nodes and inputs with TensorFlow's runtime."""


class Workers(Protocol):
    """Runs things on workers: each happens or does not, and ends although a worker does not answer.

    Attributes:
      cluster: what users know of them.
    """

    cluster: Any

    @property
    def connections(self) -> int:
        """How often this process was connected to them: what is on them, but variables, ends with a connection."""

    def function(
        self, name: str, nodes: Sequence[Any], inputs: Sequence[str], make: Make
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """Return a function of an emitted graph that runs on workers, called as a `RuntimeFunction` is."""

    def read(self, name: str, tasks: tuple[int, ...], run: Callable[[], R]) -> R:
        """Run what writes nothing, and watch the workers that it runs on."""


_connected: list[Workers] = []


def connected_workers() -> Workers | None:
    """Return the workers that this process is connected to; None if there are none."""
    return _connected[0] if _connected else None


def note_connected(workers: Workers) -> None:
    """Note the workers that this process is connected to from now on."""
    _connected[:] = [workers]


class Call(Future[R]):
    """A call in a thread of its own, which does not keep the process alive."""

    def __init__(self, run: Callable[[], R]):
        super().__init__()
        threading.Thread(target=self._work, args=(run,), name="graphsplit call", daemon=True).start()

    def _work(self, run: Callable[[], R]) -> None:
        try:
            self.set_result(run())
        except BaseException as error:
            self.set_exception(error)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the call ends in time."""
        return bool(wait([self], timeout_s).done)
