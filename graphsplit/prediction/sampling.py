"""Samples: how long each kind of operation took in steps that TensorFlow's profiler recorded."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.costs.families import FREE, PASSED_ON
from graphsplit.costs.machine import Sample
from graphsplit.costs.seconds import sample_key
from graphsplit.costs.work import Described, Work, work_of
from graphsplit.placement.flattening import flatten
from graphsplit.placement.placements import Placement
from graphsplit.placement.timeline import Timeline

_NO_ATTRIBUTE = tf.compat.v1.AttrValue()


def samples_of(timelines: Sequence[Timeline]) -> dict[str, Sample]:
    """Return the median time of each kind of operation, by `sample_key`.

    Args:
      timelines: recordings of the same function.
    """
    placement = timelines[0].placement
    keys = _keys(placement)
    seconds: dict[str, list[float]] = {}
    for timeline in timelines:
        for event in timeline.events:
            if event.name in keys and not event.copied:
                seconds.setdefault(keys[event.name][0], []).append(event.duration_s)
    works = dict(keys.values())
    return {key: Sample(works[key], statistics.median(found)) for key, found in seconds.items()}


def _keys(placement: Placement) -> dict[str, tuple[str, Work]]:
    """Return the key and the work of each operation of a placement that takes time."""
    nodes = {flat.name: flat.node for flat in flatten(placement.graph_def)}
    reads: dict[str, dict[int, Described]] = {}
    for edge in placement.edges:
        if not edge.control and edge.operand >= 0:
            reads.setdefault(edge.target, {})[edge.operand] = _described(placement, edge.source, edge.output)
    found = {}
    for name, op in placement.ops.items():
        node = nodes[name]
        inputs = [tensor for _, tensor in sorted(reads.get(name, {}).items())]
        outputs = [_described(placement, name, k) for k in range(len(op.shapes))]
        work = work_of(op.type, _attributes(node), inputs, outputs)
        if work.family not in (FREE, PASSED_ON):
            found[name] = sample_key(node, inputs, outputs), work
    return found


def _described(placement: Placement, name: str, output: int) -> Described:
    op = placement.ops[name]
    return op.shapes[output], tf.as_dtype(op.dtypes[output])


def _attributes(node: Any) -> Any:
    attributes: Mapping[str, Any] = node.attr
    return lambda name: attributes.get(name, _NO_ATTRIBUTE)
