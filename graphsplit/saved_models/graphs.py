"""`transpile_graph_def`: the pure form, for frozen graphs and TensorFlow 1 graphs with variables, training included.

What the outputs depend on is planned and emitted. The rest of the graph (initializers, savers, summaries) stays as it
is, under its names; where it reads something that now lives on the shards, that is gathered under its old name, which
costs nothing in a session run that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit import structures
from graphsplit.decompositions import decompose
from graphsplit.devices import names_of_devices
from graphsplit.emission import EmittedGraph, emit
from graphsplit.errors import ArgumentError, CheckError, UnsupportedError, bullet_list
from graphsplit.functions import Options, plan_for
from graphsplit.graphdefs import GraphDef, NodeDef, inline_calls, make_node, output_names, output_type, split_reference
from graphsplit.hoisting import hoist_reads
from graphsplit.plans import Plan
from graphsplit.programs import Program
from graphsplit.reading import build_program
from graphsplit.saved_models.files import check_registered
from graphsplit.splitting import Split, resolve_split

V1_CONTROL_FLOW = frozenset(
    {"Switch", "RefSwitch", "Merge", "RefMerge", "Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "LoopCond"}
)
_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")
_DECLARED = "_output_shapes"


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
      devices: how many, or their names. They need not exist here. The first is home.
      split: an axis, or a mapping from inputs to an axis or None (keep whole).
      strict: raise `StrictError` if an operation that carries rows of the batch would have to run at home.

    Raises:
      ArgumentError: if names do not exist in the graph, or options clash.
      UnsupportedError: for operation types that are not registered, and TensorFlow 1 control flow on the way from
        inputs to outputs.
      StrictError: see `strict`.

    >>> import tensorflow as tf, graphsplit as gs
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.compat.v1.placeholder(tf.float32, [5, 2], name="x")
    ...     y = tf.multiply(x, 2.0, name="y")
    >>> result = gs.transpile_graph_def(graph.as_graph_def(), "x", "y", 2)
    >>> [node.device for node in result.node if node.op == "Mul"]
    ['/device:CPU:0', '/device:CPU:1']
    """
    return transpile_and_plan(graph_def, inputs, outputs, devices, split=split, strict=strict)[0]


def transpile_and_plan(
    graph_def: Any,
    inputs: Sequence[str] | str,
    outputs: Sequence[str] | str,
    devices: int | str | Sequence[str] | None,
    *,
    split: Split = 0,
    strict: bool = False,
) -> tuple[Any, Plan]:
    """Return what `transpile_graph_def` returns, and the plan."""
    names = names_of_devices(devices)
    check_registered(graph_def, "The graph")
    part = _take_part(graph_def, _listed(inputs), _listed(outputs))
    program = _read(part)
    leaves = tuple(_leaf(program, position) for position in program.inputs)
    arguments = structures.Branch(dict, program.input_names, leaves)
    options = Options(split=_by_argument(split, program.input_names), strict=strict)
    plan = plan_for(program, resolve_split(options.split, arguments), options, names, names[0])
    return _join(part, plan), plan


@dataclass(frozen=True, eq=False)
class _Part:
    """What the outputs depend on, cut out of a graph.

    Attributes:
      graph: the whole graph as it was.
      nodes: the part's nodes; the inputs are placeholders.
      inputs: the references that were cut, by the placeholder's name.
      outputs: tensors that are asked for, by users and by the rest of the graph.
      effects: names of operations that must run.
      imported: the whole graph as TensorFlow reads it, for shapes.
    """

    graph: Any
    nodes: tuple[Any, ...]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    imported: tf.Graph


def _take_part(graph_def: Any, inputs: Sequence[str], outputs: Sequence[str]) -> _Part:
    by_name = {node.name: node for node in graph_def.node}
    _check_names(by_name, inputs, outputs)
    cuts = {_plain(reference): reference for reference in inputs}
    tensors, effects = [], []
    for reference in outputs:
        is_operation = ":" not in reference and not output_names_of(by_name[reference], graph_def)
        (effects if is_operation else tensors).append(_plain(reference))
    members = _ancestors(by_name, [*tensors, *effects], set(cuts))
    _check_members(by_name, members, cuts)
    rest = [node for node in graph_def.node if node.name not in members]
    for node in rest:
        for reference in node.input:
            name = split_reference(reference.lstrip("^"))[0]
            if name in members and by_name[name].op not in _PLACEHOLDERS:
                (effects if reference[0] == "^" else tensors).append(_plain(reference.lstrip("^")))
    imported = tf.Graph()
    with imported.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    placeholders = {reference: _placeholder_name(reference, by_name) for reference in cuts}
    nodes = [_placeholder(placeholders[r], r, imported) for r in cuts]
    made = {node.name for node in nodes}
    for node in graph_def.node:
        if node.name in members and node.name not in made:
            nodes.append(_redirected(node, placeholders))
    tensors = [tensor for tensor in dict.fromkeys(tensors) if tensor not in cuts]
    tensors = _with_siblings(tensors, by_name, graph_def)
    named = {placeholders[r]: r for r in cuts}
    return _Part(graph_def, tuple(nodes), named, tuple(tensors), tuple(dict.fromkeys(effects)), imported)


