"""Cutting an emitted graph where gradients of outputs come in: one forward part, backward parts, residuals between."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.protos import make_node, output_type, source_of, split_reference, with_inputs
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.runtime.executable import DeadTensors, Function, dead_tensors, runtime_function, waiting_for


@dataclass(frozen=True, eq=False)
class SeparatedGraph:
    """An emitted graph of outputs and gradients, as functions that run forward and backward.

    Attributes:
      outputs: how many outputs there are.
      given: the references of arguments and captures.
      residuals: those of what forward returns besides the outputs.
      forward: takes what is given; returns outputs and residuals.
      backward: for each group the references of what its part reads of forward, and what takes that, then the seeds.
    """

    outputs: int
    given: Sequence[str]
    residuals: Sequence[str]
    forward: Function
    backward: Sequence[tuple[Sequence[str], Function]]

    def run_forward(self, inputs: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the outputs and the residuals, for the arguments and captures."""
        results = self.forward(inputs)
        return results[: self.outputs], results[self.outputs :]

    def run_backward(
        self, g: int, inputs: Sequence[tf.Tensor], seeds: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the gradients of group `g`."""
        tensor_by_reference = dict(zip((*self.given, *self.residuals), (*inputs, *residuals), strict=True))
        references, function = self.backward[g]
        return function([*[tensor_by_reference[r] for r in references], *seeds])


class _BackwardPart(NamedTuple):
    """What of an emitted graph belongs to a group.

    Attributes:
      seeds: names of the placeholders of the gradients that come in.
      results: references of the gradients that it returns.
      after: the names of all nodes that depend on its seeds.
    """

    seeds: Sequence[str]
    results: Sequence[str]
    after: set[str]


def separate_graph(
    graph: EmittedGraph,
    arguments: int,
    outputs: int,
    groups: Sequence[tuple[int, int]],
    name: str,
    late: Collection[str] = (),
) -> SeparatedGraph:
    """Return an emitted graph of outputs and gradients as functions that run forward and backward.

    What depends on a seed (the gradient of an output) runs backward, the rest forward. A forward tensor that is read
    backward is a residual and stays on its device; what follows from constants alone is made again instead.

    Args:
      graph: inputs are the arguments, then the seeds, group by group; outputs are the outputs proper, then the
        gradients, group by group.
      arguments, outputs: how many of each there are.
      groups: for each group, its number of seeds and its number of gradient tensors.
      name: what to call the functions.
      late: captures of which the forward part knows nothing: what reads them runs backward.
    """
    inputs = (*graph.inputs[:arguments], *graph.captures)
    parts = _parts(graph, arguments, outputs, groups, late)
    constant = _constant_only(graph) | {n.name for n in graph.nodes if n.op == "Const"}
    forward = set(graph.by_name).difference(*[part.after for part in parts])
    crossing = [_crossing(graph, part.after, part.results, constant) for part in parts]
    dead = dead_tensors(graph)
    references = [*[r for c in crossing for r in c], *graph.present]
    residuals = [r for r in dict.fromkeys(references) if source_of(r) not in inputs]
    replacing_nodes, returned = dead.replaced(residuals)
    run_forward = runtime_function(
        f"{name}_forward",
        graph,
        [*[n for n in graph.nodes if n.name in forward], *replacing_nodes],
        inputs,
        (*graph.outputs[:outputs], *returned),
        [e for e in graph.effects if e in forward],
        {},
    )
    pairs = zip(parts, crossing, strict=True)
    backward = [_backward(graph, constant, part, crossed, dead, f"{name}_backward") for part, crossed in pairs]
    return SeparatedGraph(outputs, inputs, residuals, run_forward, backward)


def _parts(
    graph: EmittedGraph, arguments: int, outputs: int, groups: Sequence[tuple[int, int]], late: Collection[str]
) -> list[_BackwardPart]:
    parts, first_seed, first_result = [], arguments, outputs
    later = graph.by_name.after(late) - {*late, *graph.by_name.after(graph.inputs[arguments:])}
    for seeds, results in groups:
        own_seeds = graph.inputs[first_seed : first_seed + seeds]
        own_results = graph.outputs[first_result : first_result + results]
        parts.append(_BackwardPart(own_seeds, own_results, graph.by_name.after(own_seeds) | later))
        first_seed, first_result = first_seed + seeds, first_result + results
    return parts


def _backward(
    graph: EmittedGraph, constant: set[str], part: _BackwardPart, crossing: Sequence[str], dead: DeadTensors, name: str
) -> tuple[Sequence[str], Function]:
    """Return the backward part of a group."""
    references = list(dict.fromkeys([*crossing, *graph.present]))
    inputs = {r: f"{graph.scope}/residual_{i}" for i, r in enumerate(references)}
    nodes = [_placeholder(stand_in, graph, r) for r, stand_in in inputs.items()]
    dead_nodes, stand_ins, tokens = dead.again(inputs)
    nodes += dead_nodes
    own_constants = constant - part.after  # (one that waits for a gradient stands with what follows from that)
    for node in graph.nodes:
        if node.name in own_constants:
            nodes.append(waiting_for(node, tokens.get(dead.without.get(node.name, ""))))
    names_in_part = part.after | constant  # what nodes may wait for: what runs in the same part
    for node in graph.nodes:
        if node.name in part.after:
            read_there = [stand_ins.get(r, r) for r in node.input if r[0] != "^" or r[1:] in names_in_part]
            nodes.append(with_inputs(node, read_there))
    function = runtime_function(
        name,
        graph,
        nodes,
        (*inputs.values(), *part.seeds),
        [stand_ins.get(r, r) for r in part.results],
        [e for e in graph.effects if e in part.after],
        {},
    )
    return references, function


def _crossing(graph: EmittedGraph, after: set[str], results: Sequence[str], constant: set[str]) -> list[str]:
    """Return the references that a backward part (or its results) reads from outside of it, constants apart."""
    references = [r for n in graph.nodes if n.name in after for r in n.input if r[0] != "^"]
    return [r for r in dict.fromkeys([*references, *results]) if source_of(r) not in after | constant]


def _placeholder(name: str, graph: EmittedGraph, reference: str) -> Any:
    node, index = split_reference(reference)
    return make_node(name, "Placeholder", [], dtype=tf.as_dtype(output_type(graph.by_name[node], index)))


def _constant_only(graph: EmittedGraph) -> set[str]:
    """Return the names of nodes that follow from constants alone."""
    variable = [n.name for n in graph.nodes if n.op == "Placeholder" or op_definition(n.op).is_stateful]
    return set(graph.by_name) - graph.by_name.after(variable)
