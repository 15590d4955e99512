"""Emission: Plan -> nodes, each with its device. Straight-line: every decision is already in the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.function_calls import function_names, hand_over, named_by_content, rename_functions
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.graphdefs import XLA_ATTRIBUTE, GraphDef, function_definition, make_node
from graphsplit.core.layouts import REPLICATE, Shard
from graphsplit.core.node_writer import Writer, host_of
from graphsplit.core.polynomials import Polynomial, Symbol
from graphsplit.core.symbolic_sizes import OWN, ROWS
from graphsplit.emission import random_numbers, stage_devices
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.local_operands import resized
from graphsplit.emission.loop_inputs import bring_loop_inputs
from graphsplit.emission.resharding import Resharding
from graphsplit.emission.row_counts import (
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
from graphsplit.planning.plan import Plan
from graphsplit.program.program import SIZES, Op
from graphsplit.rules import Sharded


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
        self.functions: dict[str, Any] = {}
        self._resource_devices = resource_devices
        self._draft = Draft(plan, only)
        self._ended: set[str] = set()
        self._told: list[str] = []
        self._counts = self._count_rows(only, nested)
        self._read = Resharding(plan, self._draft, self._counts).read

    def _count_rows(self, only: int | None, nested: bool) -> RowCounts:
        plan, draft, symbols = self.plan, self._draft, self.program.symbols
        scope = f"{draft.scope}/rows"
        devices = {d: draft.devices[d] for d in draft.shards}
        self._told_symbols = _told(symbols, only is not None)
        given: dict[Symbol, str] = {}
        if nested:
            self._told = [f"{scope}/given_{k}" for k in range(len(self._told_symbols))]
            given = dict(zip(self._told_symbols, self._told, strict=True))
            draft.nodes += [make_node(name, "Placeholder", [], plan.home, dtype=tf.int64) for name in self._told]
        elif symbols:
            writer = Writer(f"{scope}/lengths", host_of(plan.home), draft.nodes.append)
            given = {s: measured(writer, self._source(*source)) for s, source in plan.length_sources().items()}
        lengths = {symbol: reference for symbol, reference in given.items() if symbol not in (ROWS, OWN, BEGIN)}
        site = Site(plan.home, devices, scope, draft.add, lengths)
        if ROWS not in symbols:
            return FixedRows(plan.rows, site)
        if only is not None:
            return ToldRows(only, given, scope, draft.add)
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
        draft = self._draft
        stage_devices.move_stages(self.plan, draft.nodes, draft.shard_of, draft.prefixes, self._resource_devices)
        bring_loop_inputs(draft.nodes, draft.shard_of)
        ops = self.program.ops
        library = GraphDef().library
        library.CopyFrom(self.program.library)
        library.function.extend(self.functions.values())
        return EmittedGraph(
            outputs=outputs,
            nodes=tuple(draft.nodes),
            inputs=(*[ops[i].name for i in self.program.inputs], *self._told),
            captures=tuple(ops[i].name for i in self.program.captures),
            effects=ends,
            shard_of=draft.shard_of,
            library=library,
            versions=self.program.versions,
            present=tuple(self._counts.present(d) for d in draft.shards if self._counts.may_be_absent(d)),
        )

    def emit_function(self, name: str, carries: bool) -> str:
        """Emit a function for one shard, and return the name its content gives it.

        If it `carries` its arguments to the next turn of a loop, it returns what it is told of rows as well.
        """
        self._emit_ops()
        layouts = self.plan.output_layouts or ()
        shard = self._draft.shards[0]
        outputs = [self._read(t, layout, shard) for t, layout in zip(self.program.outputs, layouts, strict=True)]
        inputs = [*[self.program.ops[i].name for i in self.program.inputs], *self._told]
        outputs += self._told if carries else []
        function = function_definition(name, self._draft.nodes, inputs, outputs, ())
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
                for d in self._draft.shards:
                    self._emit_shard(op, d)

    def _names(self, position: int) -> list[str]:
        """Return the names of the nodes that an op became."""
        name = self.program.ops[position].name
        if self.plan.steps[position].home:
            return [name]
        return [self._draft.prefixes[d] + name for d in self._draft.shards]

    def _ends(self, position: int) -> list[str]:
        """Return the names of nodes that have run when all nodes have that an op became, or will not run."""
        names = self._names(position)
        if len(names) == 1 or not any(map(self._counts.may_be_absent, self._draft.shards)):
            return names
        name = f"{self._draft.scope}/ended/{self.program.ops[position].name}"
        if name not in self._ended:
            self._ended.add(name)
            controls = [f"^{name}" for name in names]
            self._draft.add(make_node(name, "ControlTrigger", controls, self.plan.home), None)  # does not mind the dead
        return [name]

    def _emit_home(self, op: Op) -> None:
        if op.type == SIZES:
            self._counts.whole(op.name, _yields(op), op.out_dtypes[0])
            return
        inputs = [self._read(tensor, REPLICATE) for tensor in op.inputs]
        controls = [f"^{name}" for c in op.controls for name in self._ends(c) if not self._is_argument(c)]
        device = self.plan.home
        for tensor in op.inputs:
            device = self._resource_devices.get(self.program.ops[tensor.op].name, device)
        device = self._resource_devices.get(op.name, device)
        node = self._draft.copy(op, op.name, device, inputs + controls, None)
        if bodies := self.plan.steps[op.index].bodies:
            self._transpile_bodies(op, node, bodies)

    def _is_argument(self, position: int) -> bool:
        return self.program.ops[position].type == "Placeholder"

    def _emit_shard(self, op: Op, d: int) -> None:
        sharded = self.plan.steps[op.index].shards
        assert sharded is not None
        prefix, device = self._draft.prefixes[d], self._draft.devices[d]
        name = prefix + op.name
        inputs = [
            "" if i in sharded.makes else self._read(tensor, want, d)
            for i, (tensor, want) in enumerate(zip(op.inputs, sharded.wants, strict=True))
        ]
        for i, value in resized(op, sharded).items():
            own_name = f"{name}/graphsplit_operand_{i}"
            inputs[i] = self._counts.operand(own_name, d, value, self._draft.dtype(op.inputs[i]))
        for c in op.controls:
            if not self._is_argument(c):
                inputs += [
                    f"^{n}" for n in ([prefix + self.program.ops[c].name] if self._is_sharded(c) else self._ends(c))
                ]
        if op.index in self.plan.order:
            inputs.append(f"^{prefix}{self.program.ops[self.plan.order[op.index]].name}")
        if sharded.draw:
            self._draw(op, sharded, inputs, d)
        elif not sharded.rescale or len(self.plan.devices) == 1:
            node = self._draft.copy(op, name, device, inputs, d)
            if sharded.divisor and len(self.plan.devices) > 1:
                node.op = "Sum"
            if sharded.bodies:
                self._localise_bodies(op, node, sharded.bodies, d)
        else:
            dtype = op.out_dtypes[0]
            share = self._counts.share(f"{name}/graphsplit_share", d, dtype)
            local = self._draft.copy(op, f"{name}/graphsplit_local", device, inputs, d)
            self._draft.add(make_node(name, "Mul", [local.name, share], device, T=dtype), d)

    def _draw(self, op: Op, sharded: Sharded, inputs: list[str], d: int) -> None:
        """Write a random op that draws the numbers of shard `d`."""
        name, layout, draw = self._draft.prefixes[d] + op.name, sharded.gives[0], sharded.draw
        assert isinstance(layout, Shard)
        assert draw is not None
        shape = [size or 0 for size in op.out_shapes[0] or ()]
        if self.plan.random == "independent":
            nodes = random_numbers.own_stream(op.node, name, inputs, draw, d)
        elif self.program.symbols:
            each = [Polynomial.of(size) for size in (*shape[1:], layout.blocks[0])]
            place = np.array([math.prod(each, start=Polynomial.of(BEGIN)), None], object)[0:1].reshape(())
            first = self._counts.operand(f"{name}/graphsplit_first", d, place, tf.int64)
            nodes = random_numbers.measured_rows(op.node, name, inputs, draw, first, self._counts.writers[d])
        else:
            nodes = random_numbers.own_rows(op.node, name, inputs, shape, layout, draw, self.plan.rows, d)
        for node in nodes:
            node.device = self._draft.devices[d]
            self._draft.add(node, d)

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