def _read(part: _Part) -> Program:
    """Return the part as a program: calls inlined, fused ops taken apart, reads before loops."""
    graph = GraphDef(versions=part.graph.versions, library=part.graph.library)
    graph.node.extend(part.nodes)
    results = [*part.outputs, *(f"^{name}" for name in part.effects)]
    nodes, references = inline_calls(graph, results)
    nodes, references = decompose(nodes, references, graph.library.function, graph.versions, part.imported)
    resources = {
        node.name: (tf.as_dtype(node.attr["dtype"].type), tf.TensorShape(node.attr["shape"].shape))
        for node in nodes
        if node.op == "VarHandleOp"
    }
    library = {function.signature.name: function for function in graph.library.function}
    nodes, library = hoist_reads(nodes, library, {name: shape for name, (_, shape) in resources.items()})
    del graph.library.function[:]
    graph.library.function.extend(library.values())
    count = len(part.outputs)
    return build_program(
        nodes,
        inputs=list(part.inputs),
        input_names=[reference.removesuffix(":0") for reference in part.inputs.values()],
        captures=(),
        outputs=references[:count],
        effects=[reference[1:] for reference in references[count:]],
        library=graph.library,
        versions=graph.versions,
        resources=resources,
        inlined_from=part.imported,
    )


def _join(part: _Part, plan: Plan) -> Any:
    """Return the emitted part and the rest of the graph as one graph."""
    emitted = emit(plan, _devices_of_variables(plan))
    result = GraphDef(versions=part.graph.versions, library=part.graph.library)
    known = {function.signature.name for function in result.library.function}
    result.library.function.extend(f for f in emitted.library.function if f.signature.name not in known)
    by_name = {node.name: node for node in part.graph.node}
    for node in emitted.nodes:
        if node.name not in part.inputs:
            result.node.append(node)
        elif node.name in by_name and by_name[node.name].op in _PLACEHOLDERS:
            result.node.append(by_name[node.name])
        else:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            result.node.append(make_node(node.name, "Identity", [part.inputs[node.name]], plan.home, T=dtype))
    there = {node.name for node in result.node}
    result.node.extend(_under_old_names(part, plan, emitted, there))
    result.node.extend(_effects_under_old_names(part, plan, emitted, there))
    members = {node.name for node in part.nodes}
    there = {node.name for node in result.node}
    for node in part.graph.node:
        if node.name not in there and (node.name not in members or node.op in _PLACEHOLDERS):
            result.node.append(node)
    _check(result)
    return result


def _under_old_names(part: _Part, plan: Plan, emitted: EmittedGraph, there: set[str]) -> list[Any]:
    """Return a node for every output that is now made by a node of another name."""
    found: dict[str, list[str]] = {}
    for reference, now in zip(part.outputs, emitted.outputs, strict=True):
        name, index = split_reference(reference)
        if split_reference(now) != (name, index):
            found.setdefault(name, []).append(now)
    nodes = []
    types = {node.name: node for node in (*part.graph.node, *emitted.nodes)}
    for name, references in found.items():
        if name in there:
            raise CheckError(f"The output {name!r} is made under another name, and there is a node of that name.")
        dtypes = [tf.as_dtype(output_type(types[n], i)) for n, i in map(split_reference, references)]
        node = make_node(name, "Identity" if len(references) == 1 else "IdentityN", references, plan.home)
        if len(references) == 1:
            node.attr["T"].type = dtypes[0].as_datatype_enum
        else:
            node.attr["T"].list.type.extend(dtype.as_datatype_enum for dtype in dtypes)
        nodes.append(node)
        there.add(name)
    return nodes


def _effects_under_old_names(part: _Part, plan: Plan, emitted: EmittedGraph, there: set[str]) -> list[Any]:
    """Return a node for every operation that others wait for and that became several, or has another name."""
    copies: dict[str, list[str]] = {}
    for name in emitted.shard_of:
        copies.setdefault(name.split("/", 1)[-1], []).append(name)
    nodes = []
    for name in part.effects:
        if name not in there:
            inlined = [effect for effect in emitted.effects if effect.startswith(f"{name}/")]
            waits = copies.get(name) or inlined
            nodes.append(make_node(name, "NoOp", [f"^{wait}" for wait in waits], plan.home))
            there.add(name)
    return nodes


