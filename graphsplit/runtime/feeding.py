"""Feeding: an emitted graph cut behind the splitting of its arguments, so that the next batch can travel ahead.

One function cuts the arguments and sends each piece to the devices that read it; it can run while the other, which
takes the pieces where they lie, still computes on those of the batch before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.graphdefs import NodeDef, make_node, output_type, split_reference
from graphsplit.core.polynomials import Point
from graphsplit.core.symbolic_sizes import without_sizes
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.runtime.empty_shards import DeadTensors
from graphsplit.runtime.executable import runtime_function
from graphsplit.runtime.handles import captured
from graphsplit.runtime.trial_compilations import Trials
from graphsplit.tracing.trace import Trace

_AHEAD = frozenset({"scatter", "sizes"})  # what cuts, and counts what is cut
_STAYS = frozenset({tf.resource.as_datatype_enum, tf.variant.as_datatype_enum})


class FedExecutable:
    """A plan made runnable in two steps: `feed` the flat arguments, then call it with the pieces.

    Args:
      trace, plan: what runs where.
      name: what to call the functions.
      trials, point: see `Differentiable`.
    """

    def __init__(self, trace: Trace, plan: Plan, name: str, trials: Trials, point: Point):
        graph = emit(plan)
        asking = trials.asking(plan, graph, trace, point)
        by_name = {node.name: node for node in graph.nodes}
        cutting = _cutting(graph, by_name)
        pieces = _pieces(graph, cutting, plan.home)
        dead = DeadTensors(graph)
        references = list(dict.fromkeys(reference for reference, _ in pieces))
        instead, returned = dead.replaced(references)
        alive = dict(zip(references, returned, strict=True))
        nodes = [*_feeding_nodes(graph, by_name, cutting), *instead]
        self._trace, self._plan = trace, plan
        self._feed = runtime_function(
            f"{name}_feed",
            graph,
            [*nodes, *_sent(pieces, by_name, alive)],
            graph.inputs,
            list(pieces.values()),
            (),
            {},
        )
        arguments = [
            make_node(piece, "Placeholder", [], device, dtype=tf.as_dtype(_type(reference, by_name)))
            for (reference, device), piece in pieces.items()
        ]
        taken = dict(pieces)
        for (reference, device), piece in pieces.items():
            present, dtype = dead.present(reference), tf.as_dtype(_type(reference, by_name))
            if present is not None:  # a shard without rows: its piece is only there to be sent
                inputs = [piece, pieces[present, plan.home]]
                arguments.append(make_node(f"{piece}_taken", "Switch", inputs, device, T=dtype))
                taken[reference, device] = f"{piece}_taken:1"
        rest = [_reading(node, taken, cutting) for node in graph.nodes if node.name not in cutting]
        outputs = [taken.get((reference, plan.home), reference) for reference in graph.outputs]
        self._run = runtime_function(
            name,
            graph,
            [*arguments, *rest],
            (*pieces.values(), *graph.captures),
            outputs,
            graph.effects,
            {},
            [without_sizes(plan.program.shape(tensor)) for tensor in plan.program.outputs],
            asking=asking,
            stand_ins={piece: reference for (reference, _), piece in pieces.items()},
        )

    def feed(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Cut the flat arguments and return the pieces, each on the device that reads it."""
        return self._feed(tensors)

    def __call__(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the flat results."""
        return self._run([*pieces, *captured(self._trace, self._plan)])


Pieces = dict[tuple[str, str], str]  # what is read, and on which device -> the name of the piece


def _cutting(graph: EmittedGraph, by_name: dict[str, Any]) -> set[str]:
    """Return the names of the arguments and of the nodes that do nothing but cut them."""
    found = set(graph.inputs)
    for node in graph.nodes:
        origin = graph.origins[node.name]
        if origin.role in _AHEAD and origin.shard is None and node.op != "Const":
            sources = _sources(node)
            if all(source in found or by_name[source].op == "Const" for source in sources):
                found.add(node.name)
    return found


def _sources(node: Any) -> set[str]:
    """Return the names of the nodes that a node reads, or waits for."""
    return {split_reference(reference.lstrip("^"))[0] for reference in node.input}


def _pieces(graph: EmittedGraph, cutting: set[str], home: str) -> Pieces:
    """Return a piece for everything that the rest of the graph reads of the cut arguments, and each reader's device."""
    reads = [(r, node.device) for node in graph.nodes if node.name not in cutting for r in node.input if r[0] != "^"]
    reads += [(reference, home) for reference in (*graph.outputs, *graph.present)]
    wanted = dict.fromkeys((r, device) for r, device in reads if split_reference(r)[0] in cutting)
    return {key: f"{graph.scope}/piece_{i}" for i, key in enumerate(wanted)}


def _feeding_nodes(graph: EmittedGraph, by_name: dict[str, Any], cutting: set[str]) -> list[Any]:
    constants = {source for name in cutting for source in _sources(by_name[name])} - cutting
    return [node for node in graph.nodes if node.name in cutting or node.name in constants]


def _sent(pieces: Pieces, by_name: dict[str, Any], alive: Mapping[str, str]) -> list[Any]:
    """Return the nodes that take each piece (by `alive`, what can be returned of it) to its device. Handles stay."""
    nodes = []
    for (reference, device), piece in pieces.items():
        dtype = _type(reference, by_name)
        where = by_name[split_reference(reference)[0]].device if dtype in _STAYS else device
        nodes.append(make_node(piece, "Identity", [alive[reference]], where, T=tf.as_dtype(dtype)))
    return nodes


def _type(reference: str, by_name: dict[str, Any]) -> int:
    name, index = split_reference(reference)
    return output_type(by_name[name], index)


def _reading(node: Any, pieces: Pieces, cutting: set[str]) -> Any:
    """Return `node` reading pieces instead of cut arguments."""
    copy = NodeDef()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(pieces.get((r, node.device), r) for r in node.input if r[0] != "^" or r[1:] not in cutting)
    return copy
