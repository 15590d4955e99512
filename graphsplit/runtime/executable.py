"""Execution: a plan as a callable on flat tensors.

What enters: a trace and its plan. What leaves: a function of TensorFlow's runtime, made of the emitted graph's nodes.

Of TensorFlow's graph optimizer, an emitted graph gets all, what loops need, or nothing.

Where an emitted graph is cut into several functions, what is dead in a run in which a shard has no rows is passed on as
such (`DeadTensors`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import check_runnable, name_for_runtime, task_of
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.progress import phase
from graphsplit.core.protos import (
    constant_node,
    function_definition,
    inputs_of,
    make_node,
    output_type,
    split_reference,
    with_inputs,
)
from graphsplit.core.sizes import without_sizes
from graphsplit.core.tensorflow_internals import RuntimeFunction, own_task
from graphsplit.emission.clusters import compile_clusters
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.runtime.connected_workers import connected_workers
from graphsplit.runtime.handles import Layouts, held_captures
from graphsplit.tracing.trace import Trace

_LOOPS = frozenset(op_type for op_type, flow in CONTROL_FLOW.items() if flow.loops)
_FOR_LOOPS = frozenset({"function_optimization", "dependency_optimization"})


def optimizer_config(nodes: Sequence[Any], library: Any) -> bytes | None:
    """Return the serialized `ConfigProto` under which a graph is called; None stands for TensorFlow's own choice.

    On GPUs the optimizer chooses the layout of convolutions: all of it runs. On CPUs it takes most of the time to the
    first step, growing with the number of devices, and does not make steps faster. Loops are the exception:
    TensorFlow puts their bodies in place with an `Identity` for each argument and result, and only the optimizer takes
    them out again.
    """
    if any("GPU" in node.device for node in nodes):
        return None
    inside = (node for function in library.function for node in function.node_def)
    has_loops = any(node.op in _LOOPS for node in itertools.chain(nodes, inside))
    config = tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    if not has_loops:
        rewrites.disable_meta_optimizer = True
        return bytes(config.SerializeToString())
    for option in rewrites.DESCRIPTOR.fields:
        if option.enum_type and option.enum_type.name == "Toggle" and option.name not in _FOR_LOOPS:
            setattr(rewrites, option.name, rewrites.OFF)
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.min_graph_nodes = -1  # loops of small graphs iterate as often
    return bytes(config.SerializeToString())


_serial = itertools.count()


Function = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
"""What TensorFlow's runtime has: from flat arguments, captures last, to flat results."""


