"""Variables in parts: a program whose variables are each one becomes one whose variables are several.

A variable that lies on several devices is, for TensorFlow, as many variables. So the captured handle becomes a handle
for each part; what reads and writes the variable, and what arithmetic leads from its value to its next one, becomes an
operation for each part; where somebody else reads the whole value, the parts are put together, and a gradient is taken
apart where it meets them. All else follows from the layouts of one program: each part belongs to its device
(`owners`), so an optimizer's arithmetic runs there and its slots never travel; a gradient that is a partial sum is
reduced part by part, each on its owner (a reduce-scatter); parts that the shards read are sent by their owners and put
together by each reader (an all-gather).

Which operations can be done part by part is what the rules say: those of an axis of the batch hold for any axis.

What is used where its parts are (experts) is not put together. The handles of its parts become one, of which each shard
has its own, and rules say where that leads: a product with a part is computed there, and the rows of all shards travel.

A variable that is copied becomes several in the same way, each with the whole value. Every copy is updated by the same
arithmetic. What it takes of a sum over the shards is cut, each part is added up on one device and sent to all (an
all-reduce, as a reduce-scatter and an all-gather). If its slots lie in parts, so does its update, whose parts are sent
to all (an all-gather; ZeRO stage 1). Who reads the variable reads the copy on its own device.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Copied, Cut, Division, EvenCut, Partial, Shard
from graphsplit.core.protos.graphdefs import constant_value
from graphsplit.planning.variables.gathering import Gather, find_gathers
from graphsplit.planning.variables.laid_variables import READS
from graphsplit.planning.variables.part_by_part import JOINS, PartByPart, is_at_hand, part_by_part
from graphsplit.planning.variables.staying import is_staying
from graphsplit.planning.variables.whole_writing import WholeWriter, part_shape
from graphsplit.program.program import COPIES, Op, Program, Tensor
from graphsplit.rules import Sharded
from graphsplit.rules.factors import Place
from graphsplit.rules.registry import resized

NOWHERE: Mapping[str, str] = types.MappingProxyType({})


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


def divide(
    program: Program, cuts: Mapping[str, Division], reshard: bool = True, devices: Mapping[str, str] = NOWHERE
) -> Divided:
    """Return a program whose captured variables lie in parts, or are copied.

    Args:
      program: the function, for variables that are each one.
      cuts: how variables are cut or copied, by the names of their placeholders; one part is a variable that is
        elsewhere.
      reshard: whether what is put together is dropped and put together again, where its variable asks for that.
      devices: of other variables, by the names of their placeholders.
    """
    lying = {i: cuts[name] for i in program.captures if (name := program.ops[i].name) in cuts}
    staying = {i: cut for i, cut in lying.items() if is_staying(cut)}
    handles = {i: cut for i, cut in lying.items() if i not in staying}
    gathers = find_gathers(program, handles) if reshard else ()
    if any(isinstance(cut, Copied) for cut in handles.values()):
        handles = {**_of_one_part(program, lying, devices), **handles}
    finder = part_by_part(program, handles)
    if finder.obstacles:
        return Divided(program, tuple([(k, 0) for k in range(len(program.captures))]), finder.obstacles)
    return _PartsWriter(program, finder, gathers, staying).divided()


def _of_one_part(program: Program, lying: Mapping[int, Division], devices: Mapping[str, str]) -> dict[int, Division]:
    """Return all other variables as of one part each: beside copies, what follows from one is computed once, there."""
    reads = [op for op in program.ops if op.type in READS and op.inputs[0].op in {*program.captures} - lying.keys()]
    shapes = {op.inputs[0].op: op.out_shapes[0] for op in reads}
    found: dict[int, Division] = {}
    for i, shape in shapes.items():
        if shape and isinstance(shape[0], int):
            device = devices.get(program.ops[i].name)
            found[i] = Cut(0, shape[0], 1, reshard=False, devices=(device,) if device else ())
    return found


class _PartsWriter(WholeWriter):
    """Writes the program in parts, in the order of the original."""

    def __init__(self, program: Program, finder: PartByPart, gathers: Sequence[Gather], staying: Mapping[int, Cut]):
        super().__init__(program, finder, gathers)
        self._handles: dict[int, list[Tensor]] = {}
        self._staying = staying
        self._serves_others = bool(finder.once) or any(isinstance(own, Copied) for own in finder.handles.values())
        self._laid: dict[int, Shard] = {}
        self._owners: dict[int, str] = {}  # of what is done once
        self._done = Counter[str]()  # bytes that each of them makes

    def divided(self) -> Divided:
        program = self._program
        for op in program.ops:
            with self._serving(op):
                self._write(op)
        made = self._rewritten(program, self._copies.__getitem__, self._as_whole)
        made = replace(made, divides=frozenset(self._divides), places=self._places, laid=self._laid)
        origins = [(k, part) for k, i in enumerate(program.captures) for part in range(len(self._copies[i]))]
        return Divided(made, tuple(origins))

    def _write(self, op: Op) -> None:
        if op.index in self._staying:
            self._write_staying(op, self._staying[op.index])
        elif op.index in self._finder.handles:
            self._write_handles(op)
        elif op.index in self._finder.how:
            self._write_parts(op, self._finder.how[op.index])
        elif op.index in self._finder.rows:
            self._write_by_rows(op, self._finder.rows[op.index])
        else:
            self._write_whole(op)

    def _write_handles(self, op: Op) -> None:
        division = self._finder.handles[op.index]
        names = [op.name] if division.parts == 1 else [self._name(op, k) for k in range(division.parts)]
        self._handles[op.index] = [self._append(op, name, (), ()) for name in names]
        if division.parts == 1:  # (what takes it otherwise than part by part takes it where it is)
            self._whole[Tensor(op.index, 0)] = self._handles[op.index][0]
        self._place(self._handles[op.index], division)
        self._copies[op.index] = [tensor.op for tensor in self._handles[op.index]]

    def _write_staying(self, op: Op, cut: Cut) -> None:
        handles = [self._append(op, self._name(op, k), (), ()) for k in range(cut.parts)]
        self._places.update({handle.op: device for handle, device in zip(handles, cut.devices, strict=True)})
        self._copies[op.index] = [handle.op for handle in handles]
        result = [(op.out_shapes[0], op.out_dtypes[0])]
        made = self._made(COPIES, self._unused(f"{op.name}/lying"), handles, result, {}, T=op.out_dtypes[0])
        self._laid[made.op], self._whole[Tensor(op.index, 0)] = cut.in_place, made

    def _write_whole(self, op: Op) -> None:
        inputs = tuple([self._as_read(op, tensor) for tensor in op.inputs])
        made = self._append(op, op.name, inputs, self._controls(op, None))
        self._copies[op.index] = [made.op]
        if op.index in self._finder.once:
            self._places[made.op] = self._owner_of(op)
        self._whole.update({Tensor(op.index, k): Tensor(made.op, k) for k in range(len(op.out_shapes))})

    def _owner_of(self, op: Op) -> str:
        """Return the device of what is done once: that of what it follows from, or else the one that does least."""
        owner = next((self._owners[tensor.op] for tensor in op.inputs if tensor.op in self._owners), None)
        if owner is None:
            known = [self._finder.cut.get(tensor) for tensor in op.inputs]
            devices = [device for own in known if own is not None for device in own.devices]
            owner = min(dict.fromkeys(devices), key=lambda device: self._done[device])
        self._done[owner] += sum(op.out_bytes)
        self._owners[op.index] = owner
        return owner

    def _write_by_rows(self, op: Op, table: Division) -> None:
        """Write an operation on rows of a table for each part of it, where that is."""
        first, result = op.inputs[0], Tensor(op.index, 0)
        ids = self._as_whole(op.inputs[1])
        if first.op in self._handles:
            rows, handles = self._as_whole(op.inputs[2]), self._handles[first.op]
            controls = [self._controls(op, k) for k in range(len(handles))]
            if isinstance(table, Copied):
                made = self._write_rows_of_copies(op, handles, ids, rows, controls)
            else:
                made = self._write_rows(op, table, handles, ids, rows, controls)
            self._copies[op.index] = [tensor.op for tensor in made]
            return
        assert isinstance(table, Cut)
        if op.type == "UnsortedSegmentSum":
            made = self._add_up(op, table, self._as_whole(first), ids)
            self._parts[result, table], self._copies[op.index] = made, [tensor.op for tensor in made]
        else:
            self._whole[result] = self._look_up(op, table, self._parts[first, table], ids)
            self._copies[op.index] = [self._whole[result].op]

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
        self._copies[op.index] = [tensor.op for tensor in made]
        self._place(made, base)
        for output, layout in enumerate(how.gives):
            own = [Tensor(tensor.op, output) for tensor in made]
            tensor = Tensor(op.index, output)
            if isinstance(layout, Partial):
                self._whole[tensor] = self._joined(op, output, own, JOINS[layout.reduction])
            else:
                self._parts[tensor, self._finder.cut[tensor]] = own

    def _operand(self, op: Op, how: Sharded, i: int, want: Division | None, k: int) -> tuple[Tensor, np.ndarray | None]:
        """Return what part or copy `k` of an operation reads as operand `i`, and its value where that is known.

        Args:
          op, how, i, k: which.
          want: how the operand is divided; None if it is read whole.
        """
        tensor, base = op.inputs[i], self._finder.base[op.index]
        if tensor.op in self._handles:
            return self._handles[tensor.op][k], None
        has_size = any(resize.operand == i for resize in how.resize)
        if has_size and isinstance(base, Cut):
            rows, dtype = EvenCut(base.length).counts(base.parts), self._program.dtype(tensor)
            made = resized(op, how, lambda extent: _own(extent, rows, k))[i]
            own = made.astype(dtype.as_numpy_dtype)
            return self._constant(f"{op.name}/size_{i}_{k}", own, dtype), own
        value = op.constants.get(i)
        if not has_size and isinstance(how.wants[i], Shard):
            assert want is not None
            if value is not None and isinstance(want, Cut):
                value = np.take(value, _entries(want, k), want.axis)
            return self._as_parts(tensor, want)[k], value
        number = self._finder.cut.get(tensor)
        if isinstance(number, Copied) and isinstance(base, Copied) and number.devices == base.devices:
            return self._as_parts(tensor, number)[k], value
        return self._as_whole(tensor), value

    def _place(self, tensors: Sequence[Tensor], division: Division) -> None:
        """Note on which devices operations run, one for each copy.

        (Parts go where their variable is, unless they serve copies as well, or what is done once.)
        """
        if isinstance(division, Copied) or (self._serves_others and division.devices):
            pairs = zip(tensors, division.devices, strict=True)
            self._places.update({tensor.op: device for tensor, device in pairs})

    def _controls(self, op: Op, part: int | None) -> tuple[int, ...]:
        found: list[int] = []
        for control in op.controls:
            copies = self._copies[control]
            found += copies if part is None or len(copies) <= part else [copies[part]]
        return tuple(found)

    def _as_parts(self, tensor: Tensor, cut: Division) -> list[Tensor]:
        """Return the parts of a value: taken apart, once, where it is whole; or what each copy reads."""
        if (tensor, cut) not in self._parts:
            with self._serving(self._program.ops[tensor.op]):
                self._parts[tensor, cut] = self._made_in_parts(tensor, cut)
        return self._parts[tensor, cut]

    def _made_in_parts(self, tensor: Tensor, cut: Division) -> list[Tensor]:
        op, dtype = self._program.ops[tensor.op], self._program.dtype(tensor)
        if isinstance(cut, Copied):
            return self._for_copies(tensor, cut)
        known = self._finder.cut.get(tensor)
        if isinstance(known, Copied) and is_at_hand(known, cut):
            return self._sliced(tensor, known, cut)
        if op.type != "Const":
            return self._taken_apart(self._as_whole(tensor), op.name, cut, self._program.shape(tensor), dtype)
        value = constant_value(op.node)
        pieces = [np.take(value, _entries(cut, k), cut.axis) for k in range(cut.parts)]
        return [self._constant(f"{op.name}/part_{k}", piece, dtype) for k, piece in enumerate(pieces)]

    def _sliced(self, tensor: Tensor, copied: Copied, cut: Cut) -> list[Tensor]:
        """Return parts of a value that is copied, each taken from the copy on its own device."""
        copies = dict(zip(copied.devices, self._as_parts(tensor, copied), strict=True))
        if cut.parts == 1:
            return [copies[cut.devices[0]]]
        name, shape, dtype = self._program.ops[tensor.op].name, self._program.shape(tensor), self._program.dtype(tensor)
        found: list[Tensor] = []
        for k, device in enumerate(cut.devices):
            size, begin = part_shape(shape, cut, k), np.zeros(len(shape or ()), np.int64)
            begin[cut.axis] = sum(cut.lengths[:k])
            operands = {1: begin, 2: np.array(size, np.int64)}
            constants = [self._constant(f"{name}/slice_{k}_{i}", value, tf.int64) for i, value in operands.items()]
            own = f"{name}/slice_{k}"
            result, reads = [(size, dtype)], [copies[device], *constants]
            found.append(self._made("Slice", self._unused(own), reads, result, operands, T=dtype, Index=tf.int64))
            self._places[found[-1].op] = device
        return found

    def _for_copies(self, tensor: Tensor, copied: Copied) -> list[Tensor]:
        """Return a value on the device of each copy: its parts, or those of a sum, go to all and are put together."""
        op, division = self._program.ops[tensor.op], self._finder.cut.get(tensor)
        if op.is_constant:
            return [self._as_whole(tensor)] * copied.parts
        if isinstance(division, Cut):  # (the weight is copied, and its slots are cut: they make the update in parts)
            parts, axis = self._as_parts(tensor, division), division.axis
        else:
            parts, axis = self._added_up(tensor, copied)
        if len(parts) == 1:
            return parts * copied.parts
        shape, dtype = self._program.shape(tensor), self._program.dtype(tensor)
        names = [f"{op.name}/copy_{k}" for k in range(copied.parts)]
        found = [self._concatenated(name, parts, axis, shape, dtype) for name in names]
        self._place(found, copied)
        return found

    def _added_up(self, tensor: Tensor, copied: Copied) -> tuple[list[Tensor], int]:
        """Return the parts of a value and their axis, each where that part of a sum for all copies is added up."""
        name, whole = self._program.ops[tensor.op].name, self._as_whole(tensor)
        shape, dtype = self._program.shape(tensor), self._program.dtype(tensor)
        sizes = [int(size or 0) for size in shape or () if size is not None]
        cut = copied.cut(sizes) if sizes and len(sizes) == len(shape or ()) else None
        if cut is None or cut.parts == 1:
            return [self._held(f"{name}/sum", whole, shape, dtype, copied.sums[0])], 0
        pieces = enumerate(self._taken_apart(whole, name, cut, shape, dtype))
        held = [
            self._held(f"{name}/sum_{j}", piece, part_shape(shape, cut, j), dtype, copied.sums[j])
            for j, piece in pieces
        ]
        return held, cut.axis

    def _held(self, name: str, tensor: Tensor, shape: Any, dtype: tf.DType, device: str) -> Tensor:
        """Return a value on a device: what is a sum is added up there."""
        made = self._made("Identity", self._unused(name), [tensor], [(shape, dtype)], {}, T=dtype)
        self._places[made.op] = device
        return made

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
        self._divides.add(made.op)
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
