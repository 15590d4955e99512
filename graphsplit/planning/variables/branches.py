"""Branches that write variables in parts: both sides are computed, and what they write is chosen.

A branch runs once, on one device, with whole variables. An optimizer that scales its loss updates all variables in one
branch, which skips the update if a gradient is not finite. Where such variables lie in parts, or on the host, a branch
becomes arithmetic: each variable is read, each side computes what it would write, and of both, or of that and what was
there, one is written. So each part is chosen and written where it is, as without a branch. (Allen, Kennedy,
Porterfield, Warren 1983: Conversion of control dependence to data dependence.)

Computed is what the step would have skipped, too. So only arithmetic is: nothing that draws, loops or raises errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.protos.graphdefs import make_node
from graphsplit.core.sizes.symbolic_sizes import Shape, has_sizes
from graphsplit.costs.families import family_of
from graphsplit.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.program.program import Op, Program, Tensor

_ARITHMETIC = frozenset({"elementwise", "reduction", "matmul"})
_PLAIN = frozenset(  # others that raise no errors where all shapes are known
    {"BroadcastTo", "ConcatV2", "Const", "ExpandDims", "Fill", "Identity", "IdentityN", "IsFinite", "IsInf", "IsNan"}
    | {"NoOp", "Pack", "PreventGradient", "Reshape", "Squeeze", "StopGradient", "Tile", "Transpose"}
    | {"Unpack"}
)
_ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
_WRITES = {"AssignVariableOp", *_ADDS}
_OPAQUE = frozenset({tf.resource, tf.variant})
_BRANCHES = frozenset({"If", "StatelessIf"})
_Values = dict[Tensor, Tensor]


def without_branches(program: Program, names: Set[str], twins: Set[str]) -> Program:
    """Return a program in which branches that write some variables are arithmetic, where they can be.

    Args:
      program: the function.
      names: of the placeholders of the variables' handles.
      twins: those of handles that are captured twice: what is written by one of them is read by the other.
    """
    handles = {i for i in program.captures if program.ops[i].name in names}
    doubtful = {i for i in program.captures if program.ops[i].name in twins}
    branches = {op.index for op in program.ops if op.type == "If" and _can_be_arithmetic(op, handles, doubtful)}
    return _ArithmeticWriter(program, branches).written() if branches else program


def _can_be_arithmetic(op: Op, handles: Set[int], doubtful: Set[int]) -> bool:
    """Return whether a branch writes a variable of some, and does nothing but arithmetic besides."""
    read = [tensor.op for tensor in op.inputs]
    is_plain = op.stage is None and doubtful.isdisjoint(read) and len({*op.inputs}) == len(read)
    return is_plain and not handles.isdisjoint(read) and _is_arithmetic(op)


def _is_arithmetic(op: Op) -> bool:
    if op.type in _BRANCHES:
        sides = [op.bodies[name] for name in function_names(op.node)]
        shapes = [[body.shape(tensor) for tensor in body.outputs] for body in sides]
        fit = op.in_shapes[0] == () and shapes[0] == shapes[1] and all(map(_is_known, shapes[0]))
        return fit and _OPAQUE.isdisjoint(op.out_dtypes) and all(_is_arithmetic(o) for body in sides for o in body.ops)
    if op.type in (*_WRITES, "ReadVariableOp", "Placeholder"):
        return True
    numbers, known = _OPAQUE.isdisjoint(op.out_dtypes), all(map(_is_known, op.out_shapes))
    may_fail = ("Div" in op.type or "Mod" in op.type) and any(dtype.is_integer for dtype in op.out_dtypes)
    is_plain = op.type in _PLAIN or (family_of(op.type) in _ARITHMETIC and not op.stateful)
    return numbers and known and is_plain and not may_fail and not op.bodies and not op.symbols


def _is_known(shape: Shape | None) -> bool:
    return shape is not None and None not in shape and not has_sizes(shape)


class _ArithmeticWriter(ProgramWriter):
    """Writes a program, some of whose branches become arithmetic."""

    def __init__(self, program: Program, branches: Set[int]):
        super().__init__([op.name for op in program.ops])
        self._program = program
        self._branches = branches
        self._became: dict[int, tuple[int, ...]] = {}  # which operations what waits for one has to wait for
        self._made_of: _Values = {}

    def written(self) -> Program:
        program, kept = self._program, dict[int, int]()
        for op in program.ops:
            if op.index in self._branches:
                with self._serving(op):
                    self._write_branch(op)
                continue
            inputs = [self._made_of[tensor] for tensor in op.inputs]
            made = self._append(op, op.name, inputs, self._controls(op))
            self._made_of.update({Tensor(op.index, k): Tensor(made.op, k) for k in range(len(op.out_shapes))})
            self._became[op.index] = (made.op,)
            kept[op.index] = made.op
        branches = [program.ops[i].name for i in sorted(self._branches)]
        said = [f"both sides of If {name!r} are computed, and what it writes is chosen" for name in branches]
        return replace(
            program,
            ops=tuple(self._ops),
            inputs=tuple([kept[i] for i in program.inputs]),
            captures=tuple([kept[i] for i in program.captures]),
            outputs=tuple([self._made_of[tensor] for tensor in program.outputs]),
            effects=tuple([new for i in program.effects for new in self._became[i]]),
            notes=(*program.notes, *said),
        )

    def _controls(self, op: Op) -> tuple[int, ...]:
        return tuple([new for control in op.controls for new in self._became[control]])

    def _write_branch(self, op: Op) -> None:
        """Write what a branch reads, what both of its sides compute, and what it writes."""
        given, controls = [self._made_of[tensor] for tensor in op.inputs], self._controls(op)
        before: _Values = {}
        for handle, (shape, dtype) in self._variables(op).items():
            own = self._made_of[handle]
            node = make_node(self._unused(f"{op.name}/read_{len(before)}"), "ReadVariableOp", [], dtype=dtype)
            before[own] = self._new(node, (own,), [(shape, dtype)], {}, controls)
        after = dict(before)
        results = self._choose(op, op.name, given, after)
        self._made_of.update({Tensor(op.index, k): result for k, result in enumerate(results)})
        writes: list[int] = []
        for handle, value in after.items():
            if value == before[handle]:
                writes.append(value.op)  # (who changes it later waits until it is read)
                continue
            dtype, name = self._type_of(value), self._unused(f"{op.name}/write_{len(writes)}")
            node = make_node(name, "AssignVariableOp", [], dtype=dtype)
            writes.append(self._new(node, (handle, value), [], {}, (before[handle].op, *controls)).op)
        self._became[op.index] = tuple(writes)

    def _variables(self, op: Op) -> dict[Tensor, tuple[tf.TensorShape, tf.DType]]:
        """Return the variables that a branch reads or writes, by handle, with shapes and types of their values."""
        found: dict[Tensor, tuple[tf.TensorShape, tf.DType]] = {}
        for name in function_names(op.node):
            body = op.bodies[name]
            for handle, value in _values(body, list(op.inputs[CONTROL_FLOW[op.type].chooses :])):
                found.setdefault(handle, value)
        return found

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


def _values(body: Program, given: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[tf.TensorShape, tf.DType]]]:
    """Yield the handles that a side is given and uses, each with the shape and type of its variable's values."""
    own: Mapping[Tensor, Tensor] = {Tensor(i, 0): tensor for i, tensor in zip(body.inputs, given, strict=True)}
    for op in body.ops:
        if op.type == "ReadVariableOp":
            yield own[op.inputs[0]], (op.out_shapes[0], op.out_dtypes[0])
        elif op.type in _WRITES:
            written = op.inputs[1]
            yield own[op.inputs[0]], (body.shape(written), body.ops[written.op].out_dtypes[written.index])
        elif op.type in _BRANCHES:
            inner = [own.get(tensor, tensor) for tensor in op.inputs[1:]]
            for name in function_names(op.node):
                yield from _values(op.bodies[name], inner)
