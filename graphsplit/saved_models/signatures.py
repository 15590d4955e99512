"""One signature of a loaded SavedModel -> the same signature on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graphsplit.api.compilation import trace_and_plan
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.errors import UnsupportedError
from graphsplit.core.graphdefs import GraphDef, split_reference
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.runtime.executable import resource_devices
from graphsplit.saved_models.parts import called_functions
from graphsplit.saved_models.weights import Mirrors, check_only_read, sent_bytes, share_constants, use_mirrors
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True, eq=False)
class PlannedSignature:
    """A signature and the decision what runs where.

    Attributes:
      name: its key.
      function: the loaded one.
      specs: its arguments by name.
    """

    name: str
    function: Any
    specs: Mapping[str, tf.TensorSpec]
    trace: Trace
    plan: Plan


def plan_signature(name: str, function: Any, options: Options, devices: Sequence[str]) -> PlannedSignature:
    """Trace a loaded signature and plan it; `options` has the split by the names of its arguments."""
    specs = dict(function.structured_input_signature[1])
    leaves = tuple(
        structures.TensorLeaf(spec.dtype, None if spec.shape.rank is None else tuple(spec.shape))
        for spec in specs.values()
    )
    arguments = structures.Branch(dict, tuple(specs), leaves)
    call = structures.Branch(tuple, (0, 1), (structures.Branch(tuple, (0,), (arguments,)), _NOTHING))
    traced, plan = trace_and_plan(lambda inputs: function(**inputs), call, arguments, options, devices, devices[0])
    return PlannedSignature(name, function, specs, traced, plan)


_NOTHING = structures.Branch(dict, (), ())


def build_signature(planned: PlannedSignature, mirrors: Mirrors | None) -> tuple[Any, int]:
    """Return the signature on several devices, as a `tf.function` that can be saved under the same names.

    With it comes how many bytes go from home to other devices in every request, besides rows of the batch.

    Args:
      planned: the signature.
      mirrors: where copies of weights on the devices come from; None to send weights from home.
    """
    trace, plan = planned.trace, planned.plan
    if mirrors is not None:
        plan = replace(plan, packs=())  # nothing is sent that could be sent together
    variables = captured_variables(trace, plan)
    graph = emit(plan, devices_of_resources(trace, plan))
    extra: list[tf.Tensor] = []
    if mirrors is not None:
        check_only_read(planned.name, plan, variables)
        graph, extra = use_mirrors(graph, plan.devices, variables, mirrors)
    else:
        graph = share_constants(graph, plan)
    graph_def = _importable(graph)
    declared = planned.function.structured_outputs
    captures = [*trace.captures, *extra]

    def signature(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        results = structures.unflatten(trace.result, _run(graph, graph_def, [*tensors, *captures]))
        if not isinstance(results, dict):
            raise UnsupportedError(f"The signature {planned.name!r} returns no tensors by name.")
        for name, tensor in results.items():
            tensor.set_shape(declared[name].shape)  # TensorFlow may not see through the joints
        return {name: tf.identity(tensor, name=name) for name, tensor in results.items()}

    specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in planned.specs.items()]
    signature.__name__ = f"transpiled_{planned.name}"
    function = tf.function(tf.autograph.experimental.do_not_convert(signature), input_signature=specs)
    return function, sent_bytes(graph, plan)


def captured_variables(trace: Trace, plan: Plan) -> dict[str, tf.Variable]:
    """Return the captured variables by the names of their placeholders."""
    by_handle = {id(variable.handle): variable for variable in trace.variables}
    names = [plan.program.ops[position].name for position in plan.program.captures]
    pairs = zip(names, trace.captures, strict=True)
    return {name: by_handle[id(handle)] for name, handle in pairs if id(handle) in by_handle}


def devices_of_resources(trace: Trace, plan: Plan) -> dict[str, str]:
    """Return no device at all for every variable and table, by name: they are where the loader puts them.

    What touches them has none either, and TensorFlow places it beside them.
    """
    own = {op.name for op in plan.program.ops if tf.resource in op.out_dtypes}
    return dict.fromkeys([*own, *resource_devices(trace, plan)], "")


def _run(graph: EmittedGraph, graph_def: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Add the emitted graph to the one that is being traced, and return its results.

    (A call of a function that the runtime knows would be quicker to make, but TensorFlow cannot save such a call.)
    """
    placeholders = (*graph.inputs, *graph.captures)
    here = tf.compat.v1.get_default_graph()
    given = {f"{name}:0": here.capture(tensor) for name, tensor in zip(placeholders, tensors, strict=True)}
    wanted = [f"{name}:{index}" for name, index in map(split_reference, graph.outputs)]
    results = tf.graph_util.import_graph_def(graph_def, input_map=given, return_elements=wanted, name="")
    return list(results)


def _importable(graph: EmittedGraph) -> Any:
    """Return the graph without its placeholders, and with those functions only that it calls."""
    result = GraphDef(versions=graph.versions)
    placeholders = {*graph.inputs, *graph.captures}
    for node in graph.nodes:
        if node.name not in placeholders:
            copy = result.node.add()
            copy.CopyFrom(node)
            inputs = [r for r in node.input if r[0] != "^" or r[1:] not in placeholders]
            del copy.input[:]
            copy.input.extend(inputs)
    result.library.function.extend(called_functions(result.node, graph.library))
    return result
