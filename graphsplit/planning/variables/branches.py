"""Branches that write variables in parts: both sides are computed, and what they write is chosen.

A branch runs once, on one device, with whole variables. An optimizer that scales its loss updates all variables in one
branch, which skips the update if a gradient is not finite. Where such variables lie in parts, or on the host, a branch
becomes arithmetic: each variable is read, each side computes what it would write, and of both, or of that and what was
there, one is written. So each part is chosen and written where it is, as without a branch. (Allen, Kennedy,
Porterfield, Warren 1983: Conversion of control dependence to data dependence.)

Computed is what the step would have skipped, too. So all that a branch does must be cheap, and must not fail whatever
the numbers are: entry by entry, sums of entries, and what moves them, of known shapes. Other branches stay branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.protos import make_node
from graphsplit.core.sizes import Shape, has_sizes
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor

_PLAIN = frozenset(
    {"Abs", "Add", "AddN", "AddV2", "All", "Any", "BiasAddGrad", "BroadcastTo", "Cast", "Ceil", "ClipByValue"}
    | {"ConcatV2", "Const", "Cos"}
    | {"Div", "DivNoNan", "Equal", "Erf", "Erfc", "EuclideanNorm", "Exp", "ExpandDims", "Expm1", "Fill"}
    | {"Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Identity", "IdentityN", "Inv", "IsFinite"}
    | {"IsInf", "IsNan", "L2Loss", "LeakyRelu", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd"}
    | {"LogicalNot", "LogicalOr", "Max", "Maximum", "Mean", "Min", "Minimum", "Mul", "Neg", "NoOp"}
    | {"NotEqual", "OnesLike", "Pack", "Pow", "PreventGradient", "Prod", "RealDiv", "Reciprocal", "Relu"}
    | {"Reshape", "Round", "Rsqrt", "Select", "SelectV2", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt"}
    | {"Square", "SquaredDifference", "Squeeze", "StopGradient", "Sub", "Sum", "Tanh", "Tile", "Transpose"}
    | {"Unpack", "ZerosLike"}
)
_OF_FLOATS = frozenset({"Div", "FloorDiv", "FloorMod", "Pow"})
"""Operations that raise errors of some integers as second operands: a divisor of 0, a negative exponent."""
_CUTS = {"Slice": (1, 2), "StridedSlice": (1, 2, 3)}
"""Operations that raise errors of some integers, unless these operands are known: where a slice begins and ends."""
_ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_WRITES = {"AssignVariableOp", *_ADDS}
_OPAQUE = frozenset({tf.resource, tf.variant})
_COMPUTED = {*_PLAIN, *_CUTS, *_WRITES, "ReadVariableOp"}
_BRANCHES = frozenset({"If", "StatelessIf"})
_Values = dict[Tensor, Tensor]


def without_branches(
    program: Program, names: Set[str], twins: Set[str], shapes: Mapping[str, Sequence[int | None]]
) -> Program:
    """Return a program in which branches that write some variables are arithmetic, where they can be.

    A note says which are, and what keeps others from it.

    Args:
      program: the function.
      names: of the placeholders of the variables' handles.
      twins: those of handles that are captured twice: what is written by one of them is read by the other.
      shapes: of captured variables, by the names of their handles' placeholders.
    """
    handles = {i for i in program.captures if program.ops[i].name in names}
    doubtful = {i for i in program.captures if program.ops[i].name in twins}
    branches, notes = set(), []
    for op in program.ops:
        read = {tensor.op for tensor in op.inputs}
        if op.type == "If" and not handles.isdisjoint(read):
            why = "it is given a variable twice" if doubtful & read else ""
            why = why or _obstacle(op) or _other_shape(program, op, shapes)
            if why:
                notes.append(f"If {op.name!r} stays a branch, on one device: {why}")
            else:
                branches.add(op.index)
                notes.append(f"both sides of If {op.name!r} are computed, and what it writes is chosen")
    written = _ArithmeticWriter(program, branches).write() if branches else program
    return replace(written, notes=(*written.notes, *notes)) if notes else written


def _obstacle(op: Op) -> str:
    """Return what is no arithmetic in an operation, "" if nothing is."""
    if op.stage is not None:
        return f"{op.name!r} is in a stage"
    if op.type in _BRANCHES:
        sides = [op.bodies[name] for name in function_names(op.node)]
        one, other = [[body.shape(tensor) for tensor in body.outputs] for body in sides]
        if op.in_shapes[0] != () or one != other or not all(map(_is_known, one)):
            return f"the results of {op.name!r} differ in shape, or their sizes are not known when planning"
        if not _OPAQUE.isdisjoint(op.out_dtypes):
            return f"{op.name!r} makes no numbers"
        found = [why for body in sides for why in map(_obstacle, body.ops) if why]
        return found[0] if found else ""
    if op.type == "Placeholder":
        return ""
    if op.type not in _COMPUTED or _may_fail(op):
        return f"{op.type} {op.name!r} in it may fail, or is too much to be computed in vain"
    if not all(map(_is_known, (*op.in_shapes, *op.out_shapes))) or op.symbols:
        return f"sizes of {op.type} {op.name!r} in it are not known when planning"
    return f"{op.type} {op.name!r} in it makes no numbers" if not _OPAQUE.isdisjoint(op.out_dtypes) else ""


def _may_fail(op: Op) -> bool:
    """Return whether an operation raises errors of some integers, and is not known to read others."""
    if op.type in _CUTS:
        return not op.constants.keys() >= set(_CUTS[op.type])
    if op.type not in _OF_FLOATS or not any(dtype.is_integer for dtype in op.out_dtypes):
        return False
    known = op.constants.get(1)
    return known is None or bool((known < 0).any() if op.type == "Pow" else (known == 0).any())


def _is_known(shape: Shape | None) -> bool:
    return shape is not None and None not in shape and not has_sizes(shape)


def _other_shape(program: Program, op: Op, shapes: Mapping[str, Sequence[int | None]]) -> str:
    """Return which variable of a branch has, or is given, another shape than it always has; "" for none.

    A chosen value, and a sum, would be as large as the larger one.
    """
    for handle, (shape, _) in _used(op, op.inputs):
        name = program.ops[handle.op].name
        if shape is None or tuple(shapes.get(name, (None,))) != tuple(shape):
            return f"the shape of variable {name!r} is not known when planning, or changes"
    return ""


class _ArithmeticWriter(ProgramWriter):
    """Writes a program, some of whose branches become arithmetic."""

    def __init__(self, program: Program, branches: Set[int]):
        super().__init__(program)
        self._branches = branches

    def _visit(self, op: Op) -> None:
        if op.index in self._branches:
            self._write_branch(op)
        else:
            super()._visit(op)

    def _write_branch(self, op: Op) -> None:
        """Write what a branch reads, what both of its sides compute, and what it writes."""
        given, controls = [self._results[tensor] for tensor in op.inputs], self._controls(op)
        before: _Values = {}
        for handle, (shape, dtype) in dict(_used(op, op.inputs)).items():
            own = self._results[handle]
            node = make_node(self._unused(f"{op.name}/read_{len(before)}"), "ReadVariableOp", [], dtype=dtype)
            before[own] = self._new(node, (own,), [(shape, dtype)], {}, controls)
        after = dict(before)
        results = self._choose(op, op.name, given, after)
        reads = [tensor.op for tensor in given if self._ops[tensor.op].type == "ReadVariableOp"]
        writes: list[int] = []
        for handle, value in after.items():
            if value == before[handle]:
                writes.append(value.op)  # (who changes it later waits until it is read)
                continue
            dtype, name = self._type_of(value), self._unused(f"{op.name}/write_{len(writes)}")
            node = make_node(name, "AssignVariableOp", [], dtype=dtype)
            writes.append(self._new(node, (handle, value), [], {}, (before[handle].op, *controls)).op)
        self._note(op, results, (*writes, *dict.fromkeys(reads)))  # (who changes what it only reads waits, too)

    def _choose(self, op: Op, name: str, given: Sequence[Tensor], state: _Values) -> list[Tensor]:
        """Write both sides of a branch, and which of their results and of the values that they leave counts.

        Args:
          op: the branch.
          name: for what is written.
          given: its operands.
          state: the value of each variable, by handle, which it changes.
        """
        states, results = [], []
        for side, function in zip(("then", "else"), function_names(op.node), strict=True):
            own = dict(state)
            results.append(self._write_side(op.bodies[function], f"{name}/{side}", given[1:], own))
            states.append(own)
        for handle in state:
            this, other = (own[handle] for own in states)
            state[handle] = this if this == other else self._select(f"{name}/chosen", given[0], this, other)
        return [self._select(f"{name}/chosen", given[0], *pair) for pair in zip(*results, strict=True)]

    def _write_side(self, body: Program, name: str, given: Sequence[Tensor], state: _Values) -> list[Tensor]:
        """Write the arithmetic of one side; operations on a variable are in the order in which they have to run."""
        values: _Values = {Tensor(i, 0): tensor for i, tensor in zip(body.inputs, given, strict=True)}
        for op in body.ops:
            inputs = [values[tensor] for tensor in op.inputs]
            result = Tensor(op.index, 0)
            if op.index in body.inputs or op.type == "NoOp":
                continue
            if op.type == "ReadVariableOp":
                values[result] = state[inputs[0]]
            elif op.type == "AssignVariableOp":
                state[inputs[0]] = inputs[1]
            elif op.type in _ADDS:
                operands = (state[inputs[0]], inputs[1])
                state[inputs[0]] = self._plain(_ADDS[op.type], f"{name}/{op.name}", operands, T=True)
            elif op.type in _BRANCHES:
                chosen = self._choose(op, f"{name}/{op.name}", inputs, state)
                values.update({Tensor(op.index, k): tensor for k, tensor in enumerate(chosen)})
            else:
                made = self._append(op, self._unused(f"{name}/{op.name}"), inputs, ())
                values.update({Tensor(op.index, k): Tensor(made.op, k) for k in range(len(op.out_shapes))})
        return [values[tensor] for tensor in body.outputs]


def _used(op: Op, given: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[Shape | None, tf.DType]]]:
    """Yield the handles that a branch reads or writes, each with the shape and type of its variable's value there.

    Args:
      op: the branch.
      given: its operands, outside of all branches.
    """
    for name in function_names(op.node):
        body = op.bodies[name]
        own = {Tensor(i, 0): tensor for i, tensor in zip(body.inputs, given[1:], strict=True)}
        for inner in body.ops:
            if inner.type == "ReadVariableOp":
                yield own[inner.inputs[0]], (inner.out_shapes[0], inner.out_dtypes[0])
            elif inner.type in _WRITES:
                written = inner.inputs[1]
                yield own[inner.inputs[0]], (body.shape(written), body.dtype(written))
            elif inner.type in _BRANCHES:
                yield from _used(inner, [own.get(tensor, tensor) for tensor in inner.inputs])
