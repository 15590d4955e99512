"""Emission: each task of a plan is written as nodes.

What enters: a plan, whose tasks say what runs where, what it reads and what it waits for. What leaves: nodes, each with
its device. Every decision is already in the plan. The body of a loop or branch that has a plan of its own becomes a
function: one for all shards, or one for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.layouts import SingleDevice, group_of
from graphsplit.core.polynomials import Symbol
from graphsplit.core.protos import NodeWriter, function_definition, host_of, make_node
from graphsplit.core.sizes import OWN, ROWS, whole_weights
from graphsplit.emission.communication import CollectiveWriter, relay_within_hosts
from graphsplit.emission.emitted_graph import ORDER_ROLE, Draft, EmittedGraph, Origin
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
    Constants,
    ShardCopies,
    bring_loop_inputs,
    carries,
    told_sizes,
    write_sizes,
    write_told,
)
from graphsplit.emission.sides import check_sides, ended_nodes, let_nobody_wait_for_the_dead
from graphsplit.planning.communication.transfers import Collective, Own
from graphsplit.planning.moments import averaged_over
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import spread
from graphsplit.planning.tasks import (
    HANDED_ON,
    OPERATION,
    SEND,
    Copy,
    Operand,
    PlannedTask,
    Result,
    is_together,
)
from graphsplit.planning.waits import TURN, ordered_tasks_of
from graphsplit.program.graph.function_calls import (
    CONTROL_FLOW,
    XLA_ATTRIBUTE,
    hand_over,
    named_by_content,
    rename_functions,
)
from graphsplit.program.program import SIZES, Op
from graphsplit.program.sides import sides_of
from graphsplit.rules import Sharded
from graphsplit.rules.families.random import part_drawn


@collection_paused()
def emit(plan: Plan) -> EmittedGraph:
    """Return the graph that carries out `plan`."""
    draft = Draft(plan.program, plan.mesh.shards)
    lengths = NodeWriter(
        f"{draft.scope}/rows/lengths", host_of(_counting(plan)), lambda node: draft.add_sizes(node, None)
    )
    sizes: dict[Symbol, str] = {}
    if plan.program.symbols:
        sizes = {s: measured(lengths, _argument(plan, *source)) for s, source in plan.length_sources().items()}
        if plan.mesh.axis and ROWS in plan.program.symbols:  # its shards have no rows; others' are the batch's
            sizes[ROWS] = measured(lengths, _argument(plan, *plan.rows_sources()[0]))
    emitter = _Emitter(plan, draft, _count_rows(plan, draft, sizes))
    graph, library = emitter.emit(), deepcopy(plan.program.library)
    library.function.extend(emitter.functions.values())
    return replace(graph, library=library)


def _emit_body(
    plan: Plan, name: str, d: int | None, returns_told: bool
) -> tuple[str, dict[str, Any], dict[str, tuple[Plan, EmittedGraph]]]:
    """Return the name of a function that a loop or branch calls, it and what it calls, and their graphs.

    Its content gives it its name. It is told the sizes that are not known.

    Args:
      plan: how it runs.
      name: of the original.
      d: the shard that runs it by itself; None if its iterations are split over all of them.
      returns_told: whether it returns the sizes that it is told, too: it is called with them again.
    """
    draft = Draft(plan.program, plan.mesh.shards, d)
    size_arguments = write_told(draft, d, plan.default_device)
    emitter = _Emitter(plan, draft, _count_rows(plan, draft, size_arguments))
    graph = emitter.emit()
    inputs = [*graph.inputs, *size_arguments.values()]
    outputs = [*graph.outputs, *(size_arguments.values() if returns_told else [])]
    effects = graph.effects if d is None else ()  # (reads of variables that were hoisted: what has effects runs once)
    function = function_definition(name, graph.nodes, inputs, outputs, effects)
    for original in plan.program.library.function:
        if original.signature.name == name and XLA_ATTRIBUTE in original.attr:
            function.attr[XLA_ATTRIBUTE].CopyFrom(original.attr[XLA_ATTRIBUTE])
    function = named_by_content(function)
    name = function.signature.name
    return name, {**emitter.functions, name: function}, {**graph.bodies, name: (plan, graph)}


def _argument(plan: Plan, position: int, axis: int, per_row: int = 1) -> Measured:
    op = plan.program.ops[position]
    device = plan.places.once(op)[0]  # there its shape is known: elsewhere all of it would have to be sent
    return Measured(
        op.name, axis, per_row, op.out_dtypes[0], device if plan.input_devices else host_of(plan.default_device)
    )


def _counting(plan: Plan) -> str:
    """Return the device beside which sizes are computed that no shard has by itself: where the arguments are cut."""
    return plan.input_devices[0] if plan.input_devices else plan.default_device


def _count_rows(plan: Plan, draft: Draft, sizes: Mapping[Symbol, str]) -> RowCounts:
    """Return how many rows each shard has; those of an unknown batch are among `sizes`, or counted on the arguments."""
    devices = {d: plan.devices[d] for d in draft.shards}
    if plan.mesh.axis:  # the rows of the batch are none of its business
        return AxisRows(plan.rows, Site(plan.default_device, devices, f"{draft.scope}/rows", draft.add_sizes, sizes))
    site = Site(
        plan.default_device, devices, f"{draft.scope}/rows", draft.add_sizes, length_sizes(sizes), _counting(plan)
    )
    if ROWS not in plan.program.symbols:
        return FixedRows(plan.rows, site)
    if OWN in sizes:
        return RowCounts(site._replace(lengths=sizes))
    sources = plan.rows_sources()
    names = [plan.program.input_names[plan.program.inputs.index(i)] for i, *_ in sources]
    counted = sizes[ROWS] if ROWS in sizes else [_argument(plan, *source) for source in sources]
    counts = MeasuredRows(site)
    counts.divide(counted, names, whole_weights(plan.mesh.weights))
    return counts


class _Emitter:
    """Writes the nodes of a plan: what its tasks become, each behind those that it reads."""

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._program = plan.program
        self._draft = draft
        self._counts = counts
        draft.add_groups(device for group in plan.owners.groups.values() for device in group.devices)
        self._found = ordered_tasks_of(plan)
        self._tasks = self._found.tasks
        self._constants = Constants(draft, counts, plan.mesh)
        self.functions: dict[str, Any] = {}
        self._bodies: dict[str, tuple[Plan, EmittedGraph]] = {}
        self._copies = ShardCopies(draft, counts, plan.places, self._call_bodies)
        self._writers: dict[int, CollectiveWriter] = {}
        self._names: dict[int, str] = {}  # of tasks that are operations
        self._ended: set[str] = set()
        self._values = {
            result: (c, i)
            for (c, i), result in self._found.values.items()
            if result and not isinstance(plan.collectives[c].values[i], Own)
        }

    def emit(self) -> EmittedGraph:
        written = (None, *self._draft.shards)  # (a shard that runs the body of a loop by itself writes its own)
        tasks = [(n, self._tasks[n]) for d in written for n in self._found.of_shards.get(d, ())]
        for n in sorted([n for n, task in tasks if task.kind == OPERATION], key=self._place):
            self._write_operation(n, self._tasks[n])
        returned = [(operand, result) for operand, result in self._found.outputs if operand.by in written]
        outputs = tuple([self._read(operand, result, None, "") for operand, result in returned])
        effects = [i for i in self._program.effects if self._plan.steps[i].once or self._plan.steps[i].shards]
        ends = tuple([name for i in effects for name in self._ends(i)])
        for n, task in sorted(tasks):
            if task.kind == TURN:
                self._write_end_of_turn(n, task)
        if self._plan.default_device:  # (else it is where a shard runs a loop)
            relay_within_hosts(self._draft)
        present = [self._counts.present(d) for d in self._draft.shards if self._counts.may_be_absent(d)]
        let_nobody_wait_for_the_dead(self._draft, self._program, *present[:1])
        graph = self._graph(outputs, ends)
        check_sides(self._plan, graph)  # (a write that is lost says nothing)
        return graph

    def _place(self, n: int) -> int:
        """Return where an operation stands: in the order of the program, on one shard after the other."""
        op, shard = self._tasks[n].op or 0, self._tasks[n].shard
        return op * (self._plan.mesh.shards + 1) + (0 if shard is None else shard + 1)

    # What is read

    def _reference(self, result: Result) -> str:
        """Return the reference of a result, of one that is sent where it was made: TensorFlow sends it."""
        task = self._tasks[result.task]
        if task.kind == OPERATION:
            name = self._name_of(result.task)
            return f"{name}:{result.index}" if result.index else name
        if task.kind in (SEND, HANDED_ON):
            assert task.reads[0] is not None
            return self._reference(task.reads[0])
        c, i = self._values[result]
        if c not in self._writers:
            self._writers[c] = self._writer(c, self._plan.collectives[c])
        return self._writers[c].reference(i)

    def _name_of(self, n: int) -> str:
        """Return the name of a task that is an operation."""
        if n not in self._names:
            self._names[n] = self._name(self._tasks[n].op or 0, self._tasks[n].copy(self._plan))
        return self._names[n]

    def _name(self, position: int, d: Copy) -> str:
        return ("" if d is None else self._draft.prefixes[d]) + self._program.ops[position].name

    def _read(self, operand: Operand, result: Result | None, d: int | None, device: str) -> str:
        """Return the reference of what is read: of a result, or of a constant that a device makes for itself."""
        if result is not None:
            return self._reference(result)
        op, layout = self._program.ops[operand.tensor.op], operand.layout
        if isinstance(layout, SingleDevice):
            return self._constants.get(op, layout, None, layout.device)
        if group_of(layout):
            return self._constants.get(op, layout, None, device)
        if operand.by is not None:
            return self._constants.get(op, layout, operand.by, self._plan.devices[operand.by])
        return self._constants.get(op, layout, d, device)

    def _waits(self, n: int) -> list[str]:
        """Return what a task waits for."""
        if not self._found.waits[n]:
            return []
        names: list[str] = []
        for k in self._found.waits[n]:
            task = self._tasks[k]
            if task.kind == TURN:
                names.append(self._name_of_turn(k))
            elif task.kind == OPERATION and task.shard not in (None, self._tasks[n].shard):
                names += self._ends(task.op or 0)
            else:
                names.append(self._reference(Result(k)))
        return [f"^{name}" for name in dict.fromkeys(names)]

    def _ends(self, position: int) -> list[str]:
        """Return the names of nodes that have run when all nodes have that an op became, or will not run."""
        if self._plan.steps[position].once or is_together(self._plan, position):
            return self._names_once(position)
        names = [self._name(position, d) for d in self._draft.shards]
        absent = [d for d in self._draft.shards if self._counts.may_be_absent(d)]
        if not absent:
            return names
        ended = f"{self._draft.scope}/ended/{self._program.ops[position].name}"
        if ended not in self._ended:
            self._ended.add(ended)
            controls = [f"^{name}" for name in names]
            for node in ended_nodes(ended, controls, self._counts.present(absent[0]), self._plan.default_device):
                self._draft.add(node, Origin(position, None, "part"))
        return [ended]

    def _names_once(self, position: int) -> list[str]:
        """Return the names of an operation that runs once, on each device of a group if it has one."""
        group = self._plan.owners.groups.get(position)
        return [self._name(position, d) for d in (group.devices if group else (None,))]

    # What is written

    def _writer(self, number: int, collective: Collective) -> CollectiveWriter:
        def given(k: int) -> str:
            shard_value = collective.values[k]
            assert isinstance(shard_value, Own)
            by = shard_value.by if isinstance(shard_value.by, int) else None
            return self._read(
                Operand(shard_value.tensor, shard_value.layout, by),
                self._found.values[number, k],
                None,
                shard_value.device,
            )

        kind = collective.kind.replace("-", "_").replace(" ", "_")
        of = "bucket" if collective.is_bucket else self._program.ops[collective.moves[0].tensor.op].name
        name = f"{self._draft.scope}/{kind}_{number}/{of}"
        averaged = averaged_over(self._plan.steps, collective)
        return CollectiveWriter(collective, given, name, self._draft, self._counts, averaged)

    def _name_of_turn(self, n: int) -> str:
        return f"{self._draft.scope}/ended_{n}/shard_{self._tasks[n].shard}"

    def _write_end_of_turn(self, n: int, task: PlannedTask) -> None:
        """Write one node for a turn that another one follows: it runs when the shard has ended the phase."""
        name, controls, after = self._name_of_turn(n), self._waits(n), self._plan.mesh.shards - 1
        nodes = [make_node(name, "NoOp", controls, task.device)]
        if self._counts.may_be_absent(after):
            nodes = ended_nodes(name, controls, self._counts.present(after), task.device)
        for node in nodes:
            self._draft.add(node, Origin(None, task.shard, ORDER_ROLE))

    def _write_operation(self, n: int, task: PlannedTask) -> None:
        op, d = self._program.ops[task.op or 0], task.shard
        device = "" if d is None and self._plan.places.is_anywhere(op) else task.device  # ("": a loader says where)
        shards = self._plan.steps[op.index].shards
        if op.type == SIZES:
            write_sizes(self._draft, self._counts, op, self._name_of(n), d)
            return
        pairs = zip(self._found.operands[op.index, d is not None], task.reads, strict=True)
        data = ["" if operand is None else self._read(operand, result, d, device) for operand, result in pairs]
        controls = self._waits(n)
        if shards is not None and d is not None:
            self._copies.write(op, shards, d, device, data, controls)
        elif shards is not None and shards.together:
            self._write_together(op, shards, [*data, *controls])
        else:
            self._write_once(op, self._name_of(n), device, [*data, *controls])

    def _write_together(self, op: Op, sharded: Sharded, inputs: Sequence[str]) -> None:
        """Write a loop or branch that is given what each shard has, and makes what each shard has of its results."""
        node = self._draft.write_op(op, op.name, self._plan.default_device, inputs, None)
        self._call_bodies(op, node, sharded.bodies, None)
        flow, mesh = CONTROL_FLOW[op.type], self._plan.mesh
        for attribute, layouts in ((flow.types, sharded.wants[flow.chooses :]), ("Tout", sharded.gives)):
            if attribute in node.attr:
                types = node.attr[attribute].list.type
                pairs = zip(list(types), spread(layouts, mesh.shards), strict=True)
                types[:] = [dtype for dtype, numbers in pairs for _ in numbers]
        results = zip(op.out_shapes, sharded.gives, spread(sharded.gives, mesh.shards), strict=True)
        shapes = [
            mesh.shape_on(d, shape, layout)
            for shape, layout, shards_of_result in results
            for d in range(len(shards_of_result))
        ]
        del node.attr["output_shapes"].list.shape[:]
        node.attr["output_shapes"].list.shape.extend([tf.TensorShape(shape).as_proto() for shape in shapes])

    def _write_once(self, op: Op, name: str, device: str, inputs: Sequence[str]) -> None:
        if part_drawn(op.node) is not None and not self._plan.mesh.axis:
            for node in own_numbers(op, name, inputs):
                node.device = device
                self._draft.add(node, Origin(op.index, None, "op" if node.name == name else "part"))
            return
        node = self._draft.write_op(op, name, device, inputs, None)
        if bodies := self._plan.steps[op.index].bodies:
            self._call_bodies(op, node, bodies, None)
        if op.type in CONTROL_FLOW:
            bring_loop_inputs(node, self._draft, self._plan.places.passed(op, None, device)[0])

    def _call_bodies(self, op: Op, node: Any, bodies: Mapping[str, Plan], d: int | None) -> None:
        """Let a loop or branch call functions that have plans: shard `d`'s, or those in which all shards meet."""
        names = {}
        for name, plan in bodies.items():
            names[name], functions, inside = _emit_body(plan, name, d, carries(op, name))
            self.functions.update(functions)
            self._bodies.update(inside)
        rename_functions(node, names)
        hand_over(node, self._counts.told(d, told_sizes(self._program.symbols, on_shard=d is not None)))

    # What is returned

    def _graph(self, outputs: tuple[str, ...], ends: tuple[str, ...]) -> EmittedGraph:
        return EmittedGraph(
            nodes=tuple(self._draft.nodes),
            inputs=tuple(self._placeholders(self._program.inputs)),
            captures=tuple(self._placeholders(self._program.captures)),
            outputs=outputs,
            effects=ends,
            origins=self._draft.origins,
            shards=self._draft.shards,
            library=self._program.library,
            versions=self._program.versions,
            scope=self._draft.scope,
            present=tuple(self._counts.present(d) for d in self._draft.shards if self._counts.may_be_absent(d)),
            beside_variables=self._beside_variables(),
            prefixes=self._draft.prefixes,
            compiled=bool(self._plan.jit_compile),
            uncompiled=frozenset(self._plan.loops_split),
            bodies=self._bodies,
            predicates=sides_of(self._program).predicates,
        )

    def _placeholders(self, positions: Sequence[int]) -> list[str]:
        """Return the names of placeholders: of one that lies along an axis, each shard has its own."""
        steps, shards = self._plan.steps, self._draft.shards
        names_by_position = [
            [self._name(i, d) for d in shards] if steps[i].shards else self._names_once(i) for i in positions
        ]
        return [name for names in names_by_position for name in names]

    def _beside_variables(self) -> frozenset[str]:
        """Return the nodes that belong to operations beside variables that are wherever a loader puts them.

        And those of the body of a loop that are where a shard runs it.
        """
        if not self._plan.default_device:
            return frozenset([node.name for node in self._draft.nodes if not node.device])
        if "" not in self._plan.state.devices.values():
            return frozenset()
        once = ((name, origin.op) for name, origin in self._draft.origins.items() if origin.shard is None)
        ops = self._program.ops
        return frozenset(name for name, i in once if i is not None and self._plan.places.is_anywhere(ops[i]))
