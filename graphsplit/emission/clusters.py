"""Clusters: what a shard, or home, computes between two moves, as one call that XLA compiles.

The nodes of one shard and device that XLA compiles get levels: as many as there are borders (moves, effects, other
shards) on the longest way to them; those that only later ones of their own shard read, the level of these. Nodes of one
level form a cluster. No way leads from a cluster out and back into it, since levels only rise along it, and there are
no more clusters than a step has to wait for others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphsplit.core.protos.graphdefs import source_of
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.program.graph.compilability import holds_variants, why_not_compiled
from graphsplit.program.graph.graph import Graph
from graphsplit.program.graph.inlining import is_compiled

_COMPUTING = frozenset({"op", "part", "shift", "constant"})  # roles; all others move, count rows or keep an order
# they compute nothing that XLA could do better
TRIVIAL = frozenset(
    {"Identity", "IdentityN", "ReadVariableOp", "Reshape", "Squeeze", "ExpandDims", "Cast", "Shape", "AssignVariableOp"}
)
# (a `ControlTrigger` runs when what it waits for is dead; a call with it inside would be dead as well)
LEFT_OUT = frozenset({"Placeholder", "NoOp", "Const", "ControlTrigger"})
FEWEST = 2  # operations that are worth a call


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
class XlaCluster:
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
    graph: EmittedGraph, web: Graph, outputs: Sequence[str], functions: Mapping[str, Any]
) -> list[XlaCluster]:
    """Return the clusters of some of an emitted graph's nodes.

    Args:
      graph: where the nodes come from.
      web: the nodes.
      outputs: references of what they return.
      functions: all functions that they may call, by name.
    """
    nodes = web.nodes
    keys = _keys(graph, nodes, functions)
    returned = {web.place[source_of(reference)] for reference in outputs}
    _leave_out_reads_for_others(web, returned, keys)
    levels = _levels_of(web, returned, {k for k, node in enumerate(nodes) if holds_variants(node)}, keys)
    groups: dict[tuple[Key, int], list[Any]] = {}
    found = [(graph.origins[node.name].op or 0, node.name, k) for k, node in enumerate(nodes) if keys[k] is not None]
    for _, _, k in sorted(found):
        key = keys[k]
        assert key is not None
        groups.setdefault((key, levels[k]), []).append(nodes[k])
    return [
        XlaCluster(key, level, tuple(members))
        for (key, level), members in groups.items()
        if sum(node.op not in TRIVIAL for node in members) >= FEWEST
    ]


def _levels_of(web: Graph, returned: Set[int], holding: Set[int], keys: list[Key | None]) -> list[int]:
    """Return the levels; nodes with the same key and level form a cluster.

    Args:
      web: who reads whom.
      returned: nodes of which something is returned.
      holding: nodes that read or make lists of tensors.
      keys: of the nodes, equal ones one object. Those that hand lists over the border of a cluster lose theirs.
    """
    while True:
        levels = _levels(web, keys)
        _sink(web, returned, keys, levels)
        torn = _torn_variants(web, returned, holding, keys, levels)
        if not torn:
            return levels
        for k in torn:
            keys[k] = None


@functools.cache
def kind_of_device(device: str) -> str:
    """Return for which kind of device XLA compiles what runs on this one."""
    return "GPU" if "GPU" in device.upper() else "CPU"


def _keys(graph: EmittedGraph, nodes: Sequence[Any], functions: Mapping[str, Any]) -> list[Key | None]:
    """Return the keys of the nodes, None for those that XLA does not compile; equal ones are one object."""
    dead = graph.dead_without()
    keys: list[Key | None] = []
    same_keys: dict[Key, Key] = {}
    answers: dict[tuple[Any, ...], bool] = {}  # of the same operation on several shards
    for node in nodes:
        name, device, op_type = node.name, node.device, node.op
        origin = graph.origins.get(name)
        keys.append(None)
        if origin is None or origin.role not in _COMPUTING or op_type in LEFT_OUT or not device:
            continue
        if origin.op in graph.uncompiled:
            continue
        same = (origin.op, origin.role, op_type, kind_of_device(device))
        if same not in answers:
            answers[same] = not is_compiled(node) and not why_not_compiled(node, functions, same[-1])
        if answers[same]:
            key = Key(device, origin.shard, dead.get(name, ""))
            keys[-1] = same_keys.setdefault(key, key)
    return keys


def _levels(web: Graph, keys: Sequence[Key | None]) -> list[int]:
    levels = [0] * len(keys)
    for k in web.positions_in_order:
        key, level = keys[k], 0
        for source in web.sources[k]:
            other = keys[source]
            before = levels[source] + (other is not None and other is not key)
            level = max(before, level)
        levels[k] = level
    return levels


def _leave_out_reads_for_others(web: Graph, returned: Set[int], keys: list[Key | None]) -> None:
    """Leave out what reads variables for others: they get the value as it is, where XLA would copy it for them."""
    values = {n.name: k for k, n in enumerate(web.nodes) if n.op == "ReadVariableOp" and keys[k] is not None}
    for_others = {k for k in values.values() if k in returned}
    for node, key in zip(web.nodes, keys, strict=True):
        for reference in node.input:
            k = values.get(reference.removesuffix(":0"))  # (none for what only waits)
            if k is not None and keys[k] is not key:
                for_others.add(k)
    for k in for_others:
        keys[k] = None


def _sink(web: Graph, returned: Set[int], keys: Sequence[Key | None], levels: list[int]) -> None:
    """Put what only nodes of the same shard wait for where the first of them is: nobody else waits longer for it."""
    for k in reversed(web.positions_in_order):
        key, readers = keys[k], web.readers[k]
        if key is not None and readers and k not in returned and all(keys[reader] is key for reader in readers):
            levels[k] = min([levels[reader] for reader in readers])


def _torn_variants(
    web: Graph, returned: Set[int], holding: Set[int], keys: Sequence[Key | None], levels: Sequence[int]
) -> set[int]:
    """Return the nodes that hand lists of tensors to others, or get them, across the border of a cluster."""
    torn = {k for k in holding & returned if keys[k] is not None}
    for k in holding:
        for source in web.sources[k]:
            together = keys[source] is not None and keys[source] is keys[k] and levels[source] == levels[k]
            if source in holding and not together:
                torn |= {one for one in (source, k) if keys[one] is not None}
    return torn
