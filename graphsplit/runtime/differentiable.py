"""Gradients from outside: a parallelized function under the user's own tape.

A plain tape records no devices, and would run the whole backward pass on the first one. So the vector-Jacobian product
is traced together with the function, planned as one program, and the emitted graph is cut in two: a forward part that
also returns the residuals, which stay where they are, and a backward part that reads them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.errors import UnsupportedError
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, Shard
from graphsplit.core.symbolic_sizes import Shape
from graphsplit.core.tensorflow_internals import (
    accumulator_watches,
    no_recording,
    record_on_tapes,
    resource_value,
    set_graph_gradient,
    tape_watches,
)
from graphsplit.emission.emitter import emit
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import plan_program
from graphsplit.planning.state import state_of
from graphsplit.program.program import Program, Tensor
from graphsplit.runtime.cutting import Cut, descendants
from graphsplit.runtime.executable import Executable
from graphsplit.runtime.feeding import FedExecutable
from graphsplit.tracing.trace import Trace, read_graph


class Differentiable:
    """A planned function that tapes can differentiate: called like an `Executable`, on flat tensors."""

    def __init__(self, trace: Trace, plan: Plan, name: str):
        self.trace = trace
        self.plan = plan
        self.name = name
        self._executable: Executable | None = None
        self._fed: FedExecutable | None = None
        self._pairs: dict[tuple[bool, ...], ForwardAndBackward] = {}

    @property
    def executable(self) -> Executable:
        """The function alone, as it runs when no tape is watching."""
        if self._executable is None:
            self._executable = Executable(self.trace, self.plan, self.name)
        return self._executable

    @property
    def sends(self) -> bool:
        """Whether `send` has what it needs, and only runs it."""
        return self._fed is not None

    def send(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Cut the flat arguments and send the pieces to the devices that read them, for `run_sent`."""
        if self._fed is None:
            self._fed = FedExecutable(self.trace, self.plan, self.name)
        return self._fed.feed(tensors)

    def run_sent(self, tensors: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor] | None) -> list[tf.Tensor]:
        """Run on the pieces that `send` returned for the flat arguments (None: send them now). No tape may watch."""
        sources = [*tensors, *self.trace.captures]
        if tape_watches(sources, self.trace.variables) or accumulator_watches(sources):
            raise UnsupportedError(
                f"{self.name}.map is called under a gradient tape or accumulator. It sends batches ahead of the call "
                "and records no gradients: put the tape inside of the function, or call the function batch by batch."
            )
        pieces = self.send(tensors) if pieces is None else pieces
        assert self._fed is not None
        return self._fed(pieces)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on the flat arguments; if a tape is watching any of them, or a variable, tell it how to go back."""
        sources = [*tensors, *self.trace.captures]
        if tape_watches(sources, self.trace.variables):
            return self.pair(tuple([tape_watches([source]) for source in sources]))(tensors)
        if accumulator_watches(sources):
            raise UnsupportedError(
                f"{self.name} is called under tf.autodiff.ForwardAccumulator. Forward-mode differentiation around a "
                "parallelized function is not supported: use tf.GradientTape, or put the accumulator inside."
            )
        outputs = self.executable(tensors)
        if not tf.executing_eagerly():
            set_graph_gradient(self.name, outputs, lambda *gradients: self._gradients_in_graph(tensors, gradients))
        return outputs

    def _gradients_in_graph(self, tensors: Sequence[tf.Tensor], gradients: Sequence[Any]) -> list[Any]:
        """Answer `tf.gradients`, which asks when the forward ops are already there: by running forward again."""
        if self.trace.program.writes:
            raise UnsupportedError(
                f"tf.gradients through {self.name}, which changes variables, would run it twice. Use tf.GradientTape."
            )
        return self.pair().gradients(tensors, gradients)

    def pair(self, watched: tuple[bool, ...] | None = None) -> ForwardAndBackward:
        """Return the function with its gradients by the arguments and captures that are `watched` (None: by all)."""
        program = self.trace.program
        if watched is None or any(op.bodies for op in program.ops):
            # TensorFlow changes a loop when it differentiates it, so loops are differentiated once, by everything.
            watched = (True,) * (len(program.inputs) + len(program.captures))
        if watched not in self._pairs:
            self._pairs[watched] = ForwardAndBackward(self, watched)
        return self._pairs[watched]


class ForwardAndBackward:
    """A function and its vector-Jacobian products, planned as one program and cut.

    Outputs that depend on the same sources share one product. Others have their own, because a source that an output
    does not depend on has no gradient (None), not a gradient of zeros.
    """

    def __init__(self, single: Differentiable, watched: Sequence[bool]):
        self.single = single
        program = single.trace.program
        is_float = [_is_differentiable(program.ops[t.op].out_dtypes[t.index]) for t in program.outputs]
        floats = [k for k, differentiable in enumerate(is_float) if differentiable]
        if any(op.bodies for op in program.ops):
            sources = (*program.inputs, *program.captures)
            joint = _trace_joint(single.trace, _grouped(program, sources, floats, program.outputs), watched)
        else:
            joint = _trace_joint(single.trace, [floats], watched)
            if len(apart := _outputs_by_sources(joint)) > 1:
                joint = _trace_joint(single.trace, apart, watched)
        self._joint = joint
        layouts = [_layout_of(single, k) for group in joint.groups for k in group]
        self.plan = _plan_like(single.plan, joint.trace, (*single.plan.input_layouts, *layouts))
        graph = emit(self.plan)
        self._cut = Cut(graph, len(program.inputs), len(program.outputs), joint.sizes(), single.name)
        self._again_functions: dict[int, Differentiable] = {}

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run forward and tell the tapes how to run backward."""
        outputs, residuals = self._run_forward(tensors)
        inputs = [*tensors, *self.single.trace.captures]
        for g, group in enumerate(self._joint.groups):
            sources = self._joint.sources(g)

            def backward(*gradients: Any, g: int = g, sources: Sequence[int] = sources) -> list[Any]:
                found = self._run_backward(g, tensors, outputs, gradients, residuals)
                return [found[i] for i in sources]

            if group and sources:
                record_on_tapes(self.single.name, [outputs[k] for k in group], [inputs[i] for i in sources], backward)
        return outputs

    def gradients(self, tensors: Sequence[tf.Tensor], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients by arguments and captures, given those of all outputs (None where there is none)."""
        outputs, residuals = self._run_forward(tensors)
        totals: list[Any] = [None] * (len(tensors) + len(self.single.trace.captures))
        for g, group in enumerate(self._joint.groups):
            own = [gradients[k] for k in group]
            if any(gradient is not None for gradient in own):
                found = self._run_backward(g, tensors, outputs, own, residuals)
                pairs = zip(totals, found, strict=True)
                totals = [a if b is None else b if a is None else a + b for a, b in pairs]
        return totals

    def _run_forward(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        with no_recording():
            return self._cut.run_forward([*tensors, *self._joint.trace.captures])

    def _run_backward(
        self, g: int, tensors: Sequence[tf.Tensor], outputs: Sequence[Any], gradients: Sequence[Any], residuals: Any
    ) -> list[Any]:
        """Return the gradient by each argument and capture."""
        seeds = [_seed(outputs[k], gradient) for k, gradient in zip(self._joint.groups[g], gradients, strict=True)]
        single = self.single.trace
        if tape_watches([*tensors, *single.captures, *seeds], single.variables):
            flat = self._again(g)([*tensors, *seeds])
        else:
            with no_recording():
                flat = self._cut.run_backward(g, [*tensors, *self._joint.trace.captures], seeds, residuals)
        return list(structures.unflatten(self._joint.gradients[g], flat))

    def _again(self, g: int) -> Differentiable:
        """Return the gradients as a function of arguments and seeds, itself differentiable; it runs forward again.

        Effects (a counter, a moving average) happened in the first run and are left out of this one.
        """
        if g not in self._again_functions:
            trace = _gradients_only(self.single.trace, self._joint, g)
            layouts = [_layout_of(self.single, k) for k in self._joint.groups[g]]
            plan = _plan_like(self.single.plan, trace, (*self.single.plan.input_layouts, *layouts))
            written = trace.program.writes & {op.index for op in plan.home_ops}
            if written:
                raise UnsupportedError(
                    f"A second derivative of {self.single.name} was asked for, but its value depends on variables "
                    "that it changes while it runs. Parallelize the whole computation with both tapes inside, or make "
                    "those changes outside of the function."
                )
            self._again_functions[g] = Differentiable(trace, plan, f"{self.single.name}_gradient")
        return self._again_functions[g]


def _layout_of(single: Differentiable, output: int) -> Layout:
    """Return the layout in which the gradient of an output is used: that in which the output is made."""
    tensor = single.trace.program.outputs[output]
    sharded = single.plan.steps[tensor.op].shards
    given = sharded.gives[tensor.index] if sharded else SINGLE_DEVICE
    return given if isinstance(given, Shard) else SINGLE_DEVICE


def _plan_like(plan: Plan, trace: Trace, layouts: Sequence[Layout]) -> Plan:
    # shapes of gradients may not follow for every batch size where those of the function do (a note says so)
    split = trace.program.symbols == plan.program.symbols
    return plan_program(
        trace.program,
        mesh=plan.mesh if split else Mesh(),
        home=plan.home,
        input_layouts=layouts if split else [SINGLE_DEVICE] * len(layouts),
        state=state_of(trace),
        random=plan.random,
        notes=plan.notes,
    )


def _is_differentiable(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)


def _seed(output: tf.Tensor, gradient: Any) -> tf.Tensor:
    return tf.zeros_like(output) if gradient is None else tf.convert_to_tensor(gradient)


@dataclass(frozen=True, eq=False)
class _Joint:
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
        assert isinstance(tree, structures.Branch)
        return [i for i, entry in enumerate(tree.entries) if not isinstance(entry, structures.StaticLeaf)]

    def sizes(self) -> list[tuple[int, int]]:
        """Return, for each group, how many seeds it takes and how many tensors its gradients are."""
        pairs = zip(self.groups, self.gradients, strict=True)
        return [(len(group), len(structures.leaves(tree))) for group, tree in pairs]


def _trace_joint(trace: Trace, groups: list[list[int]], watched: Sequence[bool]) -> _Joint:
    """Add gradients to a function's graph. The user's Python does not run again."""
    sources = [*trace.inputs, *trace.graph.internal_captures]
    chosen = [i for i, watch in enumerate(watched) if watch and _has_gradient(sources[i])]
    seeds: list[tf.Tensor] = []
    flat: list[tf.Tensor] = []
    trees = []
    with trace.graph.as_default():
        for group in groups:
            targets = [trace.outputs[k] for k in group]
            own_seeds = [tf.compat.v1.placeholder(t.dtype, t.shape, "graphsplit_seed") for t in targets]
            found = tf.gradients(targets, [sources[i] for i in chosen], own_seeds) if chosen and group else []
            by_source: list[Any] = [None] * len(watched)
            for i, gradient in zip(chosen, found, strict=True):
                by_source[i] = gradient
            tensors, tree = structures.flatten(by_source)
            seeds += own_seeds
            flat += tensors
            trees.append(tree)
    names = [*trace.program.input_names, *[f"gradient of output {k}" for group in groups for k in group]]
    inputs, outputs = (*trace.inputs, *seeds), (*trace.outputs, *flat)
    effects = [trace.program.ops[i].name for i in trace.program.effects]
    shapes = _shapes(trace, groups)
    joint = read_graph(trace.function, inputs, outputs, effects, trace.result, names, shapes, len(seeds))
    return _Joint(joint, groups, trees)


def _shapes(trace: Trace, groups: Sequence[Sequence[int]]) -> list[Shape | None]:
    """Return the shapes of arguments and of seeds: those of the outputs."""
    program = trace.program
    arguments = [program.ops[i].out_shapes[0] for i in program.inputs]
    return [*arguments, *[program.shape(program.outputs[k]) for group in groups for k in group]]


def _has_gradient(source: tf.Tensor) -> bool:
    held = resource_value(source) if source.dtype == tf.resource else (source.dtype, None)
    return held is not None and _is_differentiable(held[0])


def _outputs_by_sources(joint: _Joint) -> list[list[int]]:
    """Return the outputs grouped by the sources they depend on: those whose gradients their seeds reach."""
    program, group = joint.trace.program, joint.groups[0]
    arguments = len(program.inputs) - len(group)
    first = len(program.outputs) - len(structures.leaves(joint.gradients[0]))
    readers = _readers(program)
    found: dict[tuple[int, ...], list[int]] = {}
    for k, seed in zip(group, program.inputs[arguments:], strict=True):
        reached = descendants(readers, [seed])
        key = tuple([i for i, t in enumerate(program.outputs[first:]) if t.op in reached])
        found.setdefault(key, []).append(k)
    return list(found.values())


def _grouped(
    program: Program, sources: Sequence[int], chosen: Sequence[int], outputs: Sequence[Tensor]
) -> list[list[int]]:
    """Return the chosen outputs grouped by the sources that they can depend on, before anything is differentiated."""
    readers = _readers(program)
    reached = [descendants(readers, [source]) for source in sources]
    found: dict[tuple[int, ...], list[int]] = {}
    for k in chosen:
        found.setdefault(tuple([i for i, r in enumerate(reached) if outputs[k].op in r]), []).append(k)
    return list(found.values()) or [[]]


def _readers(program: Program) -> dict[int, list[int]]:
    readers: dict[int, list[int]] = {}
    for op in program.ops:
        for tensor in op.inputs:
            readers.setdefault(tensor.op, []).append(op.index)
    return readers


def _gradients_only(single: Trace, joint: _Joint, g: int) -> Trace:
    """Return one group's gradients as a function of arguments and the group's seeds, without effects."""
    sizes = joint.sizes()
    first_seed = len(single.inputs) + sum(seeds for seeds, _ in sizes[:g])
    first = len(single.outputs) + sum(results for _, results in sizes[:g])
    inputs = (*single.inputs, *joint.trace.inputs[first_seed : first_seed + sizes[g][0]])
    outputs = joint.trace.outputs[first : first + sizes[g][1]]
    names = (*single.program.input_names, *[f"gradient of output {k}" for k in joint.groups[g]])
    shapes = _shapes(single, [joint.groups[g]])
    return read_graph(joint.trace.function, inputs, outputs, (), joint.gradients[g], names, shapes, sizes[g][0])
