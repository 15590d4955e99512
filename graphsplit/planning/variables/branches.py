"""Branches that read or write variables in parts: their operations become operations of the program.

A branch runs once, on one device, with whole variables. An optimizer that scales its loss, or adds up gradients,
updates all variables in one branch. Where such variables lie in parts, or on the host, the operations of both sides
stand in the program instead, so that each part is updated where it is, as without a branch. What they read passes a
`Switch`, which lets the side run that is taken (`program/sides.py`). Of more than two sides (`tf.switch_case`) a
`Switch` lets the first run, or what chooses among the others.

What a branch writes is chosen by a `Merge`, and written outside, whichever side was taken: no effect depends on a
`Switch`. So sides have to consist of pure operations, and others stay branches.

Operations on a side that are equal become one: an optimizer computes its rates anew for each variable, and of what a
branch calls nothing was merged when the function was read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.core.protos import make_node
from graphsplit.core.sizes import Shape
from graphsplit.planning.variables.sparse_updates import ADDS_ROWS, RowAdder, is_sum_of_rows
from graphsplit.program.graph.equal_work import equal_work, is_pure
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import MERGE, SWITCH

_ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_ShapeByName = Mapping[str, Sequence[int | None]]
_WRITES = {"AssignVariableOp", *_ADDS}
_OF_VARIABLES = frozenset({"ReadVariableOp", *_WRITES, *ADDS_ROWS})
_OPAQUE = frozenset({tf.resource, tf.variant})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_ValueByHandle = dict[Tensor, Tensor]
_NUMBER_BYTES = 16  # and a few, as an axis


def without_branches(
    program: Program, names: Set[str], twins: Set[str], shapes: _ShapeByName, apart: Set[str] = frozenset()
) -> Program:
    """Return a program in which the operations of branches that take some variables are its own, where they can be.

    A note says which are, and what keeps others from it.

    Args:
      program: the function.
      names: of the placeholders of the variables' handles.
      twins: those of handles that are captured twice: what is written by one of them is read by the other.
      shapes: of captured variables, by the names of their handles' placeholders.
      apart: those of variables that lie whole on a device without rows of the batch, as on the host: large tables.
    """
    handles = {i for i in program.captures if program.ops[i].name in names}
    doubtful = {i for i in program.captures if program.ops[i].name in twins}
    branches, notes = set(), []
    for op in program.ops:
        ops_read = {tensor.op for tensor in op.inputs}
        if op.type in _BRANCHES and not handles.isdisjoint(ops_read):
            why = "it is given a variable twice" if doubtful & ops_read else ""
            why = why or _obstacle(program, op) or _other_shape(program, op, shapes, apart)
            if why:
                notes.append(f"{op.type} {op.name!r} stays a branch, on one device: {why}")
            else:
                branches.add(op.index)
                notes.append(f"the side of {op.type} {op.name!r} that is taken runs where its variables are")
    written = _BranchWriter(program, branches, shapes).write() if branches else program
    return replace(written, notes=(*written.notes, *notes)) if notes else written


def _obstacle(program: Program, op: Op) -> str:
    """Return what keeps a branch, or an operation on a side of one, from being an operation of the program."""
    if op.type in _BRANCHES:
        return _obstacle_of_branch(program, op)
    if op.type in ("Placeholder", "NoOp", *_OF_VARIABLES):
        return ""
    # (what reads nothing would run on either side)
    is_made_up = not op.inputs and not (op.is_constant or op.yields is not None)
    if op.stateful or op.writes or op.bodies or not op.out_dtypes or is_made_up:
        return f"{op.type} {op.name!r} in it has effects, or a body of its own"
    if not _OPAQUE.isdisjoint([*op.out_dtypes, *map(program.dtype, op.inputs)]):
        return f"{op.type} {op.name!r} in it takes or makes what is no number"
    return ""


def _obstacle_of_branch(program: Program, op: Op) -> str:
    if op.in_shapes[0] != () or not (_is_of_several(op) or program.dtype(op.inputs[0]) == tf.bool):
        return f"what {op.name!r} chooses by is no single truth value or number"
    if len(function_names(op.node)) == 1:
        return f"{op.name!r} has one side only"
    if not _OPAQUE.isdisjoint(op.out_dtypes):
        return f"{op.name!r} makes what is no number"
    bodies = [op.bodies[name] for name in function_names(op.node)]
    for body in bodies:
        argument_shapes = [body.ops[i].out_shapes[0] for i in body.inputs]
        if any(
            argument_shape is None and shape is not None
            for argument_shape, shape in zip(argument_shapes, op.in_shapes[1:], strict=True)
        ):
            return f"a side of {op.name!r} does not fit what it is given"
    obstacles = [why for body in bodies for inner in body.ops if (why := _obstacle(body, inner))]
    return obstacles[0] if obstacles else ""


def _is_of_several(op: Op) -> bool:
    """Return whether a branch chooses by a number: side 0, 1, ..., and the last one for any other number."""
    return op.type in ("Case", "StatelessCase")


def _other_shape(program: Program, op: Op, shapes: _ShapeByName, apart: Set[str]) -> str:
    """Return which variable of a branch has, or is given, another shape than it always has; "" for none.

    A chosen value, and a sum, would be as large as the larger one. And of a table apart, a few rows are written there.
    """
    for handle, body, inner in _used(op, op.inputs):
        name = program.ops[handle.op].name
        always, shape = tuple(shapes.get(name, (None,))), _value_of(body, inner)[0]
        is_same = (
            is_sum_of_rows(inner, always) if inner.type in ADDS_ROWS else shape is not None and always == tuple(shape)
        )
        if name in apart and inner.type in ADDS_ROWS:
            return f"{inner.type} {inner.name!r} in it adds to rows of {name!r}, whose device has no rows of the batch"
        if None in always or not is_same:
            return f"the shape of variable {name!r} is not known when planning, or changes"
    return ""


def _value_of(body: Program, op: Op) -> tuple[Shape | None, tf.DType]:
    """Return the shape and type of what an operation on a variable reads or writes."""
    if op.type == "ReadVariableOp":
        return op.out_shapes[0], op.out_dtypes[0]
    return body.shape(op.inputs[-1]), body.dtype(op.inputs[-1])


class _SideWriting:
    """One side of a branch, while it is written.

    Args:
      which: the predicate.
      number: the value of the predicate with which it is taken: 0 or 1.
      before: the value of each variable before the branch, by handle.

    Attributes:
      behind: the operations that run only if it is taken.
      written: the values of variables that it writes, by handle.
    """

    def __init__(self, which: Tensor, number: int, before: _ValueByHandle):
        self.which, self.number, self.before = which, number, before
        self.behind: set[int] = set()
        self.written: _ValueByHandle = {}


class _BranchWriter(RowAdder):
    """Writes a program, some of whose branches become operations of it, behind a `Switch` each.

    Only pure operations are behind a `Switch`. What a branch writes is a `Merge`, is always written, and outside: so
    nothing that has to run waits for something that may be dead.
    """

    def __init__(self, program: Program, branches: Set[int], shapes: _ShapeByName):
        super().__init__(program)
        self._branches = branches
        self._held_shapes = shapes
        self._switches: dict[tuple[Tensor, Tensor], Tensor] = {}  # of the branch that is written
        self._op_by_work: dict[Hashable, int] = {}  # likewise

    def _visit(self, op: Op) -> None:
        if op.index in self._branches:
            self._write_branch(op)
        else:
            super()._visit(op)

    def _write_branch(self, op: Op) -> None:
        """Write what a branch reads, what its sides compute, and what it writes."""
        # (a gradient's branch has its own, as nothing that may be dead can be handed from one function to another)
        self._switches, self._op_by_work = {}, {}
        operands, controls = [self._results[tensor] for tensor in op.inputs], self._controls(op)
        values_before: _ValueByHandle = {}
        for handle, dtype in {
            handle: _value_of(body, inner)[1] for handle, body, inner in _used(op, op.inputs)
        }.items():
            written_handle, shape = self._results[handle], tuple(self._held_shapes[self._program.ops[handle.op].name])
            node = make_node(self._unused(f"{op.name}/read_{len(values_before)}"), "ReadVariableOp", [], dtype=dtype)
            values_before[written_handle] = self._new(node, (written_handle,), [(shape, dtype)], {}, controls)
        results, after = self._choose(op, op.name, operands, values_before)
        reads = [tensor.op for tensor in operands if self._ops[tensor.op].type == "ReadVariableOp"]
        # (who changes later what is only read waits until it is)
        writes = [value.op for handle, value in values_before.items() if handle not in after]
        for handle, value in after.items():
            dtype, name = self._type_of(value), self._unused(f"{op.name}/write_{len(writes)}")
            node = make_node(name, "AssignVariableOp", [], dtype=dtype)
            writes.append(self._new(node, (handle, value), [], {}, (values_before[handle].op, *controls)).op)
        self._note(op, results, (*writes, *dict.fromkeys(reads)))  # (who changes what it only reads waits, too)

    def _choose(
        self, op: Op, name: str, operands: Sequence[Tensor], values_before: _ValueByHandle, first: int = 0
    ) -> tuple[list[Tensor], dict[Tensor, Tensor]]:
        """Write the sides of a branch; return its results, and the value of each variable that it writes, by handle.

        Args:
          op: the branch.
          name: for what is written.
          operands: what it is given.
          values_before: the value of each variable, by handle.
          first: the number of the first side that may be taken here. Where more than one other is left, what chooses
            among those is the other side.
        """
        then, otherwise, *other_names = function_names(op.node)[first:]
        which = self._compared("Equal", f"{name}/is_{first}", operands[0], first) if _is_of_several(op) else operands[0]
        sides, results = [_SideWriting(which, number, values_before) for number in (0, 1)], []
        for side in sides:
            part = f"{name}/{'then' if side.number else 'else'}"
            passed = [self._passed(f"{name}/given", tensor, side) for tensor in operands[1:]]
            if other_names and not side.number:
                inner_operands = [self._passed(f"{name}/index", operands[0], side), *passed]
                results.append(self._write_branch_inside(op, part, inner_operands, side, first + 1))
            else:
                function = then if side.number else otherwise
                results.append(self._write_side(op.bodies[function], part, passed, side))
        after: _ValueByHandle = {}
        for handle in dict.fromkeys([*sides[0].written, *sides[1].written]):
            ends = [self._value(f"{name}/before", handle, side) for side in sides]
            after[handle] = self._merged(f"{name}/merged", ends, sides, self._shape_of(values_before[handle]))
        pairs = zip(op.out_shapes, zip(*results, strict=True), strict=True)
        return [self._merged(f"{name}/merged", ends, sides, shape) for shape, ends in pairs], after

    def _value(self, name: str, handle: Tensor, side: _SideWriting) -> Tensor:
        """Return the value of a variable on a side: as it was written there, or as it was before."""
        return side.written.get(handle) or self._passed(name, side.before[handle], side)

    def _passed(self, name: str, tensor: Tensor, side: _SideWriting) -> Tensor:
        """Return a value that is there only if a side is taken."""
        if self._type_of(tensor) in _OPAQUE:
            return tensor
        key = tensor, side.which
        if key not in self._switches:
            result = (self._shape_of(tensor), self._type_of(tensor))
            self._switches[key] = self._made(SWITCH, self._unused(name), key, [result, result], {}, T=result[1])
        switch = self._switches[key].op
        side.behind.add(switch)
        return Tensor(switch, side.number)

    def _merged(self, name: str, ends: Sequence[Tensor], sides: Sequence[_SideWriting], shape: Shape | None) -> Tensor:
        """Return what is there of two sides, of the shape in which they agree.

        Each passes a `Switch` right before, whatever made it. (A shard makes some operands itself, and what reads
        nothing else runs on either side.)
        """
        pairs = zip(ends, sides, strict=True)
        passed_ends = [t if self._is_passed(t, side) else self._passed(f"{name}/end", t, side) for t, side in pairs]
        dtype = self._type_of(passed_ends[0])
        return self._made(MERGE, self._unused(name), passed_ends, [(shape, dtype)], {}, N=2, T=dtype)

    def _is_passed(self, tensor: Tensor, side: _SideWriting) -> bool:
        op = self._ops[tensor.op]
        return op.type == SWITCH and op.inputs[1] == side.which and tensor.index == side.number

    def _write_side(self, body: Program, name: str, passed: Sequence[Tensor], side: _SideWriting) -> list[Tensor]:
        """Write one side; operations on a variable are in the order in which they have to run."""
        results: _ValueByHandle = {Tensor(i, 0): tensor for i, tensor in zip(body.inputs, passed, strict=True)}
        for op in body.ops:
            inputs, result = [results[tensor] for tensor in op.inputs], Tensor(op.index, 0)
            if op.index in body.inputs or op.type == "NoOp":
                continue
            if op.type == "ReadVariableOp":
                results[result] = self._value(f"{name}/before", inputs[0], side)
            elif op.type == "AssignVariableOp":
                side.written[inputs[0]] = inputs[1]
            elif op.type in _ADDS or op.type in ADDS_ROWS:
                old_value, added = self._value(f"{name}/before", inputs[0], side), inputs[-1]
                if op.type in ADDS_ROWS:
                    added = self._added_up(f"{name}/{op.name}", inputs[1], inputs[2], self._shape_of(old_value))
                kind = _ADDS[ADDS_ROWS.get(op.type, op.type)]
                side.written[inputs[0]] = self._plain(kind, f"{name}/{op.name}", (old_value, added), T=True)
                side.behind.add(side.written[inputs[0]].op)
            else:
                results_inside = self._write_inside(op, f"{name}/{op.name}", inputs, side)
                # (constants are there on either side)
                side.behind.update([tensor.op for tensor in results_inside if inputs])
                results.update({Tensor(op.index, k): tensor for k, tensor in enumerate(results_inside)})
        return [results[tensor] for tensor in body.outputs]

    def _write_inside(self, op: Op, name: str, inputs: list[Tensor], side: _SideWriting) -> list[Tensor]:
        """Write an operation on a side, a branch or a pure one, so that it runs only if the side is taken."""
        deciding = inputs[:1] if op.type in _BRANCHES else inputs
        if inputs and side.behind.isdisjoint([tensor.op for tensor in deciding]):
            passing = next((k for k in range(len(deciding)) if k not in op.constants), 0)
            inputs[passing] = self._passed(f"{name}/given", inputs[passing], side)
        if op.stage is None:  # (it is called in the branch's)
            stage, backward = self._provenance.stage, self._provenance.backward
            op = replace(op, provenance=replace(op.provenance, stage=stage, backward=backward))
        if op.type in _BRANCHES:
            with self._serving(op):
                return self._write_branch_inside(op, name, inputs, side)
        written = self._merged_with_equal(self._append(op, self._unused(name), inputs, ()))
        return [Tensor(written.op, k) for k in range(len(op.out_shapes))]

    def _new(self, *arguments: Any, **fields: Any) -> Tensor:
        return self._merged_with_equal(super()._new(*arguments, **fields))

    def _merged_with_equal(self, result: Tensor) -> Tensor:
        """Return the first result of an operation of the branch that is equal to the last one appended, which goes."""
        op = self._ops[result.op]
        is_table = not op.inputs and sum(op.out_bytes) > _NUMBER_BYTES  # (each device makes its own, for nothing)
        work = equal_work(op.node) if op.yields is None and is_pure(op.type) and not is_table else None
        if work is None:
            return result
        place = op.provenance.stage, op.provenance.column
        key = work, op.inputs, op.controls, op.out_shapes, place
        first = self._op_by_work.setdefault(key, op.index)
        if first != op.index:
            self._ops.pop()
        return Tensor(first, 0)

    def _write_branch_inside(
        self, op: Op, name: str, operands: Sequence[Tensor], side: _SideWriting, first: int = 0
    ) -> list[Tensor]:
        """Write a branch on a side, or (`first`) what is left of one; `operands` are behind the side's `Switch`."""
        handles = dict.fromkeys([handle for handle, _, _ in _used(op, operands)])
        values_before = {handle: self._value(f"{name}/before", handle, side) for handle in handles}
        results, after = self._choose(op, name, operands, values_before, first)
        side.written.update(after)
        side.behind.update([value.op for value in after.values()])
        return results


def _used(op: Op, operands: Sequence[Tensor]) -> Iterator[tuple[Tensor, Program, Op]]:
    """Yield the handles that a branch reads or writes, each with the operation that does, and the body that has that.

    Args:
      op: the branch.
      operands: what it is given, outside of all branches.
    """
    for name in function_names(op.node):
        body = op.bodies[name]
        argument_by_tensor = {Tensor(i, 0): tensor for i, tensor in zip(body.inputs, operands[1:], strict=True)}
        for inner in body.ops:
            if inner.type in _OF_VARIABLES:
                yield argument_by_tensor[inner.inputs[0]], body, inner
            elif inner.type in _BRANCHES:
                yield from _used(inner, [argument_by_tensor.get(tensor, tensor) for tensor in inner.inputs])
