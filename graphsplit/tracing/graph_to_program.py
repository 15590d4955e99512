"""From a graph to a program, whoever made it: a traced function, a SavedModel's signature, a TensorFlow 1 graph.

Calls are inlined, fused operations taken apart, reads of variables put before loops, and equal operations made one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.devices import names_device
from graphsplit.core.protos.graphdefs import GraphDef, fill_defaults, source_of
from graphsplit.core.sizes.symbolic_sizes import Shape
from graphsplit.program.asked_layouts import write_marks
from graphsplit.program.graph.function_calls import CONTROL_FLOW, check_nesting
from graphsplit.program.graph.inlining import inline_calls
from graphsplit.program.program import Program
from graphsplit.program.reading.function_bodies import Memo
from graphsplit.program.reading.reader import build_for_any_batch, build_for_sizes, build_program
from graphsplit.program.reading.shape_inference import ELEMENT_SHAPE, known_shape
from graphsplit.program.stages import StageCalls, stage_calls
from graphsplit.tracing.branch_effects import ShapeOf
from graphsplit.tracing.common_subexpressions import drop_idle_waits, merge
from graphsplit.tracing.decompositions import decompose
from graphsplit.tracing.recomputation import wait_instead_of_adding
from graphsplit.tracing.variable_hoisting import hoist_reads

Held = Mapping[str, tuple[tf.DType, tf.TensorShape]]


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
      known: the graph as TensorFlow reads it, calls not inlined. It knows shapes that were set by hand.
      held: what the variables among the captures hold, by placeholder name.
      locate: operation name -> the user's source line.
      seeds: how many of the inputs, the last, are gradients of outputs.
      notes: what a user might not expect.
      names_stay: whether what is returned keeps its name, because others read it by that.
      bodies: of loops and branches, those that were read before.
      shapes_inside: shapes of what nodes in functions yield.
      compiled: whether XLA compiles what comes of it anyway, so that calls that it would compile are taken apart.
    """

    inputs: Sequence[str]
    input_names: Sequence[str]
    captures: Sequence[str]
    outputs: Sequence[str]
    effects: Sequence[str]
    shapes: Sequence[Shape | None]
    known: tf.Graph
    held: Held
    locate: Callable[[str], str] = lambda _: ""
    seeds: int = 0
    notes: Sequence[str] = ()
    names_stay: bool = False
    bodies: Memo = field(default_factory=dict)
    shapes_inside: ShapeOf = lambda *_: ()
    compiled: bool = False
    sizes: CallSizes | None = None
    adjust: Callable[[Sequence[Any]], None] = field(default=lambda _: None)


def graph_to_program(graph: Any, reading: Reading) -> Program:
    """Return some of a graph as a program.

    If shapes do not follow for every number of rows of a batch of unknown size, no axis of it counts as one.

    Args:
      graph: a `GraphDef`. It is changed.
      reading: what of it, and what is known besides.

    Raises:
      UnsupportedError: if loops and branches are nested too deep.
      ValueError: if TensorFlow cannot infer shapes.
    """
    fill_defaults(graph)
    calls = stage_calls(graph)
    write_marks(graph)
    nodes, references = inline_calls(
        graph, [*reading.outputs, *(f"^{name}" for name in reading.effects)], reading.compiled
    )
    functions = {body.signature.name: body for body in graph.library.function}
    check_nesting(nodes, functions)
    nodes, references = decompose(nodes, references, graph.library.function, graph.versions, reading.known)
    reading.adjust(nodes)
    shapes_held = {name: shape for name, (_, shape) in reading.held.items()}
    nodes, library, moved = hoist_reads(nodes, functions, shapes_held, reading.shapes_inside)
    references = [f"^{moved.get(r[1:], r[1:])}" if r[0] == "^" else r for r in references]
    whole = GraphDef().library
    whole.function.extend(library.values())
    drop_idle_waits(nodes)
    wait_instead_of_adding(nodes)
    named = {*reading.captures, *(source_of(r) for r in references if reading.names_stay)}
    notes = [*reading.notes, *_replaced_devices(nodes, calls)]
    nodes, references = merge(nodes, references, named, calls.of)
    count = len(reading.outputs)
    build = functools.partial(
        build_program,
        nodes,
        inputs=reading.inputs,
        input_names=reading.input_names,
        captures=reading.captures,
        outputs=references[:count],
        effects=[reference[1:] for reference in references[count:]],
        library=whole,
        versions=graph.versions,
        resources={n: (d, known_shape(s)) for n, (d, s) in reading.held.items()},
        inlined_from=reading.known,
        locate=reading.locate,
        seeds=reading.seeds,
        calls=calls,
        memo=reading.bodies,
    )
    given = dict(zip(reading.inputs, reading.shapes, strict=bool(reading.shapes)))
    if reading.sizes is not None:
        shapes, *values = reading.sizes
        sizes = dict(zip(reading.inputs, shapes, strict=True))
        known = [{reading.inputs[i]: value for i, value in own.items()} for own in values]
        behind_loops = any(node.op in CONTROL_FLOW or node.op in ELEMENT_SHAPE for node in nodes)
        return build_for_sizes(functools.partial(build, notes=notes), given if behind_loops else {}, sizes, *known)
    return build_for_any_batch(build, given, notes)


def _replaced_devices(nodes: Sequence[Any], calls: StageCalls) -> list[str]:
    """Say which devices were asked for inside of the graph, which the plan does not follow."""
    asked = {n.device for n in nodes if n.device and n.op != "Placeholder" and not calls.asked(n)}
    names = ", ".join(sorted(filter(names_device, asked)))
    return [f"tf.device requests inside the function are replaced by the plan's: {names}"] * bool(names)
