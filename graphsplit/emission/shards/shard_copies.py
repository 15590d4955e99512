"""A shard's copy of an operation: its operands resized, its numbers drawn, the functions that it calls its own.

Of constants every device makes its own, whole or its piece, instead of being sent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_MEAN, Layout, Shard
from graphsplit.core.polynomials import Polynomial, Symbol, as_entries
from graphsplit.core.protos import NodeWriter, constant_node, constant_value, copied, make_node
from graphsplit.core.sizes import OWN, ROWS
from graphsplit.emission.emitted_graph import Draft, Origin
from graphsplit.emission.shards import random_numbers
from graphsplit.emission.shards.row_counts import BEGIN, RowCounts
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Places
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import SIZES, Op
from graphsplit.rules import Sharded
from graphsplit.rules.factors import DROPPED, LEFT_OUT, LIST, ZEROS, Place, Shift
from graphsplit.rules.families.random import PartDrawn, note_part, part_drawn
from graphsplit.rules.registry import resized

_PART = "part"
CallBodies = Callable[[Op, Any, Mapping[str, Any], int], None]
_RESOURCE = tf.resource.as_datatype_enum


class ShardCopies:
    """Writes copies of operations.

    Args:
      draft: what is written.
      counts: how many rows each shard has.
      places: of the shards.
      call_bodies: lets a loop or branch, its node, call functions made for a shard by plans, by name: see `emitter`.
    """

    def __init__(self, draft: Draft, counts: RowCounts, places: Places, call_bodies: CallBodies):
        self._draft = draft
        self._counts = counts
        self._places = places
        self._mesh = places.mesh
        self._call_bodies = call_bodies
        self._plain: dict[int, bool] = {}

    def write(self, op: Op, sharded: Sharded, d: int, device: str, data: Sequence[str], controls: Sequence[str]) -> Any:
        """Write the copy of an operation for shard `d`, and return its node.

        Args:
          op, sharded: the operation, and how it runs on the shards.
          device: where.
          data: what it reads; "" for operands that the shard makes for itself.
          controls: what it waits for, `^node`.
        """
        name = self._draft.prefixes[d] + op.name
        if op.index not in self._plain:
            self._plain[op.index] = self._is_plain(op, sharded)
        if self._plain[op.index]:
            return self._draft.write_op(op, name, device, [*data, *controls], d)
        inputs = list(data)
        for i, value in resized(op, sharded, lambda extent: self._extent(extent, d)).items():
            inputs[i] = self._counts.operand(
                f"{name}/{self._draft.helper}operand_{i}", d, value, self._draft.program.dtype(op.inputs[i])
            )
        are_own = ""
        for i, shift in sharded.shift.items():
            inputs[i], are_own = self._shifted(op, i, shift, inputs[i], d, device)
        inputs += controls
        if are_own and op.out_shapes:
            return self._zeros_elsewhere(op, inputs, are_own, d, device)
        if are_own:
            inputs[1:3] = self._own_rows(op, inputs, are_own, d, device)
        if sharded.draw or part_drawn(op.node) is not None:
            return self._random_copy(op, sharded, inputs, d, device)
        if sharded.weighted and self._mesh.shards > 1:
            return self._weighted(op, sharded, inputs, d, device)
        node = self._draft.write_op(op, name, device, inputs, d)
        if PARTIAL_MEAN in sharded.gives and self._mesh.shards > 1:
            node.op = "Sum"  # what they add up to is divided once
        if op.type == "TensorListStack" and isinstance(rows := sharded.wants[0], Shard) and rows.axis == LIST:
            node.attr["num_elements"].i = -1  # as many as the shard has rows
        if op.type in CONTROL_FLOW:
            if sharded.bodies:  # else it runs as it is, on whole values that each shard has
                self._localise_bodies(op, node, sharded, d)
            bring_loop_inputs(node, self._draft, self._places.passed(op, d, device)[0])
        return node

    def _is_plain(self, op: Op, sharded: Sharded) -> bool:
        """Return whether a shard runs an operation as it is."""
        changed = sharded.resize or sharded.shift or sharded.draw or sharded.weighted or PARTIAL_MEAN in sharded.gives
        return not (changed or op.type in (*CONTROL_FLOW, "TensorListStack") or part_drawn(op.node))

    def _extent(self, extent: Shard | Place, d: int) -> Polynomial:
        if isinstance(extent, Shard):
            return self._counts.own(extent, d)
        first = self._counts.before(extent.layout, d)
        return Polynomial.of(first + self._counts.own(extent.layout, d)) if extent.end else first

    def _writer(self, op: Op, word: str, d: int, device: str, role: str = _PART) -> NodeWriter:
        """Return what writes nodes beside shard `d`'s copy of an operation."""
        scope = f"{self._draft.prefixes[d]}{op.name}/{self._draft.helper}{word}"

        def add(node: Any) -> None:
            self._draft.add(node, Origin(op.index, d, _PART if node.op == "Const" else role))

        return NodeWriter(scope, device, add)

    def _shifted(self, op: Op, operand: int, shift: Shift, source: str, d: int, device: str) -> tuple[str, str]:
        """Return a shard's numbers of its own rows, given those that these rows have in the whole.

        And, if what is made for numbers of others' rows has to be replaced, which numbers are its own.
        """
        w, dtype = self._writer(op, f"own_{operand}", d, device, "shift"), self._draft.program.dtype(op.inputs[operand])

        def number(word: str, value: Any) -> str:
            return self._counts.operand(f"{w.scope}/{word}", d, as_entries(value), dtype)

        begin = self._counts.before(shift.layout, d)
        place = [begin, *[Polynomial.of(0)] * (shift.columns - 1)] if shift.columns else begin
        local = w("Sub", source, number("before", place), T=dtype)
        if shift.others not in (DROPPED, LEFT_OUT, ZEROS):
            return local, ""
        own_length, end = self._counts.own(shift.layout, d), Polynomial.of(shift.layout.size(0))
        # numbers of no shard's are the first one's
        low, high = (begin, begin + own_length) if d else (own_length, end)
        at_least = w("GreaterEqual", source, number("from", low), T=dtype)
        between = w("LogicalAnd", at_least, w("Less", source, number("upto", high), T=dtype))
        is_own = between if d else w("LogicalNot", between)
        if shift.others == LEFT_OUT:
            return local, is_own
        instead = number("other", -1 if shift.others == DROPPED else 0)
        safe = w("SelectV2", is_own, local, instead, T=dtype)
        return safe, is_own if shift.others == ZEROS else ""

    def _zeros_elsewhere(self, op: Op, inputs: Sequence[str], are_own: str, d: int, device: str) -> Any:
        """Write a gather whose result is zero wherever its indices are not the shard's own."""
        name, dtype, w = self._draft.prefixes[d] + op.name, op.out_dtypes[0], self._writer(op, "zeros", d, device)
        gathered = self._draft.write_op(op, f"{name}/{self._draft.helper}found", device, inputs, d, _PART)
        behind = len(op.in_shapes[0] or ()) - 1 - int(op.constants[2]) % len(op.in_shapes[0] or ())
        for _ in range(behind):
            are_own = w("ExpandDims", are_own, w.constant(-1, tf.int32), T=tf.bool, Tdim=tf.int32)
        node = make_node(name, "SelectV2", [are_own, gathered.name, w.constant(0, dtype)], device, T=dtype)
        self._draft.add(node, Origin(op.index, d, "op"))
        return node

    def _own_rows(self, op: Op, inputs: Sequence[str], are_own: str, d: int, device: str) -> list[str]:
        """Write the numbers of a shard's own rows, and what is written there: as many as those are."""
        w = self._writer(op, "rows", d, device, "shift")
        operands, types = [are_own, *inputs[1:3]], [tf.bool, *map(self._draft.program.dtype, op.inputs[1:3])]
        if not op.in_shapes[1]:  # (`Where` takes no single number)
            pairs = zip(operands, types, strict=True)
            operands = [
                w("ExpandDims", operand, w.constant(0, tf.int32), T=dtype, Tdim=tf.int32) for operand, dtype in pairs
            ]
        which, rows = w("Where", operands[0], T=tf.bool), zip(operands[1:], types[1:], strict=True)
        return [w("GatherNd", source, which, Tparams=dtype, Tindices=tf.int64) for source, dtype in rows]

    def _weighted(self, op: Op, sharded: Sharded, inputs: Sequence[str], d: int, device: str) -> Any:
        """Write the mean of a shard's own rows times its share of all rows."""
        name, dtype = self._draft.prefixes[d] + op.name, op.out_dtypes[0]
        averaged = sharded.wants[0]
        assert isinstance(averaged, Shard)
        share = self._counts.share(f"{name}/{self._draft.helper}share", d, dtype, averaged)
        local = self._draft.write_op(op, f"{name}/{self._draft.helper}local", device, inputs, d, _PART)
        node = make_node(name, "Mul", [local.name, share], device, T=dtype)
        self._draft.add(node, Origin(op.index, d, "op"))
        return node

    def _random_copy(self, op: Op, sharded: Sharded, inputs: Sequence[str], d: int, device: str) -> Any:
        """Write shard `d`'s copy of a random op; return the node that has its numbers.

        They are those that one device would draw for these rows: known ones, or measured when it runs. Along another
        axis than the batch's it is only noted which these are.
        """
        name, layout = self._draft.prefixes[d] + op.name, sharded.gives[0]
        draw = sharded.draw if part_drawn(op.node) is None else None  # (a part has the numbers of one device)
        if self._mesh.axis:  # (the plan of the rows, which is made later, draws them)
            assert isinstance(layout, Shard)
            nodes = [copied(op.node, name, inputs)]
            begin = sum([layout.own(self._mesh.rows, k) for k in range(d)])
            note_part(nodes[0], PartDrawn(layout.axis, begin, layout.size(0)))
        elif draw and self._draft.program.symbols:
            assert isinstance(layout, Shard)
            shape = [size or 0 for size in op.out_shapes[0] or ()]
            sizes = [Polynomial.of(size) for size in (*shape[1:], layout.blocks[0])]
            number = as_entries(math.prod(sizes, start=Polynomial.of(BEGIN)))
            first = self._counts.operand(f"{name}/{self._draft.helper}first", d, number, tf.int64)
            nodes = random_numbers.measured_rows(op.node, name, inputs, draw, first, self._counts.writers[d])
        else:
            rows = None
            if isinstance(layout, Shard):
                [counts] = layout.pieces(self._mesh.rows)
                rows = range(sum(counts[:d]), sum(counts[: d + 1]))
            nodes = random_numbers.own_numbers(op, name, inputs, rows)
        for node in nodes:
            node.device = device
            self._draft.add(node, Origin(op.index, d, "op" if node.name == name else _PART))
        return nodes[-1]

    def _localise_bodies(self, op: Op, node: Any, sharded: Sharded, d: int) -> None:
        """Let a loop or branch call bodies made for shard `d`. Shards of the same size share them."""
        plans = sharded.bodies
        if self._places.of_stage(op) and self._mesh.columns:
            apart = self._places.within(op).mesh.apart()
            plans = {name: replace(plan, mesh=apart) for name, plan in plans.items()}
        self._call_bodies(op, node, plans, d)
        if "output_shapes" in node.attr:  # of the whole; TensorFlow infers them again
            del node.attr["output_shapes"].list.shape[:]
            if self._mesh.axis:  # (or they are told: sizes are known along it)
                shapes = [self._mesh.shape_on(d, *pair) for pair in zip(op.out_shapes, sharded.gives, strict=True)]
                node.attr["output_shapes"].list.shape.extend([tf.TensorShape(shape).as_proto() for shape in shapes])


