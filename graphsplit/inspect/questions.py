"""Questions about a placement, as functions of its operations and edges. `Placement` has them as methods."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphsplit.core import patterns
from graphsplit.inspect.records import NO_DATA, Change, DeviceTotals, Edge, PlacedOp, Transfer
from graphsplit.program.graph.walks import reached

if TYPE_CHECKING:
    import networkx as nx

_NOT_ACTIVATIONS = frozenset({"Const", "Placeholder", "VarHandleOp", "ReadVariableOp", "VariableV2"})


def find_transfers(ops: Mapping[str, PlacedOp], edges: Sequence[Edge]) -> list[Transfer]:
    """Return every tensor that crosses devices, largest first; one that several ops of a device read, once."""
    edges = [edge for edge in edges if not edge.control and edge.dtype not in NO_DATA]
    readers: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    sizes: dict[tuple[str, int, str], int] = {}
    for edge, origin in _through_removed(ops, edges):
        target = ops[edge.target]
        if not crosses(ops[origin.source], target):
            continue
        key = (origin.source, origin.output, target.device)
        readers[key].append(edge.target)
        sizes[key] = origin.bytes
    transfers = [
        Transfer(name, output, ops[name].device, device, sizes[name, output, device], tuple(dict.fromkeys(targets)))
        for (name, output, device), targets in readers.items()
    ]
    return sorted(transfers, key=lambda t: (-t.bytes, t.source, t.target_device))


def _through_removed(ops: Mapping[str, PlacedOp], edges: Sequence[Edge]) -> list[tuple[Edge, Edge]]:
    """Return every edge with the edge that fed it: itself, unless its source was removed and only passed data on."""
    feeds: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        if not ops[edge.target].ran and ops[edge.target].reason.startswith(("removed", "lowered")):
            feeds[edge.target].append(edge)
    found = []
    for edge in edges:
        origins = reached([edge], lambda e: feeds.get(e.source, ())) if edge.source in feeds else [edge]
        found += [(edge, origin) for origin in origins if origin.source not in feeds]
    return found


def crosses(source: PlacedOp, target: PlacedOp) -> bool:
    """Return whether a tensor from one operation to the other changes devices: both take part, and elsewhere."""
    return source.ran and target.ran and source.device != target.device


def total_by_device(ops: Iterable[PlacedOp], transfers: Iterable[Transfer]) -> dict[str, DeviceTotals]:
    """Return what each device has to do, by device, in their order."""
    totals: dict[str, DeviceTotals] = {}
    for op in ops:
        if not op.ran:
            continue
        before = totals.get(op.device, DeviceTotals(op.device))
        totals[op.device] = replace(
            before,
            ops=before.ops + 1,
            flops=before.flops + (op.flops or 0),
            parameter_bytes=before.parameter_bytes + op.parameter_bytes,
            activation_bytes=before.activation_bytes + (0 if op.type in _NOT_ACTIVATIONS else op.output_bytes),
        )
    for transfer in transfers:
        sender, receiver = totals[transfer.source_device], totals[transfer.target_device]
        totals[sender.device] = replace(sender, sent_bytes=sender.sent_bytes + transfer.bytes)
        totals[receiver.device] = replace(receiver, received_bytes=receiver.received_bytes + transfer.bytes)
    return {device: totals[device] for device in sorted(totals, key=natural_order)}


def natural_order(name: str) -> tuple[object, ...]:
    """Return a sort key in which CPU:2 comes before CPU:10."""
    head, _, tail = name.rpartition(":")
    return (head, int(tail)) if tail.isdigit() else (name, -1)


def topological_order(graph: nx.MultiDiGraph) -> list[str]:
    """Return the nodes so that every one follows its inputs, and else stay in the order in which the graph has them.

    Where a graph has loops (TensorFlow 1), the edges back are ignored.
    """
    import networkx as nx

    again = [name for name, op_type in graph.nodes(data="type") if op_type in ("NextIteration", "RefNextIteration")]
    if again:
        graph = graph.copy()
        graph.remove_edges_from(list(graph.out_edges(again)))
    position = {name: i for i, name in enumerate(graph)}
    return list(nx.lexicographical_topological_sort(graph, position.__getitem__))


def reading_order(graph: nx.MultiDiGraph) -> list[str]:
    """Return the topological order with constants and the like just before the first operation that reads them."""
    rank = {name: float(i) for i, name in enumerate(topological_order(graph))}
    for name in reversed(list(rank)):
        after = [rank[target] for target in graph.successors(name)]
        if after and not graph.in_degree(name) and graph.nodes[name]["type"] != "Placeholder":
            rank[name] = min(after) - 0.5
    return sorted(rank, key=lambda name: rank[name])


def select(ops: Iterable[PlacedOp], pattern: str) -> list[PlacedOp]:
    """Return the operations whose name or type matches a shell pattern: `MatMul`, or, from any `/` on, `dense/*`.

    Layers are called as in their model: if that finds something, names as TensorFlow has them are not looked at.
    """
    ops = list(ops)
    plain = layer_names(ops)
    found = [op for op in ops if plain.get(op.name, op.name) != op.name and _matches(plain[op.name], op.type, pattern)]
    return found or [op for op in ops if _matches(op.name, op.type, pattern)]


def _matches(name: str, op_type: str, pattern: str) -> bool:
    if "/" in pattern:
        return patterns.fits(name, pattern)
    # (a type's name is that of operations in many scopes, too)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(op_type, pattern)


def layer_names(ops: Sequence[PlacedOp]) -> dict[str, str]:
    """Return names of operations with the scopes of layers called as these are, for models of Keras 3.

    Keras 3 enters each layer's scope twice, so that TensorFlow gives it a number: `dense_1` is the layer `dense`. The
    variables, which have the layers' own names, tell.
    """
    numbered = any(_is_numbered(op.variable.split("/")[:-1], op.name.split("/")) for op in ops if op.variable)
    return {op.name: _without_numbers(op) for op in ops} if numbered else {}


def _is_numbered(layers: Sequence[str], scopes: Sequence[str]) -> bool:
    """Return whether a variable's layers are scopes of its handle, with numbers; models may be around them."""
    starts = range(len(scopes) - len(layers) + 1) if layers else ()
    windows = [scopes[start : start + len(layers)] for start in starts]
    if any(list(layers) == list(window) for window in windows):
        return False
    patterns = [rf"{re.escape(layer)}(_\d+)?" for layer in layers]
    return any(all(map(re.fullmatch, patterns, window)) for window in windows)


