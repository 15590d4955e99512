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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout, Partial, Shard, SingleDevice, is_whole
from graphsplit.planning.propagation.backward_propagation import WholeBackwardPropagation
from graphsplit.planning.propagation.forward_propagation import ForwardPropagation, forks
from graphsplit.planning.steps import Step
from graphsplit.program.asked_layouts import along
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Answer, Sharded, answer, answer_for_output, rule_of
from graphsplit.rules.factors import LEFT_OUT, Shift
from graphsplit.rules.registry import Rule

_READS = frozenset({"ReadVariableOp"})
_WRITES = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_WRITES_ROWS = frozenset({f"ResourceScatter{how}" for how in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")})
_ONLY_THIS = 1 << 50  # bytes: an operand of this size decides the factor


@dataclass(eq=False)
class AxisForward(ForwardPropagation):
    """The natural forms along an axis.

    Args:
      laid: the layouts of captured handles, and of arguments, that lie along it, by position.
      axis: what it is called.
    """

    laid: Mapping[int, Layout] = field(kw_only=True)
    axis: str = field(kw_only=True)
    _moved: set[tuple[Tensor, Layout]] = field(default_factory=set, init=False)  # what moves for an operation before

    def _arguments(self) -> dict[int, Layout]:
        return {i: layout for i, layout in super()._arguments().items() if i not in self.laid}

    def _visit(self, op: Op) -> None:
        if op.index in self.laid:
            self._append(Sharded((), (self.laid[op.index],)), "", (self.laid[op.index],))
            return
        layouts = [self.layout(tensor) for tensor in op.inputs]
        found, asked = _of_variable(self.program, op, layouts), along(op, self.axis, max(self.exchanging, 1))
        if found is not None:
            self._append_sharded(op, found)
        elif asked is not None:
            self._append_sharded(op, Sharded((asked,), (asked,)))
        elif all(map(is_whole, layouts)):
            self._append_home(op, "")
        else:
            given = self._answer(op, [REPLICATE if is_whole(layout) else layout for layout in layouts])
            if isinstance(given, Sharded):
                self._append_sharded(op, given)
            else:
                self._append_home(op, given.reason)

    def _tensors_wanted_whole(self, outputs: Collection[Tensor]) -> set[Tensor]:
        wanted = self._read_whole(outputs)
        return wanted | forks(self.program, wanted, behind_moves=True)

    def _append_home(self, op: Op, reason: str) -> None:
        self._append(None, reason, tuple([self._seen_whole(op, k) for k in range(len(op.out_shapes))]))

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Answer with the factor for which fewest bytes move."""
        if op.bodies and op.index not in self.kept_home:  # whose handles may be of whole variables, which do not move
            types = [self.program.ops[tensor.op].out_dtypes[tensor.index] for tensor in op.inputs]
            pairs = zip(op.inputs, layouts, types, strict=True)
            return self.control_flow(op, [self.layout(t) if kind == tf.resource else own for t, own, kind in pairs])
        rule, cuts = rule_of(op.type), {layout for layout in layouts if isinstance(layout, Shard)}
        if len(cuts) < 2 or op.stateful or op.index in self.kept_home or not rule:
            return super()._answer(op, layouts)
        answers = [with_operand(rule, op, layouts, i) for i, layout in enumerate(layouts) if isinstance(layout, Shard)]
        found = [given for given in answers if isinstance(given, Sharded)]
        if not found:
            return super()._answer(op, layouts)
        given = min(found, key=lambda given: self._bytes_moved(op, layouts, given))
        for tensor, layout, want in zip(op.inputs, layouts, given.wants, strict=True):
            self._moved.update([(tensor, want)] if want != layout else [])
        return given

    def _bytes_moved(self, op: Op, layouts: Sequence[Layout], given: Sharded) -> float:
        """Return the bytes that a device sends: of operands that move, and of sums that are added up in parts."""
        shards, total = max(self.exchanging, 1), 0.0
        for tensor, layout, want in zip(op.inputs, layouts, given.wants, strict=True):
            if isinstance(layout, Shard) and want != layout and (tensor, want) not in self._moved:
                share = 1.0 if want == REPLICATE else 1 / shards
                total += self.program.bytes(tensor) * (shards - 1) / shards * share
        sums = [k for k, layout in enumerate(given.gives) if isinstance(layout, Partial)]
        return total + sum(self.program.bytes(Tensor(op.index, k)) * (shards - 1) / shards for k in sums)


def with_operand(rule: Rule, op: Op, layouts: Sequence[Layout], operand: int) -> Answer:
    """Return how an operation may run with one of its operands where it is."""
    return answer(rule, op, layouts, [_ONLY_THIS if k == operand else 0 for k in range(len(layouts))])


@dataclass(eq=False)
class AxisBackward(WholeBackwardPropagation):
    """What must run along an axis.

    Attributes:
      wishes: what is made whole and read both whole and in pieces, and each device could make its own piece of.
    """

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
            return self._step_at_home(op, required, None)
        made = self._in_pieces(op)
        if made is None or any(map(is_whole, wanted)):
            pieces = [(tensor, layout) for tensor, layout in self._demanded(op) if made and isinstance(layout, Shard)]
            self.wishes.update(pieces)  # type: ignore[arg-type]
            made = self._on_every_shard(op)
        self._demand_inputs(op, made)
        return Step(False, made, "")

    def _in_pieces(self, op: Op) -> Sharded | None:
        """Return how every device makes its own piece of what is read in the same pieces, and sends nothing for it."""
        demanded = [(tensor, layout) for tensor, layout in self._demanded(op) if not is_whole(layout)]
        layouts, rule = {layout for _, layout in demanded}, rule_of(op.type)
        layout = layouts.pop() if len(layouts) == 1 else None
        if not isinstance(layout, Shard) or op.bodies or rule is None:
            return None
        found = answer_for_output(rule, op, demanded[0][0].index, layout)
        if found is None or found.draw or any(found.gives[tensor.index] != layout for tensor, _ in demanded):
            return None
        for i, (tensor, want) in enumerate(zip(op.inputs, found.wants, strict=True)):
            if i not in found.makes and want != REPLICATE and not self._has_each(tensor, want):
                return None
        return found

    def _has_each(self, tensor: Tensor, want: Layout) -> bool:
        """Return whether each device makes its piece of a tensor, or all of it."""
        made = self.natural.answers[tensor.op]
        return self._may_repeat(self.program.ops[tensor.op]) if made is None else made.gives[tensor.index] == want

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
        return self._step_at_home(op, is_needed, None)


def _of_variable(program: Program, op: Op, layouts: Sequence[Layout]) -> Sharded | None:
    """Return how what reads or writes a variable that lies along the axis is done: by each device with its own part."""
    is_handle = [program.ops[t.op].out_dtypes[t.index] == tf.resource for t in op.inputs]
    lying = [layout for own, layout in zip(is_handle, layouts, strict=True) if own and layout != SINGLE_DEVICE]
    if not lying:
        return None
    own = lying[0]
    if op.type in _READS:
        return Sharded((own,), (own,))
    if op.type in _WRITES:
        return Sharded((own, own), ())
    if op.type == "VariableShape" and own == REPLICATE:
        return Sharded((own,), (REPLICATE,))
    if op.type in _WRITES_ROWS:
        return _of_rows(program, op, own)
    if (
        op.type.startswith("ResourceApply")
        and lying == [own] * sum(is_handle)
        and _is_elementwise(program, op, is_handle)
    ):
        wants = [own if h or program.shape(t) != () else REPLICATE for h, t in zip(is_handle, op.inputs, strict=True)]
        return Sharded(tuple(wants), ())
    return None


def _of_rows(program: Program, op: Op, own: Layout) -> Sharded | None:
    """Return how rows of a variable are written by their numbers: each device its own, or its part of each."""
    numbers, rows = op.in_shapes[1:]
    if own == REPLICATE:
        return Sharded((REPLICATE,) * 3, ())
    if not isinstance(own, Shard) or numbers is None or not rows:
        return None
    if own.axis > 0:
        return Sharded((own, REPLICATE, own.along(len(numbers) + own.axis - 1)), ())
    most = program.ops[op.inputs[1].op].out_dtypes[op.inputs[1].index].max
    if len(own.blocks) > 1 or own.size(0) > most or any(type(size) is not int for size in rows[len(numbers) :]):
        return None
    return Sharded((own, REPLICATE, REPLICATE), (), shift={1: Shift(own, others=LEFT_OUT)})


def _is_elementwise(program: Program, op: Op, is_handle: Sequence[bool]) -> bool:
    """Return whether an update has numbers and one gradient, so that each part is updated by itself."""
    pairs = zip(is_handle, op.inputs, strict=True)
    return sum(not handle and program.shape(tensor) != () for handle, tensor in pairs) == 1
