"""Writing programs: operations appended one by one, with shapes and sizes that follow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import constant_node, make_node
from graphsplit.program.program import Op, Program, Provenance, Tensor, is_stateful


class ProgramWriter:
    """Writes a program again: visits its operations in order, and appends them or others, each behind what it reads.

    Args:
      program: the original, which stays as it is.
    """

    def __init__(self, program: Program):
        self._program = program
        self._ops: list[Op] = []
        self._names = {op.name for op in program.ops}
        self._provenance = Provenance()
        self._became: dict[int, Sequence[int]] = {}  # which operations each of the original became
        self._results: dict[Tensor, Tensor] = {}

    def write(self) -> Program:
        """Return the program that is written in place of the original."""
        for op in self._program.ops:
            with self._serving(op):
                self._visit(op)
        return self._written()

    def _visit(self, op: Op) -> None:
        """Write an operation of the original, or what stands for it: by default as it is."""
        self._keep(op, [self._result(tensor) for tensor in op.inputs])

    def _keep(self, op: Op, inputs: Sequence[Tensor]) -> None:
        new_op = self._append(op, op.name, inputs, self._controls(op))
        self._note(op, [Tensor(new_op.op, k) for k in range(len(op.out_shapes))], [new_op.op])

    def _note(self, op: Op, results: Sequence[Tensor], became: Sequence[int]) -> None:
        """Note the results of what was written for an operation, and what waits for it has to wait for."""
        self._became[op.index] = became
        self._results.update({Tensor(op.index, k): result for k, result in enumerate(results)})

    def _result(self, tensor: Tensor) -> Tensor:
        """Return what a tensor of the original became."""
        return self._results[tensor]

    def _controls(self, op: Op) -> tuple[int, ...]:
        return tuple([position for control in op.controls for position in self._became[control]])

    @contextlib.contextmanager
    def _serving(self, op: Op) -> Iterator[None]:
        """Let new operations come from where an operation of the original does for which they are made."""
        provenance_before, self._provenance = self._provenance, op.provenance
        yield
        self._provenance = provenance_before

    def _written(self) -> Program:
        def all_of(positions: Iterable[int]) -> tuple[int, ...]:
            return tuple([position for i in positions for position in self._became[i]])

        program, outputs = self._program, tuple(map(self._result, self._program.outputs))  # (which may be written now)
        inputs, captures, effects = map(all_of, (program.inputs, program.captures, program.effects))
        return replace(
            program, ops=tuple(self._ops), inputs=inputs, captures=captures, outputs=outputs, effects=effects
        )

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
        controls: tuple[int, ...] = (),
    ) -> Tensor:
        """Append an operation that the original lacks, and return its first output."""
        new_op = Op(
            index=len(self._ops),
            name=node.name,
            type=node.op,
            inputs=tuple(inputs),
            controls=controls,
            node=node,
            in_shapes=self._shapes(inputs),
            out_shapes=tuple([shape for shape, _ in results]),
            out_dtypes=tuple([dtype for _, dtype in results]),
            out_bytes=tuple([_bytes(*result) for result in results]),
            constants=constants,
            stateful=is_stateful(node.op),
            provenance=self._provenance,
        )
        self._ops.append(new_op)
        return Tensor(new_op.index, 0)

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
        new_op = replace(op, index=len(self._ops), name=name, inputs=tuple(inputs), controls=tuple(controls))
        if shapes is not None:
            sizes = tuple(map(_bytes, shapes, op.out_dtypes))
            new_op = replace(
                new_op,
                in_shapes=self._shapes(inputs),
                out_shapes=tuple(shapes),
                out_bytes=sizes,
                constants=constants or {},
            )
        self._ops.append(new_op)
        return Tensor(new_op.index, 0)

    def _lay(self, position: int, **fields: Any) -> None:
        """Say of an operation that was appended where it runs, or what it is for: `devices`, `layout`, `divides`."""
        self._ops[position] = replace(self._ops[position], **fields)

    def _shapes(self, inputs: Iterable[Tensor]) -> tuple[Any, ...]:
        return tuple([self._ops[t.op].out_shapes[t.index] for t in inputs])

    def _shape_of(self, tensor: Tensor) -> Any:
        return self._ops[tensor.op].out_shapes[tensor.index]

    def _type_of(self, tensor: Tensor) -> tf.DType:
        return self._ops[tensor.op].out_dtypes[tensor.index]

    def _number(self, name: str, value: float, like: Tensor) -> Tensor:
        dtype = self._type_of(like)
        return self._constant(name, np.array(value, dtype.as_numpy_dtype), dtype)

    def _plain(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Tensor],
        *,
        T: bool = False,  # noqa: N803
        shape: Any = None,
        controls: tuple[int, ...] = (),
    ) -> Tensor:
        """Append arithmetic whose result has the type, and unless another one is given the shape, of the first."""
        dtype = self._type_of(inputs[0])
        node = make_node(self._unused(name), kind, [], **({"T": dtype} if T else {}))
        return self._new(node, inputs, [(self._shape_of(inputs[0]) if shape is None else shape, dtype)], {}, controls)

    def _compared(self, kind: str, name: str, ids: Tensor, bound: int) -> Tensor:
        """Append a comparison with a number."""
        operands = [ids, self._number(f"{name}/bound", bound, ids)]
        result = [(self._shape_of(ids), tf.bool)]
        return self._made(kind, self._unused(name), operands, result, {}, T=self._type_of(ids))

    def _select(self, name: str, which: Tensor, this: Tensor, other: Tensor, shape: Any = None) -> Tensor:
        dtype = self._type_of(this)
        result = [(shape if shape is not None else self._shape_of(this), dtype)]
        return self._made("SelectV2", self._unused(name), [which, this, other], result, {}, T=dtype)

    def _widened(self, name: str, tensor: Tensor, axis: int = -1) -> Tensor:
        """Append an axis of one entry, the last or the first."""
        value, shape = np.array(axis, np.int32), self._shape_of(tensor)
        operands = [tensor, self._constant(f"{name}/axis", value, tf.int32)]
        result, dtype = [((*shape, 1) if axis else (1, *shape), self._type_of(tensor))], self._type_of(tensor)
        return self._made("ExpandDims", self._unused(name), operands, result, {1: value}, T=dtype, Tdim=tf.int32)

    def _reshaped(self, op: Op, tensor: Tensor) -> Tensor:
        """Append a tensor in the shape in which an operation made it."""
        shape, dtype, name = op.out_shapes[0], op.out_dtypes[0], self._unused(f"{op.name}/reshaped")
        to = np.array(shape, np.int32)
        operands = [tensor, self._constant(f"{name}/shape", to, tf.int32)]
        return self._made("Reshape", name, operands, [(shape, dtype)], {1: to}, T=dtype, Tshape=tf.int32)

    def _unused(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


def _bytes(shape: Any, dtype: tf.DType) -> int:
    return 0 if shape is None or None in shape else math.prod(map(int, shape)) * dtype.size
