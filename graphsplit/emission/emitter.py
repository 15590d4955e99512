"""Emission: Plan -> nodes, each with its device. Straight-line: every decision is already in the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import tensorflow as tf

from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import SINGLE_DEVICE, Layout, SingleDevice
from graphsplit.core.protos.graphdefs import function_definition, make_node
from graphsplit.core.protos.node_writer import Writer, host_of
from graphsplit.core.sizes.apportionment import whole_weights
from graphsplit.core.sizes.polynomials import Symbol
from graphsplit.core.sizes.symbolic_sizes import ROWS
from graphsplit.emission.barriers import Barriers, ended_nodes
from graphsplit.emission.communication.host_relays import relay_within_hosts
from graphsplit.emission.communication.resharding import Resharding
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import EmittedGraph, Origin
from graphsplit.emission.local_emitter import emit_local
from graphsplit.emission.shards.random_numbers import own_numbers
from graphsplit.emission.shards.row_counts import (
    AxisRows,
    FixedRows,
    Measured,
    MeasuredRows,
    RowCounts,
    Site,
    length_sizes,
    measured,
)
from graphsplit.emission.shards.shard_copies import (
    ShardCopies,
    bring_loop_inputs,
    carries,
    told_sizes,
    write_sizes,
    write_told,
)
from graphsplit.graph.function_calls import CONTROL_FLOW, hand_over, named_by_content, rename_functions
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import spread
from graphsplit.program.program import COPIES, SIZES, Op, Tensor
from graphsplit.rules import Sharded
from graphsplit.rules.families.random import part_drawn


@collection_paused()
def emit(plan: Plan) -> EmittedGraph:
    """Return the graph that carries out `plan`."""
    draft = Draft(plan.program, range(plan.mesh.shards))
    lengths = Writer(f"{draft.scope}/rows/lengths", host_of(plan.home), lambda node: draft.add_sizes(node, None))
    given: dict[Symbol, str] = {}
    if plan.program.symbols:
        given = {s: measured(lengths, _argument(plan, *source)) for s, source in plan.length_sources().items()}
        if plan.mesh.axis and ROWS in plan.program.symbols:  # its shards have no rows; others' are the batch's
            given[ROWS] = measured(lengths, _argument(plan, *plan.rows_sources()[0]))
    return _Emitter(plan, draft, _count_rows(plan, draft, given)).emit()


def _emit_body(
    plan: Plan, name: str, returns_told: bool
) -> tuple[str, dict[str, Any], dict[str, tuple[Plan, EmittedGraph]]]:
    """Return the name of a function of a loop or branch whose turns are split, it and what it calls, and their graphs.

    It is told the sizes that are not known, and returns them too if it is called with them again.
    """
    draft = Draft(plan.program, range(plan.mesh.shards))
    told = write_told(draft, None, plan.home)
    emitter = _Emitter(plan, draft, _count_rows(plan, draft, told))
    graph = emitter.emit()
    outputs = [*graph.outputs, *(told.values() if returns_told else [])]
    function = function_definition(name, graph.nodes, [*graph.inputs, *told.values()], outputs, graph.effects)
    function = named_by_content(function)
    name = function.signature.name
    return name, {**emitter.functions, name: function}, {**graph.bodies, name: (plan, graph)}


def _argument(plan: Plan, position: int, axis: int, each: int = 1) -> Measured:
    op = plan.program.ops[position]
    return Measured(op.name, axis, each, op.out_dtypes[0])


def _count_rows(plan: Plan, draft: Draft, given: Mapping[Symbol, str]) -> RowCounts:
    """Return how many rows each shard has; those of an unknown batch are `given`, or counted on the arguments."""
    devices = dict(enumerate(plan.devices))
    if plan.mesh.axis:  # the rows of the batch are none of its business
        return AxisRows(Site(plan.home, devices, f"{draft.scope}/rows", draft.add_sizes, given))
    site = Site(plan.home, devices, f"{draft.scope}/rows", draft.add_sizes, length_sizes(given))
    if ROWS not in plan.program.symbols:
        return FixedRows(plan.rows, site)
    found = plan.rows_sources()
    names = [plan.program.input_names[plan.program.inputs.index(i)] for i, *_ in found]
    counted = given[ROWS] if ROWS in given else [_argument(plan, *source) for source in found]
    counts = MeasuredRows(site)
    counts.divide(counted, names, whole_weights(plan.mesh.weights))
    return counts


class _Emitter:
    """Writes the nodes of a plan: `emit` lists in which order."""

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._program = plan.program
        self._draft = draft
        self._counts = counts
        self._moves = Resharding(plan, draft, counts)
        self.functions: dict[str, Any] = {}
        self._bodies: dict[str, tuple[Plan, EmittedGraph]] = {}
        self._copies = ShardCopies(draft, counts, plan.mesh, plan.random, self.functions, emit_local)
        self._barriers = Barriers(plan, draft, counts)
        self._ended: set[str] = set()

    def emit(self) -> EmittedGraph:
        self._write_operations()  # and the moves that they are the first to read
        layouts = self._plan.output_layouts or [SINGLE_DEVICE] * len(self._program.outputs)
        pairs = zip(self._program.outputs, layouts, strict=True)
        outputs = tuple([reference for tensor, layout in pairs for reference in self._of_each(tensor, layout)])
        ends = self._write_ends_of_effects()
        self._moves.check()
        self._barriers.write(self._moves)
        relay_within_hosts(self._draft)
        return self._graph(outputs, ends)

    def _write_operations(self) -> None:
        for op, step in zip(self._program.ops, self._plan.steps, strict=True):
            if step.home:
                self._emit_once(op)
            if step.shards and step.shards.together:
                self._emit_together(op, step.shards)
            elif step.shards:
                for d in self._draft.shards:
                    self._emit_shard(op, d)

    def _write_ends_of_effects(self) -> tuple[str, ...]:
        effects = [i for i in self._program.effects if self._plan.steps[i].home or self._plan.steps[i].shards]
        return tuple(name for i in effects for name in self._ends(i))

    def _graph(self, outputs: tuple[str, ...], ends: tuple[str, ...]) -> EmittedGraph:
        library = deepcopy(self._program.library)
        library.function.extend(self.functions.values())
        return EmittedGraph(
            nodes=tuple(self._draft.nodes),
            inputs=tuple(self._placeholders(self._program.inputs)),
            captures=tuple(self._placeholders(self._program.captures)),
            outputs=outputs,
            effects=ends,
            origins=self._draft.origins,
            library=library,
            versions=self._program.versions,
            scope=self._draft.scope,
            present=tuple(self._counts.present(d) for d in self._draft.shards if self._counts.may_be_absent(d)),
            beside_variables=self._beside_variables(),
            prefixes=self._draft.prefixes,
            compiled=bool(self._plan.jit_compile),
            uncompiled=frozenset(self._plan.turns_split),
            bodies=self._bodies,
        )

    def _placeholders(self, positions: Sequence[int]) -> list[str]:
        """Return the names of placeholders: of one that lies along an axis, each shard has its own."""
        found: list[str] = []
        for i in positions:
            prefixes = [self._draft.prefixes[d] for d in self._draft.shards] if self._plan.steps[i].shards else [""]
            found += [prefix + self._program.ops[i].name for prefix in prefixes]
        return found

    def _beside_variables(self) -> frozenset[str]:
        """Return the nodes that belong to operations beside variables that are wherever a loader puts them."""
        if "" not in self._plan.state.devices.values():
            return frozenset()
        once = ((name, origin.op) for name, origin in self._draft.origins.items() if origin.shard is None)
        return frozenset(name for name, op in once if op is not None and self._plan.owners.of_ops[op] == "")

    def _ends(self, position: int) -> list[str]:
        """Return the names of nodes that have run when all nodes have that an op became, or will not run."""
        name = self._program.ops[position].name
        if self._plan.steps[position].home or self._runs_together(position):
            return [name]
        names = [self._draft.prefixes[d] + name for d in self._draft.shards]
        absent = [d for d in self._draft.shards if self._counts.may_be_absent(d)]
        if not absent:
            return names
        ended = f"{self._draft.scope}/ended/{name}"
        if ended not in self._ended:
            self._ended.add(ended)
            home, origin = self._plan.home, Origin(position, None, "part")
            controls = [f"^{name}" for name in names]
            for node in ended_nodes(ended, controls, self._counts.present(absent[0]), home):
                self._draft.add(node, origin)
        return [ended]

    def _runs_together(self, position: int) -> bool:
        shards = self._plan.steps[position].shards
        return shards is not None and shards.together

    def _of_each(self, tensor: Tensor, layout: Layout) -> list[str]:
        """Return the references of what each shard has of a tensor; the one that there is on a single device."""
        if layout == SINGLE_DEVICE:
            return [self._moves.whole(tensor, SINGLE_DEVICE)]
        return [self._moves.on_shard(tensor, layout, d, self._plan.devices[d]) for d in self._draft.shards]

    def _emit_together(self, op: Op, sharded: Sharded) -> None:
        """Write a loop or branch that is given what each shard has, and makes what each shard has of its results."""
        wanted = zip(op.inputs, sharded.wants, strict=True)
        inputs = [reference for tensor, want in wanted for reference in self._of_each(tensor, want)]
        node = self._draft.copy(op, op.name, self._plan.home, inputs + self._waits(op), None)
        self._split_turns(op, node, sharded.bodies)
        flow, mesh = CONTROL_FLOW[op.type], self._plan.mesh
        for attribute, layouts in ((flow.types, sharded.wants[flow.chooses :]), ("Tout", sharded.gives)):
            if attribute in node.attr:
                types = node.attr[attribute].list.type
                pairs = zip(list(types), spread(layouts, mesh.shards), strict=True)
                types[:] = [dtype for dtype, numbers in pairs for _ in numbers]
        made = zip(op.out_shapes, sharded.gives, spread(sharded.gives, mesh.shards), strict=True)
        shapes = [mesh.shape_on(d, shape, layout) for shape, layout, own in made for d in range(len(own))]
        del node.attr["output_shapes"].list.shape[:]
        node.attr["output_shapes"].list.shape.extend([tf.TensorShape(shape).as_proto() for shape in shapes])

    def _emit_once(self, op: Op) -> None:
        device = self._plan.owners.of_ops[op.index]
        if op.type == SIZES:
            write_sizes(self._draft, self._counts, op, None, self._counts.home.device)
            return
        if op.type == COPIES:
            nearest = self._moves.whole(self._program.nearest(op, device), SingleDevice(device))
            self._write_copy(op, op.name, [nearest], device, None)
            return
        inputs = [self._moves.whole(tensor, SingleDevice(device)) for tensor in op.inputs] + self._waits(op)
        if part_drawn(op.node) is not None and not self._plan.mesh.axis:
            for node in own_numbers(op, op.name, inputs):
                node.device = device
                self._draft.add(node, Origin(op.index, None, "op" if node.name == op.name else "part"))
            return
        node = self._draft.copy(op, op.name, device, inputs, None)
        if bodies := self._plan.steps[op.index].bodies:
            self._split_turns(op, node, bodies)
        if op.type in CONTROL_FLOW:
            bring_loop_inputs(node, self._draft, self._plan.mesh.carried_at(op, device, None))

    def _write_copy(self, op: Op, name: str, inputs: Sequence[str], device: str, d: int | None) -> None:
        """Write what reads the nearest copy."""
        node = make_node(name, "Identity", inputs, device, T=op.out_dtypes[0])
        self._draft.add(node, Origin(op.index, d, "op"))

    def _waits(self, op: Op, d: int | None = None) -> list[str]:
        """Return what an operation that runs once, or shard `d`'s copy of one, waits for."""
        found: list[str] = []
        for c in op.controls:
            waited, step = self._program.ops[c], self._plan.steps[c]
            if waited.type != "Placeholder":
                own = d is not None and step.shards is not None and not step.home and not step.shards.together
                found += [self._draft.prefixes[d or 0] + waited.name] if own else self._ends(c)
        return [f"^{name}" for name in found]

    def _emit_shard(self, op: Op, d: int) -> None:
        sharded = self._plan.steps[op.index].shards
        assert sharded is not None
        device = self._plan.shard_device(op, d)
        read = dict(enumerate(zip(op.inputs, sharded.wants, strict=True)))
        if op.type == COPIES:
            nearest = op.inputs.index(self._program.nearest(op, device))
            read = {nearest: read[nearest]}
        data = [
            "" if i in sharded.makes else self._moves.on_shard(tensor, want, d, device)
            for i, (tensor, want) in read.items()
        ]
        prefix, controls = self._draft.prefixes[d], self._waits(op, d)
        if op.index in self._plan.order:
            controls.append(f"^{prefix}{self._program.ops[self._plan.order[op.index]].name}")
        controls += self._barriers.before(op.index, d)
        if op.type == COPIES:
            self._write_copy(op, prefix + op.name, [*data, *controls], device, d)
            return
        self._copies.write(op, sharded, d, device, data, controls)

    def _split_turns(self, op: Op, node: Any, bodies: Mapping[str, Plan]) -> None:
        """Let a loop or branch that runs once call functions whose turns are split over the devices."""
        names = {}
        for name, plan in bodies.items():
            names[name], functions, inside = _emit_body(plan, name, carries(op, name))
            self.functions.update(functions)
            self._bodies.update(inside)
        rename_functions(node, names)
        hand_over(node, self._counts.told(None, told_sizes(self._program.symbols, on_shard=False)))
