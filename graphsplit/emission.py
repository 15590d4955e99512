"""Emission: Plan -> nodes, each with its device. Straight-line: every decision is already in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphsplit import communication, drawing
from graphsplit.collecting import collection_paused
from graphsplit.errors import CheckError
from graphsplit.graphdefs import (
    XLA_ATTRIBUTE,
    GraphDef,
    NodeDef,
    constant_node,
    constant_value,
    function_definition,
    make_node,
    split_reference,
)
from graphsplit.hoisting import named_by_content, rename_functions
from graphsplit.layouts import REPLICATE, Layout, Partial, Replicate, Shard
from graphsplit.plans import Plan
from graphsplit.programs import Op, Tensor
from graphsplit.rules import Sharded


@dataclass(frozen=True, eq=False)
class EmittedGraph:
    """The multi-device graph.

    Attributes:
      nodes: every node with its device; placeholders of arguments and captures included.
      inputs, captures: names of those placeholders.
      outputs: references of the returned tensors.
      effects: names of nodes that must run.
      shard_of: the shard of every node that runs on the shards; home nodes are absent.
    """

    nodes: tuple[Any, ...] = field(repr=False)
    inputs: tuple[str, ...]
    captures: tuple[str, ...]
    outputs: tuple[str, ...]
    effects: tuple[str, ...]
    shard_of: Mapping[str, int] = field(repr=False)
    library: Any = field(repr=False)
    versions: Any = field(repr=False)

    def graph_def(self) -> Any:
        """Return the graph as a `GraphDef`."""
        graph = GraphDef(versions=self.versions, library=self.library)
        graph.node.extend(self.nodes)
        return graph

    def check(self) -> None:
        """Raise `CheckError` unless names are unique, references exist and every node has a device."""
        names = {node.name for node in self.nodes}
        if len(names) != len(self.nodes):
            raise CheckError("Two emitted nodes have the same name.")
        for node in self.nodes:
            if not node.device:
                raise CheckError(f"Emitted node {node.name!r} has no device.")
            for reference in node.input:
                if split_reference(reference.lstrip("^"))[0] not in names:
                    raise CheckError(f"Emitted node {node.name!r} reads {reference!r}, which does not exist.")
        for reference in (*self.outputs, *self.effects, *self.inputs, *self.captures):
            if split_reference(reference)[0] not in names:
                raise CheckError(f"The emitted graph names {reference!r}, which does not exist.")


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

    def __init__(self, plan: Plan, resource_devices: Mapping[str, str], only: int | None = None):
        self.plan = plan
        self.program = plan.program
        self.nodes: list[Any] = []
        self.shard_of: dict[str, int] = {}
        self._resource_devices = resource_devices
        self._resharded: dict[tuple[Tensor, Layout], list[str]] = {}
        self._constants: dict[tuple[int, Layout, int], str] = {}
        self._own_constants: dict[tuple[int, Any, tuple[int, ...], bytes], str] = {}
        self._prefixes = _shard_prefixes(plan)
        self._shards = range(len(plan.devices)) if only is None else [only]
        self._devices = plan.devices if only is None else ("",) * len(plan.devices)
        self.functions: dict[str, Any] = {}

    def emit(self) -> EmittedGraph:
        self._emit_ops()
        ops, steps = self.program.ops, self.plan.steps
        library = GraphDef().library
        library.CopyFrom(self.program.library)
        library.function.extend(self.functions.values())
        return EmittedGraph(
            outputs=tuple(self._read(tensor, REPLICATE) for tensor in self.program.outputs),
            nodes=tuple(self.nodes),
            inputs=tuple(ops[i].name for i in self.program.inputs),
            captures=tuple(ops[i].name for i in self.program.captures),
            effects=tuple(
                name for i in self.program.effects for name in self._names(i) if steps[i].home or steps[i].shards
            ),
            shard_of=self.shard_of,
            library=library,
            versions=self.program.versions,
        )

    def emit_function(self, name: str) -> str:
        """Emit the body for one shard as a function, and return the name its content gives it."""
        self._emit_ops()
        layouts = self.plan.output_layouts or ()
        shard = self._shards[0]
        outputs = [self._read(t, layout, shard) for t, layout in zip(self.program.outputs, layouts, strict=True)]
        inputs = [self.program.ops[i].name for i in self.program.inputs]
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
        inputs = [self._read(tensor, REPLICATE) for tensor in op.inputs]
        controls = [f"^{name}" for c in op.controls for name in self._names(c) if not self._is_argument(c)]
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
        resized = {
            operand: self._own_constant(f"{name}/graphsplit_operand_{operand}", value, dtype, d)
            for operand, value, dtype in self._resized(op, d)
        }
        inputs = [
            resized[i] if i in resized else self._read(tensor, want, d)
            for i, (tensor, want) in enumerate(zip(op.inputs, sharded.wants, strict=True))
        ]
        for c in op.controls:
            if not self._is_argument(c):
                inputs += [
                    f"^{n}" for n in ([prefix + self.program.ops[c].name] if self._is_sharded(c) else self._names(c))
                ]
        if sharded.draw:
            self._draw(op, sharded, inputs, d)
        elif not sharded.rescale:
            node = self._copy(op, name, device, inputs)
            if sharded.bodies:
                self._localise_bodies(node, sharded.bodies, d)
        else:
            share = self.plan.rows[d] / self.plan.batch
            dtype = op.out_dtypes[0]
            factor = self._own_constant(f"{name}/graphsplit_share", np.array(share, dtype.as_numpy_dtype), dtype, d)
            self._copy(op, f"{name}/graphsplit_local", device, inputs)
            self.shard_of[f"{name}/graphsplit_local"] = d
            self.nodes.append(make_node(name, "Mul", [f"{name}/graphsplit_local", factor], device, T=dtype))
        self.shard_of[name] = d

    def _draw(self, op: Op, sharded: Sharded, inputs: list[str], d: int) -> None:
        """Write a random op that draws the numbers of shard `d`."""
        name, layout, draw = self._prefixes[d] + op.name, sharded.gives[0], sharded.draw
        assert isinstance(layout, Shard)
        assert draw is not None
        if self.plan.random == "independent":
            nodes = drawing.own_stream(op.node, name, inputs, draw, d)
        else:
            shape = [size or 0 for size in op.out_shapes[0] or ()]
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
            emitter = _Emitter(plan, {a: device for a, device in zip(arguments, own, strict=True) if device})
            emitted = emitter.emit()
            function = function_definition(name, emitted.nodes, emitted.inputs, emitted.outputs, emitted.effects)
            function = named_by_content(function)
            names[name] = function.signature.name
            self.functions.update(emitter.functions)
            self.functions[function.signature.name] = function
        rename_functions(node, names)

    def _localise_bodies(self, node: Any, bodies: Mapping[str, Plan], d: int) -> None:
        """Let a loop or branch call bodies made for shard `d`. Shards of the same size share them."""
        names = {}
        for name, plan in bodies.items():
            emitter = _Emitter(plan, {}, only=d)
            names[name] = emitter.emit_function(name)
            self.functions.update(emitter.functions)
        rename_functions(node, names)
        if "output_shapes" in node.attr:  # of the whole; TensorFlow infers them again
            del node.attr["output_shapes"].list.shape[:]

    def _is_sharded(self, position: int) -> bool:
        return self.plan.steps[position].shards is not None and not self.plan.steps[position].home

    def _add(self, node: Any, d: int) -> None:
        self.nodes.append(node)
        self.shard_of[node.name] = d

    def _resized(self, op: Op, d: int) -> list[tuple[int, np.ndarray, Any]]:
        """Return the operands that hold the size of a sharded axis, or a place on it, with those of this device."""
        sharded = self.plan.steps[op.index].shards
        assert sharded is not None
        values: dict[int, np.ndarray] = {}
        for operand, position, value, per_row in sharded.resize:
            layout, rows = sharded.gives[0], self.plan.rows[d]
            assert isinstance(layout, Shard)
            own = values.setdefault(operand, np.array(value))
            if position is not None:
                own[position] = layout.size(rows) if per_row is None else per_row * rows
        return [(operand, value, self._dtype(op.inputs[operand])) for operand, value in values.items()]

    def _dtype(self, tensor: Tensor) -> Any:
        return self.program.ops[tensor.op].out_dtypes[tensor.index]

    def _read(self, tensor: Tensor, layout: Layout, d: int | None = None) -> str:
        """Return the reference of `tensor` in `layout`, on device `d` or (None) at home; make it if need be."""
        op, step = self.program.ops[tensor.op], self.plan.steps[tensor.op]
        if self.plan.local and self._is_argument(tensor.op):
            return op.name
        if step.shards and step.shards.gives[tensor.index] == layout and (d is not None or not step.home):
            return _reference(self._prefixes[self._shards[0] if d is None else d] + op.name, tensor.index)
        if op.type == "Const" and d is not None:
            return self._constant(op, layout, d)
        if isinstance(layout, Replicate):
            if step.home:
                return _reference(op.name, tensor.index)
            return self._make_whole(tensor)
        key = (tensor, layout)
        if key not in self._resharded and isinstance(layout, Partial):
            name, dtype = self._communication_name(tensor, "zero_fill"), self._dtype(tensor)
            shape, whole = self.program.shape(tensor), self._read(tensor, REPLICATE)
            nodes, self._resharded[key] = communication.zero_fill(name, whole, shape, dtype, self.plan.devices)
            self.nodes += nodes
        if key not in self._resharded:
            assert isinstance(layout, Shard)
            nodes, references = communication.split(
                self._communication_name(tensor, f"split_{layout.axis}"),
                self._read(tensor, REPLICATE),
                layout,
                self.plan.rows,
                self._dtype(tensor),
                self.plan.home,
                self.plan.devices,
            )
            self.nodes += nodes
            self._resharded[key] = references
        return self._resharded[key][d or 0]

    def _make_whole(self, tensor: Tensor) -> str:
        key = (tensor, REPLICATE)
        if key not in self._resharded:
            step = self.plan.steps[tensor.op]
            assert step.shards is not None
            given = step.shards.gives[tensor.index]
            parts = [self._read(tensor, given, d) for d in range(len(self.plan.devices))]
            dtype, home = self._dtype(tensor), self.plan.home
            if isinstance(given, Partial):
                name = self._communication_name(tensor, "all_reduce")
                nodes, reference = communication.all_reduce(name, parts, given.reduction, dtype, home)
            else:
                assert isinstance(given, Shard)
                name = self._communication_name(tensor, "all_gather")
                nodes, reference = communication.all_gather(
                    name, parts, given, self.plan.rows, dtype, home, self.plan.devices
                )
            self.nodes += nodes
            self._resharded[key] = [reference]
        return self._resharded[key][0]

    def _communication_name(self, tensor: Tensor, kind: str) -> str:
        name = self.program.ops[tensor.op].name
        suffix = f"_{tensor.index}" if tensor.index else ""
        blocks = sum(key[0] == tensor for key in self._resharded)
        return f"graphsplit/{kind}/{name}{suffix}" + (f"_{blocks}" if blocks else "")

    def _constant(self, op: Op, layout: Layout, d: int) -> str:
        """Return device `d`'s own copy, whole or cut, of a constant: constants are re-made, not sent."""
        key = (op.index, layout, d)
        if key not in self._constants:
            cut = f"/{layout.axis}" + "".join(f"_{b}" for b in layout.blocks[:8]) if isinstance(layout, Shard) else ""
            name = f"{self._prefixes[d]}{op.name}{cut}"
            if isinstance(layout, Shard):
                value = _own_rows(constant_value(op.node), layout, self.plan.rows, d)
                self._add(constant_node(name, value, op.out_dtypes[0], self._devices[d]), d)
            else:
                self._copy(op, name, self._devices[d], [])
                self.shard_of[name] = d
            self._constants[key] = name
        return self._constants[key]

    def _own_constant(self, name: str, value: np.ndarray, dtype: Any, d: int) -> str:
        """Return device `d`'s constant of a few numbers: operands of many ops are equal there, and one node."""
        key = (d, dtype, value.shape, value.tobytes())
        if key not in self._own_constants:
            self._add(constant_node(name, value, dtype, self._devices[d]), d)
            self._own_constants[key] = name
        return self._own_constants[key]


def _own_rows(value: np.ndarray, layout: Shard, rows: tuple[int, ...], d: int) -> np.ndarray:
    """Return device `d`'s piece of every block of `value`."""
    if not any(value.strides):  # one number repeated: nothing to pick, and it stays one number
        shape = list(value.shape)
        shape[layout.axis] = layout.size(rows[d])
        return np.broadcast_to(value.reshape(-1)[0], shape)
    chosen, start = [], 0
    for block in layout.pieces(rows):
        first = start + sum(block[:d])
        chosen.append(np.arange(first, first + block[d]))
        start += sum(block)
    return np.take(value, np.concatenate(chosen), layout.axis)


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name


def _shard_prefixes(plan: Plan) -> list[str]:
    """Return a name prefix for each shard that no name of the program begins with."""
    base = "shard"
    while any(op.name.startswith(f"{base}_") for op in plan.program.ops):
        base += "_"
    if plan.local:  # the same name on every shard, so that shards of the same size have the same function
        return [f"{base}_/"] * len(plan.devices)
    return [f"{base}_{d}/" for d in range(len(plan.devices))]
