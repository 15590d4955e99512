"""Parts of graphs: what some outputs depend on, cut out and read as a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.protos import (
    GraphDef,
    is_marked,
    make_node,
    mark,
    output_names,
    source_of,
    split_reference,
    with_inputs,
)
from graphsplit.core.sizes import Shape
from graphsplit.core.structures import Container, TensorLeaf
from graphsplit.core.tensorflow_internals import import_operations
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.function_calls import functions_called
from graphsplit.program.graph.graph import Graph, reached
from graphsplit.program.program import Program
from graphsplit.program.reading.shape_inference import known_shape
from graphsplit.tracing.graph_to_program import Reading, graph_to_program

V1_CONTROL_FLOW = frozenset(
    {"Switch", "RefSwitch", "Merge", "RefMerge", "Enter", "RefEnter", "Exit", "RefExit", "NextIteration", "LoopCond"}
)
PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")
VARIABLES = ("Variable", "VariableV2")
LARGE_BYTES = 1 << 14
_REFERENCE = re.compile(r"[^:^]+(:\d+)?")
_DECLARED = "_output_shapes"


@dataclass(frozen=True, eq=False)
class ModelPart:
    """What the outputs depend on, cut out of a graph.

    Attributes:
      graph: the whole graph as it was.
      nodes: the part's nodes; the inputs are placeholders.
      inputs, captures: the references that were cut, by the placeholder's name. Captures are variables, tables and
        large constants.
      outputs: tensors that are asked for, by users and by the rest of the graph.
      effects: names of operations that must run.
      imported: the whole graph as TensorFlow reads it, for shapes.
    """

    graph: Any
    nodes: tuple[Any, ...]
    inputs: Mapping[str, str]
    captures: Mapping[str, str]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    imported: tf.Graph


def take_part(graph_def: Any, inputs: Sequence[str], outputs: Sequence[str], alone: bool = False) -> ModelPart:
    """Return what the outputs depend on.

    Args:
      graph_def: the whole graph.
      inputs: references of tensors where the part ends.
      outputs: references of tensors, and names of operations without any.
      alone: whether the part is to stand alone: then it also ends at variables and tables, and nothing of the rest of
        the graph reads it. It always ends at large constants, of which the graph is to keep one copy.
    """
    by_name = Graph(graph_def.node)
    _check_names(by_name, inputs, outputs)
    cuts = {plain_reference(reference): reference for reference in inputs}
    tensors: list[str] = []
    effects: list[str] = []
    for reference in outputs:
        is_operation = ":" not in reference and not output_names_of(by_name[reference], graph_def)
        (effects if is_operation else tensors).append(reference if is_operation else plain_reference(reference))
    imported = _imported(graph_def)
    _check_tensors(imported, cuts, tensors)
    wanted = [*tensors, *(f"^{name}" for name in effects)]
    holders = [*(_holders(imported) if alone else ()), *_large_constants(graph_def)]
    members = _ancestors(by_name, wanted, {*cuts, *holders})
    check_can_be_split([by_name[name] for name in members], graph_def.library)
    tensors_read = {plain_reference(r) for name in members for r in by_name[name].input if r[0] != "^"}.union(wanted)
    holders = [holder for holder in holders if holder in tensors_read and holder not in cuts]
    ends = dict.fromkeys([*cuts, *holders])
    if not alone:
        for node in graph_def.node:
            for reference in node.input if node.name not in members else ():
                name = source_of(reference)
                if name in members and by_name[name].op not in PLACEHOLDERS:
                    (effects if reference[0] == "^" else tensors).append(
                        name if reference[0] == "^" else plain_reference(reference)
                    )
        tensors = _with_siblings([tensor for tensor in tensors if tensor not in ends], by_name, graph_def)
    placeholders = {reference: _placeholder_name(reference, by_name) for reference in ends}
    nodes = [_placeholder(placeholders[r], r, imported, by_name[source_of(r)]) for r in ends]
    placeholder_names = {node.name for node in nodes}
    for node in graph_def.node:
        if node.name in members and node.name not in placeholder_names:
            nodes.append(_redirected(node, placeholders))
    named, captures = ({placeholders[r]: r for r in references} for references in (cuts, holders))
    return ModelPart(
        graph_def, tuple(nodes), named, captures, tuple(dict.fromkeys(tensors)), tuple(dict.fromkeys(effects)), imported
    )


class CannotBeSplitError(UnsupportedError):
    """No plan can be made of a graph; it can only stay as it is."""


def check_can_be_split(nodes: Iterable[Any], library: Any) -> None:
    """Raise `CannotBeSplitError` if nodes, or functions that they call, are what no plan can be made of."""
    node_list = list(nodes)
    by_name = {function.signature.name: function for function in library.function}
    everything = [
        *node_list,
        *(node for function in functions_called(node_list, by_name) for node in function.node_def),
    ]
    if any(map(is_marked, everything)):
        raise CannotBeSplitError("The graph was transpiled before; transpile the original.")
    old = sorted(f"{node.op} {node.name!r}" for node in everything if node.op in V1_CONTROL_FLOW)
    if old:
        raise CannotBeSplitError(
            f"The outputs depend on TensorFlow 1 control flow:\n{bullet_list(old, 8)}\n"
            "Build the graph after tf.compat.v1.enable_control_flow_v2()."
        )


def arguments_of(part: ModelPart, names: Sequence[str]) -> Container:
    """Return the structure of the part's inputs, called by these names."""
    placeholders = {node.name: node for node in part.nodes}
    leaves = []
    for name in part.inputs:
        attributes = placeholders[name].attr
        shape = tf.TensorShape(attributes["shape"].shape)
        leaves.append(TensorLeaf(tf.as_dtype(attributes["dtype"].type), known_shape(shape)))
    return Container(dict, tuple(names), tuple(leaves))


