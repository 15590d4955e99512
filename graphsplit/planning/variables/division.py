"""Variables in parts: a program whose variables are each one becomes one whose variables are several.

What enters: a program, and which device has which part (or copy) of each variable. What leaves: a program with a handle
for each part, and an operation for each part where that can be.

For TensorFlow, a variable in parts is as many variables. Reads, writes, and the arithmetic from a variable's value to
its next one are done part by part. A reader of the whole value gets the parts gathered, and a gradient is sliced where
it meets them. The rest follows from layouts: each part belongs to its device (`owners`), so an optimizer's arithmetic
runs there and its slots are never sent; a gradient that is a partial sum is reduced part by part, each on its owner (a
reduce-scatter); owners send the parts that the shards read, and each reader concatenates them (an all-gather).

Rules say which operations can be done part by part: what holds for the axis of the batch holds for any axis.

Parts that are used in place (experts) are not gathered. Their handles become one, of which each shard reads its own,
and rules say what follows: a product with a part is computed there, and the rows of all shards are sent.

A variable that is copied stays one in the program, with a handle for each device of a group (`propagation/groups.py`).
If its slots are in parts, so is its update, whose parts are concatenated beside each copy (an all-gather; ZeRO stage
1), and what they take of the variable is sliced from the copy on their device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import (
    Cut,
    EvenCut,
    Layout,
    MeshDivision,
    Partial,
    Replicate,
    Shard,
    copies_of_pieces,
    cut_in,
    group_of,
)
from graphsplit.core.protos import constant_value
from graphsplit.core.sizes import Shape
from graphsplit.planning.variables.gathering import read_again
from graphsplit.planning.variables.laid_variables import READS, WRITES_ROWS, copies_of
from graphsplit.planning.variables.part_by_part import JOINS, PartByPart, part_by_part
from graphsplit.planning.variables.row_writing import begin_of
from graphsplit.planning.variables.staying import is_staying, taken_whole
from graphsplit.planning.variables.whole_writing import WholeWriter, part_shape
from graphsplit.program.graph.graph import reached
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Sharded
from graphsplit.rules.factors import Place
from graphsplit.rules.registry import resized

_MORE = 8  # times as many bytes are read where something shrinks
_OF_TRUTHS = {"LogicalAnd": "All", "LogicalOr": "Any"}
_FEW_PARTS = 3  # are joined one after the other


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


def divide(program: Program, cuts: Mapping[str, MeshDivision], reshard: bool = True) -> Divided:
    """Return a program whose captured variables lie in parts, or are copied.

    Args:
      program: the function, for variables that are each one.
      cuts: how variables are cut or copied, by the names of their placeholders; one part is a variable that is
        elsewhere.
      reshard: whether what is put together is dropped and put together again, where its variable asks for that.
    """
    lying = {i: cuts[name] for i in program.captures if (name := program.ops[i].name) in cuts}
    copies = {i: several for i, division in lying.items() if (several := copies_of(division))}
    copied = {i: copied_layout for i, [copied_layout, *more_copies] in copies.items() if not more_copies}
    whole: dict[int, Shard | Replicate] = {**copied, **{i: cut.in_place for i, cut in lying.items() if is_staying(cut)}}
    parts = {i: cut for i, division in lying.items() if isinstance(cut := cut_in(division), Cut) and i not in whole}
    handles = {i: cut.layout for i, cut in parts.items() if cut.parts > 1}
    if obstacles := taken_whole(program, {**copied, **handles}):
        return Divided(program, tuple([(k, 0) for k in range(len(program.captures))]), obstacles)
    ops = list(program.ops)
    for i in lying.keys() - handles.keys():  # (one part is a variable that is elsewhere)
        ops[i] = replace(ops[i], layout=whole.get(i), devices=lying[i].devices)
    lying_so, finder = replace(program, ops=tuple(ops)), part_by_part(program, handles)
    finder = replace(finder, once=finder.once | _done_once(lying_so))
    again = read_again(program, parts) if reshard else {}
    return _PartsWriter(lying_so, finder, again).divided()


def _done_once(program: Program) -> Set[int]:
    """Return what of updates follows from products of copies with each other: see `part_by_part` of parts."""
    reads = [op for op in program.ops if op.type in READS and op.inputs[0].op in program.copied and op.out_shapes[0]]
    updates = reached([op.index for op in program.ops if op.writes], lambda i: [t.op for t in program.ops[i].inputs])
    in_two = Shard(0, partition=EvenCut(2, ("first", "second")))
    finder = part_by_part(program, dict.fromkeys([op.inputs[0].op for op in reads], in_two)) if reads else None
    return finder.once & updates if finder else set()


class _PartsWriter(WholeWriter):
    """Writes the program in parts, in the order of the original."""

    def __init__(self, program: Program, finder: PartByPart, again: Mapping[int, Sequence[Tensor]]):
        super().__init__(program, finder, again)
        self._handles: dict[int, list[Tensor]] = {}
        self._owners: dict[int, str] = {}  # of what is done once
        self._done = Counter[str]()  # bytes that each of them makes

    def divided(self) -> Divided:
        program = self.write()
        counts = [sum([len(program.ops[k].devices or [k]) for k in self._became[i]]) for i in self._program.captures]
        return Divided(program, tuple([(k, part) for k, count in enumerate(counts) for part in range(count)]))

    def _visit(self, op: Op) -> None:
        if op.index in self._finder.handles:
            self._write_handles(op)
        elif op.index in self._finder.how:
            self._write_parts(op, self._finder.how[op.index])
        elif op.type in WRITES_ROWS and (table := self._program.copied.get(op.inputs[0].op)):
            operands = [self._result(tensor) for tensor in op.inputs]
            self._note(op, (), [self._write_rows_of_copies(op, table, operands, self._controls(op)).op])
        else:
            self._keep(op, [self._as_read(op, tensor) for tensor in op.inputs])
            if op.index in self._finder.once:
                self._lay(self._became[op.index][0], devices=(self._owner_of(op),))

    def _write_handles(self, op: Op) -> None:
        layout = self._finder.handles[op.index]
        group, copies = group_of(layout), copies_of_pieces(layout)
        handles = [self._append(op, self._unused(f"{op.name}/part_{k}"), (), ()) for k in range(len(group))]
        self._handles[op.index] = handles
        self._note(op, (), [handle.op for handle in handles])
        for handle, device in zip(handles, group, strict=True):
            self._lay(handle.op, devices=(device,))
        for handle, copies_of_piece in zip(handles, copies, strict=False):
            self._lay(handle.op, layout=copies_of_piece, devices=copies_of_piece.devices)

    def _owner_of(self, op: Op) -> str:
        """Return the device of what is done once: that of what it follows from, or else the one that does least."""
        owner = next((self._owners[tensor.op] for tensor in op.inputs if tensor.op in self._owners), None)
        if owner is None:
            layouts = [self._finder.cut[tensor] for tensor in op.inputs if tensor in self._finder.cut]
            devices = [device for cut_layout in layouts for device in group_of(cut_layout)]
            devices = devices or [device for copies in self._program.copied.values() for device in copies.devices]
            owner = min(dict.fromkeys(devices), key=lambda device: self._done[device])
        self._done[owner] += sum(op.out_bytes)
        self._owners[op.index] = owner
        for tensor in op.inputs:  # (what else follows from what is put together there is done there)
            if tensor in self._finder.cut:
                self._owners.setdefault(tensor.op, owner)
        return owner

    def _write_parts(self, op: Op, how: Sharded) -> None:
        layout = next(filter(group_of, (*how.wants, *how.gives)))
        written_parts = [self._write_part(op, how, layout, k) for k in range(len(group_of(layout)))]
        self._note(op, (), [tensor.op for tensor in written_parts])
        for output, give in enumerate(how.gives):
            part_results, tensor = [Tensor(part.op, output) for part in written_parts], Tensor(op.index, output)
            if isinstance(give, Shard):
                self._parts[tensor, give] = part_results
            elif isinstance(give, Partial):
                part_results = self._weighted(op, part_results, layout) if give.reduction == "mean" else part_results
                self._results[tensor] = self._joined(op, output, part_results, JOINS[give.reduction])

    def _weighted(self, op: Op, means: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Return each part's mean times its share of the entries. (Sums might overflow, before they are divided.)"""
        assert isinstance(layout, Shard)
        weighted = []
        for k, mean in enumerate(means):
            share = self._number(f"{op.name}/share_{k}", layout.own((), k) / layout.size(0), mean)
            weighted.append(self._plain("Mul", f"{op.name}/weighted_{k}", [mean, share], T=True))
            self._lay(weighted[-1].op, devices=self._ops[mean.op].devices)
        return weighted

    def _write_part(self, op: Op, how: Sharded, layout: Layout, k: int) -> Tensor:
        """Write an operation for part `k` of what lies so, and return its first output."""
        operands = [self._operand(op, how, i, k) for i in range(len(op.inputs))]
        inputs = [tensor for tensor, _ in operands]
        own_rows, controls = self._own_rows(op, how, k, group_of(layout)[k], inputs), self._controls(op, k)
        table = self._ops[inputs[0].op].layout if op.type in WRITES_ROWS else None
        if isinstance(table, Replicate):
            return self._write_rows_of_copies(op, table, inputs, controls)
        pairs = enumerate(zip(operands, inputs, strict=True))
        constants = {i: value for i, ((operand, value), tensor) in pairs if value is not None and tensor == operand}
        shapes = [part_shape(shape, give, k) for shape, give in zip(op.out_shapes, how.gives, strict=True)]
        name = self._unused(f"{op.name}/{'rows' if how.shift else 'part'}_{k}")
        written = self._append(op, name, inputs, controls, shapes, constants)
        self._place(written, layout, k, is_there=bool(how.shift) or self._shrinks(op, how, layout))
        return written if own_rows is None else self._zeros_elsewhere(op, k, own_rows, written)

    def _shrinks(self, op: Op, how: Sharded, layout: Layout) -> bool:
        """Return whether an operation makes much less of parts than they are: it runs there, whoever reads that.

        (What is taken apart may be a partial sum, which is added up where that is best.)
        """
        pairs = zip(op.inputs, how.wants, strict=True)
        tensors_read = [tensor for tensor, want in pairs if isinstance(want, Shard) and tensor.op in self._finder.how]
        least = _MORE * len(group_of(layout)) * sum(op.out_bytes)
        return 0 < least <= sum(map(self._program.bytes, tensors_read)) and not copies_of_pieces(layout)

    def _operand(self, op: Op, how: Sharded, i: int, k: int) -> tuple[Tensor, np.ndarray | None]:
        """Return what part `k` of an operation reads as operand `i`, and its value where that is known."""
        tensor, want, value = op.inputs[i], how.wants[i], op.constants.get(i)
        if tensor.op in self._handles:
            return self._handles[tensor.op][k], None
        if i in how.makes:
            dtype, part_value = self._program.dtype(tensor), resized(op, how, lambda extent: _own(extent, k))[i]
            value = part_value.astype(dtype.as_numpy_dtype)
            return self._constant(f"{op.name}/size_{i}_{k}", value, dtype), value
        if not isinstance(want, Shard):
            return self._result(tensor), value
        value = None if value is None else np.take(value, _entries(want, k), want.axis)
        return self._as_parts(tensor, want)[k], value

    def _place(self, tensor: Tensor, layout: Layout, k: int, *, is_there: bool = False) -> None:
        """Note on which device a part is: where it serves copies as well, or what is done once, or must be there."""
        if is_there or ((self._finder.once or self._program.copied) and not copies_of_pieces(layout)):
            self._lay(tensor.op, devices=(group_of(layout)[k],))

    def _controls(self, op: Op, part: int | None = None) -> tuple[int, ...]:
        waits: list[int] = []
        for control in op.controls:
            copies = self._became[control]
            waits += copies if part is None or len(copies) <= part else [copies[part]]
        return tuple(waits)

    def _as_parts(self, tensor: Tensor, layout: Shard) -> list[Tensor]:
        """Return the parts of a value: taken apart, once, where it is whole."""
        if (tensor, layout) not in self._parts:
            with self._serving(self._program.ops[tensor.op]):
                self._parts[tensor, layout] = self._made_in_parts(tensor, layout)
        return self._parts[tensor, layout]

    def _made_in_parts(self, tensor: Tensor, layout: Shard) -> list[Tensor]:
        op, dtype, group = self._program.ops[tensor.op], self._program.dtype(tensor), group_of(layout)
        if op.type in READS and op.inputs[0].op in self._program.copied:
            return [self._sliced(tensor, layout, k) for k in range(len(group))]
        if op.type != "Const":
            return self._taken_apart(tensor, layout)
        value = constant_value(op.node)
        pieces = [np.take(value, _entries(layout, k), layout.axis) for k in range(len(group))]
        return [self._constant(f"{op.name}/part_{k}", piece, dtype) for k, piece in enumerate(pieces)]

    def _sliced(self, tensor: Tensor, layout: Shard, k: int) -> Tensor:
        """Return a part of a variable with copies, taken from the nearest copy."""
        name, shape, dtype = self._program.ops[tensor.op].name, self._program.shape(tensor), self._program.dtype(tensor)
        size, begin = part_shape(shape, layout, k), np.zeros(len(shape or ()), np.int64)
        begin[layout.axis] = begin_of(layout, k)
        operands = {1: begin, 2: np.array(size, np.int64)}
        constants = [self._constant(f"{name}/slice_{k}_{i}", value, tf.int64) for i, value in operands.items()]
        result, reads, node_name = (
            [(size, dtype)],
            [self._result(tensor), *constants],
            self._unused(f"{name}/slice_{k}"),
        )
        sliced = self._made("Slice", node_name, reads, result, operands, T=dtype, Index=tf.int64)
        self._place(sliced, layout, k)
        return sliced

    def _taken_apart(self, tensor: Tensor, layout: Shard) -> list[Tensor]:
        name, parts = self._program.ops[tensor.op].name, range(len(group_of(layout)))
        shape, dtype = self._program.shape(tensor), self._program.dtype(tensor)
        sizes, axis = np.array([layout.own((), k) for k in parts], np.int64), np.array(layout.axis, np.int32)
        operands = [self._result(tensor), self._constant(f"{name}/lengths", sizes, tf.int64)]
        operands.append(self._constant(f"{name}/cut_axis", axis, tf.int32))
        split = self._made(
            "SplitV",
            self._unused(f"{name}/parts"),
            operands,
            [(part_shape(shape, layout, k), dtype) for k in parts],
            {1: sizes, 2: axis},
            num_split=len(parts),
            T=dtype,
            Tlen=tf.int64,
        )
        self._lay(split.op, divides=True)
        return [Tensor(split.op, k) for k in parts]

    def _joined(self, op: Op, output: int, parts: Sequence[Tensor], kind: str) -> Tensor:
        """Write what the parts of a result that was reduced over the axis that is cut come to."""
        name, dtype = f"{op.name}/joined_{output}", op.out_dtypes[output]
        if kind == "AddN":
            result = [(op.out_shapes[output], dtype)]
            return self._made(kind, self._unused(name), parts, result, {}, N=len(parts), T=dtype)
        if kind in _OF_TRUTHS and len(parts) > _FEW_PARTS:
            return self._all_or_any(name, _OF_TRUTHS[kind], parts, op.out_shapes[output])
        typed = dtype != tf.bool  # (which has operations of its own)
        return functools.reduce(lambda joined, other: self._plain(kind, name, [joined, other], T=typed), parts)

    def _all_or_any(self, name: str, kind: str, parts: Sequence[Tensor], shape: Shape | None) -> Tensor:
        """Write whether all of many truth values are true, or any is: in two operations, however many there are."""
        stacked = None if shape is None else (len(parts), *shape), tf.bool
        packed = self._made(
            "Pack", self._unused(f"{name}/of_all"), parts, [stacked], {}, N=len(parts), T=tf.bool, axis=0
        )
        axis = np.array(0, np.int32)
        operands = [packed, self._constant(f"{name}/axis", axis, tf.int32)]
        return self._made(kind, self._unused(name), operands, [(shape, tf.bool)], {1: axis}, Tidx=tf.int32)


def _own(extent: Shard | Place, part: int) -> int:
    """Return how many entries a part has of an axis that lies so, or where they are."""
    return extent.own((), part) if isinstance(extent, Shard) else begin_of(extent.layout, part + extent.end)


def _entries(layout: Shard, part: int) -> range:
    first = begin_of(layout, part)
    return range(first, first + layout.own((), part))
