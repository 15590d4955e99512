"""Part by part: which operations can be done for each part of a variable by itself.

From what reads a variable that lies in parts, forward: arithmetic on the parts gives parts. And from what writes it,
backward: what is added to it is needed in parts, and is made so as early as that pays. Rules say which operations
allow it: what holds for an axis of the batch holds for any axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, Cut, Layout, Partial, Shard
from graphsplit.core.sizes.symbolic_sizes import has_sizes
from graphsplit.planning.variables.laid_variables import READS, WRITES
from graphsplit.planning.variables.row_writing import adds_up_rows, finds_rows, writes_rows
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Declined, Sharded, answer, answer_for_output, partial_operands, rule_of
from graphsplit.rules.factors import Dims, Factors
from graphsplit.rules.registry import Rule

_SMALL = 1024  # bytes: what is no larger is sent whole to the owner of each part
JOINS = {"sum": "AddN", "max": "Maximum", "min": "Minimum", "prod": "Mul"}
"""How the parts of a result are joined whose entries were reduced over the axis that is cut."""


@dataclass(frozen=True, eq=False)
class PartByPart:
    """Which operations are done part by part.

    Attributes:
      handles: how the captured variables are cut, by position.
      how: for operations that are done part by part, how.
      base: for the same operations, a cut that those of all they read and make follow from.
      cut: how their results are cut, and others' that are taken apart.
      rows: the tables of operations that go to where the rows of ids are.
      once: operations on whole values that follow from parts, and that one of their devices does.
      obstacles: why variables must be whole, by placeholder name.
    """

    handles: Mapping[int, Cut]
    how: Mapping[int, Sharded]
    base: Mapping[int, Cut]
    cut: Mapping[Tensor, Cut]
    rows: Mapping[int, Cut]
    once: Set[int]
    obstacles: Mapping[str, str]


def part_by_part(program: Program, handles: Mapping[int, Cut]) -> PartByPart:
    """Return which operations of a program are done part by part; `handles` as in `PartByPart`."""
    return _PartFinder(program, handles).find()


class _PartFinder:
    def __init__(self, program: Program, handles: Mapping[int, Cut]):
        self._program = program
        self._handles = {i: cut for i, cut in handles.items() if cut.parts > 1}
        self._how: dict[int, Sharded] = {}
        self._base: dict[int, Cut] = {}
        self._cut: dict[Tensor, Cut] = {}
        self._rows: dict[int, Cut] = {}
        self._once: set[int] = set()
        self._put_together: set[Tensor] = set()  # what is in parts and has to be whole for what is done once
        self._obstacles: dict[str, str] = {}

    def find(self) -> PartByPart:
        before = -1
        while len(self._how) + len(self._cut) != before:  # a gradient that is taken apart has other readers, and so on
            before = len(self._how) + len(self._cut)
            for op in self._program.ops:
                self._follow(op)
            for op in reversed(self._program.ops):
                self._lead(op)
        return PartByPart(self._handles, self._how, self._base, self._cut, self._rows, self._once, self._obstacles)

    def _follow(self, op: Op) -> None:
        """Do an operation part by part if what it reads is in parts."""
        touched = [i for i, tensor in enumerate(op.inputs) if tensor.op in self._handles]
        if touched:
            self._touch(op, touched)
            return
        in_parts = [i for i, tensor in enumerate(op.inputs) if tensor in self._cut]
        # (what is only taken apart for others is whole, too: its rows are there)
        is_made_in_parts = in_parts == [0] and (op.inputs[0].op in self._how or op.inputs[0].op in self._rows)
        table = self._cut[op.inputs[0]] if is_made_in_parts else None
        if table is not None and finds_rows(self._program, op, table):
            self._rows[op.index] = table
            return
        if op.index not in self._how and self._is_done_once(op):
            self._once.add(op.index)
            return
        rule = self._rule(op) if in_parts and op.index not in self._how else None
        factors = rule.factors(op) if rule else Declined("")
        if rule and isinstance(factors, Factors) and _adds_no_axis(factors, [factors.inputs[i] for i in in_parts]):
            layouts: list[Layout] = [self._cut[t].layout if t in self._cut else REPLICATE for t in op.inputs]
            found = answer(rule, op, layouts, [self._program.bytes(tensor) for tensor in op.inputs])
            if isinstance(found, Sharded):
                self._accept(op, found, self._cut[op.inputs[in_parts[0]]])

    def _is_done_once(self, op: Op) -> bool:
        """Return whether an operation follows from products of a variable's parts with each other.

        A matrix is orthogonalized by such: all parts would need all others again and again. So it is put together once,
        and what follows is whole until a variable takes it.
        """
        rule, large = self._rule(op), [t for t in op.inputs if self._program.bytes(t) > _SMALL]
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

    def _touch(self, op: Op, touched: Sequence[int]) -> None:
        cut = self._handles[op.inputs[touched[0]].op]
        self._base[op.index] = cut
        if op.type in READS:
            self._how[op.index] = Sharded((REPLICATE,), (cut.layout,))
            self._cut[Tensor(op.index, 0)] = cut
        elif op.type in WRITES:
            self._how[op.index] = Sharded((REPLICATE, cut.layout), ())
        elif op.type.startswith("ResourceApply") and self._is_dense_update(op, cut):
            wants = [cut.layout if self._is_entries(tensor) else REPLICATE for tensor in op.inputs]
            self._how[op.index] = Sharded(tuple(wants), ())
        elif touched == [0] and writes_rows(op, cut):
            self._rows[op.index] = cut
        else:
            where = self._program.line_of(op)
            for i in touched:
                name = self._program.ops[op.inputs[i].op].name
                self._obstacles[name] = f"{op.type} {op.name!r}{f' at {where}' if where else ''} takes it whole"

    def _is_dense_update(self, op: Op, cut: Cut) -> bool:
        """Return whether an update is elementwise: variables that are all cut alike, numbers, and one gradient."""
        alike = all(self._handles.get(t.op) == cut for t in op.inputs if self._program.dtype(t) == tf.resource)
        return alike and sum(map(self._is_entries, op.inputs)) == 1

    def _is_entries(self, tensor: Tensor) -> bool:
        """Return whether an operand of an update is neither a handle nor a number."""
        return self._program.dtype(tensor) != tf.resource and self._program.shape(tensor) != ()

    def _accept(self, op: Op, found: Sharded, base: Cut) -> bool:
        """Note that an operation is done part by part, unless its parts would need what others have."""
        operands = [(t, w) for i, (t, w) in enumerate(zip(op.inputs, found.wants, strict=True)) if i not in found.makes]
        wanted = [(tensor, base.like(want)) for tensor, want in operands if isinstance(want, Shard)]
        whole = [tensor for tensor, want in operands if not isinstance(want, Shard)]
        given = {k: base.like(layout) for k, layout in enumerate(found.gives) if isinstance(layout, Shard)}
        joined = [layout for layout in found.gives if isinstance(layout, Partial)]
        cannot = (
            found.draw is not None
            or bool(found.shift)
            or found.weighted
            or any(not isinstance(resize.position, int) for resize in found.resize)
            or any(isinstance(want, Partial) for _, want in operands)
            or any(layout.reduction not in JOINS for layout in joined)
            or len(given) + len(joined) < len(found.gives)
            or None in given.values()
            or any(own is None or self._cut.get(tensor, own) != own for tensor, own in wanted)
            or any(tensor in self._cut or self._program.bytes(tensor) > _SMALL for tensor in whole)
        )
        if not cannot:
            self._how[op.index], self._base[op.index] = found, base
            self._cut.update({Tensor(op.index, k): own for k, own in given.items() if own is not None})
        return not cannot

    def _lead(self, op: Op) -> None:
        """Cut what an operation that is done part by part reads: made in parts, or taken apart, as early as it pays."""
        how = self._how.get(op.index)
        for i, (tensor, want) in enumerate(zip(op.inputs, how.wants, strict=True) if how else ()):
            cut = self._base[op.index].like(want)
            if how and cut is not None and i not in how.makes and tensor not in self._cut:
                self._want(tensor, cut)

    def _want(self, tensor: Tensor, cut: Cut) -> None:
        op = self._program.ops[tensor.op]
        if adds_up_rows(self._program, op, cut):
            self._rows[op.index], self._cut[tensor] = cut, cut
            return
        is_plain = len(op.out_shapes) == 1 and op.type != "Const" and op.index not in self._once
        rule = self._rule(op) if is_plain else None
        factors = rule.factors(op) if rule and not self._stays_a_sum(op) else Declined("")
        if isinstance(factors, Factors) and rule and _adds_no_axis(factors, factors.outputs):
            found = answer_for_output(rule, op, tensor.index, cut.layout)
            if found is not None and self._accept(op, found, cut):
                return
        self._cut[tensor] = cut

    def _stays_a_sum(self, op: Op) -> bool:
        """Return whether a partial sum would go through an operation: then it is taken apart behind it, once."""
        return {i for i in range(len(op.inputs)) if i not in op.constants} <= {*partial_operands(op)}


def _adds_no_axis(factors: Factors, known: Sequence[Dims]) -> bool:
    """Return whether all axes of what an operation reads and makes are among those of some operands.

    So is elementwise arithmetic on a variable, and so are sums over it. Products with what has other axes, a batch,
    are not: they are done by the shards, with the whole variable.
    """
    at_hand = set().union(*map(_factors_of, known))
    return all(_factors_of(dims) <= at_hand for dims in (*factors.inputs, *factors.outputs))


def _factors_of(dims: Dims) -> set[int]:
    found: set[int] = set()
    for dim in dims or ():
        if isinstance(dim, int):
            found.add(dim)
        elif dim is not None:
            found.update(part.factor for part in dim)
    return found
