"""`transpile_graph_def`: the pure form, for frozen graphs and TensorFlow 1 graphs with variables, training included.

What the outputs depend on is planned and emitted. The rest of the graph (initializers, savers, summaries) stays as it
is, under its names; where it reads something that now lives on the shards, that is gathered under its old name, which
costs nothing in a session run that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import resolve_split
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.options import Options, Split
from graphsplit.core.progress import phase
from graphsplit.core.protos import GraphDef, make_node, output_type, split_reference
from graphsplit.core.storage.stored_models import check_graph
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.errors import ArgumentError, CheckError
from graphsplit.planning.plan import Plan, check_strict
from graphsplit.planning.state import State
from graphsplit.program.graph.graph import Graph
from graphsplit.program.program import Program
from graphsplit.serving.options import TranspileOptions, names_in
from graphsplit.serving.parts import PLACEHOLDERS, VARIABLES, ModelPart, arguments_of, noting, read_part, take_part


def transpile_graph_def(
    graph_def: Any,
    inputs: Sequence[str] | str,
    outputs: Sequence[str] | str,
    devices: int | str | Sequence[str] | None = None,
    *,
    split: Split = 0,
    strict: bool = False,
) -> Any:
    """Return a `GraphDef` that computes on several devices what `graph_def` computes.

    For frozen graphs, and for TensorFlow 1 graphs with variables: build the single-device graph, its optimizer
    included, transpile it, import the result, and run it in a session. Inputs, outputs and variables keep their names,
    so feeds, fetches and checkpoints are those of the single device. To run several CPU devices in one session, give
    it `ConfigProto(device_count={"CPU": n})`.

    Args:
      graph_def: the graph. It is not changed.
      inputs: names of the tensors that are fed, `"x"` or `"x:0"`.
      outputs: names of the tensors to compute, and of operations to run, such as a training step.
      devices: how many, or their names. They need not exist here. The first is the default device.
      split: an axis, or a mapping from inputs to an axis or None (keep whole).
      strict: raise `StrictError` if an operation on rows of the batch would run on one device, or if more than a
        hundredth of the floating-point operations would be computed from whole rows. A number is the largest share of
        the operations that may work on the batch on one device.

    Raises:
      ArgumentError: if `graph_def` is none, names do not exist in it, TensorFlow cannot import it, or options clash.
      UnsupportedError: for operation types that are not registered, and TensorFlow 1 control flow on the way from
        inputs to outputs.
      StrictError: see `strict`.

    >>> import tensorflow as tf, graphsplit as gs
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.compat.v1.placeholder(tf.float32, [5, 2], name="x")
    ...     y = tf.multiply(x, 2.0, name="y")
    >>> result = gs.serving.transpile_graph_def(graph.as_graph_def(), "x", "y", 2)
    >>> [node.device for node in result.node if node.op == "Mul"]
    ['/device:CPU:0', '/device:CPU:1']
    """
    return transpile_and_plan(
        graph_def, inputs, outputs, TranspileOptions(devices=devices, split=split, strict=strict)
    )[0]


@phase("transpiling the graph")
def transpile_and_plan(
    graph_def: Any, inputs: Sequence[str] | str, outputs: Sequence[str] | str, options_given: TranspileOptions
) -> tuple[Any, Plan]:
    """Return what `transpile_graph_def` returns, and the plan."""
    if not isinstance(graph_def, GraphDef):
        raise ArgumentError(
            f"transpile_graph_def takes a GraphDef, got {graph_def!r}. For a tf.Graph pass graph.as_graph_def(); "
            "for a function, graphsplit.parallelize(fn).graph_def(*args) returns the graph for several devices."
        )
    check_graph(graph_def, "The graph")
    fed = names_in(inputs, "inputs", "names of tensors")
    part = take_part(graph_def, fed, names_in(outputs, "outputs", "names of tensors and operations"))
    called = [reference.removesuffix(":0") for reference in part.inputs.values()]
    options = Options(split=_by_argument(options_given.split, called))
    splitting = resolve_split(options.split, arguments_of(part, called))
    program = read_part(part, called, splitting.shapes)
    default_device = options_given.names[0]
    plan = PlanRequest(
        program, splitting, options, options_given.names, default_device, state=_state(program, default_device)
    ).plan()
    check_strict(plan, options_given.strict, finished=True)
    return _join(part, plan), plan


def _join(part: ModelPart, plan: Plan) -> Any:
    """Return the emitted part and the rest of the graph as one graph."""
    emitted = emit(plan)
    result = GraphDef(versions=part.graph.versions, library=part.graph.library)
    function_names = {function.signature.name for function in result.library.function}
    result.library.function.extend(f for f in emitted.library.function if f.signature.name not in function_names)
    by_name, tensor_of_placeholder = Graph(part.graph.node), {**part.inputs, **part.captures}
    note = noting(plan, emitted)
    for node in emitted.nodes:
        if node.name not in tensor_of_placeholder:
            result.node.append(node)
            note(result.node[-1])
        elif node.name in by_name and by_name[node.name].op in PLACEHOLDERS:
            result.node.append(by_name[node.name])
        else:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            device = node.device if node.name in part.inputs else plan.default_device
            result.node.append(make_node(node.name, "Identity", [tensor_of_placeholder[node.name]], device, T=dtype))
    written_names = {node.name for node in result.node}
    result.node.extend(_under_old_names(part, plan, emitted, written_names))
    result.node.extend(_effects_under_old_names(part, plan, emitted, written_names))
    members = {node.name for node in part.nodes} - set(part.captures)
    written_names = {node.name for node in result.node}
    for node in part.graph.node:
        if node.name not in written_names and (node.name not in members or node.op in PLACEHOLDERS):
            result.node.append(node)
    _drop_lost_colocations(result)
    Graph(result.node).check()
    return result


def _drop_lost_colocations(graph: Any) -> None:
    """Let no node ask to be beside one that has become several."""
    names = {node.name for node in graph.node}
    for node in graph.node:
        if "_class" in node.attr:
            beside = node.attr["_class"].list.s
            kept_names = [name for name in beside if name.decode().removeprefix("loc:@") in names]
            if len(kept_names) < len(beside):
                del beside[:]
                beside.extend(kept_names)


def _under_old_names(part: ModelPart, plan: Plan, emitted: EmittedGraph, written_names: set[str]) -> list[Any]:
    """Return a node for every output that is now made by a node of another name."""
    references_by_name: dict[str, list[str]] = {}
    for reference, emitted_reference in zip(part.outputs, emitted.outputs, strict=True):
        name, index = split_reference(reference)
        if split_reference(emitted_reference) != (name, index):
            references_by_name.setdefault(name, []).append(emitted_reference)
    nodes = []
    types = {node.name: node for node in (*part.graph.node, *emitted.nodes)}
    for name, references in references_by_name.items():
        if name in written_names:
            raise CheckError(f"The output {name!r} is made under another name, and there is a node of that name.")
        dtypes = [tf.as_dtype(output_type(types[n], i)) for n, i in map(split_reference, references)]
        node = make_node(name, "Identity" if len(references) == 1 else "IdentityN", references, plan.default_device)
        if len(references) == 1:
            node.attr["T"].type = dtypes[0].as_datatype_enum
        else:
            node.attr["T"].list.type.extend(dtype.as_datatype_enum for dtype in dtypes)
        nodes.append(node)
        written_names.add(name)
    return nodes


def _effects_under_old_names(part: ModelPart, plan: Plan, emitted: EmittedGraph, written_names: set[str]) -> list[Any]:
    """Return a node for every operation that others wait for and that became several, or has another name."""
    copies: dict[str, list[str]] = {}
    for name, origin in emitted.origins.items():
        if origin.role == "op" and origin.op is not None and origin.shard is not None:
            copies.setdefault(plan.program.ops[origin.op].name, []).append(name)
    nodes = []
    for name in part.effects:
        if name not in written_names:
            inlined = [effect for effect in emitted.effects if effect.startswith(f"{name}/")]
            waits = copies.get(name) or inlined
            nodes.append(make_node(name, "NoOp", [f"^{wait}" for wait in waits], plan.default_device))
            written_names.add(name)
    return nodes


def _state(program: Program, default_device: str) -> State:
    """Return where variables and tables are: where the graph asks for, else on the default device."""
    holders = [op for op in program.ops if tf.resource in op.out_dtypes or op.type in VARIABLES]
    return State({op.name: op.node.device or default_device for op in holders})


def _by_argument(split: Split, names: Sequence[str]) -> Split:
    if not isinstance(split, Mapping):
        return split
    by_name = {name.removesuffix(":0"): axis for name, axis in split.items()}
    unknown = [name for name in by_name if name not in names]
    if unknown:
        raise ArgumentError(
            f"split names {', '.join(map(repr, unknown))}, which are no inputs; inputs are {', '.join(names)}."
        )
    return by_name
