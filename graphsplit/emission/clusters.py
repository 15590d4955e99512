"""Clusters: what a shard, or home, computes between two moves, as one call that XLA compiles.

The nodes of one shard and device that XLA compiles get levels: as many as there are borders (moves, effects, other
shards) on the longest way to them; those that only later ones of their own shard read, the level of these. Nodes of one
level form a cluster. No way leads from a cluster out and back into it, since levels only rise along it, and there are
no more clusters than a step has to wait for others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphsplit.core.call_inlining import is_compiled
from graphsplit.core.compilability import holds_variants, why_not_compiled
from graphsplit.core.graphdefs import split_reference
from graphsplit.emission.emitted_graph import EmittedGraph

_COMPUTING = frozenset({"op", "part", "shift", "constant"})  # roles; all others move, count rows or keep an order
# they compute nothing that XLA could do better
_TRIVIAL = frozenset(
    {"Identity", "IdentityN", "ReadVariableOp", "Reshape", "Squeeze", "ExpandDims", "Cast", "Shape", "AssignVariableOp"}
)
_LEFT_OUT = frozenset({"Placeholder", "NoOp", "Const"})
_FEWEST = 2  # operations that are worth a call


class Key(NamedTuple):
    """What the nodes of a cluster have in common.

    Attributes:
      device: where they run.
      shard: which they belong to; None for home.
      present: the reference of whether that shard has rows, if it may have none.
    """

    device: str
    shard: int | None
    present: str


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes that become one call.

    Attributes:
      key: what they have in common.
      level: how many borders lie before it, on the longest way.
      nodes: in the program's order, so that those of shards that do the same are the same.
    """

    key: Key
    level: int
    nodes: tuple[Any, ...]


def find_clusters(
    graph: EmittedGraph, nodes: Sequence[Any], outputs: Sequence[str], functions: Mapping[str, Any]
) -> list[Cluster]:
    """Return the clusters of some of an emitted graph's nodes.

    Args:
      graph: where the nodes come from.
      nodes: the nodes.
      outputs: references of what they return.
      functions: all functions that they may call, by name.
    """
    sources = {node.name: sources_of(node) for node in nodes}
    ordered = list(_in_order(nodes, sources))
    readers = _readers(sources)
    keys = _keys(graph, nodes, functions)
    returned = {split_reference(reference)[0] for reference in outputs}
    _leave_out_reads_for_others(ordered, keys, returned)
    while True:
        levels = _levels(ordered, sources, keys)
        _sink(ordered, readers, keys, levels, returned)
        torn = _torn_variants(ordered, sources, keys, levels, returned)
        if not torn:
            break
        for name in torn:
            del keys[name]
    groups: dict[tuple[Key, int], list[Any]] = {}
    compiled = [node for node in ordered if node.name in keys]
    for node in sorted(compiled, key=lambda node: (graph.origins[node.name].op or 0, node.name)):
        groups.setdefault((keys[node.name], levels[node.name]), []).append(node)
    return [
        Cluster(key, level, tuple(members))
        for (key, level), members in groups.items()
        if sum(node.op not in _TRIVIAL for node in members) >= _FEWEST
    ]


def reasons_not_compiled(graph: EmittedGraph, functions: Mapping[str, Any]) -> dict[str, str]:
    """Return the computing nodes of a graph that are left out of clusters, each with the reason."""
    found = {}
    for node in graph.nodes:
        if graph.origins[node.name].role in _COMPUTING and node.op not in _LEFT_OUT and not is_compiled(node):
            why = why_not_compiled(node, functions, kind_of_device(node.device))
            if why:
                found[node.name] = why
    return found


@functools.cache
def kind_of_device(device: str) -> str:
    """Return for which kind of device XLA compiles what runs on this one."""
    return "GPU" if "GPU" in device.upper() else "CPU"


