"""Part by part: which operations can be done for each part of a variable by itself.

From what reads a variable that lies in parts, forward: arithmetic on the parts gives parts. And from what writes it,
backward: what is added to it is needed in parts, and is made so as early as that pays. Rules say which operations
allow it: what holds for an axis of the batch holds for any axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout, Partial, Shard, group_of
from graphsplit.core.sizes import has_sizes
from graphsplit.planning.costs.work import COPY_BYTES, SMALL_BYTES
from graphsplit.planning.variables.laid_variables import READS, of_variable
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import SWITCH
from graphsplit.rules import Declined, Sharded, answer, answer_for_output, partial_operands, rule_of
from graphsplit.rules.factors import DROPPED, ZEROS, Dims, Factors
from graphsplit.rules.registry import Rule

JOINS = {"sum": "AddN", "mean": "AddN", "max": "Maximum", "min": "Minimum", "prod": "Mul"} | {
    "all": "LogicalAnd",
    "any": "LogicalOr",
}
"""How the parts of a result are joined whose entries were reduced over the axis that is cut; means by their shares."""

_SUMS = frozenset({"UnsortedSegmentSum"})
_FEWER = 8  # times as many bytes as all parts read of something whole are cut


@dataclass(frozen=True, eq=False)
class PartByPart:
    """Which operations are done part by part. All layouts name the devices of the parts (`group_of`).

    Attributes:
      handles: how the captured variables are cut, by position.
      how: for operations that are done part by part, how.
      cut: how their results are cut, and others' that are taken apart.
      once: operations on whole values that follow from parts, and that one of their devices does.
    """

    handles: Mapping[int, Shard]
    how: Mapping[int, Sharded]
    cut: Mapping[Tensor, Shard]
    once: Set[int]


def part_by_part(program: Program, handles: Mapping[int, Shard]) -> PartByPart:
    """Return which operations of a program are done part by part; `handles` as in `PartByPart`."""
    return _PartFinder(program, handles).find()


def most_bytes(program: Program, rows: Tensor) -> int:
    """Return the bytes of rows; if their number is open, the most that are known of those from which they follow.

    (Keras divides rows in a branch, one side of which finds out which of them are zero.)
    """
    size, pending, seen = program.bytes(rows), [rows], set[Tensor]()
    while pending:
        tensor = pending.pop()
        op = program.ops[tensor.op]
        if tensor in seen or None not in (program.shape(tensor) or ()):
            continue
        seen.add(tensor)
        is_branch = bool(op.bodies) and not CONTROL_FLOW[op.type].loops
        ends = [(body, body.outputs[tensor.index]) for body in op.bodies.values()] if is_branch else []
        size = max([size, *[body.bytes(end) for body, end in ends if not has_sizes(body.shape(end))]])
        pending += op.inputs
    return size


class _PartFinder:
    def __init__(self, program: Program, handles: Mapping[int, Shard]):
        self._program = program
        self._handles = {i: layout for i, layout in handles.items() if len(group_of(layout)) > 1}
        reads = [op for op in program.ops if op.type in READS and op.inputs[0].op in self._handles]
        self._shape_by_handle = {op.inputs[0].op: op.out_shapes[0] for op in reads}
        self._how: dict[int, Sharded] = {}
        self._cut: dict[Tensor, Shard] = {}
        self._once: set[int] = set()
        self._no_sums: set[Tensor] = set()  # what is made in parts, and is no partial sum
        self._put_together: set[Tensor] = set()  # what is in parts and has to be whole for what is done once

    def find(self) -> PartByPart:
        self._settle()
        for op in self._program.ops:
            if op.type in _SUMS and self._is_cut_as_a_variable(op):
                self._settle()
        self._put_together_once()
        return PartByPart(self._handles, self._how, self._cut, self._once)

    def _put_together_once(self) -> None:
        """Do once what is only done in parts for what is done once, and follows from what is put together for that."""
        readers: dict[int, set[int]] = {}
        for op in self._program.ops if self._put_together else ():
            for tensor in op.inputs:
                readers.setdefault(tensor.op, set()).add(op.index)
        for op in self._program.ops if self._put_together else ():
            result, large = Tensor(op.index, 0), [t for t in op.inputs if self._program.bytes(t) > COPY_BYTES]
            is_read_once = result in self._put_together and readers.get(op.index, set()) <= self._once
            is_of_parts = any(tensor.op in self._handles for tensor in op.inputs)  # (those are read where they are)
            if is_read_once and op.index in self._how and not is_of_parts and self._put_together.issuperset(large):
                del self._how[op.index], self._cut[result]
                self._once.add(op.index)

    def _is_cut_as_a_variable(self, op: Op) -> bool:
        """Cut sums of rows that nothing in parts reads as a variable of their shape is, if there is one.

        (Statistics of a table's gradient may lie whole. It does not: the shards would send all of it to one device.)
        """
        tensor, shape = Tensor(op.index, 0), op.out_shapes[0]
        large = tensor not in self._cut and self._program.bytes(tensor) > SMALL_BYTES
        layouts = [self._handles[i] for i in self._handles if large and self._shape_by_handle.get(i) == shape]
        if layouts and tensor not in self._program.outputs:
            self._cut[tensor] = layouts[0]
            self._note(op, self._made_in_parts(tensor, layouts[0]))
        return tensor in self._cut and large

    def _settle(self) -> None:
        """Follow what is in parts, and lead it to where it is made, until nothing more is found."""
        count = -1
        while len(self._how) + len(self._cut) != count:  # a gradient that is taken apart has other readers, and so on
            count = len(self._how) + len(self._cut)
            for op in self._program.ops:
                if op.index not in self._how:
                    self._follow(op)
            for op in reversed(self._program.ops):
                self._lead(op)

    def _follow(self, op: Op) -> None:
        """Do an operation part by part if what it reads is in parts."""
        handles = [self._handles.get(tensor.op, SINGLE_DEVICE) for tensor in op.inputs]
        if any(isinstance(layout, Shard) for layout in handles):
            self._note(op, of_variable(self._program, op, handles))
            return
        in_parts = [i for i, tensor in enumerate(op.inputs) if tensor in self._cut]
        # (what is only taken apart for others is whole, too: its rows are there)
        if in_parts == [0] and op.inputs[0].op in self._how and (answer_of_op := self._found_rows(op)):
            self._note(op, answer_of_op)
            return
        if self._is_done_once(op):
            self._once.add(op.index)
            return
        rule = self._rule(op) if in_parts else None
        factors = rule.factors(op) if rule else Declined("")
        if rule and isinstance(factors, Factors) and _adds_no_axis(factors, [factors.inputs[i] for i in in_parts]):
            answer_of_op = self._answer(rule, op)
            if answer_of_op is not None and self._is_by_itself(op, answer_of_op):
                self._note(op, answer_of_op)

    def _answer(self, rule: Rule, op: Op) -> Sharded | None:
        layouts: list[Layout] = [self._cut.get(tensor, REPLICATE) for tensor in op.inputs]
        answer_of_op = answer(rule, op, layouts, [self._program.bytes(tensor) for tensor in op.inputs])
        return answer_of_op if isinstance(answer_of_op, Sharded) else None

    def _note(self, op: Op, how: Sharded | None) -> None:
        """Note how an operation is done part by part, if it is."""
        if how is not None:
            self._how[op.index] = how
            gives = {Tensor(op.index, k): layout for k, layout in enumerate(how.gives)}
            self._cut.update({tensor: layout for tensor, layout in gives.items() if isinstance(layout, Shard)})

    def _found_rows(self, op: Op) -> Sharded | None:
        """Return how rows of the first operand are looked up where they are, if they are fewer bytes than that has."""
        rule = None if op.controls or op.out_shapes[0] is None else rule_of(op.type)
        answer_of_op = self._answer(rule, op) if rule else None
        is_less = self._program.bytes(Tensor(op.index, 0)) < self._program.bytes(op.inputs[0])
        return answer_of_op if answer_of_op is not None and is_less and _is_by_rows(answer_of_op, ZEROS) else None

    def _is_done_once(self, op: Op) -> bool:
        """Return whether an operation follows from products of a variable's parts with each other.

        A matrix is orthogonalized by such: all parts would need all others again and again. So it is put together once,
        and what follows is whole until a variable takes it.
        """
        rule, large = self._rule(op), [t for t in op.inputs if self._program.bytes(t) > COPY_BYTES]
        divided = [tensor for tensor in large if tensor in self._cut]
        once = [tensor for tensor in large if tensor.op in self._once]
        if rule is None or not (divided or once):
            return False
        factors = rule.factors(op)
        if isinstance(factors, Factors) and factors.contracted and len(divided) + len(once) > 1:
            self._put_together.update(divided)
            return True
        return len(divided) + len(once) == len(large) and self._put_together.issuperset(divided)

    def _rule(self, op: Op) -> Rule | None:
        unknown = op.symbols or any(shape is None or has_sizes(shape) or None in shape for shape in op.out_shapes)
        # (a list is one thing, whatever is written into it)
        opaque = any(self._program.dtype(tensor) == tf.variant for tensor in op.inputs) or tf.variant in op.out_dtypes
        cannot = op.stateful or op.bodies or op.controls or unknown or opaque
        return None if cannot else rule_of(op.type)

    def _is_by_itself(self, op: Op, how: Sharded) -> bool:
        """Return whether an operation can be done so part by part: no part needs what others have."""
        operands = [(t, w) for i, (t, w) in enumerate(zip(op.inputs, how.wants, strict=True)) if i not in how.makes]
        wanted = [(tensor, want) for tensor, want in operands if isinstance(want, Shard)]
        whole = [tensor for tensor, want in operands if not isinstance(want, Shard)]
        cut = [tensor for tensor, _ in wanted] + [Tensor(op.index, k) for k in range(len(op.out_shapes))]
        # (a column's statistics are sent to all parts for less than a matrix is put together)
        parts = max([len(group_of(want)) for _, want in wanted], default=1)
        most = max(COPY_BYTES, max(map(self._program.bytes, cut)) // (_FEWER * parts))
        cannot = (
            how.draw is not None
            or bool(how.shift)
            or how.weighted
            or any(not isinstance(resize.position, int) for resize in how.resize)
            or any(isinstance(want, Partial) for _, want in operands)
            or any(layout.reduction not in JOINS for layout in how.gives if isinstance(layout, Partial))
            or not all(isinstance(layout, (Shard, Partial)) for layout in how.gives)
            or any(len(layout.blocks) > 1 for layout in (*how.wants, *how.gives) if isinstance(layout, Shard))
            or any(self._cut.get(tensor, want) != want for tensor, want in wanted)
            or any(tensor in self._cut or self._program.bytes(tensor) > most for tensor in whole)
        )
        return not cannot

    def _lead(self, op: Op) -> None:
        """Cut what an operation that is done part by part reads: made in parts, or taken apart, as early as it pays."""
        how = self._how.get(op.index)
        for i, (tensor, want) in enumerate(zip(op.inputs, how.wants, strict=True) if how else ()):
            is_made = how is None or i in how.makes or tensor.op in self._handles or tensor in self._cut
            if isinstance(want, Shard) and not is_made:
                self._cut[tensor] = want
                self._note(self._program.ops[tensor.op], self._made_in_parts(tensor, want))

    def _made_in_parts(self, tensor: Tensor, layout: Shard) -> Sharded | None:
        """Return how an operation makes its result in parts; None if that is taken apart."""
        how = self._possible_in_parts(tensor, layout)
        return None if how is None or self._stays_a_sum(tensor, how) else how

    def _possible_in_parts(self, tensor: Tensor, layout: Shard) -> Sharded | None:
        """Return how an operation could make its result in parts."""
        op = self._program.ops[tensor.op]
        is_one = len(op.out_shapes) == 1 or op.type == SWITCH
        is_plain = is_one and op.type != "Const" and op.index not in self._once
        rule = self._rule(op) if is_plain else None
        how = answer_for_output(rule, op, tensor.index, layout) if rule else None
        if rule is None or how is None:
            return None
        if _is_by_rows(how, DROPPED):  # (added up where they are)
            return how if most_bytes(self._program, op.inputs[0]) < self._program.bytes(tensor) else None
        factors = rule.factors(op)
        adds_none = isinstance(factors, Factors) and _adds_no_axis(factors, factors.outputs)
        return how if adds_none and self._is_by_itself(op, how) else None

    def _stays_a_sum(self, tensor: Tensor, how: Sharded) -> bool:
        """Return whether a partial sum would go through an operation: then it is taken apart behind it, once.

        What it reads is none if that would be made in parts itself, by something that sums do not go through. (A
        gradient is divided by the scale of a loss, and was clipped before.)
        """
        pending, reader_of = [(tensor, how)], dict[Tensor, Tensor]()
        while pending:
            tensor, how = pending.pop()
            op = self._program.ops[tensor.op]
            summed = [i for i in range(len(op.inputs)) if i not in op.constants]
            if tensor in self._no_sums or _is_by_rows(how, DROPPED) or not {*summed} <= {*partial_operands(op)}:
                self._no_sums.add(tensor)
                while tensor in reader_of:
                    self._no_sums.add(tensor := reader_of[tensor])
                return False
            for i in summed:
                operand, want = op.inputs[i], how.wants[i]
                possible = self._possible_in_parts(operand, want) if isinstance(want, Shard) else None
                if possible is not None and operand not in reader_of:
                    reader_of[operand] = tensor
                    pending.append((operand, possible))
        return True


def _is_by_rows(how: Sharded, of_others: str) -> bool:
    """Return whether an operation goes to where the rows are that an operand of it numbers."""
    return [(shift.others, shift.layout.blocks) for shift in how.shift.values()] == [(of_others, (1,))]


def _adds_no_axis(factors: Factors, known_dims: Sequence[Dims]) -> bool:
    """Return whether all axes of what an operation reads and makes are among those of some operands.

    So is elementwise arithmetic on a variable, and so are sums over it. Products with what has other axes, a batch,
    are not: they are done by the shards, with the whole variable.
    """
    at_hand = set().union(*map(_factors_of, known_dims))
    return all(_factors_of(dims) <= at_hand for dims in (*factors.inputs, *factors.outputs))


def _factors_of(dims: Dims) -> set[int]:
    factors: set[int] = set()
    for dim in dims or ():
        if isinstance(dim, int):
            factors.add(dim)
        elif dim is not None:
            factors.update(part.factor for part in dim)
    return factors
