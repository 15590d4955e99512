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

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import Cut, EvenCut, MeshDivision, Partial, Replicate, Shard, cut_in, in_groups
from graphsplit.core.protos.graphdefs import constant_value
from graphsplit.planning.variables.gathering import Gather, find_gathers
from graphsplit.planning.variables.laid_variables import READS, WRITES_ROWS, copies_of
from graphsplit.planning.variables.part_by_part import JOINS, PartByPart, part_by_part
from graphsplit.planning.variables.staying import is_staying, taken_whole
from graphsplit.planning.variables.whole_writing import WholeWriter, part_shape
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Sharded
from graphsplit.rules.factors import Place
from graphsplit.rules.registry import resized


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
    copies = {i: found for i, own in lying.items() if (found := copies_of(own))}
    copied = {i: own for i, [own, *others] in copies.items() if not others}
    whole: dict[int, Shard | Replicate] = {**copied, **{i: cut.in_place for i, cut in lying.items() if is_staying(cut)}}
    handles = {i: cut for i, own in lying.items() if isinstance(cut := cut_in(own), Cut) and i not in whole}
    gathers = find_gathers(program, handles) if reshard else ()
    finder = part_by_part(program, handles)
    if obstacles := {**taken_whole(program, copied), **finder.obstacles}:
        return Divided(program, tuple([(k, 0) for k in range(len(program.captures))]), obstacles)
    ops = list(program.ops)
    for i in lying.keys() - finder.handles.keys():  # (one part is a variable that is elsewhere)
        ops[i] = replace(ops[i], layout=whole.get(i), devices=tuple(map(canonical_name, lying[i].devices)))
    lying_so = replace(program, ops=tuple(ops))
    finder = replace(finder, once=finder.once | _done_once(lying_so))
    return _PartsWriter(lying_so, finder, gathers).divided()


def _done_once(program: Program) -> Set[int]:
    """Return what follows from products of copies with each other: see `part_by_part` of parts."""
    reads = [op for op in program.ops if op.type in READS and op.inputs[0].op in program.copied and op.out_shapes[0]]
    return part_by_part(program, {op.inputs[0].op: Cut(0, 2, 2) for op in reads}).once if reads else set()


