"""From a graph to a program, whoever made it: a traced function, a SavedModel's signature, a TensorFlow 1 graph.

Calls are inlined, fused operations taken apart, and reads of variables put before loops.

Equal operations become one, and waits that order nothing are dropped. A traced training step repeats itself: Keras'
Adam computes the powers of its decay rates for every variable anew, and every axis and shape is a constant of its own.
TensorFlow's graph optimizer would merge them, but on CPUs graphsplit does without it; and what is merged before the
split is not planned, copied to every device, placed and started.

What `tf.recompute_grad` runs again waits for the shard's own gradient, not for that of all rows. It runs a function
forward once more when the gradient of its result is there. It says so with data: to what the function reads it adds a
zero, made from the first entry of the gradient. Of a gradient in pieces that is one shard's, for which all others would
wait. An operation that only waits orders the same, each shard by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.devices import names_device
from graphsplit.core.protos import (
    GraphDef,
    fill_defaults,
    make_node,
    set_inputs,
    source_of,
    split_reference,
)
from graphsplit.core.sizes import Shape
from graphsplit.errors import ArgumentError
from graphsplit.program.asked_layouts import write_marks
from graphsplit.program.graph.equal_work import equal_work, is_pure
from graphsplit.program.graph.function_calls import CONTROL_FLOW, check_nesting, inline_calls
from graphsplit.program.program import Locate, Program
from graphsplit.program.reading.flat_graphs import FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.function_bodies import Memo
from graphsplit.program.reading.reader import build_for_any_batch, build_for_sizes
from graphsplit.program.reading.shape_inference import ELEMENT_SHAPE, InferenceError, known_shape
from graphsplit.program.stages import StageCalls, stage_calls
from graphsplit.tracing.branch_effects import ShapeOf
from graphsplit.tracing.decompositions import decompose
from graphsplit.tracing.variable_hoisting import hoist_reads

HeldByCaptures = Mapping[str, tuple[tf.DType, tf.TensorShape]]


class CallSizes(NamedTuple):
    """What arguments of a call have that the trace of its function does not know.

    Attributes:
      shapes: of each.
      values: of those that are the shape of a sparse tensor, by their numbers.
      open_values: the same values, where they follow from what the shapes in a trace follow from.
    """

    shapes: Sequence[Shape | None]
    values: Mapping[int, Shape]
    open_values: Mapping[int, Shape]


@dataclass(frozen=True, eq=False)
class Reading:
    """What of a graph is read, and under which names.

    Attributes:
      inputs, captures: names of the placeholders of arguments, and of variables, tables and large constants.
      input_names: how users call each argument.
      outputs: references (`node:0`) of what is returned.
      effects: names of operations that must run.
      shapes: of the inputs, where more is known than the placeholders say: multiples of unknown sizes.
      sizes: of the inputs, in the calls that the program is for, if these are to be known, and were not to the trace.
      values: of inputs that are the shape of a sparse tensor, where these follow from unknown sizes, by name.
      known: the graph as TensorFlow reads it, calls not inlined. It knows shapes that were set by hand.
      held: what the variables among the captures hold, by placeholder name.
      locate: operation name -> the frames of the Python code that made it, outermost first.
      seeds: how many of the inputs, the last, are gradients of outputs.
      notes: what a user might not expect.
      names_stay: whether what is returned keeps its name, because others read it by that.
      bodies: of loops and branches, those that were read before.
      shapes_inside: shapes of what nodes in functions yield.
      compiled: whether XLA compiles what comes of it anyway, so that calls that it would compile are taken apart.
      counter_of: adds the placeholder of what counts the draws of a kernel to the inputs of the graph, and returns its
        name; None if kernels count for themselves.
    """

    inputs: Sequence[str]
    input_names: Sequence[str]
    captures: Sequence[str]
    outputs: Sequence[str]
    effects: Sequence[str]
    shapes: Sequence[Shape | None]
    known: tf.Graph
    held: HeldByCaptures
    locate: Locate = lambda _: ()
    seeds: int = 0
    notes: Sequence[str] = ()
    names_stay: bool = False
    bodies: Memo = field(default_factory=dict)
    shapes_inside: ShapeOf = lambda *_: ()
    compiled: bool = False
    sizes: CallSizes | None = None
    values: Mapping[str, Shape] = field(default_factory=dict)
    counter_of: Callable[[Any], str] | None = None
    adjust: Callable[[Sequence[Any]], None] = field(default=lambda _: None)


def graph_to_program(graph: Any, reading: Reading) -> Program:
    """Return some of a graph as a program.

    If shapes do not follow for every number of rows of a batch of unknown size, no axis of it counts as one.

    Args:
      graph: a `GraphDef`. It is changed.
      reading: what of it, and what is known besides.

    Raises:
      UnsupportedError: if loops and branches are nested too deep.
      ArgumentError: if TensorFlow says that shapes do not fit each other.
    """
    fill_defaults(graph)
    calls = stage_calls(graph)
    write_marks(graph)
    nodes, references = inline_calls(
        graph, [*reading.outputs, *(f"^{name}" for name in reading.effects)], reading.compiled
    )
    functions = {body.signature.name: body for body in graph.library.function}
    check_nesting(nodes, functions)
    names_before = {node.name for node in nodes}
    parts = graph.library.function, graph.versions, reading.known
    nodes, references = decompose(nodes, references, *parts, reading.counter_of)
    counters = [node.name for node in nodes if node.op == "Placeholder" and node.name not in names_before]
    captures = [*reading.captures, *counters]
    reading.adjust(nodes)
    shapes_held = {name: shape for name, (_, shape) in reading.held.items()}
    nodes, library, moved = hoist_reads(nodes, functions, shapes_held, reading.shapes_inside)
    references = [f"^{moved.get(r[1:], r[1:])}" if r[0] == "^" else r for r in references]
    whole = GraphDef().library
    whole.function.extend(library.values())
    drop_idle_waits(nodes)
    wait_instead_of_adding(nodes)
    named = {*captures, *(source_of(r) for r in references if reading.names_stay)}
    notes = [*reading.notes, *_replaced_devices(nodes, calls)]
    nodes, references = merge(nodes, references, named, calls.of)
    count = len(reading.outputs)
    flat = FlatGraph(
        nodes=nodes,
        inputs=reading.inputs,
        captures=captures,
        outputs=references[:count],
        effects=[reference[1:] for reference in references[count:]],
        library=whole,
        versions=graph.versions,
    )
    known = KnownBefore(
        resources={
            **{n: (d, known_shape(s)) for n, (d, s) in reading.held.items()},
            **dict.fromkeys(counters, (tf.int64, (3,))),
        },
        shapes=dict(zip(reading.inputs, reading.shapes, strict=bool(reading.shapes))),
        values=reading.values,
        inlined_from=reading.known,
    )
    labels = Labels(
        input_names=reading.input_names, seeds=reading.seeds, notes=notes, locate=reading.locate, calls=calls
    )
    try:
        if reading.sizes is None:
            return build_for_any_batch(flat, known, labels, reading.bodies)
        shapes, *values = reading.sizes
        sizes = dict(zip(reading.inputs, shapes, strict=True))
        values_now, for_all = [{reading.inputs[i]: value for i, value in by_number.items()} for by_number in values]
        behind_loops = any(node.op in CONTROL_FLOW or node.op in ELEMENT_SHAPE for node in nodes)
        known = replace(known, shapes=known.shapes if behind_loops else {}, values=for_all)
        return build_for_sizes(flat, known, labels, reading.bodies, sizes, values_now)
    except InferenceError as error:
        raise ArgumentError(f"The function cannot run on arguments of these sizes. TensorFlow says: {error}") from None


def _replaced_devices(nodes: Sequence[Any], calls: StageCalls) -> list[str]:
    """Say which devices were asked for inside of the graph, which the plan does not follow."""
    devices = {n.device for n in nodes if n.device and n.op != "Placeholder" and not calls.asked(n)}
    names = ", ".join(sorted(filter(names_device, devices)))
    return [f"tf.device requests inside the function are replaced by the plan's: {names}"] * bool(names)


_READ = "ReadVariableOp"


def merge(
    nodes: Sequence[Any],
    references: Sequence[str],
    named: Collection[str],
    place_of: Callable[[str], Hashable] = lambda _: None,
) -> tuple[list[Any], list[str]]:
    """Return the nodes without repetitions, and `references` as they are named now.

    Operations are equal if their types, attributes (`equal_work`), inputs and controls are. Reads of a variable between
    the same controls read the same value: whatever writes waits for the reads before it, and is waited for by those
    after it.

    Args:
      nodes: `NodeDef`s in graph spelling, calls inlined. Those that stand behind their inputs are merged; their inputs
        are edited in place.
      references: references (`node:0`) and effects (`^node`).
      named: names of nodes that stay: captured tensors, which may be constants.
      place_of: from a node's name to where it was asked to run; nodes with different answers stay apart.
    """
    twins: dict[str, str] = {}  # the name of a dropped node -> that of the one that is kept
    name_by_key: dict[Hashable, str] = {}
    unique_nodes: list[Any] = []
    for node in nodes:
        key = _key(node, twins)
        apart = key is None or node.name in named
        name = node.name if apart else name_by_key.setdefault((key, place_of(node.name)), node.name)
        if name == node.name:
            unique_nodes.append(node)
        else:
            twins[node.name] = name
    for node in unique_nodes:  # again, for those that stand before their inputs
        _let_read(node, [_renamed(reference, twins) for reference in node.input])
    return unique_nodes, [_renamed(reference, twins) for reference in references]


def drop_idle_waits(nodes: Sequence[Any]) -> None:
    """Let operations without effects not wait for such, which orders nothing; edits the nodes.

    (The gradient of a squared difference waits for the gradient that it is given: that would be made whole on the
    default device only to be waited for, where it is read in pieces.)
    """
    idle: set[str] = set()
    for node in nodes:
        pure = is_pure(node.op)
        if pure:
            _let_read(node, [r for r in node.input if r[0] != "^" or r[1:] not in idle])
        # EnsureShape may be there for its error, and others wait for that
        silent = (pure and node.op != "EnsureShape") or node.op in ("Placeholder", _READ)
        if silent and all(source_of(reference) in idle for reference in node.input):
            idle.add(node.name)


def _let_read(node: Any, inputs: list[str]) -> None:
    """Let a node read something else, if it is something else: for most nodes it is not."""
    if inputs != node.input:
        set_inputs(node, inputs)


def _key(node: Any, twins: Mapping[str, str]) -> Hashable | None:
    """Return what equal nodes have in common, or None for a node that is not to be merged."""
    work = equal_work(node) if is_pure(node.op) or node.op == _READ else None
    if work is None:
        return None
    inputs = [_renamed(reference, twins) for reference in node.input]
    data_inputs = tuple([reference for reference in inputs if reference[0] != "^"])
    return work, data_inputs, frozenset(inputs).difference(data_inputs)


def _renamed(reference: str, twins: Mapping[str, str]) -> str:
    name = source_of(reference)
    return reference.replace(name, twins[name], 1) if name in twins else reference


_FROM_ZERO_TO_GRADIENT = ("Equal", "Cast", "Max", "StridedSlice", "Reshape")  # tf.recompute_grad of TensorFlow 2.21


def wait_instead_of_adding(nodes: Sequence[Any]) -> None:
    """Let what is run again wait for the gradient to which it adds nothing; edits the nodes.

    Args:
      nodes: `NodeDef`s in graph spelling, calls inlined.
    """
    by_name = {node.name: node for node in nodes}
    gradients: dict[str, str] = {}  # the name of a zero -> that of what made the gradient
    for node in nodes:
        if node.op == "SelectV2" and (gradient := _gradient(node, by_name)) is not None:
            gradients[node.name] = gradient
    for node in nodes if gradients else ():
        if node.op == "Cast" and source_of(node.input[0]) in gradients:
            gradients[node.name] = gradients[source_of(node.input[0])]
    for node in nodes if gradients else ():
        added = source_of(node.input[1]) if node.op == "AddV2" else ""
        if added in gradients:
            inputs = [node.input[0], f"^{gradients[added]}"]
            node.CopyFrom(make_node(node.name, "Identity", inputs, node.device, T=tf.as_dtype(node.attr["T"].type)))


def _gradient(select: Any, nodes: Mapping[str, Any]) -> str | None:
    """Return the node of the gradient from which a zero is made; None if it is something else that is selected."""
    reference = select.input[0]
    for kind in _FROM_ZERO_TO_GRADIENT:
        node = nodes.get(source_of(reference))
        if node is None or node.op != kind:
            return None
        if kind == "Equal" and not (node.input[0] == node.input[1] and node.attr["T"].type == tf.bool.as_datatype_enum):
            return None
        reference = node.input[0]
    return _origin(reference, nodes)


def _origin(reference: str, nodes: Mapping[str, Any]) -> str:
    """Return the node that made what is passed on, together with others that it does not depend on."""
    name, index = split_reference(reference)
    while name in nodes and nodes[name].op in ("Identity", "IdentityN"):
        name, index = split_reference(nodes[name].input[index])
    return name
