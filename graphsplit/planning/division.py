"""Variables in parts: a program whose variables are each one becomes one whose variables are several.

A variable that lies on several devices is, for TensorFlow, as many variables. So the captured handle becomes a handle
for each part; what reads and writes the variable, and what arithmetic leads from its value to its next one, becomes an
operation for each part; where somebody else reads the whole value, the parts are put together, and a gradient is taken
apart where it meets them. All else follows from the layouts of one program: each part belongs to its device
(`owners`), so an optimizer's arithmetic runs there and its slots never travel; a gradient that is a partial sum is
reduced part by part, each on its owner (a reduce-scatter); parts that the shards read are sent by their owners and put
together by each reader (an all-gather).

Which operations can be done part by part is what the rules say: those of an axis of the batch hold for any axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.graphdefs import constant_node, constant_value, make_node
from graphsplit.core.layouts import Cut, Partial, Shard
from graphsplit.planning.part_by_part import JOINS, PartByPart
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Sharded


@dataclass(frozen=True)
class Divided:
    """A program whose variables lie in parts.

    Attributes:
      program: the program.
      origins: for each of its captures, which capture of the original it stands for, and which part of it.
      obstacles: captures that must be whole, by placeholder name, and why.
    """

    program: Program
    origins: tuple[tuple[int, int], ...]
    obstacles: Mapping[str, str] = field(default_factory=dict)


def divide(program: Program, cuts: Mapping[str, Cut]) -> Divided:
    """Return a program whose captured variables lie in parts.

    Args:
      program: the function, for variables that are each one.
      cuts: how variables are cut, by the names of their placeholders; one part is a variable that is elsewhere.
    """
    handles = {i: cuts[name] for i in program.captures if (name := program.ops[i].name) in cuts}
    finder = PartByPart(program, handles)
    if finder.obstacles:
        return Divided(program, tuple([(k, 0) for k in range(len(program.captures))]), finder.obstacles)
    return _Writer(program, finder).divided()


class _Writer:
    """Writes the program in parts, in the order of the original."""

    def __init__(self, program: Program, finder: PartByPart):
        self._program = program
        self._finder = finder
        self._ops: list[Op] = []
        self._whole: dict[Tensor, Tensor] = {}
        self._parts: dict[tuple[Tensor, Cut], list[Tensor]] = {}
        self._handles: dict[int, list[Tensor]] = {}
        self._copies: dict[int, list[int]] = {}  # what became of each operation
        self._names = {op.name for op in program.ops}
        self._divides: set[int] = set()

    def divided(self) -> Divided:
        program = self._program
        for op in program.ops:
            if op.index in self._finder.handles:
                self._write_handles(op)
            elif op.index in self._finder.how:
                self._write_parts(op, self._finder.how[op.index])
            else:
                self._write_whole(op)
        captures: list[int] = []
        origins: list[tuple[int, int]] = []
        for k, position in enumerate(program.captures):
            copies = self._copies[position]
            captures += copies
            origins += [(k, part) for part in range(len(copies))]
        outputs = tuple([self._as_whole(tensor) for tensor in program.outputs])
        made = replace(
            program,
            ops=tuple(self._ops),
            inputs=tuple([self._copies[i][0] for i in program.inputs]),
            captures=tuple(captures),
            outputs=outputs,
            effects=tuple([copy for i in program.effects for copy in self._copies[i]]),
            divides=frozenset(self._divides),
        )
        return Divided(made, tuple(origins))

    def _write_handles(self, op: Op) -> None:
        parts = self._finder.handles[op.index].parts
        self._handles[op.index] = [self._append(op, self._name(op, k), (), ()) for k in range(parts)]
        self._copies[op.index] = [tensor.op for tensor in self._handles[op.index]]

    def _write_whole(self, op: Op) -> None:
        inputs = tuple([self._as_whole(tensor) for tensor in op.inputs])
        made = self._append(op, op.name, inputs, self._controls(op, None))
        self._copies[op.index] = [made.op]
        self._whole.update({Tensor(op.index, k): Tensor(made.op, k) for k in range(len(op.out_shapes))})

    def _write_parts(self, op: Op, how: Sharded) -> None:
        base = self._finder.base[op.index]
        made: list[Tensor] = []
        for k in range(base.parts):
            inputs, constants = [], {}
            for i, (tensor, want) in enumerate(zip(op.inputs, how.wants, strict=True)):
                resize = next((resize for resize in how.resize if resize.operand == i), None)
                if tensor.op in self._handles:
                    inputs.append(self._handles[tensor.op][k])
                elif resize is not None:
                    constants[i] = resize.value.copy()
                    constants[i][resize.position] = self._finder.cut[Tensor(op.index, 0)].lengths[k]
                    inputs.append(self._constant(f"{op.name}/size_{i}_{k}", constants[i], self._dtype(tensor)))
                elif isinstance(want, Shard):
                    cut = base.like(want)
                    assert cut is not None
                    inputs.append(self._as_parts(tensor, cut)[k])
                    if i in op.constants:
                        constants[i] = np.take(op.constants[i], _entries(cut, k), cut.axis)
                else:
                    inputs.append(self._as_whole(tensor))
                    if i in op.constants:
                        constants[i] = op.constants[i]
            shapes = [
                _shape(shape, base.like(give), k) for shape, give in zip(op.out_shapes, how.gives or (), strict=True)
            ]
            made.append(self._append(op, self._name(op, k), inputs, self._controls(op, k), shapes, constants))
        self._copies[op.index] = [tensor.op for tensor in made]
        for output, layout in enumerate(how.gives):
            own = [Tensor(tensor.op, output) for tensor in made]
            tensor = Tensor(op.index, output)
            if isinstance(layout, Partial):
                self._whole[tensor] = self._joined(op, output, own, JOINS[layout.reduction])
            else:
                self._parts[tensor, self._finder.cut[tensor]] = own

    def _controls(self, op: Op, part: int | None) -> tuple[int, ...]:
        found: list[int] = []
        for control in op.controls:
            copies = self._copies[control]
            found += copies if part is None or len(copies) <= part else [copies[part]]
        return tuple(found)

    def _as_whole(self, tensor: Tensor) -> Tensor:
        """Return the whole value: put together, once, where it is in parts."""
        if tensor not in self._whole:
            cut = self._finder.cut[tensor]
            op, parts = self._program.ops[tensor.op], self._parts[tensor, cut]
            axis = self._constant(f"{op.name}/axis_{tensor.index}", np.array(cut.axis, np.int32), tf.int32)
            dtype = self._dtype(tensor)
            name = self._unused(f"{op.name}/whole_{tensor.index}")
            self._whole[tensor] = self._made(
                "ConcatV2",
                name,
                [*parts, axis],
                [(self._program.shape(tensor), dtype)],
                {len(parts): np.array(cut.axis, np.int32)},
                N=len(parts),
                T=dtype,
                Tidx=tf.int32,
            )
            self._divides.add(self._whole[tensor].op)
        return self._whole[tensor]

    def _as_parts(self, tensor: Tensor, cut: Cut) -> list[Tensor]:
        """Return the parts of a value: taken apart, once, where it is whole."""
        if (tensor, cut) not in self._parts:
            op, dtype = self._program.ops[tensor.op], self._dtype(tensor)
            if op.type == "Const":
                value = constant_value(op.node)
                found = [
                    self._constant(f"{op.name}/part_{k}", np.take(value, _entries(cut, k), cut.axis), dtype)
                    for k in range(cut.parts)
                ]
            else:
                found = self._taken_apart(self._as_whole(tensor), op.name, cut, self._program.shape(tensor), dtype)
            self._parts[tensor, cut] = found
        return self._parts[tensor, cut]

    def _taken_apart(self, whole: Tensor, name: str, cut: Cut, shape: Any, dtype: tf.DType) -> list[Tensor]:
        sizes, axis = np.array(cut.lengths, np.int64), np.array(cut.axis, np.int32)
        operands = [whole, self._constant(f"{name}/lengths", sizes, tf.int64)]
        operands.append(self._constant(f"{name}/cut_axis", axis, tf.int32))
        made = self._made(
            "SplitV",
            self._unused(f"{name}/parts"),
            operands,
            [(_shape(shape, cut, k), dtype) for k in range(cut.parts)],
            {1: sizes, 2: axis},
            num_split=cut.parts,
            T=dtype,
            Tlen=tf.int64,
        )
        self._divides.add(made.op)
        return [Tensor(made.op, k) for k in range(cut.parts)]

    def _joined(self, op: Op, output: int, parts: Sequence[Tensor], joins: str) -> Tensor:
        shape, dtype = op.out_shapes[output], op.out_dtypes[output]
        if joins == "AddN":
            name = self._unused(f"{op.name}/sum_{output}")
            return self._made("AddN", name, parts, [(shape, dtype)], {}, N=len(parts), T=dtype)
        result = parts[0]
        for k, part in enumerate(parts[1:], 1):
            name = self._unused(f"{op.name}/upto_{output}_{k}")
            result = self._made(joins, name, [result, part], [(shape, dtype)], {}, T=dtype)
        return result

    def _constant(self, name: str, value: np.ndarray, dtype: tf.DType) -> Tensor:
        return self._new(constant_node(self._unused(name), value, dtype), (), [(value.shape, dtype)], {})

    def _made(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[Any, tf.DType]],
        constants: Mapping[int, np.ndarray],
        **attributes: Any,
    ) -> Tensor:
        return self._new(make_node(name, kind, [], **attributes), inputs, results, constants)

    def _new(
        self,
        node: Any,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[Any, tf.DType]],
        constants: Mapping[int, np.ndarray],
    ) -> Tensor:
        """Append an operation that the original lacks, and return its first output."""
        made = Op(
            index=len(self._ops),
            name=node.name,
            type=node.op,
            inputs=tuple(inputs),
            controls=(),
            node=node,
            in_shapes=self._shapes(inputs),
            out_shapes=tuple([shape for shape, _ in results]),
            out_dtypes=tuple([dtype for _, dtype in results]),
            out_bytes=tuple([_bytes(*result) for result in results]),
            constants=constants,
            stateful=False,
        )
        self._ops.append(made)
        return Tensor(made.index, 0)

    def _append(
        self,
        op: Op,
        name: str,
        inputs: Sequence[Tensor],
        controls: Sequence[int],
        shapes: Sequence[Any] | None = None,
        constants: Mapping[int, np.ndarray] | None = None,
    ) -> Tensor:
        """Append an operation of the original under a name, and return its first output."""
        made = replace(op, index=len(self._ops), name=name, inputs=tuple(inputs), controls=tuple(controls))
        if shapes is not None:
            made = replace(
                made,
                in_shapes=self._shapes(inputs),
                out_shapes=tuple(shapes),
                out_bytes=tuple(map(_bytes, shapes, op.out_dtypes)),
                constants=constants or {},
            )
        self._ops.append(made)
        return Tensor(made.index, 0)

    def _shapes(self, inputs: Iterable[Tensor]) -> tuple[Any, ...]:
        return tuple([self._ops[t.op].out_shapes[t.index] for t in inputs])

    def _dtype(self, tensor: Tensor) -> tf.DType:
        return self._program.ops[tensor.op].out_dtypes[tensor.index]

    def _name(self, op: Op, part: int) -> str:
        return self._unused(f"{op.name}/part_{part}")

    def _unused(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


def _entries(cut: Cut, part: int) -> range:
    first = sum(cut.lengths[:part])
    return range(first, first + cut.lengths[part])


def _shape(shape: Any, cut: Cut | None, part: int) -> Any:
    """Return the shape of a part of a tensor; of the whole where it is not cut."""
    if cut is None or shape is None:
        return shape
    return (*shape[: cut.axis], cut.lengths[part], *shape[cut.axis + 1 :])


def _bytes(shape: Any, dtype: tf.DType) -> int:
    return 0 if shape is None or None in shape else math.prod(map(int, shape)) * dtype.size
