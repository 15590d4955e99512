"""Planned functions, and their gradients from outside: a parallelized function under the user's own tape.

A plain tape records no devices, and would run the whole backward pass on the first one. So the vector-Jacobian product
is traced together with the function, planned as one program, and the emitted graph is cut in two: a forward part that
also returns the residuals, which stay where they are, and a backward part that reads them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.devices import place
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, Shard
from graphsplit.core.tensorflow_internals import (
    accumulator_watches,
    no_recording,
    record_captures,
    record_on_tapes,
    set_graph_gradient,
    tapes_watch_twice,
)
from graphsplit.core.variables.parted_variables import layout_changes
from graphsplit.core.variables.running_calls import calls
from graphsplit.emission.emitter import emit
from graphsplit.errors import UnsupportedError
from graphsplit.planning.plan import Plan
from graphsplit.runtime.executable import Function, make_executable
from graphsplit.runtime.failures import Located
from graphsplit.runtime.feeding import make_fed_executable
from graphsplit.runtime.gradients.joint_trace import JointTrace, differentiable_outputs, gradients_only, joint_trace
from graphsplit.runtime.gradients.kept_values import KeptValues
from graphsplit.runtime.gradients.separation import SeparatedGraph, separate_graph
from graphsplit.runtime.handles import Layouts, LayoutsChangedError, captured, held_captures, origins_of, watches
from graphsplit.tracing.trace import Trace

MadeKey = TypeVar("MadeKey")
Made = TypeVar("Made")


class PlansAgain(Protocol):
    """Whoever asked for a function's plan, and may be asked for others like it."""

    def plan_like(self, plan: Plan, trace: Trace, layouts: Sequence[Layout]) -> Plan:
        """Return a plan like another one: for another trace, such as the function with its gradients.

        Args:
          plan: of the function.
          trace: what is planned.
          layouts: of its arguments.
        """