def _without_numbers(op: PlacedOp) -> str:
    *scopes, last = op.own_name.removeprefix(op.written).split("/")
    first = 0 if op.shard is None or op.written else 1  # `shard_2` is no layer
    return (
        op.prefix
        + op.written
        + "/".join([*scopes[:first], *[re.sub(r"_\d+$", "", scope) for scope in scopes[first:]], last])
    )


def near(ops: Iterable[PlacedOp], pattern: str) -> list[str]:
    """Return a few patterns like one, which match operations: scopes, names outside of scopes, and types."""
    ops = list(ops)
    plain = layer_names(ops)
    names = patterns.scopes_and_names(plain.get(op.name, op.name) for op in ops)
    return patterns.near(pattern, [*names, *(op.type for op in ops)])


def compare(before: Mapping[str, PlacedOp], after: Mapping[str, PlacedOp]) -> list[Change]:
    """Return what is different: operations that came, went, or changed in device, type, shapes or FLOPs."""
    changes = []
    for name in sorted({*before, *after}):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            changes.append(Change(name, "operation", a.type if a else "", b.type if b else ""))
            continue
        for what in ("type", "device", "shard", "shapes", "flops", "ran"):
            x, y = getattr(a, what), getattr(b, what)
            if x != y:
                changes.append(Change(name, what, str(x), str(y)))
    return changes
