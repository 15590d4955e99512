"""Prefetching: while one batch is computed, the next ones are read, cut and sent to the devices."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from graphsplit.api.input.host_reading import HostPipeline, connection, is_dataset_function
from graphsplit.core import structures
from graphsplit.core.hosts import by_host

Prepared = TypeVar("Prepared")
END: Any = object()


def ahead(items: Iterator[Any], prepare: Callable[[Any], Prepared], count: int) -> Iterator[Prepared]:
    """Yield `prepare(item)` for every item, in order, prepared up to `count` items ahead by another thread.

    What the iterator or `prepare` raises is raised here, after the items before it. When the consumer stops early, the
    other thread has finished with the iterator before it goes on; up to `count` items are lost.
    """

    def next_one() -> Any:
        item = next(items, END)
        return END if item is END else prepare(item)

    pending: collections.deque[Future[Any]] = collections.deque()
    executor = ThreadPoolExecutor(1, thread_name_prefix="graphsplit_prefetch")
    try:
        pending.extend(executor.submit(next_one) for _ in range(count))
        while (prepared := pending.popleft().result() if pending else next_one()) is not END:
            if count:
                pending.append(executor.submit(next_one))
            yield prepared
    finally:
        executor.shutdown(cancel_futures=True)


def results(function: Any, batches: Any, count: int) -> Iterator[Any]:
    """Return an iterator over what a `ParallelFunction` returns for every batch; see `ParallelFunction.map`."""
    if not is_dataset_function(batches):
        return _results(function, _alone(batches), count, ())
    hosts = tuple(by_host(function.devices))
    if not any(hosts):  # all devices are this process'
        return _results(function, _alone(batches()), count, ())
    return _results(function, _read(HostPipeline(function._name(), batches), hosts), count, hosts)


def _alone(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Return batches as one reader has them."""
    return map(lambda batch: [batch], batches)  # noqa: C417  (it begins at once to iterate, as a generator does not)


def _read(pipeline: HostPipeline, hosts: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield batches as all hosts have them."""
    for number in itertools.count():
        found = pipeline.read(number, hosts)
        if not found:
            return
        yield found


def _results(function: Any, batches: Iterator[list[Any]], count: int, readers: tuple[str, ...]) -> Iterator[Any]:
    """Yield results for batches as each of the readers has them; without readers, as this process has them."""

    def prepare(found: list[Any]) -> tuple[Any, Any, Any, Any]:
        tensors, tree = _flatten(function, found)
        planned = function._find(tree)  # new signatures are traced by the user's own thread
        planned = planned if planned is None or readers else planned.on(tensors)
        sends = planned is not None and planned.sends(readers)
        return tensors, tree, planned, planned.send(tensors, readers) if sends else None

    for tensors, tree, sender, pieces in ahead(batches, prepare, count):
        # another one, if layouts changed meanwhile, or scopes are open here
        lying = None if readers else tensors
        yield function._run_planned(tree, lying, partial(_run, tensors, readers, sender, pieces))


class ReadCall:
    """A call on a batch that each host reads; on those hosts that have it, also again."""

    def __init__(self, pipeline: HostPipeline, number: int):
        self._pipeline = pipeline
        self._number = number
        self._found: dict[str, Any] = {}  # by host
        self._connection = connection()

    def __call__(self, function: Any) -> Any:
        """Return what a `ParallelFunction` returns; `END` if there is no such batch."""
        hosts = tuple(by_host(function.devices))
        if self._connection != connection():
            self._found, self._connection = {}, connection()
        if not self._found.keys() >= set(hosts):
            self._found.update(zip(hosts, self._pipeline.read(self._number, hosts), strict=False))
        if not self._found:
            return END
        tensors, tree = _flatten(function, [self._found[host] for host in hosts])
        return function._run_planned(tree, None, partial(_run, tensors, hosts, None, None))


def _run(tensors: Any, readers: tuple[str, ...], sender: Any, pieces: Any, planned: Any) -> list[tf.Tensor]:
    found: list[tf.Tensor] = planned.run_sent(tensors, pieces if planned is sender else None, readers)
    return found


def _flatten(function: Any, found: list[Any]) -> tuple[list[tf.Tensor], structures.Container]:
    """Return the tensors of a batch, of one reader after the other, and its structure, which is that of each."""
    flat = [function._flatten(arguments_of(batch), {}) for batch in found]
    return [tensor for tensors, _ in flat for tensor in tensors], flat[0][1]


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Return the arguments that a batch is: a tuple is several, and a named one is not, as in `Dataset.map`."""
    return batch if type(batch) is tuple else (batch,)