def with_captures(function: Function, trace: Trace, plan: Plan, layouts: Layouts | None) -> Function:
    """Return a function that is given the captures at each call: what the variables hold by then."""

    def run(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with held_captures(trace, plan, layouts) as captures:
            return function([*tensors, *captures])

    return run


@collection_paused()
def make_executable(trace: Trace, plan: Plan, name: str, layouts: Layouts | None = None) -> Function:
    """Return a plan made runnable: call it with the flat argument tensors, get the flat results.

    Args:
      trace, plan, name: what was planned, how, and what to call it.
      layouts: how the variables have to lie in each call; see `held_captures`.
    """
    with phase("writing the graph"):
        graph = emit(plan)
    inputs, program = (*graph.inputs, *graph.captures), plan.program
    positions = (*program.inputs, *[i for i, _ in program.handles])
    shapes = {name: without_sizes(program.ops[i].out_shapes[0]) for name, i in zip(inputs, positions, strict=True)}
    results = [without_sizes(program.shape(tensor)) for tensor in program.outputs]
    parts = (graph, graph.nodes, inputs, graph.outputs, graph.effects, shapes, results)
    with phase("handing the graph to TensorFlow"):
        return with_captures(runtime_function(name, *parts, whole=True), trace, plan, layouts)


def runtime_function(
    name: str,
    graph: EmittedGraph,
    nodes: Sequence[Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    effects: Sequence[str],
    input_shapes: Mapping[str, Any],
    output_shapes: Sequence[Any] | None = None,
    whole: bool = False,
) -> Function:
    """Register some of an emitted graph's nodes with TensorFlow's runtime as one function.

    Args:
      name: what to call it; a serial number is added.
      graph: where the nodes come from, for its library.
      nodes: the nodes, placeholders of the inputs included.
      inputs: names of the placeholders that become the arguments.
      outputs, effects: what it returns and what must run.
      input_shapes: static shapes of inputs, by placeholder name, where known.
      output_shapes: static shapes of the outputs, where known.
      whole: whether these are all nodes of the graph, so that its outputs may come to the device that calls it. A graph
        that calls it then need not contain it, on which TensorFlow's optimizer would work again.

    Raises:
      DeviceError: if this process does not have a device of the nodes: of a stage, as a rule.
    """
    check_runnable(name, sorted({node.device for node in nodes} - {""}))
    functions = list(graph.library.function)
    if graph.compiled:
        compiled = compile_clusters(graph, nodes, outputs, effects)
        nodes, outputs, effects = compiled.nodes, compiled.outputs, compiled.effects
        functions += compiled.functions
    is_on_workers = any(task_of(node.device) for node in nodes)
    if own_task() is not None:
        nodes, functions = deepcopy(list(nodes)), deepcopy(functions)
        for node in (*nodes, *[node for function in functions for node in function.node_def]):
            node.device = name_for_runtime(node.device)  # in a graph for several processes a name must say which
    by_name = {node.name: node for node in nodes}
    shapes = output_shapes if output_shapes is not None else [None] * len(outputs)
    pairs = zip(map(split_reference, outputs), shapes, strict=True)
    results = [_spec(by_name[node], index, shape) for (node, index), shape in pairs]
    config = optimizer_config(nodes, graph.library)
    label = re.sub(r"\W", "_", name)

    def make(nodes: Sequence[Any], inputs: Sequence[str]) -> RuntimeFunction:
        node_by_name = {node.name: node for node in nodes}
        specs = [_spec(node_by_name[name], 0, input_shapes.get(name)) for name in inputs]
        definition = function_definition(f"graphsplit_{label}_{next(_serial)}", nodes, inputs, outputs, effects)
        return RuntimeFunction(definition, functions, specs, results, config, not whole or config is None)

    workers = connected_workers() if is_on_workers else None
    return make(nodes, inputs) if workers is None else workers.function(name, nodes, inputs, make)


def _spec(node: Any, index: int, shape: Any) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.as_dtype(output_type(node, index)))


@dataclass(frozen=True, eq=False)
class DeadTensors:
    """Tensors of an emitted graph that are dead if a shard has no rows, where they cross from forward to backward.

    A function cannot return what is dead: something stands in its place, and in the backward part it is dead again.

    Attributes:
      graph: the emitted graph.
      without: by the name of a node that may be dead, the truth value without which it is.
      relayed: truth values that were sent on, each with the one that it is a copy of.
    """

    graph: EmittedGraph
    without: Mapping[str, str]
    relayed: Mapping[str, str]

    def present(self, reference: str) -> str | None:
        """Return the truth value without which a tensor is dead, or None if it never is."""
        name, index = split_reference(reference)
        switch = self.graph.by_name[name]
        if switch.op == "Switch" and index == 1:
            return self.relayed.get(switch.input[1], str(switch.input[1]))
        return self.without.get(name)

    def _place(self, reference: str) -> tuple[tf.DType, str]:
        name, index = split_reference(reference)
        node = self.graph.by_name[name]
        return tf.as_dtype(output_type(node, index)), node.device

    def replaced(self, residuals: Sequence[str]) -> tuple[list[Any], list[str]]:
        """Return the nodes that put something in place of what is dead, and the references to return."""
        nodes: list[Any] = []
        returned = list(residuals)
        for i, reference in enumerate(residuals):
            present = self.present(reference)
            if present is not None:
                dtype, device = self._place(reference)
                returned[i] = merged_name = f"{self.graph.scope}/returned_{i}"
                nodes += _nothing(f"{merged_name}/nothing", dtype, device)
                nodes.append(
                    make_node(f"{merged_name}/instead", "Switch", [f"{merged_name}/nothing", present], device, T=dtype)
                )
                nodes.append(
                    make_node(merged_name, "Merge", [reference, f"{merged_name}/instead"], device, N=2, T=dtype)
                )
        return nodes, returned

    def again(self, inputs: Mapping[str, str]) -> tuple[list[Any], dict[str, str], dict[str, str]]:
        """Return the nodes that make dead again what was returned.

        With them, what stands in for each residual; and for each truth value what to wait for so as to be dead too.
        """
        nodes: list[Any] = []
        stand_ins, tokens = dict(inputs), {}
        for reference, stand_in in inputs.items():
            present = self.present(reference)
            if present is not None:
                dtype, device = self._place(reference)
                nodes.append(make_node(f"{stand_in}_taken", "Switch", [stand_in, inputs[present]], device, T=dtype))
                stand_ins[reference] = f"{stand_in}_taken:1"
        for present in self.graph.present:
            token, device = f"{inputs[present]}_token", self._place(present)[1]
            nodes.append(make_node(f"{token}/taken", "Switch", [inputs[present]] * 2, device, T=tf.bool))
            nodes.append(make_node(token, "Identity", [f"{token}/taken:1"], device, T=tf.bool))
            tokens[present] = token
        return nodes, stand_ins, tokens


def dead_tensors(graph: EmittedGraph) -> DeadTensors:
    """Return the tensors of a graph that may be dead."""
    return DeadTensors(graph, graph.dead_without(), graph.relayed())


def _nothing(name: str, dtype: tf.DType, device: str) -> list[Any]:
    """Return the nodes that make a tensor of the type of another, whatever it holds."""
    if dtype != tf.variant:
        return [constant_node(name, np.zeros(0, dtype.as_numpy_dtype), dtype, device)]
    scalar = np.array(-1, np.int32)
    nodes = [constant_node(f"{name}/{part}", scalar, tf.int32, device) for part in ("shape", "most")]
    types = {"element_dtype": tf.float32, "shape_type": tf.int32}  # in place of a list or optional of anything
    return [*nodes, make_node(name, "EmptyTensorList", [node.name for node in nodes], device, **types)]


def waiting_for(node: Any, token: str | None) -> Any:
    """Return what follows from constants, waiting for `token`, if any, instead of what it waits for in forward."""
    if not any(reference[0] == "^" for reference in node.input):
        return node
    return with_inputs(node, [*inputs_of(node)[0], *([f"^{token}"] if token else [])])