def told_sizes(symbols: Sequence[Symbol], *, on_shard: bool) -> list[Symbol]:
    """Return of which sizes the body of a loop is told, in this order."""
    rows = ([OWN, ROWS, BEGIN] if on_shard else [ROWS]) if ROWS in symbols else []
    return [*rows, *[symbol for symbol in symbols if symbol != ROWS]]


def write_told(draft: Draft, d: int | None, device: str) -> dict[Symbol, str]:
    """Write placeholders for the sizes that a loop tells its body, of shard `d` or once; return their names."""
    symbols = told_sizes(draft.program.symbols, on_shard=d is not None)
    size_arguments = {symbol: f"{draft.scope}/rows/given_{k}" for k, symbol in enumerate(symbols)}
    for name in size_arguments.values():
        draft.add_sizes(make_node(name, "Placeholder", [], device, dtype=tf.int64), d)
    return size_arguments


def write_sizes(draft: Draft, counts: RowCounts, op: Op, name: str, d: int | None) -> None:
    """Write integers that follow from sizes, which a program has as an operation, for shard `d` or once."""
    assert op.yields is not None
    source = counts.operand(f"{name}/{draft.helper}value", d, op.yields, op.out_dtypes[0])
    device = (counts.once if d is None else counts.writers[d]).device
    draft.add(make_node(name, "Identity", [source], device, T=op.out_dtypes[0]), Origin(op.index, d, "op"))


