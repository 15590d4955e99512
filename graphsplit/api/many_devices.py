"""Predictions for hundreds of devices: some of them are emitted, twice, and stand for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.predicted_calls import PredictedCall, predicted_call
from graphsplit.api.predicted_layouts import Layout, layout_name, notes_on_layout
from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import Shard
from graphsplit.costs.machine import Machine
from graphsplit.prediction.growth import Counts
from graphsplit.prediction.predictions import Planned, Prediction, planned_tasks, predict_many
from graphsplit.prediction.state_bytes import state_bytes
from graphsplit.prediction.unknown_sizes import UnknownSize

MOST_NODES = 1_000_000  # that are emitted for one prediction: about 2 minutes, and 3 GB
ENOUGH_NODES = 100_000  # with more, some devices stand for all
_FEW, _MORE = 4, 6  # of one host
_FEW_HOSTS, _MORE_HOSTS = 2, 3


class ManyDevices:
    """Predictions of a function for numbers of devices that are too large to emit the graph for each of them.

    Args:
      fn, args, kwargs: what is called.
      call: that.
      unknown_size: what sizes count as that follow from data; of two numbers the least.
    """

    def __init__(
        self,
        fn: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: PredictedCall,
        unknown_size: UnknownSize,
    ):
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self._call = call
        self._unknown_size = unknown_size[0] if isinstance(unknown_size, tuple) else unknown_size
        self._calls = {int(call.splitting.batch): call}
        self._planned: dict[tuple[object, ...], Planned] = {}

    @collection_paused()
    def predict(self, machine: Machine, count: int, rows: int, layout: Layout) -> Prediction:
        """Return the prediction for so many devices that share so many rows."""
        counts = counts_of(machine, count)
        few, more = (self._tasks(machine, n, _rows_of(n, rows, count), layout) for n in (counts.few, counts.more))
        found = predict_many(few, more, machine, counts, title=self._call.title, layout=layout_name(layout))
        traced = next((call for call in self._calls.values() if call.is_traced), self._call)
        return dataclasses.replace(found, notes=notes_on_layout(traced.trace, layout, machine.names(count)))

    def any_call(self, machine: Machine, count: int, rows: int) -> PredictedCall:
        """Return the call with some number of rows, if none is traced with one that `predict` would need as well."""
        counts = counts_of(machine, count)
        if self._call.is_traced or count <= counts.more or not self._call.splitting.batch:
            return self._call
        return self.with_rows(_rows_of(counts.few, rows, count))

    def with_rows(self, rows: int) -> PredictedCall:
        """Return the call with another number of rows in what is split, traced once.

        Raises:
          ArgumentError: if nothing is split.
        """
        if not self._call.splitting.batch:
            raise ArgumentError(
                f"Weak scaling of {self._call.title}: no argument is split, so there are no rows to add."
            )
        if rows not in self._calls:
            self._calls[rows] = _with_rows(self._fn, self._args, self._kwargs, self._call, rows)
        return self._calls[rows]

    def _tasks(self, machine: Machine, count: int, rows: int, layout: Layout) -> Planned:
        key = (machine.hosts > 1, count, rows, str(layout))
        if key not in self._planned:
            call = self.with_rows(rows)
            plan = call.plan(machine.names(count), layout)
            state = state_bytes(call.trace, plan.program, plan.state, plan.home)
            self._planned[key] = planned_tasks(plan, machine, state, self._unknown_size)
        return self._planned[key]


def _rows_of(devices: int, rows: int, count: int) -> int:
    """Return how many rows some devices have if each has as many as each of `count` devices that share `rows`."""
    return devices * -(-rows // count)


def counts_of(machine: Machine, count: int) -> Counts:
    """Return how many devices stand for so many: those of some hosts, or some of one."""
    if machine.hosts == 1:
        return Counts(_FEW, _MORE, count, (_FEW, _MORE, count))
    hosts = -(-count // machine.devices)
    few, more = _FEW_HOSTS * machine.devices, _MORE_HOSTS * machine.devices
    return Counts(few, more, count, (_FEW_HOSTS, _MORE_HOSTS, hosts))


def are_many(call: PredictedCall, machine: Machine, count: int, layout: Layout) -> bool:
    """Return whether some devices are to stand for all: if the whole graph is large, and all devices do the same.

    Raises:
      UnsupportedError: if the whole graph is too large, and they do not.
    """
    nodes = _nodes(call, count, layout)
    if nodes <= ENOUGH_NODES:
        return False
    reasons = {
        "stages": bool(call.options.stages or call.trace.program.all_stages()),
        "unequal shares": call.options.weights is not None,
        "logical CPU devices, which share threads": machine.device.kind == "CPU",
        "no rows that are split": not call.splitting.batch,
        "so few devices": count <= counts_of(machine, count).more,
    }
    different = [what for what, holds in reasons.items() if holds]
    if different and nodes > MOST_NODES:
        raise UnsupportedError(
            f"{call.title} on {count} devices would be a graph of about {nodes:,} nodes, and some devices cannot stand "
            f"for all with {', '.join(different)}; then a prediction replays at most {MOST_NODES:,}. Choose fewer "
            "devices."
        )
    return not different


def _nodes(call: PredictedCall, count: int, layout: Layout) -> int:
    """Return about how many nodes and sends a graph has: where variables are several, each device sends to each."""
    exchanged = 0 if layout in (None, "home") else count * count * len(call.trace.variables)
    return count * sum(1 for op in call.trace.program.ops if op.type != "Const") + exchanged


def _with_rows(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: PredictedCall, rows: int
) -> PredictedCall:
    """Return the call with another number of rows in what is split."""
    layouts, batch = iter(call.splitting.layouts), int(call.splitting.batch)

    def widen(value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, tf.TensorSpec)) and not hasattr(value, "__array_interface__"):
            return value
        layout, spec = (
            next(layouts),
            value if isinstance(value, tf.TensorSpec) else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value)),
        )
        shape = list(spec.shape)
        if isinstance(layout, Shard):
            shape[layout.axis] = shape[layout.axis] * rows // batch
        return tf.TensorSpec(shape, spec.dtype)

    wide = tf.nest.map_structure(widen, (tuple(args), dict(kwargs)))
    return dataclasses.replace(predicted_call(fn, wide[0], wide[1]), options=call.options)