def read_part(part: ModelPart, names: Sequence[str], shapes: Sequence[Shape | None]) -> Program:
    """Return the part as a program: calls inlined, fused ops taken apart, reads before loops.

    Args:
      part: see `take_part`.
      names: how users call each input.
      shapes: of each input; multiples of an unknown batch where it is split along one.
    """
    graph = GraphDef(versions=part.graph.versions, library=part.graph.library)
    graph.node.extend(part.nodes)
    placeholders = {reference: name for name, reference in {**part.inputs, **part.captures}.items()}
    held_values = {
        name: (tf.as_dtype(node.attr["dtype"].type), tf.TensorShape(node.attr["shape"].shape))
        for name, node in _variables(part).items()
    }
    reading = Reading(
        inputs=list(part.inputs),
        input_names=names,
        captures=list(part.captures),
        outputs=[placeholders.get(reference, reference) for reference in part.outputs],
        effects=part.effects,
        shapes=shapes,
        known=part.imported,
        held=held_values,
        names_stay=True,
    )
    return graph_to_program(graph, reading)


def resources_of(program: Program) -> list[str]:
    """Return the names of all variables and tables of a program, captured or made in it."""
    return [op.name for op in program.ops if tf.resource in op.out_dtypes]


def ends_of(graph_def: Any) -> tuple[list[str], list[str]]:
    """Return the placeholders of a graph, and the tensors and operations that nothing in it reads or waits for."""
    sources = {source_of(reference) for node in graph_def.node for reference in node.input}
    placeholders = [node.name for node in graph_def.node if node.op in PLACEHOLDERS]
    last = [node.name for node in graph_def.node if node.name not in sources and node.op not in (*PLACEHOLDERS, "NoOp")]
    return placeholders, last


def output_names_of(node: Any, graph: Any) -> list[str]:
    """Return the outputs of a node, which may call a function of the graph by its name."""
    for function in graph.library.function:
        if function.signature.name == node.op:
            return [argument.name for argument in function.signature.output_arg]
    return output_names(node)


def plain_reference(reference: str) -> str:
    """Return a reference with its output's number: `"x"` is `"x:0"`."""
    name, index = split_reference(reference)
    return f"{name}:{index}"


def _imported(graph_def: Any) -> tf.Graph:
    """Return the graph as TensorFlow reads it, or raise `ArgumentError` if it cannot."""
    try:
        return import_operations(deepcopy(graph_def))[0].graph
    except ValueError as error:
        raise ArgumentError(f"TensorFlow cannot import the graph: {type(error).__name__}: {error}") from error


def _check_tensors(imported: tf.Graph, inputs: Iterable[str], outputs: Iterable[str]) -> None:
    """Raise `ArgumentError` unless the operations have the outputs that references ask for."""
    missing = []
    for kind, references in (("inputs", inputs), ("outputs", outputs)):
        for reference in references:
            name, index = split_reference(reference)
            count = len(imported.get_operation_by_name(name).outputs)
            if index >= count:
                missing.append(f"{kind} {reference!r}: {name!r} has {count} output{'s' if count != 1 else ''}")
    if missing:
        raise ArgumentError(f"Operations of the graph do not have these outputs:\n{bullet_list(missing)}")


