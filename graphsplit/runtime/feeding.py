"""Feeding: an emitted graph cut behind the splitting of its arguments, so that the next batch can travel ahead.

One function cuts the arguments and sends each piece to the devices that read it; it can run while the other, which
takes the pieces where they lie, still computes on those of the batch before. Where several hosts have the batch, each
cuts it, and sends nothing but to its own devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.hosts import host_device, host_name
from graphsplit.core.protos import (
    make_node,
    output_type,
    source_of,
    split_reference,
    with_inputs,
    with_prefix,
)
from graphsplit.core.sizes import without_sizes
from graphsplit.emission.emitted_graph import RELAY_ROLE, EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.graph import Graph
from graphsplit.runtime.executable import DeadTensors, Function, dead_tensors, runtime_function, with_captures
from graphsplit.runtime.handles import Layouts
from graphsplit.tracing.trace import Trace

_AHEAD = frozenset({"scatter", "sizes", RELAY_ROLE})  # what cuts, and counts what is cut, and sends the counts on
_STAYS = frozenset({tf.resource.as_datatype_enum, tf.variant.as_datatype_enum})


PieceNames = dict[tuple[str, str], str]  # what is read, and on which device -> the name of the piece


@dataclass(frozen=True, eq=False)
class CutAhead:
    """The part of an emitted graph that cuts the arguments and sends the pieces.

    Attributes:
      nodes: what that takes.
      given: names of the placeholders of the arguments; of one reader after the other, if there are any.
      pieces: what there is then.
      cutting: names of the nodes that the rest of the graph goes without.
      dead: which pieces are only there to be sent.
    """

    nodes: list[Any]
    given: Sequence[str]
    pieces: PieceNames
    cutting: set[str]
    dead: DeadTensors


def cut_ahead(graph: EmittedGraph, default_device: str, readers: Sequence[str] = ()) -> CutAhead:
    """Return the part of a graph that cuts its arguments.

    Args:
      graph: the whole.
      default_device: the device of what it returns.
      readers: the hosts that have the arguments, each all of them; none if these are where the caller has them.
    """
    by_name, cutting = graph.by_name, _cutting(graph)
    pieces = _pieces(graph, cutting, default_device)
    dead = dead_tensors(graph)
    references = list(dict.fromkeys(reference for reference, _ in pieces))
    instead, returned = dead.replaced(references)
    feeding = cutting.union(*[_sources(by_name[name]) for name in cutting])  # (they read constants besides)
    nodes = [*[node for node in graph.nodes if node.name in feeding], *instead]
    sent = _sent(pieces, by_name, dict(zip(references, returned, strict=True)))
    if readers:
        copies, inputs = on_readers(readers, graph.scope, nodes, graph.inputs, sent)
        return CutAhead(copies, inputs, pieces, cutting, dead)
    return CutAhead([*nodes, *sent], graph.inputs, pieces, cutting, dead)


def make_fed_executable(
    trace: Trace, plan: Plan, name: str, readers: Sequence[str] = (), layouts: Layouts | None = None
) -> tuple[Function, Function]:
    """Return a plan made runnable in two steps; see `cut_ahead` for the readers, `make_executable` for the others.

    The first cuts the flat arguments, of one reader after the other, and returns the pieces, each where it is read. The
    second takes the pieces.
    """
    graph = emit(plan)
    ahead = cut_ahead(graph, plan.default_device, readers)
    pieces = tuple(ahead.pieces.values())
    feed = runtime_function(f"{name}_feed", graph, ahead.nodes, ahead.given, pieces, (), {})
    arguments, taken = _arguments(graph, ahead, plan.default_device)
    other_nodes = [_reading(node, taken, ahead.cutting) for node in graph.nodes if node.name not in ahead.cutting]
    outputs = [taken.get((reference, plan.default_device), reference) for reference in graph.outputs]
    shapes = [without_sizes(plan.program.shape(tensor)) for tensor in plan.program.outputs]
    inputs = (*pieces, *graph.captures)
    run = runtime_function(name, graph, [*arguments, *other_nodes], inputs, outputs, graph.effects, {}, shapes)
    return feed, with_captures(run, trace, plan, layouts)


def _arguments(graph: EmittedGraph, ahead: CutAhead, default_device: str) -> tuple[list[Any], PieceNames]:
    """Return the nodes that stand for the pieces where the rest of a graph takes them, and what it reads of these."""
    nodes, taken = [], dict(ahead.pieces)
    for (reference, device), piece in ahead.pieces.items():
        dtype, present = tf.as_dtype(_type(reference, graph.by_name)), ahead.dead.present(reference)
        nodes.append(make_node(piece, "Placeholder", [], device, dtype=dtype))
        if present is not None:  # a shard without rows: its piece is only there to be sent
            inputs = [piece, ahead.pieces[present, default_device]]
            nodes.append(make_node(f"{piece}_taken", "Switch", inputs, device, T=dtype))
            taken[reference, device] = f"{piece}_taken:1"
    return nodes, taken


def _cutting(graph: EmittedGraph) -> set[str]:
    """Return the names of the arguments and of the nodes that do nothing but cut them."""
    names = set(graph.inputs)
    for node in graph.nodes:
        origin = graph.origins[node.name]
        cuts = origin.role in _AHEAD and origin.shard is None and node.op != "Const"
        if cuts and all(source in names or graph.by_name[source].op == "Const" for source in _sources(node)):
            names.add(node.name)
    return names


def _sources(node: Any) -> set[str]:
    """Return the names of the nodes that a node reads, or waits for."""
    return set(map(source_of, node.input))


def _pieces(graph: EmittedGraph, cutting: set[str], default_device: str) -> PieceNames:
    """Return a piece for everything that the rest of the graph reads of the cut arguments, and each reader's device."""
    reads = [(r, node.device) for node in graph.nodes if node.name not in cutting for r in node.input if r[0] != "^"]
    reads += [(reference, default_device) for reference in (*graph.outputs, *graph.present)]
    wanted = dict.fromkeys((r, device) for r, device in reads if source_of(r) in cutting)
    return {key: f"{graph.scope}/piece_{i}" for i, key in enumerate(wanted)}


