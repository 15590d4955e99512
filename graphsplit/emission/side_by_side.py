"""Graphs side by side: several emitted graphs as one, in which none waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from graphsplit.core.graphdefs import prefixed, with_prefix
from graphsplit.emission.emitted_graph import EmittedGraph


def side_by_side(graphs: Sequence[EmittedGraph]) -> EmittedGraph:
    """Return the graphs as one: arguments, captures and results are those of the first, then those of the next, ...

    Args:
      graphs: of one program, for whatever devices.
    """
    nodes, origins = [], {}
    for k, graph in enumerate(graphs):
        nodes += [with_prefix(node, f"copy_{k}/") for node in graph.nodes]
        origins.update({prefixed(f"copy_{k}/", name): origin for name, origin in graph.origins.items()})

    def of_all(attribute: str) -> tuple[str, ...]:
        return tuple(
            [prefixed(f"copy_{k}/", name) for k, graph in enumerate(graphs) for name in getattr(graph, attribute)]
        )

    library = deepcopy(graphs[0].library)
    known = {function.signature.name for function in library.function}
    for graph in graphs[1:]:  # (bodies are written for devices; functions of one name are the same)
        library.function.extend([f for f in graph.library.function if f.signature.name not in known])
        known.update([function.signature.name for function in graph.library.function])
    return replace(
        graphs[0],
        library=library,
        nodes=tuple(nodes),
        origins=origins,
        inputs=of_all("inputs"),
        captures=of_all("captures"),
        outputs=of_all("outputs"),
        effects=of_all("effects"),
        present=of_all("present"),
        beside_variables=frozenset(of_all("beside_variables")),
    )
