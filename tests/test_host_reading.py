"""Input that hosts read themselves: what cuts it, and functions of batches. (Over workers: `worker_reading.py`.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.hosts import by_host, host_name
from graphsplit.core.protos import split_reference
from graphsplit.emission import EmittedGraph, emit
from graphsplit.runtime.executable import runtime_function
from graphsplit.runtime.feeding import CutAhead, cut_ahead
from tests.helpers.hosts import on_hosts, on_local_devices, plan_on_hosts
from tests.helpers.law import assert_close, rows


def between_hosts(nodes: Sequence[Any]) -> list[tuple[str, str]]:
    """Return what nodes read of other hosts' nodes, and where."""
    device = {node.name: node.device for node in nodes}
    edges = {(split_reference(r.lstrip("^"))[0], node.device) for node in nodes for r in node.input}
    return sorted((source, target) for source, target in edges if host_name(device[source]) != host_name(target))


def fed(graph: EmittedGraph, ahead: CutAhead, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Cut arguments on local devices that stand for those of hosts."""
    local = on_local_devices(dataclasses.replace(graph, nodes=tuple(ahead.nodes)), on_hosts(2, 3))
    return runtime_function("fed", local, local.nodes, ahead.given, list(ahead.pieces.values()), (), {})(tensors)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [13, 4, 1])
@pytest.mark.parametrize("is_known", [True, False])
def test_each_host_cuts_what_it_reads(is_known: bool, count: int):
    """Nothing passes between hosts, and the pieces are those of one that cuts for all."""

    def function(x: tf.Tensor, table: tf.Tensor) -> Any:
        return tf.tanh(x) @ table, tf.cumsum(x, 0)

    x, table = rows(count, 6), rows(6, 2)
    given = x if is_known else tf.TensorSpec((None, 6), x.dtype)
    plan = plan_on_hosts(function, (2, 3), given, table, split={"table": None})
    graph, hosts = emit(plan), tuple(by_host(plan.devices))
    alone = cut_ahead(graph, plan.default_device)
    ahead = cut_ahead(graph, plan.default_device, hosts)
    assert ahead.pieces == alone.pieces
    away = [piece for (_, device), piece in alone.pieces.items() if host_name(device) != host_name(plan.default_device)]
    assert len(between_hosts(alone.nodes)) == len(away)
    assert bool(away) == (count > 1 or not is_known)
    assert between_hosts(ahead.nodes) == []
    assert len(ahead.given) == len(hosts) * len(alone.given)
    together = fed(graph, ahead, [x, table] * len(hosts))
    for own, other in zip(together, fed(graph, alone, [x, table]), strict=True):
        np.testing.assert_array_equal(own, other)


def test_what_other_hosts_read_comes_from_the_first_reader():
    plan = plan_on_hosts(lambda x: tf.cumsum(x, 0) + tf.tanh(x), (2, 3), rows(13, 6))
    ahead = cut_ahead(emit(plan), plan.default_device, [host_name(plan.devices[2])])
    assert host_name(plan.default_device) not in {
        host_name(node.device) for node in ahead.nodes if "/reader_0/" in node.name
    }
    there = {target for source, target in between_hosts(ahead.nodes) if "/reader_0/" in source}
    assert there == set(plan.devices[:2])


def test_a_function_of_the_batches():
    """Where all devices are of this process it is called once, here."""
    calls = []

    def batches():
        calls.append(1)
        return tf.data.Dataset.from_tensor_slices(rows(17)).shuffle(9, seed=3).batch(5)

    def function(x: tf.Tensor) -> Any:
        return tf.tanh(x), tf.reduce_mean(x)

    parallel = gs.parallelize(function, devices=3)
    found = list(parallel.map(batches))
    assert calls == [1]
    assert_close(found, [function(x) for x in batches()])

    def generated():
        yield rows(5)
        yield rows(2)

    assert_close(list(parallel.map(generated)), [function(rows(5)), function(rows(2))])


def test_what_can_be_called_and_iterated_is_iterated():
    class Both:
        def __call__(self):
            raise AssertionError("it has batches itself")

        def __iter__(self):
            return iter([rows(3), rows(2)])

    assert_close(list(gs.parallelize(tf.sin, devices=2).map(Both())), [tf.sin(rows(3)), tf.sin(rows(2))])


def test_what_is_neither():
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        gs.parallelize(tf.sin, devices=2).map(5)