def carries(op: Op, name: str) -> bool:
    """Return whether a function of a control-flow op returns what it is given, for the next iteration."""
    return CONTROL_FLOW[op.type].loops and name == function_names(op.node)[1]


def bring_loop_inputs(node: Any, draft: Draft, devices: Sequence[str]) -> None:
    """Let a loop or branch, written last, read copies on the devices of its values of what is made elsewhere.

    TensorFlow turns a loop into `Enter`, `Switch`, `Merge` and `NextIteration` nodes, and puts those of each loop
    variable on the device that its first value comes from. A variable that came from elsewhere, be it only weights read
    on the default device, would travel there and back in every iteration.

    Args:
      node: the loop or branch; it is changed.
      draft: takes the copies, which belong to whom their reader belongs to.
      devices: of its values; what it is given besides is where it is itself.
    """
    flow, origin = CONTROL_FLOW[node.op], draft.origins[node.name]
    types_and_devices = zip_longest(node.attr[flow.types].list.type, devices, fillvalue=node.device)
    for i, (dtype, device) in enumerate(types_and_devices, int(flow.chooses)):
        if draft.device_of(node.input[i]) == device or dtype == _RESOURCE:
            continue
        name = f"{node.name}/{draft.helper}input_{i}"
        copy = make_node(name, "Identity", [node.input[i]], device, T=tf.as_dtype(dtype))
        draft.add(copy, origin._replace(role="part"))
        node.input[i] = name