def _holders(graph: tf.Graph) -> list[str]:
    """Return the outputs that are variables or tables."""
    return [
        output.name
        for operation in graph.get_operations()
        for output in operation.outputs
        if operation.type in VARIABLES or (output.dtype == tf.resource and not operation.inputs)
    ]


def _large_constants(graph_def: Any) -> list[str]:
    """Return the constants that are too large to be written once for every device: weights of a frozen graph."""
    constants = [node for node in graph_def.node if node.op == "Const"]
    return [f"{node.name}:0" for node in constants if node.attr["value"].ByteSize() > LARGE_BYTES]


def _variables(part: ModelPart) -> dict[str, Any]:
    """Return the nodes of resource variables by the names that they have in the part."""
    whole = Graph(part.graph.node)
    nodes = {n.name: n for n in part.nodes} | {name: whole[source_of(r)] for name, r in part.captures.items()}
    return {name: node for name, node in nodes.items() if node.op == "VarHandleOp"}


def _ancestors(by_name: Graph, outputs: Iterable[str], cuts: set[str]) -> set[str]:
    """Return the names of the nodes that outputs depend on, up to tensors that are cut."""

    def read_by(reference: str) -> list[str]:
        references = [r if r[0] == "^" else plain_reference(r) for r in by_name[source_of(reference)].input]
        return [r for r in references if r not in cuts]

    return set(map(source_of, reached([r for r in outputs if r not in cuts], read_by)))


def _with_siblings(tensors: Sequence[str], by_name: Graph, graph: Any) -> list[str]:
    """Return the tensors with all outputs of their operations, so that one node can stand for each operation."""
    result: dict[str, None] = {}
    for reference in tensors:
        name = source_of(reference)
        count = len(output_names_of(by_name[name], graph))
        result.update(dict.fromkeys(f"{name}:{i}" for i in range(count)))
    return list(result)


def _placeholder_name(reference: str, by_name: Graph) -> str:
    name, index = split_reference(reference)
    return name if by_name[name].op in PLACEHOLDERS else f"graphsplit/input/{name}_{index}"


def _placeholder(name: str, reference: str, imported: tf.Graph, original: Any) -> Any:
    """Return the placeholder of an input, in the shape that TensorFlow infers or the graph declares."""
    tensor = imported.get_tensor_by_name(reference)
    shape = tensor.shape
    if _DECLARED in original.attr:  # of `as_graph_def(add_shapes=True)`: knows what was set by hand
        shape = shape.merge_with(tf.TensorShape(original.attr[_DECLARED].list.shape[tensor.value_index]))
    value = tf.compat.v1.AttrValue(shape=shape.as_proto())
    return make_node(name, "Placeholder", [], dtype=tensor.dtype.base_dtype, shape=value)


def _redirected(node: Any, placeholders: Mapping[str, str]) -> Any:
    copy = with_inputs(node, [r if r[0] == "^" else placeholders.get(plain_reference(r), r) for r in node.input])
    if _DECLARED in copy.attr:
        del copy.attr[_DECLARED]
    return copy


def _check_names(by_name: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    if not outputs:
        raise ArgumentError("outputs is empty; name the tensors to compute or the operations to run.")
    odd = [repr(reference) for reference in (*inputs, *outputs) if not _REFERENCE.fullmatch(reference)]
    if odd:
        raise ArgumentError(f"{', '.join(odd)}: that is no name of a tensor; write it like 'x' or 'x:0'.")
    missing = [
        f"{kind} {reference!r}"
        for kind, references in (("inputs", inputs), ("outputs", outputs))
        for reference in references
        if source_of(reference) not in by_name
    ]
    if missing:
        placeholders = ", ".join(name for name in by_name if by_name[name].op in PLACEHOLDERS) or "none"
        raise ArgumentError(
            f"The graph has no node for:\n{bullet_list(missing)}\nIts placeholders are: {placeholders}."
        )


def noting(plan: Plan, graph: EmittedGraph) -> Callable[[Any], Any]:
    """Return what notes on a node of an emitted graph, wherever it is put, what the plan says of it; see `mark`."""
    reasons = {op.name: reason for op, reason in plan.unsharded_ops}
    return lambda node: mark(node, graph.shard_of(node.name), reasons.get(node.name, ""), graph.serves(node.name))