class PlannedFunction:
    """What a call runs, whether a tape watches or not: a function and its plan, called on flat tensors.

    Threads may call it at the same time: what it lacks is made by one of them.

    Args:
      trace, plan, name: of the function.
      request: by whom plans of its gradients are made.
      layouts: how its variables lie, or are to lie; None for as they did when it was planned.
    """

    def __init__(self, trace: Trace, plan: Plan, name: str, request: PlansAgain, layouts: Layouts | None = None):
        self.trace = trace
        self.request = request
        self.name = name
        self._plan = plan
        self._executable: Function | None = None
        self._elsewhere: PlannedFunction | None = None
        self._fed: dict[tuple[str, ...], tuple[Function, Function]] = {}  # by the hosts that have the arguments
        self._pairs: dict[tuple[bool, ...], ForwardAndBackward] = {}
        self._has_gradients = bool(differentiable_outputs(trace.program))
        self.runs = 0  # how often it was called
        self.layouts = layouts or Layouts(trace, plan)
        cut = {move.tensor.op for move in plan.moves if isinstance(move.target, Shard)}
        input_places = zip(plan.program.inputs, plan.input_devices, strict=False)
        self._cut = {k: device for k, (i, device) in enumerate(input_places) if i in cut}

    @property
    def plan(self) -> Plan:
        """What runs where. Once the first call has moved variables, it does not say so any more."""
        if self._plan.first_move is not None and self.layouts.settled:
            self._plan = replace(self._plan, first_move=None)
        return self._plan

    @property
    def forms(self) -> tuple[PlannedFunction, ...]:
        """What a call may run: itself, and the same for arguments of a device, if there were any."""
        return (self,) if self._elsewhere is None else (self, self._elsewhere)

    def on(self, tensors: Sequence[Any]) -> PlannedFunction:
        """Return the form for flat arguments that lie where these do.

        Arguments are cut where they lie. So there is one form for those that come from the host, be they tensors of a
        graph or only described, and one more for those that are the first to lie on devices. Any others are brought to
        where the first form cuts them.
        """
        lying = {k: place(tensors[k]) or device for k, device in self._cut.items()}
        if lying == self._cut or not tf.executing_eagerly():
            return self
        devices = tuple([lying.get(k, device) for k, device in enumerate(self.plan.input_devices)])
        with self.trace.lock:
            if self._elsewhere is None or not self._elsewhere.is_current:
                like = replace(self.plan, input_devices=devices)
                with contextlib.suppress(LayoutsChangedError):  # which this form's call says, too
                    plan = self.plan_now(like, self.trace, self.plan.input_layouts)
                    plan = replace(plan, first_move=self.plan.first_move)
                    self._elsewhere = PlannedFunction(self.trace, plan, self.name, self.request, self.layouts)
            other = self._elsewhere
            return other if other is not None and other.plan.input_devices == devices else self

    def plan_now(self, like: Plan, trace: Trace, layouts: Sequence[Layout]) -> Plan:
        """Return a plan like another one, for variables that lie as the function was planned for, and lie so now."""
        while True:
            plan = self.request.plan_like(like, trace, layouts)
            with calls.lock:  # layouts change under it: both are planned for the same ones
                if not self.is_current:
                    raise LayoutsChangedError(self.name)
                if plan.state.changes in (None, layout_changes()):
                    return plan

    @property
    def is_current(self) -> bool:
        """Whether the variables lie as they did when this was planned."""
        return self.layouts.hold

    @property
    def executable(self) -> Function:
        """The function alone, as it runs when no tape is watching."""
        if self._executable is None:
            with self.trace.lock:
                self._executable = self._executable or make_executable(self.trace, self.plan, self.name, self.layouts)
        return self._executable

    def made_once(self, made_before: dict[MadeKey, Made], key: MadeKey, make: Callable[[], Made]) -> Made:
        """Return what is there by a key, made by the first thread that asks."""
        if key not in made_before:
            with self.trace.lock:
                if key not in made_before:
                    made_before[key] = make()
        return made_before[key]

    def sends(self, readers: tuple[str, ...] = ()) -> bool:
        """Return whether `send` has what it needs, and only runs it."""
        return readers in self._fed

    def send(self, tensors: Sequence[tf.Tensor], readers: tuple[str, ...] = ()) -> list[tf.Tensor]:
        """Cut the flat arguments and send the pieces to the devices that read them, for `run_sent`.

        Args:
          tensors: the arguments.
          readers: hosts that have them all; then the tensors are those of one after the other.
        """
        feed, _ = self.made_once(
            self._fed, readers, lambda: make_fed_executable(self.trace, self.plan, self.name, readers, self.layouts)
        )
        with Located(self.plan, tensors):
            return feed(tensors)

    def run_sent(
        self, tensors: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor] | None, readers: tuple[str, ...] = ()
    ) -> list[tf.Tensor]:
        """Run on the pieces that `send` returned for the flat arguments (None: send them now). No tape may watch."""
        sources = [*tensors, *self.trace.captures]
        if watches(sources, self.trace.variables) or accumulator_watches(sources):
            raise UnsupportedError(
                f"{self.name}.map is called under a gradient tape or accumulator. It sends batches ahead of the call "
                "and records no gradients: put the tape inside of the function, or call the function batch by batch."
            )
        pieces = self.send(tensors, readers) if pieces is None else pieces
        _, run = self._fed[readers]
        with Located(self.plan, tensors):
            return run(pieces)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on the flat arguments; if a tape is watching any of them, or a variable, tell it how to go back."""
        sources = [*tensors, *self.trace.captures]
        if watches(sources, self.trace.variables):
            if self._has_gradients:
                return self.watched(tensors)
            with no_recording(), Located(self.plan, tensors):
                return self.executable(tensors)
        if self._has_gradients and accumulator_watches(sources):
            raise UnsupportedError(
                f"{self.name} is called under tf.autodiff.ForwardAccumulator. Forward-mode differentiation around a "
                "parallelized function is not supported: use tf.GradientTape, or put the accumulator inside."
            )
        if tf.executing_eagerly() or not self._has_gradients:
            with Located(self.plan, tensors):
                return self.executable(tensors)
        kept = KeptValues.now(self.trace, self.plan, captured(self.trace, self.plan))
        with Located(self.plan, tensors):
            outputs = self.executable(tensors)
        set_graph_gradient(outputs, partial(self._gradients_in_graph, kept))
        return outputs

    def watched(self, tensors: Sequence[tf.Tensor], kept: KeptValues | None = None) -> list[tf.Tensor]:
        """Run on the flat arguments, and tell the tapes that are watching how to go back.

        Args:
          tensors: the arguments.
          kept: what captured variables count as; None if as what they are now.
        """
        sources = [*tensors, *self.trace.captures]
        # a graph is differentiated once more by those who call it, and by anything
        watched = tuple([watches([source]) for source in sources]) if tf.executing_eagerly() else None
        return self.pair(watched)(tensors, kept)

    def _gradients_in_graph(
        self, kept: KeptValues, inputs: Sequence[tf.Tensor], _: Sequence[tf.Tensor], gradients: Sequence[Any]
    ) -> list[Any]:
        """Answer `tf.gradients`, which asks when the forward ops are already there: by running forward again."""
        if self.trace.program.writes:
            raise UnsupportedError(
                f"tf.gradients through {self.name}, which changes variables, would run it twice. Use tf.GradientTape."
            )
        return self.pair().gradients(inputs, gradients, kept)

    def pair(self, watched: tuple[bool, ...] | None = None) -> ForwardAndBackward:
        """Return the function with its gradients by the arguments and captures that are `watched` (None: by all)."""
        program = self.trace.program
        if watched is None or any(op.bodies for op in program.ops):
            # TensorFlow changes a loop when it differentiates it, so loops are differentiated once, by everything.
            watched = (True,) * (len(program.inputs) + len(program.captures))
        return self.made_once(self._pairs, watched, partial(_forward_and_backward, self, watched))


@dataclass(frozen=True, eq=False)
class ForwardAndBackward:
    """A function and its vector-Jacobian products, planned as one program and cut.

    Outputs that depend on the same sources share one product. Others have their own, because a source that an output
    does not depend on has no gradient (None), not a gradient of zeros.

    Attributes:
      single: the function.
      plan: of both.
      joint: what is planned.
      cut: what runs.
      again: gradients as functions that were made already, by group.
      whole: forward (None) and backward parts as calls that take all there is, those that were made already.
    """

    single: PlannedFunction
    plan: Plan
    joint: JointTrace
    cut: SeparatedGraph
    again: dict[int, PlannedFunction] = field(default_factory=dict)
    whole: dict[int | None, Any] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[tf.Tensor], kept: KeptValues | None = None) -> list[tf.Tensor]:
        """Run forward and tell the tapes how to run backward."""
        function_inputs = [*tensors, *self.joint.trace.captures]
        # (in a graph what nobody reads is not read)
        may_go_on = not tf.executing_eagerly() or tapes_watch_twice(function_inputs)
        with self._held(function_inputs, kept, self.single.layouts) as planned:
            values = kept or (self._kept(planned) if may_go_on else None)
            run = partial(self._run_forward_again, kept=kept) if kept else partial(self._run_forward, kept=values)
            outputs, residuals = run(function_inputs, planned)
        for g, group in enumerate(self.joint.groups):
            sources = self.joint.sources(g)

            def backward(*gradients: Any, g: int = g, sources: Sequence[int] = sources) -> list[Any]:
                by_inputs = self._run_backward(g, function_inputs, outputs, gradients, residuals, values, planned)
                return [by_inputs[i] for i in sources]

            if sources:
                record_on_tapes(
                    self.single.name, [outputs[k] for k in group], [function_inputs[i] for i in sources], backward
                )
        return outputs

    def gradients(self, sources: Sequence[tf.Tensor], gradients: Sequence[Any], kept: KeptValues) -> list[Any]:
        """Return the gradients by the sources, arguments and captures, given those of all outputs (None if none)."""
        function_inputs = [*sources, *self.joint.trace.captures[len(sources) - len(self.single.trace.inputs) :]]
        outputs, residuals = self._run_forward_again(function_inputs, self._as_planned(function_inputs, kept), kept)
        return self._gradients(kept, function_inputs, [*outputs, *residuals], gradients)[: len(sources)]

    def _gradients(
        self,
        kept: KeptValues,
        function_inputs: Sequence[tf.Tensor],
        results: Sequence[tf.Tensor],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Return the gradients by `function_inputs`, added up over groups; `results` are outputs, then residuals."""
        count = len(self.single.trace.outputs)
        outputs, residuals = results[:count], results[count:]
        totals: list[Any] = [None] * len(function_inputs)
        for g, group in enumerate(self.joint.groups):
            group_gradients = [gradients[k] for k in group]
            if any(gradient is not None for gradient in group_gradients):
                of_group = self._run_backward(g, function_inputs, outputs, group_gradients, residuals, kept)
                for i, gradient in enumerate(of_group):
                    if gradient is not None:
                        totals[i] = gradient if totals[i] is None else totals[i] + gradient
        return totals

    def _run_forward(
        self, function_inputs: Sequence[tf.Tensor], planned: Sequence[tf.Tensor], kept: KeptValues | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return outputs and residuals.

        Args:
          function_inputs: arguments and captures.
          planned: the same as the plan takes them.
          kept: the values of the captures, None if those that are planned keep them.
        """
        record_captures(function_inputs)
        with no_recording(), Located(self.plan, function_inputs):
            outputs, residuals = self.cut.run_forward(planned)

        def backward(inputs: list[tf.Tensor], results: list[tf.Tensor], gradients: Sequence[Any]) -> list[Any]:
            return self._gradients(kept or self._kept(inputs), inputs, results, gradients)

        if not tf.executing_eagerly():
            set_graph_gradient([*outputs, *residuals], backward)
        return outputs, residuals

    def _run_forward_again(
        self, function_inputs: Sequence[tf.Tensor], planned: Sequence[tf.Tensor], kept: KeptValues
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return outputs and residuals where captures count as what they were.

        In a graph, from an operation whose gradient is by what was given: what is planned are variables that hold the
        values that were kept, which are nobody's.
        """
        if tf.executing_eagerly():
            return self._run_forward(function_inputs, planned, None)
        first, last = len(function_inputs), len(function_inputs) + len(planned)

        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            outputs, residuals = self.cut.run_forward(flat[first:last])
            return [*outputs, *residuals]

        with Located(self.plan, function_inputs):
            flat = self._as_one_call(None, run, [*function_inputs, *planned, *kept.tensors])

        def backward(inputs: list[tf.Tensor], results: list[tf.Tensor], gradients: Sequence[Any]) -> list[Any]:
            then = replace(kept, tensors=tuple(inputs[last:]))
            by_given = self._gradients(then, inputs[:first], results, gradients)
            return [*by_given, *[None] * (len(inputs) - first)]

        set_graph_gradient(flat, backward, by_rows=True)
        count = len(self.single.trace.outputs)
        return flat[:count], flat[count:]

    def _as_one_call(
        self, part: int | None, run: Callable[..., list[tf.Tensor]], inputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return what one operation in the graph returns that runs the forward part (None), or a backward one."""
        record_captures(inputs)
        with no_recording(), self.single.trace.lock:
            if part not in self.whole:
                self.whole[part] = tf.function(run, autograph=False)
            # known shapes stay known: TensorFlow refuses a MatrixDiagV3 of known rows whose diagonal it does not know
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
            with tf.init_scope():
                whole = self.whole[part].get_concrete_function(*specs)
            return list(whole(*inputs))

    def _kept(self, planned: Sequence[tf.Tensor]) -> KeptValues:
        """Return the values that captures have now, by arguments and captures as the plan takes them."""
        return KeptValues.now(self.joint.trace, self.plan, planned[len(self.single.trace.inputs) :])

    def _run_backward(
        self,
        g: int,
        function_inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        gradients: Sequence[Any],
        residuals: Sequence[tf.Tensor],
        kept: KeptValues | None,
        planned: Sequence[tf.Tensor] = (),
    ) -> list[Any]:
        """Return the gradient by each argument and capture; `planned` is what the forward part was given."""
        pairs = zip([outputs[k] for k in self.joint.groups[g]], gradients, strict=True)
        seeds = [tf.zeros_like(output) if by is None else tf.convert_to_tensor(by) for output, by in pairs]
        single, sources = self.single.trace, [*function_inputs, *seeds]
        by_tape = bool(planned)  # (`tf.gradients` may ask in a graph that TensorFlow made, which captures nothing more)
        is_watched = watches(sources, single.variables if kept and by_tape else ())
        if is_watched and kept and by_tape:
            flat = self._again(g).watched([*function_inputs[: len(single.inputs)], *seeds], kept)
        elif tf.executing_eagerly():
            with no_recording(), Located(self.plan, function_inputs):
                try:
                    with self._held(function_inputs, layouts=self.single.layouts if planned else None) as held_inputs:
                        flat = self.cut.run_backward(g, held_inputs, seeds, residuals)
                except LayoutsChangedError:  # since the forward part: it goes back on what that had
                    flat = self.cut.run_backward(g, planned, seeds, residuals)
            if is_watched:
                record_on_tapes(f"{self.single.name}_gradient", flat, sources, self._refuse)
        else:
            flat = self._run_backward_in_graph(g, function_inputs, seeds, residuals, kept)
        return list(structures.unflatten(self.joint.gradients[g], flat))

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedError(
            f"A second derivative of {self.single.name} was asked for, but only one tape watched its arguments and "
            "variables when it was called, so what the variables held then was not kept. Begin the outer tape before "
            "the call, and let it watch them."
        )

    def _as_planned(self, function_inputs: Sequence[tf.Tensor], kept: KeptValues | None = None) -> list[tf.Tensor]:
        """Return arguments and captures as the plan takes them: captures that hold what was kept, or as they are."""
        find = kept.handles if kept else captured
        return [*function_inputs[: len(self.single.trace.inputs)], *find(self.joint.trace, self.plan)]

    @contextlib.contextmanager
    def _held(
        self, function_inputs: Sequence[tf.Tensor], kept: KeptValues | None = None, layouts: Layouts | None = None
    ) -> Iterator[list[tf.Tensor]]:
        """Give what `_as_planned` returns to a call, and let no value move as long as it runs."""
        if kept is not None:
            yield self._as_planned(function_inputs, kept)
            return
        with held_captures(self.joint.trace, self.plan, layouts) as captures:
            yield [*function_inputs[: len(self.single.trace.inputs)], *captures]

    def _run_backward_in_graph(
        self,
        g: int,
        function_inputs: Sequence[tf.Tensor],
        seeds: Sequence[tf.Tensor],
        residuals: Sequence[tf.Tensor],
        kept: KeptValues | None,
    ) -> list[tf.Tensor]:
        """Return the flat gradients from an operation that has a gradient of its own, by what was given and the seeds.

        What is cut reads residuals, which depend on the arguments, and not all of these. So it is called by a function
        that takes all: that one's gradient by the arguments says all that there is to say, and residuals need none.
        """
        arguments, first, last = len(self.single.trace.inputs), len(function_inputs), len(function_inputs) + len(seeds)
        begin, planned = last + len(residuals), self._as_planned(function_inputs) if self.plan.state.parts else []
        end = begin + len(planned)

        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            return self.cut.run_backward(g, flat[begin:end] or flat[:first], flat[first:last], flat[last:begin])

        taken = [*function_inputs, *seeds, *residuals, *planned, *(kept.tensors if kept else ())]
        flat = self._as_one_call(g, run, taken)

        def backward(inputs: list[tf.Tensor], _: Any, gradients: Sequence[Any]) -> list[Any]:
            if kept is None:
                self._refuse()
            sources = [*inputs[:arguments], *inputs[first:last], *inputs[arguments:first]]
            gradients_by_all = (
                self._again(g).pair().gradients(sources, gradients, replace(kept, tensors=tuple(inputs[end:])))
            )
            end_of_seeds = arguments + len(seeds)
            by_arguments, by_seeds = gradients_by_all[:arguments], gradients_by_all[arguments:end_of_seeds]
            nothing = [None] * (len(inputs) - last)
            return [*by_arguments, *gradients_by_all[end_of_seeds:], *by_seeds, *nothing]

        set_graph_gradient(flat, backward, by_rows=True)
        if watches(taken[:last]):
            name = f"{self.single.name}_gradient"
            record_on_tapes(name, flat, taken[:last], lambda *gradients: backward(taken, flat, gradients)[:last])
        return flat

    def _again(self, g: int) -> PlannedFunction:
        """Return the gradients as a function of arguments and seeds, itself differentiable; it runs forward again.

        Effects (a counter, a moving average) happened in the first run and are left out of this one.
        """
        return self.single.made_once(self.again, g, lambda: self._gradients_alone(g))

    def _gradients_alone(self, g: int) -> PlannedFunction:
        trace = gradients_only(self.single.trace, self.joint, g)
        layouts = [_layout_of(self.single, k) for k in self.joint.groups[g]]
        plan = self.single.request.plan_like(self.single.plan, trace, (*self.single.plan.input_layouts, *layouts))
        live = {op.index for op in (*plan.ops_once, *plan.sharded_ops)}
        changed = _variables_of(self.single.trace, self.single.plan, self.single.plan.program.writes)
        if plan.program.writes & live or _variables_of(trace, plan, live) & changed:
            raise UnsupportedError(
                f"A second derivative of {self.single.name} was asked for, but its value depends on variables "
                "that it changes while it runs. Parallelize the whole computation with both tapes inside, or make "
                "those changes outside of the function."
            )
        return PlannedFunction(trace, plan, f"{self.single.name}_gradient", self.single.request)


def _forward_and_backward(single: PlannedFunction, watched: Sequence[bool]) -> ForwardAndBackward:
    """Return a function with its gradients by what is watched."""
    program, joint = single.trace.program, joint_trace(single.trace, watched)
    layouts = [_layout_of(single, k) for group in joint.groups for k in group]
    plan = single.plan_now(single.plan, joint.trace, (*single.plan.input_layouts, *layouts))
    graph, forward_captures = emit(plan), {program.ops[i].name for i in program.captures} | joint.trace.counters
    names = zip(origins_of(joint.trace, plan), graph.captures, strict=True)
    late = [name for (origin, _), name in names if origin not in forward_captures]
    cut = separate_graph(graph, len(program.inputs), len(program.outputs), joint.sizes(), single.name, late)
    return ForwardAndBackward(single, plan, joint, cut)


def _variables_of(trace: Trace, plan: Plan, operations: Collection[int]) -> set[str]:
    """Return the captured variables, whole or in parts, that operations take, by the names of their placeholders."""
    handles = [i for i, _ in plan.program.handles]
    ops, origins = plan.program.ops, dict(zip(handles, origins_of(trace, plan), strict=True))
    taken = {tensor.op for i in operations for tensor in ops[i].inputs}
    return {origins[i][0] for i in taken & origins.keys() if ops[i].out_dtypes[0] == tf.resource}


def _layout_of(single: PlannedFunction, output: int) -> Layout:
    """Return the layout in which the gradient of an output is used: that in which the output is made."""
    tensor = single.plan.program.outputs[output]
    sharded = single.plan.steps[tensor.op].shards
    made_layout = sharded.gives[tensor.index] if sharded else SINGLE_DEVICE
    return made_layout if isinstance(made_layout, Shard) else SINGLE_DEVICE
