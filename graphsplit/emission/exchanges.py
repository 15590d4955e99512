"""Exchanges as ordinary graph nodes: every shard has something for every other one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Partial, Replicate, Shard
from graphsplit.emission import collectives
from graphsplit.emission.collectives import Nodes
from graphsplit.emission.reductions import Parts, reduce
from graphsplit.emission.row_counts import RowCounts
from graphsplit.planning.gateways import Gateways


def exchange(
    name: str,
    shards: Sequence[str],
    source: Shard | Partial,
    target: Shard | Replicate,
    counts: RowCounts,
    dtype: tf.DType,
    made_on: Sequence[str],
    devices: Sequence[str],
    gateways: Sequence[Gateways],
) -> tuple[Nodes, list[str]]:
    """Return the nodes by which every shard sends each other one its part, and what each then has.

    An all-to-all, a reduce-scatter or an all-gather: each shard cuts what it has as the target says, and puts together
    what it gets as the source says. No device has more than its share of the work, or sees more of the bytes.

    Args:
      name: a prefix of the nodes' names that nobody else has.
      shards: the reference of what each shard has.
      source, target: the layouts, of different axes.
      counts: how many rows each shard has; they are known.
      made_on: the device on which each shard has its value.
      devices: those on which the shards read what they get.
      gateways: of what is added up for each shard, or of what each shard gives to all.
    """
    nodes: Nodes = []
    sent: list[Sequence[str]] = []  # by each shard, to each
    for d, own in enumerate(shards):
        if isinstance(target, Replicate):
            relaying, relayed = collectives.relays(f"{name}/from_{d}", own, dtype, gateways[d])
            nodes += relaying
            sent.append([relayed.get(host_name(device), own) for device in devices])
            continue
        cut, pieces = collectives.scatter(f"{name}/from_{d}", own, target, counts, dtype, made_on[d], devices, d)
        nodes += cut
        sent.append(pieces)
    found = []
    for d, device in enumerate(devices):
        received, own_name = [pieces[d] for pieces in sent], f"{name}/to_{d}"
        if isinstance(source, Partial):
            parts = Parts(received, made_on, range(len(shards)), dtype, counts, gateways[d])
            joined, (reference, _) = reduce(own_name, parts, source.reduction, device)
        else:
            joined, reference = collectives.gather(own_name, received, source, counts, dtype, device, made_on)
        nodes += joined
        found.append(reference)
    return nodes, found
