"""Collectives as ordinary graph nodes: cutting, gathering and joining tensors between a device and the shards.

TensorFlow's runtime inserts the copies between devices wherever an input comes from another device; these nodes only
say what is computed where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.graphdefs import constant_node, make_node
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import BATCH, Shard
from graphsplit.core.symbolic_sizes import has_sizes
from graphsplit.emission.row_counts import RowCounts

Nodes = list[Any]


def scatter(
    name: str,
    source: str,
    layout: Shard,
    counts: RowCounts,
    dtype: tf.DType,
    device: str,
    devices: Sequence[str],
    shard: int | None = None,
) -> tuple[Nodes, list[str]]:
    """Return the nodes that cut `source` on a device, and the reference of each shard's piece.

    Args:
      name: a prefix of the nodes' names that nobody else has.
      source: the reference of the whole.
      layout: how to cut.
      counts: how many rows each shard has.
      device: where the whole is.
      devices: those of the shards.
      shard: which of them has what is cut, if one has.
    """
    shards = len(devices)
    if shards == 1:
        return [], [source]
    pieces = len(layout.blocks) * shards
    nodes, references = _cut(name, source, counts.split_sizes(name, layout, shard), pieces, layout.axis, dtype, device)
    for k, reference in enumerate(references):
        if _may_be_absent(counts, layout, k % shards):
            switch = f"{name}/piece_{k}"
            nodes.append(make_node(switch, "Switch", [reference, counts.present(k % shards)], device, T=dtype))
            references[k] = f"{switch}:1"
    if len(layout.blocks) == 1:
        return nodes, references
    joined = []
    for d, own in enumerate(devices):
        nodes += join(f"{name}/shard_{d}", references[d::shards], layout.axis, dtype, own, counts.waits_for(d))
        joined.append(f"{name}/shard_{d}")
    return nodes, joined


def gather(
    name: str,
    shards: Sequence[str],
    layout: Shard,
    counts: RowCounts,
    dtype: tf.DType,
    device: str,
    devices: Sequence[str],
) -> tuple[Nodes, str]:
    """Return the nodes that join the shards on a device in the order of the whole, and the reference of the whole."""
    if len(shards) == 1:
        return [], shards[0]
    nodes: Nodes = []
    cut: list[list[str]] = [[shard] for shard in shards]
    if len(layout.blocks) > 1:
        for d, own_device in enumerate(devices):
            own_name = f"{name}/shard_{d}"
            sizes, wait = counts.own_sizes(own_name, layout, d), counts.waits_for(d)
            own, cut[d] = _cut(own_name, shards[d], sizes, len(layout.blocks), layout.axis, dtype, own_device, wait)
            nodes += own
    in_order = [(d, cut[d][b]) for b in range(len(layout.blocks)) for d in range(len(shards))]
    if any(_may_be_absent(counts, layout, d) for d in range(len(shards))):
        nothing, own = _no_rows(f"{name}/nothing", cut[0][0], layout.axis, dtype, device)
        nodes += own
        for k, (d, piece) in enumerate(in_order):
            if counts.may_be_absent(d):
                nodes += unless_absent(f"{name}/piece_{k}", piece, nothing, counts.present(d), dtype, device)
                in_order[k] = d, f"{name}/piece_{k}"
    return nodes + join(name, [piece for _, piece in in_order], layout.axis, dtype, device), name


def _may_be_absent(counts: RowCounts, layout: Shard, d: int) -> bool:
    """Return whether a shard may have nothing of what is cut: slices that are no rows it has in any case."""
    return layout.partition == BATCH and counts.may_be_absent(d)


def relays(name: str, source: str, dtype: tf.DType, gateways: Mapping[str, str]) -> tuple[Nodes, dict[str, str]]:
    """Return the nodes that bring a value to the gateways of hosts, and what devices of these hosts read, by host."""
    found = {host: f"{name}/relay_{k}" for k, host in enumerate(gateways)}
    return [make_node(relay, "Identity", [source], gateways[host], T=dtype) for host, relay in found.items()], found


def broadcast_bucket(
    name: str,
    sources: Sequence[str],
    sizes: Sequence[int],
    dtype: tf.DType,
    home: str,
    devices: Sequence[str],
    gateways: Mapping[str, str],
) -> tuple[Nodes, list[list[str]]]:
    """Return the nodes that join vectors at home and take them apart on each device, and each shard's references."""
    nodes, apart = join(name, sources, 0, dtype, home), {}
    relaying, relayed = relays(name, name, dtype, gateways)
    nodes += relaying
    for d, device in enumerate(devices):
        if device not in apart:
            source = relayed.get(host_name(device), name)
            own, apart[device] = taken_apart(f"{name}/shard_{d}", source, sizes, dtype, device)
            nodes += own
    return nodes, [apart[device] for device in devices]


