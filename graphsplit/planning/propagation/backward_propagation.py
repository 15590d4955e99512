"""Backward propagation: from what is returned and changed, what must run, and in which layouts it is read.

So it is known here what becomes of a mean over the batch, for everybody. A rule says that the parts of a mean are
reduced by `mean`. Where the result is read whole and nowhere else, each shard adds up its own rows, and what the sums
amount to is divided once, where it is reduced: `partial(mean)`. Where it stays partial (a linear op follows), each
shard's mean is weighted with its share of the rows: a `partial(sum)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_MEAN, PARTIAL_SUM, REPLICATE, Layout, Shard, is_whole
from graphsplit.core.sizes import has_sizes
from graphsplit.planning.costs.exchanges import has_few_bytes, is_exchanged
from graphsplit.planning.costs.work import COPY_BYTES, may_repeat
from graphsplit.planning.propagation.forward_propagation import NaturalForms
from graphsplit.planning.state import State
from graphsplit.planning.steps import RowsMoved, Step
from graphsplit.planning.variables.laid_variables import READS
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Sharded, answer_for_output
from graphsplit.rules.registry import rule_of


def as_planned(op: Op, sharded: Sharded, demands: Iterable[Layout]) -> Sharded:
    """Return how an op runs whose rule says how, if it is a mean over the batch: as a sum, or weighted.

    Args:
      op: the operation.
      sharded: what its rule says.
      demands: the layouts in which its result is read.
    """
    if PARTIAL_MEAN not in sharded.gives:
        return sharded
    if all(map(is_whole, demands)) and entries_averaged(op):
        return sharded
    gives = tuple([PARTIAL_SUM if layout == PARTIAL_MEAN else layout for layout in sharded.gives])
    return replace(sharded, gives=gives, weighted=True)


def entries_averaged(op: Op) -> int:
    """Return of how many entries a mean is taken; 0 if that is not known, or if their sum might overflow.

    (A sum over the batch overflows in float16 long before its mean does.)
    """
    dtype, shapes = op.out_dtypes[0], (op.in_shapes[0], op.out_shapes[0])
    if dtype.size < (8 if dtype.is_complex else 4):
        return 0
    if any(shape is None or None in shape or has_sizes(shape) for shape in shapes):
        return 0
    entries_before, entries_after = (math.prod(size or 0 for size in shape or ()) for shape in shapes)
    return entries_before // entries_after if entries_after else 0


_DEEPEST_REMAKE = 24
_INFINITE = 1 << 62
_REMADE_WHOLE = frozenset({"EmptyTensorList", "TensorListReserve"})

BodyPlanner = Callable[[Op, Sequence[Layout]], Mapping[str, object]]


@dataclass(eq=False)
class BackwardPropagation:
    """From what is read to what must run: `run` returns the steps.

    Args:
      program: what is planned.
      natural: the natural forms of its operations.
      output_layouts: the layouts in which the outputs are wanted.
      state: where lives what the program does not compute.
      few_bytes: of a sum that shards send each other, and of what each of them computes from it; 0 if none do.
    """

    program: Program
    natural: NaturalForms
    output_layouts: Sequence[Layout]
    state: State = field(default_factory=State)
    few_bytes: int = 0
    _demands: list[dict[tuple[int, Layout], None]] = field(default_factory=list, init=False)
    _required: set[int] = field(default_factory=set, init=False)
    _costs: dict[tuple[Tensor, Layout], int] = field(default_factory=dict, init=False)
    _remade_whole: dict[int, bool] = field(default_factory=dict, init=False)

    def run(self) -> tuple[Step, ...]:
        """Return what becomes of each op."""
        steps = [Step()] * len(self.program.ops)
        self._demands = [{} for _ in self.program.ops]
        self._required = {*self.program.effects, *self.program.captures, *self.program.inputs}
        for tensor, layout in zip(self.program.outputs, self.output_layouts, strict=True):
            self._demand(tensor, layout)
        for op in reversed(self.program.ops):
            if self._demands[op.index] or op.index in self._required:
                steps[op.index] = self._visit(op)
                self._required.update(op.controls)
        return tuple(steps)

    @functools.cached_property
    def _inputs(self) -> frozenset[int]:
        return frozenset(self.program.inputs)

    def _demand(self, tensor: Tensor, layout: Layout) -> None:
        self._demands[tensor.op][tensor.index, layout] = None

    def _demanded(self, op: Op) -> Iterable[tuple[Tensor, Layout]]:
        return ((Tensor(op.index, output), layout) for output, layout in self._demands[op.index])

    def _demand_inputs(self, op: Op, sharded: Sharded) -> None:
        for i, (tensor, layout) in enumerate(zip(op.inputs, sharded.wants, strict=True)):
            if i not in sharded.makes:
                self._demand(tensor, layout)

    def _visit(self, op: Op) -> Step:
        natural_answer = self.natural.answers[op.index]
        if natural_answer is None:
            return self._visit_whole(op)
        natural_answer = as_planned(op, natural_answer, [layout for _, layout in self._demanded(op)])
        self._demand_inputs(op, natural_answer)
        return Step(shards=natural_answer)

    def _visit_whole(self, op: Op) -> Step:
        """Visit an op whose natural form is whole: read whole, cut, or made in pieces from the start."""
        remade: Sharded | None = None
        once = op.index in self._required
        if any(layout == REPLICATE for _, layout in self._demanded(op)) and op.index in self._following_sums:
            self._demand_inputs(op, remade := self._on_every_shard(op))
            return self._step_once(op, False, remade)
        for tensor, layout in self._demanded(op):
            if isinstance(layout, Shard):
                if op.type == "Const":
                    continue
                if remade is None or remade.gives[tensor.index] != layout:
                    in_pieces = self._remake_if_cheap(tensor, layout) if remade is None else None
                    once, remade = once or in_pieces is None, remade or in_pieces
            elif layout == REPLICATE and remade is None and self._is_remade_whole(op):
                remade = self._on_every_shard(op)
            elif layout != REPLICATE or not self.state.is_everywhere(op):
                once = True
        if remade is not None:
            self._demand_inputs(op, remade)
        if once:
            for tensor in op.inputs:
                self._demand(tensor, self.natural.whole)
        return self._step_once(op, once, remade)

    def _on_every_shard(self, op: Op) -> Sharded:
        return Sharded((REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.out_shapes))

    def _step_once(self, op: Op, once: bool, remade: Sharded | None) -> Step:
        return Step(once, remade, self.natural.reasons[op.index])

    def _remake(self, tensor: Tensor, layout: Layout, depth: int = 0) -> tuple[Sharded, int] | None:
        """Return how to make a whole tensor in pieces, and the bytes that travel for that; None if it cannot be."""
        op = self.program.ops[tensor.op]
        rule = rule_of(op.type)
        if rule is None or not isinstance(layout, Shard) or not self._may_repeat(op):
            return None
        answer = answer_for_output(rule, op, tensor.index, layout)
        if answer is None:
            return None
        return answer, sum(self._cost(t, want, depth) for t, want in zip(op.inputs, answer.wants, strict=True))

    def _remake_if_cheap(self, tensor: Tensor, layout: Shard) -> Sharded | None:
        """Return how to make a whole tensor in pieces, if that moves fewer bytes than cutting it."""
        remade = self._remake(tensor, layout)
        return remade[0] if remade is not None and remade[1] < self._size(tensor, layout) else None

    def _cost(self, tensor: Tensor, layout: Layout, depth: int = 0) -> int:
        """Return the bytes that travel when the shards read `tensor` in `layout`."""
        if (tensor, layout) in self._costs:
            return self._costs[tensor, layout]
        op, size = self.program.ops[tensor.op], self._size(tensor, layout)
        natural_answer = self.natural.answers[tensor.op]
        if (
            op.type == "Const"
            or (self.state.is_everywhere(op) and is_whole(layout))
            or (natural_answer is not None and natural_answer.gives[tensor.index] == layout)
        ):
            cost = 0
        elif natural_answer is not None or is_whole(layout) or depth > _DEEPEST_REMAKE:
            cost = size
        else:
            remade = self._remake(tensor, layout, depth + 1)
            cost = size if remade is None else min(size, remade[1])
        self._costs[tensor, layout] = cost
        return cost

    def _may_repeat(self, op: Op) -> bool:
        """Return whether an op may run on every shard instead of once: nobody could tell the difference."""
        return not (op.stateful or op.controls or op.index in self._inputs or op.index in self.natural.kept_once)

    def _is_remade_whole(self, op: Op, depth: int = 0) -> bool:
        """Return whether each shard makes a whole value by itself.

        That is an empty list, something small that follows from constants, what follows from copies that every shard
        has, or a variable that lies in parts, which each shard puts together.
        """
        if op.divides:
            return op.type == "ConcatV2"
        if not self._may_repeat(op) or depth > _DEEPEST_REMAKE:
            return False
        if op.index not in self._remade_whole:
            inputs = [self.program.ops[tensor.op] for tensor in op.inputs]
            anywhere = bool(inputs) and all(
                self.state.is_everywhere(i) or self._is_copy(i) or self._is_remade_whole(i, depth + 1) for i in inputs
            )
            small = sum(op.out_bytes) <= COPY_BYTES and not op.bodies
            self._remade_whole[op.index] = op.type in _REMADE_WHOLE or (anywhere and (small or self._has_copies(op)))
        return self._remade_whole[op.index]

    @functools.cached_property
    def _following_sums(self) -> Collection[int]:
        """The operations that follow from sums that shards send each other: each shard computes those that it reads."""
        following = set[int]()
        if not self.few_bytes:
            return following
        required = {*self.program.effects, *self.program.captures, *[i for op in self.program.ops for i in op.controls]}
        for op in self.program.ops:
            sources = [self.natural.answers[tensor.op] for tensor in op.inputs]
            follows = any(
                tensor.op in following if source_answer is None else self._is_sent_to_each(tensor, source_answer)
                for tensor, source_answer in zip(op.inputs, sources, strict=True)
            )
            if follows and self.natural.answers[op.index] is None and op.index not in required and self._is_light(op):
                following.add(op.index)
        return following

    def _is_sent_to_each(self, tensor: Tensor, source_answer: Sharded) -> bool:
        return is_exchanged(self.program, tensor, source_answer.gives[tensor.index], self.few_bytes)

    def _is_light(self, op: Op) -> bool:
        """Return whether each shard may compute something instead of one device: it is small, and little work."""
        tensors = [*op.inputs, *[Tensor(op.index, k) for k in range(len(op.out_shapes))]]
        is_small = all(has_few_bytes(self.program, tensor, self.few_bytes) for tensor in tensors)
        return is_small and self._may_repeat(op) and may_repeat(self.program, op, sum(op.out_bytes))

    def _has_copies(self, op: Op) -> bool:
        """Return whether something of which every shard has a copy leads to an op."""
        ops = self.program.ops
        start = [tensor.op for tensor in op.inputs] if self.program.copied else []
        return any(self._is_copy(ops[i]) for i in reached(start, lambda i: [tensor.op for tensor in ops[i].inputs]))

    def _is_copy(self, op: Op) -> bool:
        """Return whether an op reads a variable that has copies."""
        copies = self.program.copied.get(op.inputs[0].op) if op.type in READS else None
        return copies is not None and not copies.readers

    def _size(self, tensor: Tensor, layout: Layout) -> int:
        """Return the bytes that travel when a tensor is cut. Lists cannot be: nothing is dearer."""
        opaque = self.program.dtype(tensor) == tf.variant
        return _INFINITE if opaque and not is_whole(layout) else self.program.bytes(tensor)


@dataclass(eq=False)
class WholeBackwardPropagation(BackwardPropagation):
    """Of a whole program, or of what a loop that runs once does in each iteration.

    Args:
      plan_bodies: plans the functions of a loop or branch that runs once, given the layouts of its inputs.
      once: what moves for operations, by position, that run once, though they could run on the shards.
    """

    plan_bodies: BodyPlanner = field(kw_only=True)
    once: Mapping[int, RowsMoved] = field(default_factory=dict)

    def _visit(self, op: Op) -> Step:
        if op.index not in self.once:
            return super()._visit(op)
        for tensor in op.inputs:
            self._demand(tensor, self.natural.whole)
        return Step(once=True, for_rows=self.once[op.index])

    def _step_once(self, op: Op, once: bool, remade: Sharded | None) -> Step:
        reason = self.natural.reasons[op.index]
        if once and op.bodies and (reason or op.has_columns):
            bodies = self.plan_bodies(op, [self.natural.layout(tensor) for tensor in op.inputs])
            if op.has_columns or any(body.sharded_ops for body in bodies.values()):  # type: ignore[attr-defined]
                return Step(once, remade, reason, bodies)
        return Step(once, remade, reason)


@dataclass(eq=False)
class LocalBackwardPropagation(BackwardPropagation):
    """Of a body that every shard runs by itself: whole ops run on every shard.

    Attributes:
      obstacles: why it cannot run by itself.
      wishes: the layouts in which arguments would have to be given that are given whole, by number.
    """

    obstacles: list[str] = field(default_factory=list, init=False)
    wishes: dict[int, Shard] = field(default_factory=dict, init=False)

    def _visit(self, op: Op) -> Step:
        step = super()._visit(op)
        if step.once and op.stateful:
            self.obstacles.append(f"{op.type} in it has side effects, which happen once")
        elif step.once and step.reason:
            self.obstacles.append(f"{op.type} in it: {step.reason}")
        return step

    def _visit_whole(self, op: Op) -> Step:
        if op.index not in self._inputs:
            return super()._visit_whole(op)
        given_layout = self.natural.seen[op.index][0]  # every shard has an argument in the layout in which it is given
        wanted = [layout for _, layout in self._demanded(op) if layout != given_layout]
        if wanted:
            self.obstacles.append(f"argument {op.name}: its value is {given_layout}, but it is read as {wanted[0]}")
        if (
            given_layout == REPLICATE
            and len(wanted) == len(self._demands[op.index]) == 1
            and isinstance(wanted[0], Shard)
        ):
            self.wishes[self.program.inputs.index(op.index)] = wanted[0]
        return Step(once=True)

    def _is_remade_whole(self, op: Op, depth: int = 0) -> bool:  # noqa: ARG002
        return False  # it is made on every shard anyway
