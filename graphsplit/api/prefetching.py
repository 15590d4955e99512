"""Prefetching: while one batch is computed, the next ones are read, cut and sent to the devices."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from graphsplit.core import structures

Prepared = TypeVar("Prepared")
_END: Any = object()


def ahead(items: Iterator[Any], prepare: Callable[[Any], Prepared], count: int) -> Iterator[Prepared]:
    """Yield `prepare(item)` for every item, in order, prepared up to `count` items ahead by another thread.

    What the iterator or `prepare` raises is raised here, after the items before it. When the consumer stops early, the
    other thread has finished with the iterator before it goes on; up to `count` items are lost.
    """

    def next_one() -> Any:
        item = next(items, _END)
        return _END if item is _END else prepare(item)

    pending: collections.deque[Future[Any]] = collections.deque()
    executor = ThreadPoolExecutor(1, thread_name_prefix="graphsplit_prefetch")
    try:
        pending.extend(executor.submit(next_one) for _ in range(count))
        while (prepared := pending.popleft().result() if pending else next_one()) is not _END:
            if count:
                pending.append(executor.submit(next_one))
            yield prepared
    finally:
        executor.shutdown(cancel_futures=True)


def results(function: Any, batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield what a `ParallelFunction` returns for every batch; see `ParallelFunction.map`."""

    def prepare(batch: Any) -> tuple[Any, Any, Any]:
        arguments = batch if type(batch) is tuple else (batch,)  # not a named one, as in Dataset.map
        tensors, tree = function._flatten(arguments, {})
        compiled = function._find(tree)  # new signatures are traced by the user's own thread
        return tensors, tree, compiled.send(tensors) if compiled and compiled.sends else None

    for tensors, tree, pieces in ahead(batches, prepare, count):
        compiled = function._get(tree)
        result = structures.unflatten(compiled.trace.result, compiled.run_sent(tensors, pieces))
        compiled.runs += 1
        yield result