def _keys(graph: EmittedGraph, nodes: Sequence[Any], functions: Mapping[str, Any]) -> dict[str, Key]:
    """Return the keys of the nodes that XLA compiles, by name."""
    dead = graph.dead_without()
    keys: dict[str, Key] = {}
    answers: dict[tuple[Any, ...], bool] = {}  # of the same operation on several shards
    for node in nodes:
        origin = graph.origins.get(node.name)
        if origin is None or origin.role not in _COMPUTING or node.op in _LEFT_OUT or not node.device:
            continue
        if origin.op in graph.uncompiled:
            continue
        same = (origin.op, origin.role, node.op, kind_of_device(node.device))
        if same not in answers:
            answers[same] = not is_compiled(node) and not why_not_compiled(node, functions, same[-1])
        if answers[same]:
            keys[node.name] = Key(node.device, origin.shard, dead.get(node.name, ""))
    return keys


def _in_order(nodes: Sequence[Any], sources: Mapping[str, Sequence[str]]) -> Iterator[Any]:
    """Yield the nodes, each behind those that it waits for, otherwise as they are given."""
    by_name = {node.name: node for node in nodes}
    done: set[str] = set()
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if node.name in done:
                stack.pop()
                continue
            waiting = [by_name[name] for name in sources[node.name] if name not in done]
            if waiting:
                stack += reversed(waiting)
            else:
                done.add(node.name)
                yield stack.pop()


def sources_of(node: Any) -> list[str]:
    """Return the names of the nodes that a node reads or waits for."""
    return list({reference.lstrip("^").partition(":")[0]: None for reference in node.input})


def _levels(ordered: Sequence[Any], sources: Mapping[str, Sequence[str]], keys: Mapping[str, Key]) -> dict[str, int]:
    levels: dict[str, int] = {}
    for node in ordered:
        key, level = keys.get(node.name), 0
        for source in sources[node.name]:
            border = keys.get(source, key) != key
            level = max(level, levels[source] + border)
        levels[node.name] = level
    return levels


def _leave_out_reads_for_others(ordered: Sequence[Any], keys: dict[str, Key], returned: Set[str]) -> None:
    """Leave out what reads variables for others: they get the value as it is, where XLA would copy it for them."""
    values: dict[str, list[str]] = {node.name: [] for node in ordered if node.op == "ReadVariableOp"}
    for node in ordered:
        for reference in node.input:
            if reference[0] != "^" and (source := split_reference(reference)[0]) in values:
                values[source].append(node.name)
    for name, found in values.items():
        if name in keys and (name in returned or any(keys.get(reader) != keys[name] for reader in found)):
            del keys[name]


def _sink(
    ordered: Sequence[Any],
    readers: Mapping[str, Sequence[str]],
    keys: Mapping[str, Key],
    levels: dict[str, int],
    returned: Set[str],
) -> None:
    """Put what only nodes of the same shard wait for where the first of them is: nobody else waits longer for it."""
    for node in reversed(ordered):
        name = node.name
        if name in keys and name not in returned and readers[name] and _is_for_own(name, readers, keys):
            levels[name] = min(levels[reader] for reader in readers[name])


def _is_for_own(name: str, readers: Mapping[str, Sequence[str]], keys: Mapping[str, Key]) -> bool:
    """Return whether only compiled nodes of the same shard wait for a node."""
    return all(keys.get(reader) == keys[name] for reader in readers[name])


def _readers(sources: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {name: [] for name in sources}
    for name, read in sources.items():
        for source in read:
            readers[source].append(name)
    return readers


def _torn_variants(
    ordered: Sequence[Any],
    sources: Mapping[str, Sequence[str]],
    keys: Mapping[str, Key],
    levels: Mapping[str, int],
    returned: Set[str],
) -> set[str]:
    """Return the nodes that hand lists of tensors to others, or get them, across the border of a cluster."""
    holding = {node.name for node in ordered if holds_variants(node)}
    place = {name: (keys.get(name), levels[name]) for name in holding}
    torn = {name for name in holding & returned if name in keys}
    for node in ordered:
        if node.name in holding:
            for source in sources[node.name]:
                if source in holding and (place[source] != place[node.name] or keys.get(source) is None):
                    torn |= {name for name in (source, node.name) if name in keys}
    return torn
