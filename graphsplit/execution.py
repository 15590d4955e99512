"""Execution: an emitted graph as a callable on flat tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.collecting import collection_paused
from graphsplit.emission import emit
from graphsplit.emitted import EmittedGraph
from graphsplit.graphdefs import function_definition, output_type, split_reference
from graphsplit.plans import Plan
from graphsplit.sizes import without_sizes
from graphsplit.tensorflow_internals import RuntimeFunction
from graphsplit.tracing import Trace

_serial = itertools.count()


class Executable:
    """A plan made runnable: call it with the flat argument tensors, get the flat results."""

    @collection_paused()
    def __init__(self, trace: Trace, plan: Plan, name: str):
        self.plan = plan
        self._trace = trace
        graph = self.emitted
        shapes = {name: without_sizes(plan.program.ops[i].out_shapes[0]) for name, i in _inputs(graph, plan).items()}
        results = [without_sizes(plan.program.shape(tensor)) for tensor in plan.program.outputs]
        self._function = runtime_function(
            name,
            graph,
            graph.nodes,
            (*graph.inputs, *graph.captures),
            graph.outputs,
            graph.effects,
            shapes,
            results,
            inline=_worth_optimizing(graph.nodes),
        )

    @property
    def emitted(self) -> EmittedGraph:
        """The multi-device graph, written anew each time: at many devices it is large, and the runtime has its own."""
        return emit(self.plan, resource_devices(self._trace, self.plan))

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on the flat arguments."""
        return self._function([*tensors, *self._trace.captures])


def runtime_function(
    name: str,
    graph: EmittedGraph,
    nodes: Sequence[Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    effects: Sequence[str],
    input_shapes: Mapping[str, Any],
    output_shapes: Sequence[Any] | None = None,
    inline: bool = True,
) -> RuntimeFunction:
    """Register some of an emitted graph's nodes with TensorFlow's runtime as one function.

    Args:
      name: what to call it; a serial number is added.
      graph: where the nodes come from, for its library.
      nodes: the nodes, placeholders of the inputs included.
      inputs: names of the placeholders that become the arguments.
      outputs, effects: what it returns and what must run.
      input_shapes: static shapes of inputs, by placeholder name, where known.
      output_shapes: static shapes of the outputs, where known.
      inline: whether a graph that calls it may contain it. If not, its outputs come to the device of the call.
    """
    label = re.sub(r"\W", "_", name)
    definition = function_definition(f"graphsplit_{label}_{next(_serial)}", nodes, inputs, outputs, effects)
    by_name = {node.name: node for node in nodes}
    specs = [_spec(by_name[name], 0, input_shapes.get(name)) for name in inputs]
    shapes = output_shapes if output_shapes is not None else [None] * len(outputs)
    results = []
    for reference, shape in zip(outputs, shapes, strict=True):
        node, index = split_reference(reference)
        results.append(_spec(by_name[node], index, shape))
    optimize = _worth_optimizing(nodes)
    return RuntimeFunction(definition, graph.library.function, specs, results, optimize, inline)


def _worth_optimizing(nodes: Sequence[Any]) -> bool:
    """Return whether TensorFlow's graph optimizer pays for itself.

    On CPUs it takes most of the time to the first step, growing with the number of devices, and does not make steps
    faster: a ResNet50 training step on 8 logical devices of 2 cores came first after 5.4 s instead of 13.6, and then
    took 0.31 s either way. On GPUs it chooses the layout of convolutions.
    """
    return any("GPU" in node.device for node in nodes)


def _spec(node: Any, index: int, shape: Any) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.as_dtype(output_type(node, index)))


def _inputs(graph: EmittedGraph, plan: Plan) -> dict[str, int]:
    names = (*graph.inputs, *graph.captures)
    return dict(zip(names, (*plan.program.inputs, *plan.program.captures), strict=True))


def resource_devices(trace: Trace, plan: Plan) -> dict[str, str]:
    """Return where captured variables and tables live, by the name of their placeholder."""
    devices = {}
    for position, handle in zip(plan.program.captures, trace.captures, strict=True):
        if handle.dtype == tf.resource and handle.device:
            devices[plan.program.ops[position].name] = handle.device
    return devices