def taken_apart(name: str, source: str, sizes: Sequence[int], dtype: tf.DType, device: str) -> tuple[Nodes, list[str]]:
    """Return the nodes that take joined vectors apart on a device, and their references."""
    count = constant_node(f"{name}/sizes", np.array(sizes, np.int64), tf.int64, device)
    nodes, references = _cut(name, source, count.name, len(sizes), 0, dtype, device)
    return [count, *nodes], references


def zero_fill(
    name: str,
    source: str,
    shape: tuple[int | None, ...] | None,
    counts: RowCounts,
    dtype: tf.DType,
    home: str,
    devices: Sequence[str],
) -> tuple[Nodes, list[str]]:
    """Return a whole value as a partial sum: itself on the first device, zeros on the others.

    Zeros of known shape are constants of each device; others are made at home and sent.
    """
    nodes, references = [], [source]
    known = shape is not None and None not in shape and not has_sizes(shape)
    if not known:
        nodes.append(make_node(f"{name}/zeros", "ZerosLike", [source], home, T=dtype))
    for d, device in enumerate(devices[1:], 1):
        own = f"{name}/shard_{d}"
        if known:
            zeros = np.broadcast_to(np.zeros((), dtype.as_numpy_dtype), [size or 0 for size in shape or ()])
            nodes.append(constant_node(own, zeros, dtype, device, counts.waits_for(d)))
        elif counts.may_be_absent(d):
            nodes.append(make_node(own, "Switch", [f"{name}/zeros", counts.present(d)], home, T=dtype))
            own = f"{own}:1"
        references.append(own if known or counts.may_be_absent(d) else f"{name}/zeros")
    return nodes, references


def unless_absent(
    name: str, part: str, instead: str, present: str, dtype: tf.DType, home: str, neutral: str = "", source: str = ""
) -> Nodes:
    """Return the nodes that yield `part` if its shard has rows, else something else (passed through op `neutral`).

    What stands in for it is dead where it is not needed: given the device on which it is, as `source`, it is not sent.
    """
    nodes = [make_node(f"{name}/instead", "Switch", [instead, present], source or home, T=dtype)]
    if neutral:
        nodes.append(make_node(f"{name}/neutral", neutral, [f"{name}/instead"], home, T=dtype))
    absent = f"{name}/neutral" if neutral else f"{name}/instead"
    return [*nodes, make_node(name, "Merge", [part, absent], home, N=2, T=dtype)]


def _no_rows(name: str, source: str, axis: int, dtype: tf.DType, device: str) -> tuple[str, Nodes]:
    """Return the reference of what `source` is without any rows, and the nodes that make it."""
    types = {"Tparams": dtype, "Tindices": tf.int32, "Taxis": tf.int32}
    nodes = [
        constant_node(f"{name}/indices", np.zeros(0, np.int32), tf.int32, device),
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device),
        make_node(name, "GatherV2", [source, f"{name}/indices", f"{name}/axis"], device, **types),
    ]
    return name, nodes


def _cut(
    name: str, source: str, sizes: str, pieces: int, axis: int, dtype: tf.DType, device: str, wait: str = ""
) -> tuple[Nodes, list[str]]:
    types = {"T": dtype, "Tlen": tf.int64}
    nodes = [
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device, wait),
        make_node(name, "SplitV", [source, sizes, f"{name}/axis"], device, num_split=pieces, **types),
    ]
    return nodes, [f"{name}:{i}" for i in range(pieces)]


def join(name: str, parts: Sequence[str], axis: int, dtype: tf.DType, device: str, wait: str = "") -> Nodes:
    """Return the nodes that join parts on a device; the last one has the name."""
    return [
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device, wait),
        make_node(name, "ConcatV2", [*parts, f"{name}/axis"], device, N=len(parts), T=dtype, Tidx=tf.int32),
    ]
