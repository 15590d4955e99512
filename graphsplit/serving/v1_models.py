"""SavedModels of TensorFlow 1: the graph on disk gets one call for each signature, and stays as it is otherwise.

TensorFlow 2 can load such a model, but not save all of it again: variables of the old kind get lost, as do methods of
signatures. So nothing is loaded here. Variables, assets, initializers and savers are copied byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import resolve_split
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.options import Options
from graphsplit.core.protos import function_definition, make_node, mark, output_type, split_reference
from graphsplit.emission.emitter import emit
from graphsplit.planning.state import State
from graphsplit.program.graph.function_calls import functions_called
from graphsplit.serving.parts import (
    CannotBeSplitError,
    arguments_of,
    noting,
    plain_reference,
    read_part,
    resources_of,
    take_part,
)
from graphsplit.serving.reports import SignatureReport, why_whole
from graphsplit.serving.signatures import sent_bytes


def is_v1(meta_graph: Any) -> bool:
    """Return whether a SavedModel's graph was written by TensorFlow 1's builders."""
    return not meta_graph.HasField("object_graph_def")


def has_old_variables(meta_graph: Any) -> bool:
    """Return whether a graph has variables of the old kind, whose values are no resources."""
    return any(node.op in ("Variable", "VariableV2") for node in meta_graph.graph_def.node)


def composites(signature: Any) -> list[str]:
    """Return the arguments and results of a signature that are sparse or composite."""
    infos = [*signature.inputs.items(), *signature.outputs.items()]
    return [name for name, info in infos if info.WhichOneof("encoding") != "name"]


def transpile_in_place(meta_graph: Any, key: str, options: Options, devices: Sequence[str]) -> SignatureReport:
    """Let the signature `key` of a graph call a function that runs on several devices.

    Args:
      meta_graph: the `MetaGraphDef`; it is changed.
      options: `split` and `strict`.
      devices: full names; the first is the default device.

    Raises:
      CannotBeSplitError: for TensorFlow 1 control flow on the way from the arguments to the results, and for sparse and
        composite arguments.
    """
    graph, signature = meta_graph.graph_def, meta_graph.signature_def[key]
    if foreign := composites(signature):
        raise CannotBeSplitError(f"it takes or returns sparse or composite tensors ({', '.join(foreign)})")
    inputs = {info.name: name for name, info in sorted(signature.inputs.items())}
    outputs = [info for _, info in sorted(signature.outputs.items())]
    part = take_part(graph, list(inputs), list(dict.fromkeys(info.name for info in outputs)), alone=True)
    called = [inputs[reference] for reference in part.inputs.values()]
    splitting = resolve_split(options.split, arguments_of(part, called))
    program = read_part(part, called, splitting.shapes)
    state = State(dict.fromkeys(resources_of(program), ""))
    plan = PlanRequest(program, splitting, options, devices, devices[0], state=state).plan()
    if not any(step.shards for step in plan.steps):
        return SignatureReport(key, plan, why_whole(plan))
    emitted = emit(plan)
    name = f"graphsplit_{re.sub(r'[^a-zA-Z0-9]', '_', key)}"
    nodes = list(map(noting(plan, emitted), map(deepcopy, emitted.nodes)))
    function = function_definition(name, nodes, (*emitted.inputs, *emitted.captures), emitted.outputs, emitted.effects)
    tensor_of_placeholder = {**part.inputs, **part.captures}
    sources = [tensor_of_placeholder[placeholder] for placeholder in (*emitted.inputs, *emitted.captures)]
    call = mark(make_node(f"graphsplit/{name}", "StatefulPartitionedCall", sources))
    call.attr["f"].func.name = name
    # A session that was not told to place softly would refuse devices that it does not have.
    call.attr["config_proto"].s = tf.compat.v1.ConfigProto(allow_soft_placement=True).SerializeToString()
    call.attr["Tin"].list.type.extend(output_type(emitted.by_name[p], 0) for p in (*emitted.inputs, *emitted.captures))
    call.attr["Tout"].list.type.extend(
        output_type(emitted.by_name[n], i) for n, i in map(split_reference, emitted.outputs)
    )
    call.attr["_output_shapes"].list.shape.extend(_declared(outputs, reference) for reference in part.outputs)
    graph.node.append(call)
    function_names = {f.signature.name for f in graph.library.function}
    used = functions_called(emitted.nodes, {f.signature.name: f for f in emitted.library.function})
    graph.library.function.extend(f for f in [function, *used] if f.signature.name not in function_names)
    for info in outputs:
        info.name = f"{call.name}:{part.outputs.index(plain_reference(info.name))}"
    return SignatureReport(key, plan, "", sent_bytes(plan))


def _declared(outputs: Sequence[Any], reference: str) -> Any:
    return next(info.tensor_shape for info in outputs if plain_reference(info.name) == reference)
