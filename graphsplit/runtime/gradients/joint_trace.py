"""Joint traces: a function traced together with its vector-Jacobian products, in the function's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.sizes import Shape
from graphsplit.core.tensorflow_internals import (
    captured_once_more,
    captures_of_graph,
    is_eager,
    is_read,
    resource_value,
    take_other_input,
)
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.program.graph.graph import reached, readers_of
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace, captures_in_order, read_graph

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A function traced together with the gradients of its sources (arguments, then captures).

    Attributes:
      trace: arguments and seeds (gradients of the outputs, group by group) -> outputs and gradients, group by group.
      groups: the floating-point outputs that share a product.
      gradients: for each group, the structure of the list of gradients by source; None where there is none.
    """

    trace: Trace
    groups: list[list[int]]
    gradients: list[structures.Tree]

    def sources(self, g: int) -> list[int]:
        """Return the sources that have a gradient from group `g`."""
        tree = self.gradients[g]
        assert isinstance(tree, structures.Container)
        return [i for i, entry in enumerate(tree.entries) if not isinstance(entry, structures.StaticLeaf)]

    def sizes(self) -> list[tuple[int, int]]:
        """Return, for each group, how many seeds it takes and how many tensors its gradients are."""
        pairs = zip(self.groups, self.gradients, strict=True)
        return [(len(group), len(structures.leaves(tree))) for group, tree in pairs]


@dataclass(frozen=True)
class _Group:
    """Outputs that share a product, and the sources by which they are differentiated."""

    outputs: list[int]
    sources: list[int]


def joint_trace(trace: Trace, watched: Sequence[bool]) -> JointTrace:
    """Trace a function together with its gradients by the sources that are watched."""
    sources = _sources(trace)
    groups = _grouped(trace.program, [i for i, watch in enumerate(watched) if watch and _has_gradient(sources[i])])
    loops = any(op.bodies for op in trace.program.ops)
    if loops and len(groups) > 1 and any(op.type in _CALLS for op in trace.graph.get_operations()):
        groups = [_together(groups)]  # one call, of one loop, may be differentiated for each
    joint = _trace_joint(trace, groups)
    if loops:
        return joint  # TensorFlow changes a loop when it differentiates it: not twice
    finer = _grouped_by_seeds(joint)
    return joint if len(finer) == len(groups) else _trace_joint(trace, finer)


def _together(groups: Sequence[_Group]) -> _Group:
    """Return all outputs with all sources: as a `tf.function` has them, of which one call is differentiated once."""
    outputs = sorted({k for group in groups for k in group.outputs})
    return _Group(outputs, sorted({i for group in groups for i in group.sources}))


def _trace_joint(trace: Trace, groups: Sequence[_Group]) -> JointTrace:
    """Add gradients to a function's graph, for groups of outputs. The user's Python does not run again."""
    sources = _sources(trace)
    seeds: list[tf.Tensor] = []
    flat: list[tf.Tensor] = []
    trees = []
    count_before = len(trace.graph.get_operations())
    with trace.graph.as_default():
        for group in groups:
            targets = [trace.outputs[k] for k in group.outputs]
            own_seeds = [tf.compat.v1.placeholder(t.dtype, t.shape, "graphsplit_seed") for t in targets]
            by = [sources[i] for i in group.sources]
            gradients = tf.gradients(targets, by, own_seeds) if by else []
            by_source: list[Any] = [None] * len(sources)
            for i, gradient in zip(group.sources, gradients, strict=True):
                by_source[i] = gradient
            tensors, tree = structures.flatten(by_source)
            seeds += own_seeds
            flat += tensors
            trees.append(tree)
    _read_late(trace.graph, trace.graph.get_operations()[count_before:])
    outputs_of = [group.outputs for group in groups]
    names = [*trace.program.input_names, *[f"gradient of output {k}" for group in outputs_of for k in group]]
    inputs, outputs = (*trace.inputs, *seeds), (*trace.outputs, *flat)
    shapes = _shapes(trace, outputs_of)
    effects_and_result = trace.effects, trace.result
    count, shared = len(seeds), trace.shared
    joint = read_graph(
        trace.function, inputs, outputs, *effects_and_result, names, shapes, count, shared, values=trace.values
    )
    return JointTrace(joint, outputs_of, trees)