def _devices_of_variables(plan: Plan) -> dict[str, str]:
    """Return where variables and tables are: where the graph asks for, else at home."""
    ops = plan.program.ops
    holders = [op for op in ops if tf.resource in op.out_dtypes or op.type in ("VariableV2", "Variable")]
    return {op.name: op.node.device or plan.home for op in holders}


def _ancestors(by_name: Mapping[str, Any], outputs: Iterable[str], cuts: set[str]) -> set[str]:
    found: set[str] = set()
    pending = [_plain(reference) for reference in outputs]
    while pending:
        reference = pending.pop()
        name = split_reference(reference.lstrip("^"))[0]
        if reference in cuts or name in found:
            continue
        found.add(name)
        for given in by_name[name].input:
            pending.append(given if given[0] == "^" else _plain(given))
    return found


def _with_siblings(tensors: Sequence[str], by_name: Mapping[str, Any], graph: Any) -> list[str]:
    """Return the tensors with all outputs of their operations, so that one node can stand for each operation."""
    result: dict[str, None] = {}
    for reference in tensors:
        name = split_reference(reference)[0]
        count = len(output_names_of(by_name[name], graph))
        result.update(dict.fromkeys(f"{name}:{i}" for i in range(count)))
    return list(result)


def output_names_of(node: Any, graph: Any) -> list[str]:
    """Return the outputs of a node, which may call a function of the graph by its name."""
    for function in graph.library.function:
        if function.signature.name == node.op:
            return [argument.name for argument in function.signature.output_arg]
    return output_names(node)


def _placeholder_name(reference: str, by_name: Mapping[str, Any]) -> str:
    name, index = split_reference(reference)
    return name if by_name[name].op in _PLACEHOLDERS else f"graphsplit/input/{name}_{index}"


def _placeholder(name: str, reference: str, imported: tf.Graph) -> Any:
    tensor = imported.get_tensor_by_name(reference)
    shape = tf.compat.v1.AttrValue(shape=tensor.shape.as_proto())
    return make_node(name, "Placeholder", [], dtype=tensor.dtype, shape=shape)


def _redirected(node: Any, placeholders: Mapping[str, str]) -> Any:
    copy = NodeDef()
    copy.CopyFrom(node)
    if _DECLARED in copy.attr:
        del copy.attr[_DECLARED]
    for i, reference in enumerate(copy.input):
        if reference[0] != "^" and _plain(reference) in placeholders:
            copy.input[i] = placeholders[_plain(reference)]
    return copy


def _leaf(program: Program, position: int) -> structures.TensorLeaf:
    op = program.ops[position]
    return structures.TensorLeaf(op.out_dtypes[0], op.out_shapes[0])


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


def _plain(reference: str) -> str:
    name, index = split_reference(reference)
    return f"{name}:{index}"


def _listed(names: Sequence[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_names(by_name: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> None:
    if not outputs:
        raise ArgumentError("outputs is empty; name the tensors to compute or the operations to run.")
    missing = [
        f"{kind} {reference!r}"
        for kind, references in (("inputs", inputs), ("outputs", outputs))
        for reference in references
        if split_reference(reference)[0] not in by_name
    ]
    if missing:
        there = ", ".join(name for name, node in by_name.items() if node.op in _PLACEHOLDERS) or "none"
        raise ArgumentError(f"The graph has no node for:\n{bullet_list(missing)}\nIts placeholders are: {there}.")


def _check_members(by_name: Mapping[str, Any], members: set[str], cuts: Mapping[str, str]) -> None:
    old = [f"{by_name[name].op} {name!r}" for name in sorted(members) if by_name[name].op in V1_CONTROL_FLOW]
    if old:
        more = [f"... and {len(old) - 8} more"] if len(old) > 8 else []
        raise UnsupportedError(
            f"The outputs depend on TensorFlow 1 control flow:\n{bullet_list(old[:8] + more)}\n"
            "Build the graph after tf.compat.v1.enable_control_flow_v2()."
        )


def _check(graph: Any) -> None:
    """Raise `CheckError` unless names are unique and every reference exists."""
    names = {node.name for node in graph.node}
    if len(names) != len(graph.node):
        raise CheckError("Two nodes of the transpiled graph have the same name.")
    for node in graph.node:
        for reference in node.input:
            if split_reference(reference.lstrip("^"))[0] not in names:
                raise CheckError(f"The node {node.name!r} reads {reference!r}, which does not exist.")
