"""Emission: Plan -> nodes, each with its device. Straight-line: every decision is already in the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit import communication, drawing, staging
from graphsplit.collecting import collection_paused
from graphsplit.emitted import EmittedGraph
from graphsplit.graphdefs import (
    XLA_ATTRIBUTE,
    GraphDef,
    NodeDef,
    constant_node,
    constant_value,
    function_definition,
    make_node,
)
from graphsplit.hoisting import function_names, hand_over, named_by_content, rename_functions
from graphsplit.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Replicate, Shard
from graphsplit.loop_inputs import bring_loop_inputs
from graphsplit.operands import own_rows, resized
from graphsplit.plans import Plan
from graphsplit.polynomials import Polynomial, Symbol
from graphsplit.programs import SIZES, Op, Tensor
from graphsplit.row_counts import (
    BEGIN,
    FixedRows,
    Measured,
    MeasuredRows,
    RowCounts,
    Site,
    ToldRows,
    measured,
    whole_weights,
)
from graphsplit.rules import Sharded
from graphsplit.sizes import OWN, ROWS
from graphsplit.steps import Pack
from graphsplit.writing import Writer, host_of

_SENT = "sent"  # the whole value as each shard takes it from a pack


@collection_paused()
def emit(plan: Plan, resource_devices: Mapping[str, str] | None = None) -> EmittedGraph:
    """Return the graph that carries out `plan`.

    Args:
      plan: the decisions.
      resource_devices: where captured variables live, by placeholder name. Ops that touch a variable must run where
        it is; home is used for those not named.
    """
    return _Emitter(plan, resource_devices or {}).emit()


class _Emitter:
    """Writes the nodes of a plan; of a body that shards run by themselves, those of one shard (`only`)."""

    def __init__(self, plan: Plan, resource_devices: Mapping[str, str], only: int | None = None, nested: bool = False):
        self.plan = plan
        self.program = plan.program
        self.nodes: list[Any] = []
        self.shard_of: dict[str, int] = {}
        self._resource_devices = resource_devices
        self._resharded: dict[tuple[Tensor, Layout | str], list[str]] = {}
        self._packed: dict[str, dict[Tensor, Pack]] = {"whole values": {}, "all-reduce": {}}
        for pack in plan.packs:
            self._packed[pack.kind].update(dict.fromkeys(pack.tensors, pack))
        self._constants: dict[tuple[int, Layout, int], str] = {}
        self._prefixes = _shard_prefixes(plan)
        self._shards = range(len(plan.devices)) if only is None else [only]
        self._devices = plan.devices if only is None else ("",) * len(plan.devices)
        self.functions: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._told: list[str] = []
        self._own = _unused(plan, "graphsplit")
        self._counts = self._count_rows(only, nested)

    def _count_rows(self, only: int | None, nested: bool) -> RowCounts:
        plan, scope, symbols = self.plan, f"{self._own}/rows", self.program.symbols
        devices = {d: self._devices[d] for d in self._shards}
        self._told_symbols = _told(symbols, only is not None)
        given: dict[Symbol, str] = {}
        if nested:
            self._told = [f"{scope}/given_{k}" for k in range(len(self._told_symbols))]
            given = dict(zip(self._told_symbols, self._told, strict=True))
            self.nodes += [make_node(name, "Placeholder", [], plan.home, dtype=tf.int64) for name in self._told]
        elif symbols:
            writer = Writer(f"{scope}/lengths", host_of(plan.home), self.nodes.append)
            given = {s: measured(writer, self._source(*source)) for s, source in plan.length_sources().items()}
        lengths = {symbol: reference for symbol, reference in given.items() if symbol not in (ROWS, OWN, BEGIN)}
        site = Site(plan.home, devices, scope, self._add, lengths)
        if ROWS not in symbols:
            return FixedRows(plan.rows, site)
        if only is not None:
            return ToldRows(only, given, scope, self._add)
        found = plan.rows_sources()
        names = [self.program.input_names[self.program.inputs.index(i)] for i, *_ in found]
        counted = given[ROWS] if nested else [self._source(*source) for source in found]
        shares = whole_weights(plan.rows)
        return MeasuredRows(counted, names, shares, site)

    def _source(self, position: int, axis: int, each: int = 1) -> Measured:
        op = self.program.ops[position]
        return Measured(op.name, axis, each, op.out_dtypes[0])

    def emit(self) -> EmittedGraph:
        self._emit_ops()
        outputs = tuple(self._read(tensor, REPLICATE) for tensor in self.program.outputs)
        effects = [i for i in self.program.effects if self.plan.steps[i].home or self.plan.steps[i].shards]
        ends = tuple(name for i in effects for name in self._ends(i))  # adds nodes
        staging.move_stages(self.plan, self.nodes, self.shard_of, self._prefixes, self._resource_devices)
        bring_loop_inputs(self.nodes, self.shard_of)
        ops = self.program.ops
        library = GraphDef().library
        library.CopyFrom(self.program.library)
        library.function.extend(self.functions.values())
        return EmittedGraph(
            outputs=outputs,
            nodes=tuple(self.nodes),
            inputs=(*[ops[i].name for i in self.program.inputs], *self._told),
            captures=tuple(ops[i].name for i in self.program.captures),
            effects=ends,
            shard_of=self.shard_of,
            library=library,
            versions=self.program.versions,
            present=tuple(self._counts.present(d) for d in self._shards if self._counts.may_be_absent(d)),
        )

    def emit_function(self, name: str, carries: bool) -> str:
        """Emit a function for one shard, and return the name its content gives it.

        If it `carries` its arguments to the next turn of a loop, it returns what it is told of rows as well.
        """
        self._emit_ops()
        layouts = self.plan.output_layouts or ()
        shard = self._shards[0]
        outputs = [self._read(t, layout, shard) for t, layout in zip(self.program.outputs, layouts, strict=True)]
        inputs = [*[self.program.ops[i].name for i in self.program.inputs], *self._told]
        outputs += self._told if carries else []
        function = function_definition(name, self.nodes, inputs, outputs, ())
        for original in self.program.library.function:
            if original.signature.name == name and XLA_ATTRIBUTE in original.attr:
                function.attr[XLA_ATTRIBUTE].CopyFrom(original.attr[XLA_ATTRIBUTE])
        function = named_by_content(function)
        self.functions[function.signature.name] = function
        return str(function.signature.name)

    def _emit_ops(self) -> None:
        for op, step in zip(self.program.ops, self.plan.steps, strict=True):
            if step.home:
                self._emit_home(op)
            if step.shards:
                for d in self._shards:
                    self._emit_shard(op, d)

    def _names(self, position: int) -> list[str]:
        """Return the names of the nodes that an op became."""
        name = self.program.ops[position].name
        if self.plan.steps[position].home:
            return [name]
        return [self._prefixes[d] + name for d in self._shards]

    def _ends(self, position: int) -> list[str]:
        """Return the names of nodes that have run when all nodes have that an op became, or will not run."""
        names = self._names(position)
        if len(names) == 1 or not any(map(self._counts.may_be_absent, self._shards)):
            return names
        name = f"{self._own}/ended/{self.program.ops[position].name}"
        if name not in self._ended:
            self._ended.add(name)
            controls = [f"^{name}" for name in names]
            self.nodes.append(make_node(name, "ControlTrigger", controls, self.plan.home))  # does not mind the dead
        return [name]

    def _copy(self, op: Op, name: str, device: str, inputs: list[str]) -> Any:
        node = NodeDef()
        node.CopyFrom(op.node)
        node.name = name
        node.device = device
        del node.input[:]
        node.input.extend(inputs)
        if "_class" in node.attr:  # colocation with nodes that have other names now
            del node.attr["_class"]
        self.nodes.append(node)
        return node

    def _emit_home(self, op: Op) -> None:
        if op.type == SIZES:
            self._counts.whole(op.name, _yields(op), op.out_dtypes[0])
            return
        inputs = [self._read(tensor, REPLICATE) for tensor in op.inputs]
        controls = [f"^{name}" for c in op.controls for name in self._ends(c) if not self._is_argument(c)]
        device = self.plan.home
        for tensor in op.inputs:
            device = self._resource_devices.get(self.program.ops[tensor.op].name, device)
        node = self._copy(op, op.name, self._resource_devices.get(op.name, device), inputs + controls)
        if bodies := self.plan.steps[op.index].bodies:
            self._transpile_bodies(op, node, bodies)

    def _is_argument(self, position: int) -> bool:
        return self.program.ops[position].type == "Placeholder"

    def _emit_shard(self, op: Op, d: int) -> None:
        sharded = self.plan.steps[op.index].shards
        assert sharded is not None
        prefix, device = self._prefixes[d], self._devices[d]
        name = prefix + op.name
        inputs = [
            "" if i in sharded.makes else self._read(tensor, want, d)
            for i, (tensor, want) in enumerate(zip(op.inputs, sharded.wants, strict=True))
        ]
        for i, value in resized(op, sharded).items():
            own_name = f"{name}/graphsplit_operand_{i}"
            inputs[i] = self._counts.operand(own_name, d, value, self._dtype(op.inputs[i]))
        for c in op.controls:
            if not self._is_argument(c):
                inputs += [
                    f"^{n}" for n in ([prefix + self.program.ops[c].name] if self._is_sharded(c) else self._ends(c))
                ]
        if sharded.draw:
            self._draw(op, sharded, inputs, d)
        elif not sharded.rescale or len(self.plan.devices) == 1:
            node = self._copy(op, name, device, inputs)
            if sharded.divisor and len(self.plan.devices) > 1:
                node.op = "Sum"
            if sharded.bodies:
                self._localise_bodies(op, node, sharded.bodies, d)
        else:
            dtype = op.out_dtypes[0]
            share = self._counts.share(f"{name}/graphsplit_share", d, dtype)
            self._copy(op, f"{name}/graphsplit_local", device, inputs)
            self.shard_of[f"{name}/graphsplit_local"] = d
            self.nodes.append(make_node(name, "Mul", [f"{name}/graphsplit_local", share], device, T=dtype))
        self.shard_of[name] = d

    def _draw(self, op: Op, sharded: Sharded, inputs: list[str], d: int) -> None:
        """Write a random op that draws the numbers of shard `d`."""
        name, layout, draw = self._prefixes[d] + op.name, sharded.gives[0], sharded.draw
        assert isinstance(layout, Shard)
        assert draw is not None
        shape = [size or 0 for size in op.out_shapes[0] or ()]
        if self.plan.random == "independent":
            nodes = drawing.own_stream(op.node, name, inputs, draw, d)
        elif self.program.symbols:
            each = [Polynomial.of(size) for size in (*shape[1:], layout.blocks[0])]
            place = np.array([math.prod(each, start=Polynomial.of(BEGIN)), None], object)[0:1].reshape(())
            first = self._counts.operand(f"{name}/graphsplit_first", d, place, tf.int64)
            nodes = drawing.measured_rows(op.node, name, inputs, draw, first, self._counts.writers[d])
        else:
            nodes = drawing.own_rows(op.node, name, inputs, shape, layout, draw, self.plan.rows, d)
        for node in nodes:
            node.device = self._devices[d]
            self._add(node, d)

    def _transpile_bodies(self, op: Op, node: Any, bodies: Mapping[str, Plan]) -> None:
        """Let a loop or branch at home call functions whose turns are split over the devices."""
        names = {}
        given = op.inputs if "While" in op.type else op.inputs[1:]
        for name, plan in bodies.items():
            own = [self._resource_devices.get(self.program.ops[tensor.op].name, "") for tensor in given]
            arguments = [plan.program.ops[i].name for i in plan.program.inputs]
            emitter = _Emitter(
                plan, {a: device for a, device in zip(arguments, own, strict=True) if device}, nested=True
            )
            emitted = emitter.emit()
            outputs = [*emitted.outputs, *(emitter._told if _carries(op, name) else [])]
            function = function_definition(name, emitted.nodes, emitted.inputs, outputs, emitted.effects)
            function = named_by_content(function)
            names[name] = function.signature.name
            self.functions.update(emitter.functions)
            self.functions[function.signature.name] = function
        rename_functions(node, names)
        hand_over(node, self._counts.told(None, _told(self.program.symbols, False)))

    def _localise_bodies(self, op: Op, node: Any, bodies: Mapping[str, Plan], d: int) -> None:
        """Let a loop or branch call bodies made for shard `d`. Shards of the same size share them."""
        names = {}
        for name, plan in bodies.items():
            emitter = _Emitter(plan, {}, only=d, nested=True)
            names[name] = emitter.emit_function(name, _carries(op, name))
            self.functions.update(emitter.functions)
        rename_functions(node, names)
        hand_over(node, self._counts.told(d, _told(self.program.symbols, True)))
        if "output_shapes" in node.attr:  # of the whole; TensorFlow infers them again
            del node.attr["output_shapes"].list.shape[:]

    def _is_sharded(self, position: int) -> bool:
        return self.plan.steps[position].shards is not None and not self.plan.steps[position].home

    def _add(self, node: Any, d: int | None) -> None:
        self.nodes.append(node)
        if d is not None:
            self.shard_of[node.name] = d

    def _dtype(self, tensor: Tensor) -> Any:
        return self.program.ops[tensor.op].out_dtypes[tensor.index]

    def _read(self, tensor: Tensor, layout: Layout, d: int | None = None) -> str:
        """Return the reference of `tensor` in `layout`, on device `d` or (None) at home; make it if need be."""
        op, step = self.program.ops[tensor.op], self.plan.steps[tensor.op]
        if self.plan.local and self._is_argument(tensor.op):
            return op.name
        if step.shards and step.shards.gives[tensor.index] == layout and (d is not None or not step.home):
            return _reference(self._prefixes[self._shards[0] if d is None else d] + op.name, tensor.index)
        if d is not None and (op.type == "Const" or (op.is_constant and layout is REPLICATE)):
            return self._constant(op, layout, d)
        if isinstance(layout, Replicate):
            if d is not None and tensor in self._packed["whole values"]:
                return self._unpacked(tensor, d)
            if step.home:
                return _reference(op.name, tensor.index)
            return self._make_whole(tensor)
        key = (tensor, layout)
        if key not in self._resharded and isinstance(layout, Partial):
            name, dtype = self._communication_name(tensor, "zero_fill"), self._dtype(tensor)
            shape, whole = self.program.shape(tensor), self._read(tensor, REPLICATE)
            nodes, self._resharded[key] = communication.zero_fill(
                name, whole, shape, self._counts, dtype, self.plan.home, self.plan.devices
            )
            self.nodes += nodes
        if key not in self._resharded:
            assert isinstance(layout, Shard)
            nodes, references = communication.split(
                self._communication_name(tensor, f"split_{layout.axis}"),
                self._read(tensor, REPLICATE),
                layout,
                self._counts,
                self._dtype(tensor),
                self.plan.home,
                self.plan.devices,
            )
            self.nodes += nodes
            self._resharded[key] = references
        return self._resharded[key][d or 0]

    def _unpacked(self, tensor: Tensor, d: int) -> str:
        """Return the reference on shard `d` of a whole value that is sent together with others."""
        key = (tensor, _SENT)
        if key not in self._resharded:
            name, pack, sizes = self._pack(tensor, "whole values")
            sources = [self._read(t, REPLICATE) for t in pack]
            nodes, references = communication.send_packed(
                name, sources, sizes, self._dtype(tensor), self.plan.home, self.plan.devices
            )
            self.nodes += nodes
            for k, packed in enumerate(pack):
                self._resharded[packed, _SENT] = [own[k] for own in references]
        return self._resharded[key][d]

    def _reduce_packed(self, tensor: Tensor) -> None:
        """Reduce a tensor together with others."""
        name, pack, sizes = self._pack(tensor, "all-reduce")
        parts = [[self._read(t, PARTIAL_SUM, d) for t in pack] for d in range(len(self.plan.devices))]
        nodes, references = communication.reduce_packed(
            name, parts, sizes, self._dtype(tensor), self.plan.home, self.plan.devices
        )
        self.nodes += nodes
        self._resharded.update({(t, REPLICATE): [r] for t, r in zip(pack, references, strict=True)})

    def _pack(self, tensor: Tensor, kind: str) -> tuple[str, Sequence[Tensor], list[int]]:
        """Return a name for a tensor's pack, what is in it, and the size of each."""
        pack = self._packed[kind][tensor]
        name = f"{self._own}/packed/{kind.replace(' ', '_')}_{self.plan.packs.index(pack)}"
        return name, pack.tensors, [self.program.bytes(t) // self._dtype(t).size for t in pack.tensors]

    def _make_whole(self, tensor: Tensor) -> str:
        key = (tensor, REPLICATE)
        if key not in self._resharded and tensor in self._packed["all-reduce"]:
            self._reduce_packed(tensor)
        if key not in self._resharded:
            step = self.plan.steps[tensor.op]
            assert step.shards is not None
            given = step.shards.gives[tensor.index]
            parts = [self._read(tensor, given, d) for d in range(len(self.plan.devices))]
            dtype, home = self._dtype(tensor), self.plan.home
            if isinstance(given, Partial):
                name = self._communication_name(tensor, "all_reduce")
                nodes, reference = communication.all_reduce(
                    name, parts, given.reduction, self._counts, dtype, home, step.shards.divisor
                )
            else:
                assert isinstance(given, Shard)
                name = self._communication_name(tensor, "all_gather")
                nodes, reference = communication.all_gather(
                    name, parts, given, self._counts, dtype, home, self.plan.devices
                )
            self.nodes += nodes
            self._resharded[key] = [reference]
        return self._resharded[key][0]

    def _communication_name(self, tensor: Tensor, kind: str) -> str:
        name = self.program.ops[tensor.op].name
        suffix = f"_{tensor.index}" if tensor.index else ""
        blocks = sum(key[0] == tensor for key in self._resharded)
        return f"{self._own}/{kind}/{name}{suffix}" + (f"_{blocks}" if blocks else "")

    def _constant(self, op: Op, layout: Layout, d: int) -> str:
        """Return device `d`'s own copy, whole or cut, of a constant: constants are re-made, not sent."""
        key = (op.index, layout, d)
        if key not in self._constants:
            cut = f"/{layout.axis}" + "".join(f"_{b}" for b in layout.blocks[:8]) if isinstance(layout, Shard) else ""
            name = f"{self._prefixes[d]}{op.name}{cut}"
            if isinstance(layout, Shard):
                value = own_rows(constant_value(op.node), layout, self.plan.rows, d)
                self._add(constant_node(name, value, op.out_dtypes[0], self._devices[d]), d)
            elif op.type == SIZES:
                name = self._counts.operand(name, d, _yields(op), op.out_dtypes[0])
            else:
                wait = self._counts.waits_for(d)
                self._copy(op, name, self._devices[d], [wait] if wait else [])
                self.shard_of[name] = d
            self._constants[key] = name
        return self._constants[key]


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


def _told(symbols: Sequence[Symbol], on_shard: bool) -> list[Symbol]:
    """Return of which sizes the body of a loop is told, in this order."""
    rows = ([OWN, ROWS, BEGIN] if on_shard else [ROWS]) if ROWS in symbols else []
    return [*rows, *[symbol for symbol in symbols if symbol != ROWS]]


def _yields(op: Op) -> np.ndarray:
    assert op.yields is not None
    return op.yields


def _carries(op: Op, name: str) -> bool:
    """Return whether a function of a control-flow op returns what it is given, for the next turn of a loop."""
    return "While" in op.type and name == function_names(op.node)[1]


def _unused(plan: Plan, base: str) -> str:
    """Return a scope that no operation of the program is in."""
    while any(op.name.startswith(f"{base}/") for op in plan.program.ops):
        base += "_"
    return base


def _shard_prefixes(plan: Plan) -> list[str]:
    """Return a name prefix for each shard that no name of the program begins with."""
    base = "shard"
    while any(op.name.startswith(f"{base}_") for op in plan.program.ops):
        base += "_"
    if plan.local:  # the same name on every shard, so that shards of the same size have the same function
        return [f"{base}_/"] * len(plan.devices)
    return [f"{base}_{d}/" for d in range(len(plan.devices))]