def _read_late(graph: Any, operations: Sequence[tf.Operation]) -> None:
    """Let gradients that read variables by themselves read them when they run, as `tf.recompute_grad` does.

    Somebody may change a variable between the forward and the backward part. What gradients read is another capture of
    the variable then: it is no read of the forward part, and stands where gradients come in.
    """
    readers = [
        (op, i, tensor)
        for op in operations
        if is_read(op.type) or op.type in _CALLS
        for i, tensor in enumerate(op.inputs)
        if tensor.dtype == tf.resource and resource_value(tensor) is not None
    ]
    if not readers:
        return
    with raw_handles():
        placeholders, handles = captures_of_graph(graph)
    outside = {id(inner): outer for inner, outer in zip(placeholders, handles, strict=True)}
    for op, i, tensor in readers:
        if id(tensor) in outside and is_eager(outside[id(tensor)]):
            take_other_input(op, i, captured_once_more(graph, outside[id(tensor)]))


def _sources(trace: Trace) -> list[tf.Tensor]:
    return [*trace.inputs, *[placeholder for placeholder, _ in captures_in_order(trace.graph, trace.shared)]]


def _shapes(trace: Trace, groups: Sequence[Sequence[int]]) -> list[Shape | None]:
    """Return the shapes of arguments and of seeds: those of the outputs."""
    program = trace.program
    arguments = [program.ops[i].out_shapes[0] for i in program.inputs]
    return [*arguments, *[program.shape(program.outputs[k]) for group in groups for k in group]]


def differentiable_outputs(program: Program) -> list[int]:
    """Return which outputs have gradients: those of floating-point numbers."""
    return [k for k, t in enumerate(program.outputs) if _is_differentiable(program.ops[t.op].out_dtypes[t.index])]


def _is_differentiable(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)


def _has_gradient(source: tf.Tensor) -> bool:
    dtype_and_shape = resource_value(source) if source.dtype == tf.resource else (source.dtype, None)
    return dtype_and_shape is not None and _is_differentiable(dtype_and_shape[0])


def _grouped(program: Program, chosen: Sequence[int]) -> list[_Group]:
    """Return the differentiable outputs grouped by those sources that they can depend on, and that count."""
    readers, sources = _readers(program), (*program.inputs, *program.captures)
    behind = [(i, reached([sources[i]], readers.__getitem__)) for i in chosen]
    outputs_by_sources: dict[tuple[int, ...], list[int]] = {}
    for k in differentiable_outputs(program):
        outputs_by_sources.setdefault(tuple([i for i, r in behind if program.outputs[k].op in r]), []).append(k)
    return [_Group(outputs, list(numbers)) for numbers, outputs in outputs_by_sources.items()]


def _grouped_by_seeds(joint: JointTrace) -> list[_Group]:
    """Return the outputs grouped by the sources they do depend on: those whose gradients their seeds reach.

    A part of a group has no more gradients than the group. TensorFlow may say otherwise: it changes a call of a
    `tf.function` when it differentiates it, and finds zeros the second time where there was None.
    """
    program, sizes = joint.trace.program, joint.sizes()
    readers = _readers(program)
    result: list[_Group] = []
    seed = len(program.inputs) - sum(seeds for seeds, _ in sizes)
    first = len(program.outputs) - sum(results for _, results in sizes)
    for g, (_, results) in enumerate(sizes):
        outputs_by_gradients: dict[tuple[int, ...], list[int]] = {}
        for k in joint.groups[g]:
            behind = reached([program.inputs[seed]], readers.__getitem__)
            gradients = enumerate(program.outputs[first : first + results])
            outputs_by_gradients.setdefault(tuple([i for i, t in gradients if t.op in behind]), []).append(k)
            seed += 1
        first += results
        result += [_Group(outputs, joint.sources(g)) for outputs in outputs_by_gradients.values()]
    return result


def _readers(program: Program) -> list[list[int]]:
    return readers_of([[tensor.op for tensor in op.inputs] for op in program.ops])


def gradients_only(single: Trace, joint: JointTrace, g: int) -> Trace:
    """Return one group's gradients as a function of arguments and the group's seeds, without effects."""
    sizes = joint.sizes()
    first_seed = len(single.inputs) + sum(seeds for seeds, _ in sizes[:g])
    first = len(single.outputs) + sum(results for _, results in sizes[:g])
    inputs = (*single.inputs, *joint.trace.inputs[first_seed : first_seed + sizes[g][0]])
    outputs = joint.trace.outputs[first : first + sizes[g][1]]
    names = (*single.program.input_names, *[f"gradient of output {k}" for k in joint.groups[g]])
    shapes = _shapes(single, [joint.groups[g]])
    tree, seeds = joint.gradients[g], sizes[g][0]
    function, shared = joint.trace.function, single.shared
    return read_graph(function, inputs, outputs, (), tree, names, shapes, seeds, shared, values=single.values)
