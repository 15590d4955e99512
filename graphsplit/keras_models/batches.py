"""Batch functions: what Keras calls for every batch, `f(iterator) -> logs`, on top of a parallelized step.

The iterator is advanced outside of the parallelized step, eagerly, so that every batch arrives with its true shape
and the last, smaller batch is one more signature. (Inside a graph Keras' array datasets have an unknown batch size.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from graphsplit.functions import ParallelFunction
from graphsplit.plans import Plan


class BatchFunction:
    """Runs up to `steps()` batches of an iterator through a parallelized step.

    Attributes:
      step: the template's step, parallelized.
    """

    def __init__(self, step: ParallelFunction, steps: Callable[[], int], finish: Callable[[list[Any]], Any]):
        self.step = step
        self._steps = steps
        self._finish = finish
        self._last: Any = None

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Return what the steps returned, joined; raise `StopIteration` if there is no batch left."""
        return self.run(_take(iterator, self._steps()))

    def run(self, batches: Iterator[Any]) -> Any:
        """Run the step on every batch."""
        outputs = []
        for batch in batches:
            self._last = _without_optionals(batch)
            outputs.append(self.step(self._last))
        if not outputs:
            raise StopIteration
        return self._finish(outputs)

    def plan(self) -> Plan:
        """Return what ran where for the last batch. `print` it."""
        return self.step.plan(self._last)


def last(outputs: list[Any]) -> Any:
    """Return what the last step returned."""
    return outputs[-1]


def last_sorted(outputs: list[Any]) -> Any:
    """Return the logs of the last step in alphabetical order, in which Keras 3 gets them from `tf.data`'s optionals."""
    logs = outputs[-1]
    return {key: logs[key] for key in sorted(logs)} if type(logs) is dict else logs


def joined_predictions(outputs: list[Any]) -> Any:
    """Return the predictions of several steps, joined along the rows."""
    return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(_join, *outputs)


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def _take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _without_optionals(batch: Any) -> Any:
    """Replace `tf.data`'s optional values, of which Keras 3 makes missing targets and weights, by None."""
    return tf.nest.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)
