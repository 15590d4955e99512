"""The longest chain of exchanges between devices, counted in what is emitted: apart from plans and their tasks."""

from __future__ import annotations

import graphlib

from graphsplit.core.protos import inputs_of, source_of
from graphsplit.emission.emitted_graph import EmittedGraph

ONLY_EMITTED = "relay"
"""The role of nodes through which signals from several devices of another host go."""
ONLY_COUNTING = "sizes"
"""The role of nodes that count rows, of a batch whose size is not known."""


def chain_in_graph(graph: EmittedGraph) -> int:
    """Return how many edges between two devices follow each other at most; waits count as tensors do.

    What only emission knows of is no exchange: a relay of signals stands for the devices from which they come, and
    nobody waits for numbers of rows.
    """
    devices = {node.name: node.device for node in graph.nodes}
    roles = {name: origin.role for name, origin in graph.origins.items()}
    reads = {node.name: {source_of(r) for r in (*inputs_of(node)[0], *inputs_of(node)[1])} for node in graph.nodes}
    behind: dict[str, dict[str, int]] = {}  # of each node, the longest chain that ends there, by the last device
    for name in graphlib.TopologicalSorter(reads).static_order():
        found: dict[str, int] = {}
        sources = [source for source in reads[name] if roles[source] != ONLY_COUNTING]
        for device, length in [pair for source in sources for pair in behind[source].items()]:
            if roles[name] == ONLY_EMITTED:
                found[device] = max(found.get(device, 0), length)
            else:
                length += device != devices[name]
                found[devices[name]] = max(found.get(devices[name], 0), length)
        behind[name] = found or {devices[name]: 0}
    return max([length for found in behind.values() for length in found.values()], default=0)