def _sent(pieces: PieceNames, by_name: Graph, alive: Mapping[str, str]) -> list[Any]:
    """Return the nodes that take each piece (by `alive`, what can be returned of it) to its device. Handles stay."""
    nodes = []
    for (reference, device), piece in pieces.items():
        dtype = _type(reference, by_name)
        where = by_name[source_of(reference)].device if dtype in _STAYS else device
        nodes.append(make_node(piece, "Identity", [alive[reference]], where, T=tf.as_dtype(dtype)))
    return nodes


def _type(reference: str, by_name: Graph) -> int:
    name, index = split_reference(reference)
    return output_type(by_name[name], index)


def _reading(node: Any, pieces: PieceNames, cutting: set[str]) -> Any:
    """Return `node` reading pieces instead of cut arguments."""
    inputs = [pieces.get((r, node.device), r) for r in node.input if r[0] != "^" or r[1:] not in cutting]
    return with_inputs(node, inputs)


def on_readers(
    readers: Sequence[str], scope: str, nodes: Sequence[Any], inputs: Sequence[str], sent: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """Return nodes that cut the arguments on each host that has them, and the names of the arguments.

    What devices of other hosts read comes from the first of them.

    Args:
      readers: the hosts.
      scope: a name scope that nodes of the user's are not in.
      nodes: what cuts the arguments, their placeholders included.
      inputs: names of the placeholders.
      sent: the nodes that take each piece to its device; they keep their names.
    """
    copies: list[Any] = []
    for k, host in enumerate(readers):
        copies += [_copy(node, f"{scope}/reader_{k}/", host_device(host), named=True) for node in nodes]
    for node in sent:
        host = host_name(node.device)
        reader = readers.index(host) if host in readers else 0
        copies.append(_copy(node, f"{scope}/reader_{reader}/", node.device, named=False))
    return copies, [f"{scope}/reader_{k}/{name}" for k in range(len(readers)) for name in inputs]


def _copy(node: Any, prefix: str, device: str, named: bool) -> Any:
    """Return a node on a device that reads what has a prefix; itself has it, too, if it is `named` so."""
    copy = with_prefix(node, prefix)
    copy.device = device
    if not named:
        copy.name = node.name
    return copy
