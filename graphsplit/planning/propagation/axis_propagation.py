"""Propagation along one axis of a mesh on which every device has all values, but for variables that lie along it.

A captured handle has a layout like any tensor: `Shard` of an `EvenCut` where each device of the axis has a part of the
variable, `Replicate` where each has all of it. What reads and writes such a variable runs on each device with its own
part, and the rules say where that leads: a product with a part of a weight is computed where the part is. Where an
operation has two operands that are cut along different factors, the factor counts for which fewer bytes move: the
weight is gathered, or the activation moves.

Whole values are made by every device of the axis that reads them, if they may be made more than once; else by the
first, which sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout, Partial, Shard, SingleDevice, is_whole
from graphsplit.planning.propagation.backward_propagation import WholeBackwardPropagation
from graphsplit.planning.propagation.forward_propagation import ForwardPropagation, forks
from graphsplit.planning.steps import Step
from graphsplit.planning.variables.laid_variables import of_variable
from graphsplit.program.asked_layouts import along
from graphsplit.program.program import Op, Tensor
from graphsplit.rules import Answer, Sharded, answer_for_output, rule_of
from graphsplit.rules.families.random import drawn_in_parts, is_stateless_random


@dataclass(eq=False)
class AxisForward(ForwardPropagation):
    """The natural forms along an axis.

    Args:
      laid: the layouts of captured handles, and of arguments, that lie along it, by position.
      axis: what it is called.
    """

    laid: Mapping[int, Layout] = field(kw_only=True)
    axis: str = field(kw_only=True)

    by_bytes = True

    def _arguments(self) -> dict[int, Layout]:
        return {i: layout for i, layout in super()._arguments().items() if i not in self.laid}

    def _visit(self, op: Op) -> None:
        if op.index in self.laid:
            self._append(Sharded((), (self.laid[op.index],)), "", (self.laid[op.index],))
            return
        layouts = [self.layout(tensor) for tensor in op.inputs]
        with_variable, asked_layout = (
            of_variable(self.program, op, layouts),
            along(op, self.axis, max(self.exchanging, 1)),
        )
        if with_variable is not None:
            self._append_sharded(op, with_variable)
        elif asked_layout is not None:
            self._append_sharded(op, Sharded((asked_layout,), (asked_layout,)))
        elif all(map(is_whole, layouts)):
            self._append_once(op, "")
        else:
            answer = self._answer(op, [REPLICATE if is_whole(layout) else layout for layout in layouts])
            if isinstance(answer, Sharded):
                self._append_sharded(op, answer)
            else:
                self._append_once(op, answer.reason)

    def tensors_wanted_whole(self) -> set[Tensor]:
        """Return the outputs that somebody reads whole."""
        wanted = self._read_whole(self.whole_outputs)
        return wanted | forks(self.program, wanted, lambda _: True)

    def _append_once(self, op: Op, reason: str) -> None:
        self._append(None, reason, tuple([self._seen_whole(op, k) for k in range(len(op.out_shapes))]))

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Answer for loops and branches, too, that are given handles."""
        if op.bodies and op.index not in self.kept_once:  # whose handles may be of whole variables, which do not move
            types = map(self.program.dtype, op.inputs)
            pairs = zip(op.inputs, layouts, types, strict=True)
            return self.control_flow(
                op, [self.layout(t) if kind == tf.resource else layout for t, layout, kind in pairs]
            )
        return super()._answer(op, layouts)


@dataclass(eq=False)
class AxisBackward(WholeBackwardPropagation):
    """What must run along an axis.

    Args:
      drawing: how many devices draw their own parts of random numbers; 0 if each draws all.

    Attributes:
      wishes: what is made whole and read both whole and in pieces, and each device could make its own piece of.
    """

    drawing: int = 0
    wishes: dict[Tensor, Shard] = field(default_factory=dict, init=False)

    def _visit_whole(self, op: Op) -> Step:
        """Visit an op whose natural form is whole: every device that reads it makes it, if it may."""
        wanted = [layout for _, layout in self._demanded(op)]
        elsewhere = any(not isinstance(layout, SingleDevice) for layout in wanted)
        required = op.index in self._required
        if op.type == "Placeholder" or not elsewhere or not self._may_repeat(op):
            return self._once(op, required or bool(wanted))
        if self.state.is_everywhere(op):
            if any(isinstance(layout, Partial) for layout in wanted):  # a sum has it once, from one device
                return self._once(op, True)
            return self._step_once(op, required, None)
        remade = self._in_pieces(op)
        if remade is None or any(map(is_whole, wanted)):
            pieces = [(tensor, layout) for tensor, layout in self._demanded(op) if remade and isinstance(layout, Shard)]
            self.wishes.update(pieces)  # type: ignore[arg-type]
            remade = self._on_every_shard(op)
        self._demand_inputs(op, remade)
        return Step(False, remade, "")

    def _in_pieces(self, op: Op) -> Sharded | None:
        """Return how every device makes its own piece of what is read in the same pieces, and sends nothing for it."""
        demanded = [(tensor, layout) for tensor, layout in self._demanded(op) if not is_whole(layout)]
        layouts, rule = {layout for _, layout in demanded}, rule_of(op.type)
        layout = layouts.pop() if len(layouts) == 1 else None
        if not isinstance(layout, Shard) or op.bodies or rule is None:
            return None
        if is_stateless_random(op.type):
            answer = drawn_in_parts(op, layout, self.drawing) if self.drawing else None
        else:
            answer = answer_for_output(rule, op, demanded[0][0].index, layout)
        if answer is None or any(answer.gives[tensor.index] != layout for tensor, _ in demanded):
            return None
        for i, (tensor, want) in enumerate(zip(op.inputs, answer.wants, strict=True)):
            if i not in answer.makes and want != REPLICATE and not self._has_each(tensor, want):
                return None
        return answer

    def _has_each(self, tensor: Tensor, want: Layout) -> bool:
        """Return whether each device makes its piece of a tensor, or all of it."""
        answer = self.natural.answers[tensor.op]
        return self._may_repeat(self.program.ops[tensor.op]) if answer is None else answer.gives[tensor.index] == want

    def _may_repeat(self, op: Op) -> bool:
        waits = any(not self._is_nothing(c) for c in op.controls)
        return not waits and super()._may_repeat(replace(op, controls=()) if op.controls else op)

    def _is_nothing(self, position: int) -> bool:
        """Return whether to wait for an operation is to wait for nothing: reads of variables that were hoisted."""
        op = self.program.ops[position]
        return op.type == "NoOp" and all(map(self._is_nothing, op.controls))

    def _once(self, op: Op, is_needed: bool) -> Step:
        for tensor in op.inputs if is_needed else ():
            self._demand(tensor, SINGLE_DEVICE)
        return self._step_once(op, is_needed, None)
