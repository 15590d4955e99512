"""The nodes of each primitive: a value is sliced, concatenated, added up, filled with zeros, or sent on.

A value of a shard that turns out to have no rows is dead, and so is whatever reads it, up to where something else
stands in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import constant_node, make_node

Nodes = list[Any]

_NEUTRAL = {"sum": "ZerosLike", "mean": "ZerosLike", "prod": "OnesLike"}
PAIRWISE = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "all": "LogicalAnd", "any": "LogicalOr"}


def split(
    name: str, source: str, sizes: str, pieces: int, axis: int, dtype: tf.DType, device: str, wait: str = ""
) -> tuple[Nodes, list[str]]:
    """Return the nodes that split a value on a device, given the reference of the sizes, and its pieces."""
    types = {"T": dtype, "Tlen": tf.int64}
    nodes = [
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device, wait),
        make_node(name, "SplitV", [source, sizes, f"{name}/axis"], device, num_split=pieces, **types),
    ]
    return nodes, [f"{name}:{i}" for i in range(pieces)]


def concatenate(name: str, parts: Sequence[str], axis: int, dtype: tf.DType, device: str, wait: str = "") -> Nodes:
    """Return the nodes that concatenate values on a device; the last one has the name."""
    return [
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device, wait),
        make_node(name, "ConcatV2", [*parts, f"{name}/axis"], device, N=len(parts), T=dtype, Tidx=tf.int32),
    ]


def add(name: str, parts: Sequence[str], reduction: str, dtype: tf.DType, device: str) -> Nodes:
    """Return the nodes that reduce values in order; those of a mean are added up.

    The order is fixed, so a step gives the same bits every time it runs. One op per reduction: of a ResNet50 training
    step on 8 logical CPU devices, neither a chain of additions nor a tree over the devices is faster than `AddN`
    (`benchmarks/choices.py`).
    """
    if reduction in ("sum", "mean"):
        return [make_node(name, "AddN", parts, device, N=len(parts), T=dtype)]
    nodes, result = [], parts[0]
    for i, part in enumerate(parts[1:], 1):
        own = name if i == len(parts) - 1 else f"{name}/upto_{i}"
        attributes = {} if reduction in ("all", "any") else {"T": dtype}
        nodes.append(make_node(own, PAIRWISE[reduction], [result, part], device, **attributes))
        result = own
    return nodes


def divide(name: str, total: str, entries: int, dtype: tf.DType, device: str) -> Nodes:
    """Return the nodes that divide a sum."""
    count = constant_node(f"{name}/count", np.array(entries, dtype.as_numpy_dtype), dtype, device)
    return [count, make_node(name, "RealDiv", [total, count.name], device, T=dtype)]


def send_on(name: str, source: str, dtype: tf.DType, device: str) -> Nodes:
    """Return the node that brings a value to a device, from which others get it."""
    return [make_node(name, "Identity", [source], device, T=dtype)]


def unless_absent(
    name: str, part: str, instead: str, present: str, dtype: tf.DType, device: str, reduction: str, source: str = ""
) -> Nodes:
    """Return the nodes that yield `part` if its shard has rows, else what changes nothing.

    That is made of something else of the same shape: zeros for a sum, ones for a product, for `max` and the like what
    another shard has; no `reduction`: that itself. It is dead where it is not needed: given the device on which it is,
    as `source`, it is not sent.
    """
    nodes = [make_node(f"{name}/instead", "Switch", [instead, present], source or device, T=dtype)]
    absent = f"{name}/instead"
    if reduction in _NEUTRAL:
        nodes.append(make_node(f"{name}/neutral", _NEUTRAL[reduction], [absent], device, T=dtype))
        absent = f"{name}/neutral"
    return [*nodes, make_node(name, "Merge", [part, absent], device, N=2, T=dtype)]


def no_rows(name: str, source: str, axis: int, dtype: tf.DType, device: str) -> Nodes:
    """Return the nodes that make what a value is without any rows; the last one has the name."""
    types = {"Tparams": dtype, "Tindices": tf.int32, "Taxis": tf.int32}
    return [
        constant_node(f"{name}/indices", np.zeros(0, np.int32), tf.int32, device),
        constant_node(f"{name}/axis", np.array(axis, np.int32), tf.int32, device),
        make_node(name, "GatherV2", [source, f"{name}/indices", f"{name}/axis"], device, **types),
    ]