_ROLE = "constant"


class Constants:
    """The constants that have been written, by device."""

    def __init__(self, draft: Draft, counts: RowCounts, mesh: Mesh):
        self._draft = draft
        self._counts = counts
        self._mesh = mesh
        self._made: dict[tuple[int, Layout | None, int | None, str], str] = {}
        self._first: dict[str, int] = {}
        self._copies: dict[tuple[int, int | None], int] = {}

    def get(self, op: Op, layout: Layout, d: int | None, device: str) -> str:
        """Return the reference of a constant on a device, for shard `d` or (None) for what runs once; make it once."""
        cut = layout if isinstance(layout, Shard) else None
        if d is not None and cut is None and op.type == "Const" and not self._counts.presence_control(d):
            d = self._first.setdefault(device, d)  # shards of one device share what is the same for all
        key = (op.index, cut, d, device)
        if key not in self._made:
            self._made[key] = self._make(op, cut, d, device)
        return self._made[key]

    def _make(self, op: Op, cut: Shard | None, d: int | None, device: str) -> str:
        name, origin = self._name(op, cut, d), Origin(op.index, d, _ROLE)
        if cut is not None:
            assert d is not None
            value = own_rows(constant_value(op.node), cut, self._mesh.rows, d)
            self._draft.add(constant_node(name, value, op.out_dtypes[0], device), origin)
        elif op.type == SIZES:
            assert op.yields is not None
            return self._counts.operand(name, d, op.yields, op.out_dtypes[0])
        else:
            wait = "" if d is None else self._counts.presence_control(d)
            self._draft.write_op(op, name, device, [wait] if wait else [], d, _ROLE)
        return name

    def _name(self, op: Op, cut: Shard | None, d: int | None) -> str:
        number = self._copies[op.index, d] = self._copies.get((op.index, d), -1) + 1
        if d is None:
            return f"{self._draft.scope}/constant_{number}/{op.name}"
        return self._draft.prefixes[d] + op.name + (f"/{'slice' if cut else 'copy'}_{number}" if cut or number else "")


def own_rows(value: np.ndarray, layout: Shard, rows: tuple[int, ...], d: int) -> np.ndarray:
    """Return shard `d`'s piece of every block of `value`."""
    pieces = layout.pieces(rows)
    if value.size and not any(value.strides):  # one number repeated: nothing to pick, and it stays one number
        shape = list(value.shape)
        shape[layout.axis] = sum(block[d] for block in pieces)
        return np.broadcast_to(value.reshape(-1)[0], shape)
    chosen, start = [], 0
    for block in pieces:
        first = start + sum(block[:d])
        chosen.append(np.arange(first, first + block[d]))
        start += sum(block)
    return np.take(value, np.concatenate(chosen), layout.axis)