class _PartsWriter(WholeWriter):
    """Writes the program in parts, in the order of the original."""

    def __init__(self, program: Program, finder: PartByPart, gathers: Sequence[Gather]):
        super().__init__(program, finder, gathers)
        self._handles: dict[int, list[Tensor]] = {}
        self._owners: dict[int, str] = {}  # of what is done once
        self._done = Counter[str]()  # bytes that each of them makes

    def divided(self) -> Divided:
        made = self.write()
        counts = [sum([len(made.ops[k].devices or [k]) for k in self._became[i]]) for i in self._program.captures]
        return Divided(made, tuple([(k, part) for k, count in enumerate(counts) for part in range(count)]))

    def _visit(self, op: Op) -> None:
        if op.index in self._finder.handles:
            self._write_handles(op)
        elif op.index in self._finder.how:
            self._write_parts(op, self._finder.how[op.index])
        elif op.index in self._finder.rows:
            self._write_by_rows(op, self._finder.rows[op.index])
        elif op.type in WRITES_ROWS and (table := self._program.copied.get(op.inputs[0].op)):
            operands = [self._result(tensor) for tensor in op.inputs]
            self._note(op, (), [self._write_rows_of_copies(op, table, operands, self._controls(op)).op])
        else:
            self._keep(op, [self._as_read(op, tensor) for tensor in op.inputs])
            if op.index in self._finder.once:
                self._lay(self._became[op.index][0], devices=(self._owner_of(op),))

    def _write_handles(self, op: Op) -> None:
        division = self._finder.handles[op.index]
        handles = [self._append(op, self._name(op, k), (), ()) for k in range(division.parts)]
        self._handles[op.index] = handles
        self._note(op, (), [handle.op for handle in handles])
        for handle, device in zip(handles, division.devices, strict=False):
            self._lay(handle.op, devices=(canonical_name(device),))
        for handle, own in zip(handles, copies_of(in_groups(division)) if division.groups else (), strict=False):
            self._lay(handle.op, layout=own, devices=own.devices)

    def _owner_of(self, op: Op) -> str:
        """Return the device of what is done once: that of what it follows from, or else the one that does least."""
        owner = next((self._owners[tensor.op] for tensor in op.inputs if tensor.op in self._owners), None)
        if owner is None:
            known = [self._finder.cut.get(tensor) for tensor in op.inputs]
            devices = [device for own in known if own is not None for device in own.devices]
            devices = devices or [device for own in self._program.copied.values() for device in own.devices]
            owner = min(dict.fromkeys(devices), key=lambda device: self._done[device])
        self._done[owner] += sum(op.out_bytes)
        self._owners[op.index] = owner
        return owner

    def _write_by_rows(self, op: Op, table: Cut) -> None:
        """Write an operation on rows of a table for each part of it, where that is."""
        first, result = op.inputs[0], Tensor(op.index, 0)
        ids = self._result(op.inputs[1])
        if first.op in self._handles:
            rows, handles = self._result(op.inputs[2]), self._handles[first.op]
            controls = [self._controls(op, k) for k in range(len(handles))]
            made = self._write_rows(op, table, handles, ids, rows, controls)
            self._note(op, (), [tensor.op for tensor in made])
            return
        if op.type == "UnsortedSegmentSum":
            made = self._parts[result, table] = self._add_up(op, table, self._result(first), ids)
            self._note(op, (), [tensor.op for tensor in made])
        else:
            found = self._look_up(op, table, self._parts[first, table], ids)
            self._note(op, [found], [found.op])

    def _write_parts(self, op: Op, how: Sharded) -> None:
        base = self._finder.base[op.index]
        made: list[Tensor] = []
        wants = [base.like(want) if isinstance(want, Shard) else None for want in how.wants]
        gives = [base.like(give) for give in how.gives or ()]
        for k in range(base.parts):
            inputs: list[Tensor] = []
            constants: dict[int, np.ndarray] = {}
            for i, want in enumerate(wants):
                tensor, value = self._operand(op, how, i, want, k)
                inputs.append(tensor)
                constants.update({} if value is None else {i: value})
            shapes = [part_shape(shape, give, k) for shape, give in zip(op.out_shapes, gives, strict=True)]
            made.append(self._append(op, self._name(op, k), inputs, self._controls(op, k), shapes, constants))
        self._note(op, (), [tensor.op for tensor in made])
        self._place(made, base)
        for output, layout in enumerate(how.gives):
            own = [Tensor(tensor.op, output) for tensor in made]
            tensor = Tensor(op.index, output)
            if isinstance(layout, Partial):
                self._results[tensor] = self._joined(op, output, own, JOINS[layout.reduction])
            else:
                self._parts[tensor, self._finder.cut[tensor]] = own

    def _operand(self, op: Op, how: Sharded, i: int, want: Cut | None, k: int) -> tuple[Tensor, np.ndarray | None]:
        """Return what part `k` of an operation reads as operand `i`, and its value where that is known.

        Args:
          op, how, i, k: which.
          want: how the operand is divided; None if it is read whole.
        """
        tensor, base = op.inputs[i], self._finder.base[op.index]
        if tensor.op in self._handles:
            return self._handles[tensor.op][k], None
        has_size = any(resize.operand == i for resize in how.resize)
        if has_size:
            rows, dtype = EvenCut(base.length).counts(base.parts), self._program.dtype(tensor)
            made = resized(op, how, lambda extent: _own(extent, rows, k))[i]
            own = made.astype(dtype.as_numpy_dtype)
            return self._constant(f"{op.name}/size_{i}_{k}", own, dtype), own
        value = op.constants.get(i)
        if isinstance(how.wants[i], Shard):
            assert want is not None
            if value is not None:
                value = np.take(value, _entries(want, k), want.axis)
            return self._as_parts(tensor, want)[k], value
        return self._result(tensor), value

    def _place(self, tensors: Sequence[Tensor], division: Cut) -> None:
        """Note on which devices parts are, where they serve copies as well, or what is done once."""
        if (self._finder.once or self._program.copied) and division.devices and not division.groups:
            for tensor, device in zip(tensors, division.devices, strict=True):
                self._lay(tensor.op, devices=(device,))

    def _controls(self, op: Op, part: int | None = None) -> tuple[int, ...]:
        found: list[int] = []
        for control in op.controls:
            copies = self._became[control]
            found += copies if part is None or len(copies) <= part else [copies[part]]
        return tuple(found)

    def _as_parts(self, tensor: Tensor, cut: Cut) -> list[Tensor]:
        """Return the parts of a value: taken apart, once, where it is whole."""
        if (tensor, cut) not in self._parts:
            with self._serving(self._program.ops[tensor.op]):
                self._parts[tensor, cut] = self._made_in_parts(tensor, cut)
        return self._parts[tensor, cut]

    def _made_in_parts(self, tensor: Tensor, cut: Cut) -> list[Tensor]:
        op, dtype = self._program.ops[tensor.op], self._program.dtype(tensor)
        if op.type in READS and op.inputs[0].op in self._program.copied and cut.devices:
            return self._sliced(tensor, cut)
        if op.type != "Const":
            return self._taken_apart(self._result(tensor), op.name, cut, self._program.shape(tensor), dtype)
        value = constant_value(op.node)
        pieces = [np.take(value, _entries(cut, k), cut.axis) for k in range(cut.parts)]
        return [self._constant(f"{op.name}/part_{k}", piece, dtype) for k, piece in enumerate(pieces)]

    def _sliced(self, tensor: Tensor, cut: Cut) -> list[Tensor]:
        """Return parts of a variable with copies, each taken from the nearest copy."""
        name, shape, dtype = self._program.ops[tensor.op].name, self._program.shape(tensor), self._program.dtype(tensor)
        whole, found = self._result(tensor), list[Tensor]()
        for k in range(cut.parts):
            size, begin = part_shape(shape, cut, k), np.zeros(len(shape or ()), np.int64)
            begin[cut.axis] = sum(cut.lengths[:k])
            operands = {1: begin, 2: np.array(size, np.int64)}
            constants = [self._constant(f"{name}/slice_{k}_{i}", value, tf.int64) for i, value in operands.items()]
            result, reads, own = [(size, dtype)], [whole, *constants], self._unused(f"{name}/slice_{k}")
            found.append(self._made("Slice", own, reads, result, operands, T=dtype, Index=tf.int64))
        self._place(found, cut)
        return found

    def _taken_apart(self, whole: Tensor, name: str, cut: Cut, shape: Any, dtype: tf.DType) -> list[Tensor]:
        if cut.parts == 1:
            return [whole]
        sizes, axis = np.array(cut.lengths, np.int64), np.array(cut.axis, np.int32)
        operands = [whole, self._constant(f"{name}/lengths", sizes, tf.int64)]
        operands.append(self._constant(f"{name}/cut_axis", axis, tf.int32))
        made = self._made(
            "SplitV",
            self._unused(f"{name}/parts"),
            operands,
            [(part_shape(shape, cut, k), dtype) for k in range(cut.parts)],
            {1: sizes, 2: axis},
            num_split=cut.parts,
            T=dtype,
            Tlen=tf.int64,
        )
        self._lay(made.op, divides=True)
        return [Tensor(made.op, k) for k in range(cut.parts)]

    def _joined(self, op: Op, output: int, parts: Sequence[Tensor], joins: str) -> Tensor:
        shape, dtype = op.out_shapes[output], op.out_dtypes[output]
        if len(parts) == 1:
            return parts[0]
        if joins == "AddN":
            name = self._unused(f"{op.name}/sum_{output}")
            return self._made("AddN", name, parts, [(shape, dtype)], {}, N=len(parts), T=dtype)
        result = parts[0]
        for k, part in enumerate(parts[1:], 1):
            name = self._unused(f"{op.name}/upto_{output}_{k}")
            result = self._made(joins, name, [result, part], [(shape, dtype)], {}, T=dtype)
        return result

    def _name(self, op: Op, part: int) -> str:
        return self._unused(f"{op.name}/part_{part}")


def _own(extent: Shard | Place, rows: Sequence[int], part: int) -> int:
    """Return how many entries a part has of an axis that lies so, or where they are."""
    if isinstance(extent, Shard):
        return extent.own(rows, part)
    return sum(extent.layout.own(rows, before) for before in range(part + extent.end))


def _entries(cut: Cut, part: int) -> range:
    first = sum(cut.lengths[:part])
    return range(first, first + cut.lengths[part])
