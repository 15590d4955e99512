"""Whether an emitted graph carries out its plan: every move is read off the nodes again and held against the plan's.

What an operation reads is followed back through the nodes to the operations that made it. The nodes on the way say what
happened: a `SplitV` cut it, a `ConcatV2` joined it, an `AddN` added it up, an `Identity` sent it on within a host,
nothing at all sent it. The plan says the same in its own words; both are brought into one form, nested tuples, and
compared. Only which node is which operation is taken from the origins: what joins what, in which order and on which
device, is read from the nodes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphsplit.core.layouts import MOVES, REPLICATE, SINGLE_DEVICE, Layout, Shard, SingleDevice, group_of, is_whole
from graphsplit.core.protos import constant_value, source_of, split_reference
from graphsplit.emission.clusters import compile_clusters
from graphsplit.emission.emitted_graph import RELAY_ROLE, SIZES_ROLE, EmittedGraph
from graphsplit.emission.sides import check_sides
from graphsplit.errors import CheckError
from graphsplit.planning.communication.transfers import (
    Collective,
    Concatenation,
    Merged,
    Own,
    Packed,
    Slice,
    Sum,
    Zeros,
    shards_behind,
)
from graphsplit.planning.moments import averaged_over
from graphsplit.planning.plan import Plan
from graphsplit.planning.schedule.phases import Phase, followed
from graphsplit.planning.steps import Move, spread
from graphsplit.planning.tasks import Copy
from graphsplit.program.program import Op, Tensor
from graphsplit.rules.factors import ZEROS
from graphsplit.rules.families.random import part_drawn

Form = tuple[Any, ...]
"""How a value came about: `("made", tensor, shard)`, `("SplitV", device, form, number)`, `("AddN", device, forms)`,
`("zeros", device, what has their shape)`."""

_REDUCTIONS = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "all": "LogicalAnd", "any": "LogicalOr"}
_MOVED = frozenset(MOVES.values())
_ADDED_UP = frozenset({"reduce", "all-reduce", "reduce-scatter"})
_PASSED_ON = {"Identity": 0, "Switch": 0, "Merge": 0, "Reshape": 0}  # of what they read; a `Merge` what is there first


def check_emitted(plan: Plan, graph: EmittedGraph) -> None:
    """Raise `CheckError` unless every operation is where the plan says, and reads what the plan says.

    What loops and branches do in each iteration, whose functions have plans of their own, is checked as well.

    Args:
      plan: the decisions.
      graph: what was emitted for it.
    """
    graph.check()
    if not plan.mesh.axis and (drawing := [node.name for node in graph.nodes if part_drawn(node) is not None]):
        raise CheckError(f"{drawing[0]!r} draws numbers that are not those of its part.")
    forms, planned = _EmittedForms(plan, graph), _PlannedForms(plan, graph.shards)
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.once and op.yields is None:
            for device in plan.places.once(op):
                _check_once(plan, op, device, forms, planned)
        if step.shards and step.shards.together:
            node = forms.node(op, None)
            _compare_devices(node, plan.default_device)
            _check_each(plan, op.inputs, step.shards.wants, node.input, graph.shards, forms, planned, node)
        for d in graph.shards if step.shards and not step.shards.together else ():
            _check_shard(plan, op, d, forms, planned)
    layouts = plan.output_layouts or [SINGLE_DEVICE] * len(plan.program.outputs)
    _check_each(plan, plan.program.outputs, layouts, graph.outputs, graph.shards, forms, planned, None)
    check_turns(plan, graph)
    check_sides(plan, graph)
    check_clusters(graph)
    for body_plan, emitted in graph.bodies.values():
        check_emitted(body_plan, emitted)


def check_clusters(graph: EmittedGraph) -> None:
    """Raise `CheckError` unless a compiled call is dead exactly if what is in it is, where shards have no rows."""
    if not graph.compiled or not graph.present:
        return
    compiled = compile_clusters(graph, graph.nodes, graph.outputs, graph.effects)
    for dead, word in ((graph.dead_without, "without"), (graph.dead_with, "with")):
        dead_nodes, dead_calls = dead(), dead(compiled.nodes)
        for node in graph.nodes:
            call = compiled.inside.get(node.name, node.name)
            if dead_nodes.get(node.name) != dead_calls.get(call):
                raise CheckError(
                    f"{node.name!r} is dead {word} {dead_nodes.get(node.name)!r}; its call {call!r} is dead {word} "
                    f"{dead_calls.get(call)!r}."
                )


def _check_each(
    plan: Plan,
    tensors: Sequence[Tensor],
    layouts: Sequence[Layout],
    references: Sequence[str],
    shards: Sequence[int],
    forms_found: _EmittedForms,
    planned: _PlannedForms,
    reader: Any,
) -> None:
    """Check what reads, of what is several, that of each shard: a loop that all shards run as one, or the result."""
    forms = [
        (
            tensor,
            planned.once(tensor, layout, plan.default_device) if d is None else planned.on_shard(tensor, layout, d, ""),
        )
        for tensor, layout in zip(tensors, layouts, strict=True)
        for d in ([None] if layout == SINGLE_DEVICE else shards)
    ]
    for (tensor, form), reference in zip(forms, [r for r in references if r[0] != "^"], strict=True):
        _compare(plan, forms_found.form(reference), form, tensor, reader)


def _check_once(plan: Plan, op: Op, device: str, forms_found: _EmittedForms, planned: _PlannedForms) -> None:
    layout = plan.places.layout(op)
    node = forms_found.node(op, device if group_of(layout) else None)
    _compare_devices(node, "" if plan.places.is_anywhere(op) else device)
    if part_drawn(op.node) is not None:
        return  # as of a shard's
    places = _read_at(plan, op, device)
    for tensor, place, reference in zip(op.inputs, places, node.input, strict=False):
        _compare(plan, forms_found.form(reference), planned.once(tensor, layout, place), tensor, node)


def _read_at(plan: Plan, op: Op, device: str) -> Sequence[str]:
    """Return where each operand is read: a loop or branch in columns hands it to operations of its column."""
    if not (plan.mesh.columns and op.has_columns):
        return [device] * len(op.inputs)
    carried, _ = plan.places.passed(op, None, device)
    return [*[device] * (len(op.inputs) - len(carried)), *carried]


def _check_shard(plan: Plan, op: Op, d: int, forms_found: _EmittedForms, planned: _PlannedForms) -> None:
    """Raise `CheckError` unless a shard's node is on its device, and its operands came about as planned."""
    sharded, node = plan.steps[op.index].shards, forms_found.node(op, d)
    assert sharded is not None
    _compare_devices(node, plan.places.on(op, d))
    if sharded.draw or part_drawn(op.node) is not None:
        return  # (its counter may be moved on, and its numbers cut to the shard's rows)
    if sharded.weighted and plan.mesh.shards > 1:
        node = forms_found.wrapped(node)
    if any(shift.others == ZEROS for shift in sharded.shift.values()):
        node = forms_found.wrapped(node, 1)
    for i, (tensor, layout, reference) in enumerate(zip(op.inputs, sharded.wants, node.input, strict=False)):
        if i not in sharded.makes:
            _compare(plan, forms_found.form(reference), planned.on_shard(tensor, layout, d, node.device), tensor, node)


def _compare(plan: Plan, form: Form, planned: Form, tensor: Tensor, reader: Any) -> None:
    if form != planned:
        name, who = plan.program.ops[tensor.op].name, "The result" if reader is None else repr(reader.name)
        raise CheckError(f"{who} reads {name!r} as {form}, and the plan says {planned}.")


def _compare_devices(node: Any, device: str) -> None:
    if node.device != device:
        raise CheckError(f"{node.name!r} is on {node.device!r}, and planned on {device!r}.")


class _EmittedForms:
    """What the nodes say."""

    def __init__(self, plan: Plan, graph: EmittedGraph):
        self._plan = plan
        self._graph = graph
        self._forms: dict[str, Form] = {}

    def node(self, op: Op, shard: Copy) -> Any:
        """Return the node that a copy of an operation is."""
        if isinstance(shard, str):
            return self._graph.by_name[self._graph.prefixes[shard] + op.name]
        name = self._graph.names_of_operations.get((op.index, shard))
        if name is None:
            where = "once" if shard is None else f"on shard {shard}"
            raise CheckError(f"{op.name!r} is planned {where}, and no node is that.")
        return self._graph.by_name[name]

    def wrapped(self, node: Any, operand: int = 0) -> Any:
        """Return the node whose result a node weights, or takes where indices are a shard's own."""
        return self._graph.by_name[source_of(node.input[operand])]

    def form(self, reference: str) -> Form:
        """Return how what a reference names came about."""
        if reference not in self._forms:
            self._forms[reference] = self._follow(reference)
        return self._forms[reference]

    def _follow(self, reference: str) -> Form:
        name, index = split_reference(reference)
        node, origin = self._graph.by_name[name], self._graph.origins[name]
        if origin.role == "op":
            is_copy = origin.shard is None and origin.op in self._plan.owners.groups
            return self._made(origin.op or 0, index, node.device if is_copy else origin.shard)
        if origin.role == SIZES_ROLE:
            return ("sizes",)
        if origin.role == "constant":
            return ("everywhere", Tensor(origin.op or 0, index))
        forms = [self.form(r) for r in node.input if r[0] != "^"]
        if origin.role in ("shift", RELAY_ROLE):  # numbers of rows, as the shard's own rows have them; the same again
            return forms[0]
        if node.op == "Identity" and origin.role in _MOVED:
            return ("Identity", node.device, (forms[0],))
        if node.op in _PASSED_ON:
            return forms[_PASSED_ON[node.op]]
        if node.op == "SplitV":
            return ("SplitV", node.device, forms[0], index)
        if node.op == "ConcatV2":
            return ("ConcatV2", node.device, tuple(forms[:-1]))
        if node.op == "Unpack":
            return ("Unpack", node.device, forms[0], index)
        if node.op == "Sum":
            [weighted, _], [source, *_] = (
                forms,
                [self.form(r) for r in self._graph.by_name[source_of(node.input[0])].input],
            )
            assert weighted[0] == "Mul", weighted
            return ("average", node.device, source)
        if node.op == "Mean":
            return ("Mean", node.device, forms[0])
        if node.op == "RealDiv":
            return ("RealDiv", node.device, forms[0])
        if node.op == "ZerosLike":
            return ("zeros", node.device, forms[0])
        if node.op == "Const":
            value = constant_value(node)
            return ("zeros" if not np.any(value) else node.name, node.device, value.shape)
        return (node.op, node.device, tuple(forms))

    def _made(self, position: int, index: int, shard: Copy) -> Form:
        """Return what a node makes that is an operation: of one that all shards run as one, each shard has its own."""
        sharded = self._plan.steps[position].shards
        if sharded is None or not sharded.together:
            return ("made", Tensor(position, index), shard)
        outputs = enumerate(spread(sharded.gives, self._plan.mesh.shards))
        return next(("made", Tensor(position, k), numbers.index(index)) for k, numbers in outputs if index in numbers)


class _PlannedForms:
    """What the plan says."""

    def __init__(self, plan: Plan, shards: Sequence[int]):
        self._plan = plan
        self._shards = shards
        self._moves = {(move.tensor, move.target): move for move in plan.moves}
        self._collectives = {move: collective for collective in plan.collectives for move in collective.moves}
        self._forms: dict[tuple[int, int], Form] = {}

    def whole(self, tensor: Tensor, layout: SingleDevice) -> Form:
        """Return how a whole value on a device comes about; wherever it is made, if the layout names none."""
        plan, op, step = self._plan, self._plan.program.ops[tensor.op], self._plan.steps[tensor.op]
        if step.once and layout in (SINGLE_DEVICE, plan.places.layout(op)):
            return ("made", tensor, None)
        if plan.state.is_everywhere(op):
            return _everywhere(op, tensor)
        if not layout.device and step.shards and is_whole(step.shards.gives[tensor.index]):
            return ("made", tensor, self._shards[0])
        return self._moved(self._move(tensor, layout if layout.device else plan.places.whole(tensor)), None)

    def once(self, tensor: Tensor, layout: Layout, device: str) -> Form:
        """Return how what a device has of a whole value comes about, alone or as one of a group."""
        op, copies = self._plan.program.ops[tensor.op], self._plan.copies.get(tensor)
        if copies is None and isinstance(layout, SingleDevice):
            return self.whole(tensor, layout)
        if self._plan.state.is_everywhere(op):
            return _everywhere(op, tensor)
        if copies is None:
            raise CheckError(f"{op.name!r} is read as {layout}, and no device of that has a copy.")
        if self._plan.steps[tensor.op].once and self._plan.places.layout(op) == copies:
            return ("made", tensor, copies.nearest(device))
        return self._moved(self._move(tensor, copies), copies.devices.index(copies.nearest(device)))

    def on_shard(self, tensor: Tensor, layout: Layout, d: int, device: str) -> Form:
        """Return how what shard `d` reads of a tensor on a device comes about."""
        op, step = self._plan.program.ops[tensor.op], self._plan.steps[tensor.op]
        if step.shards and step.shards.gives[tensor.index] == layout:
            return ("made", tensor, d)
        cut_constant = op.type == "Const" and isinstance(layout, Shard)
        if cut_constant or (is_whole(layout) and self._plan.state.is_everywhere(op)):
            return _everywhere(op, tensor)
        if is_whole(layout) and tensor in self._plan.copies:
            return self.once(tensor, layout, device)
        return self._moved(self._move(tensor, layout), d)

    def _move(self, tensor: Tensor, layout: Layout) -> Move:
        if (tensor, layout) not in self._moves:
            name = self._plan.program.ops[tensor.op].name
            raise CheckError(f"{name!r} is read as {layout}, and no move of the plan makes that.")
        return self._moves[tensor, layout]

    def _moved(self, move: Move, d: int | None) -> Form:
        """Return what a move makes, for shard `d` if it makes something for each."""
        collective = self._collectives[move]
        return self._form(collective, collective.reads[collective.moves.index(move)][d or 0].value)

    def _form(self, collective: Collective, i: int) -> Form:
        """Return how a value of a collective comes about."""
        key = id(collective), i
        if key not in self._forms:
            self._forms[key] = self._made(collective, i)
        return self._forms[key]

    def _made(self, collective: Collective, i: int) -> Form:
        value = collective.values[i]
        if isinstance(value, Own):
            if value.layout == REPLICATE and (value.tensor, REPLICATE) in self._moves:
                return self._moved(self._moves[value.tensor, REPLICATE], value.by or 0)  # type: ignore[arg-type]
            if isinstance(value.layout, SingleDevice):
                return self.whole(value.tensor, value.layout)
            if isinstance(value.by, str):
                return self.once(value.tensor, value.layout, value.by)
            return self.on_shard(value.tensor, value.layout, value.by or 0, value.device)
        forms = tuple([self._form(collective, k) for k in value.of])
        if isinstance(value, Zeros):  # of a known shape, or of that of a value
            shape = self._plan.program.shape(collective.moves[0].tensor)
            return ("zeros", value.device, *(forms or [shape]))
        if isinstance(value, Slice):
            of_numbers = value.split.layout is None and not self._plan.program.shape(collective.moves[0].tensor)
            return ("Unpack" if of_numbers else "SplitV", value.device, forms[0], value.piece)
        if isinstance(value, Packed):
            return ("Pack", value.device, forms)
        if isinstance(value, Merged):
            groups = [shards_behind(collective.values, k) for k in value.of]
            return _merged(value, forms, self._is_weighted(averaged_over(self._plan.steps, collective), groups))
        if isinstance(value, Concatenation):
            return ("ConcatV2", value.device, forms)
        return _reduced(value, forms) if isinstance(value, Sum) else ("Identity", value.device, forms)

    def _is_weighted(self, layout: Shard | None, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether some groups have other numbers of entries along an axis than others, as far as is known."""
        if not self._plan.rows or layout is None:
            return True
        return (
            len({sum([block[d] for block in self._plan.mesh.pieces(layout) for d in shards]) for shards in groups}) > 1
        )


def _reduced(value: Sum, forms: Sequence[Form]) -> Form:
    """Return what values amount to: added up at once, or taken two by two."""
    kind, form = _REDUCTIONS.get(value.reduction, "AddN"), forms[0]
    if len(forms) == 1 and not value.entries:
        return ("Identity", value.device, forms)
    if kind == "AddN" and len(forms) > 1:
        form = (kind, value.device, tuple(forms))
    for other in forms[1:] if kind != "AddN" else ():
        form = (kind, value.device, (form, other))
    return ("RealDiv", value.device, form) if value.entries else form


def _merged(value: Merged, forms: Sequence[Form], is_weighted: bool) -> Form:
    """Return what the moments of shards amount to."""

    def averaged(form: Form) -> Form:
        return ("average", value.device, form) if is_weighted else ("Mean", value.device, form)

    apart = ("Pack", value.device, tuple(forms))
    moments = [("Unpack", value.device, apart, k) for k in range(2)]
    mean = averaged(moments[0])
    if not value.which:
        return mean
    return averaged(("AddV2", value.device, (moments[1], ("SquaredDifference", value.device, (moments[0], mean)))))


def _everywhere(op: Op, tensor: Tensor) -> Form:
    return ("everywhere", tensor) if op.yields is None else ("sizes",)


def check_turns(plan: Plan, graph: EmittedGraph) -> None:
    """Raise `CheckError` unless every shard waits until the turn that it follows has ended, whatever runs first.

    It has when all its operations of the phase have run, and what they give to sums has been added.

    Args:
      plan: the phases and turns.
      graph: what was emitted for it.
    """
    waits = _Waits(graph)
    waits.follow()
    for (phase, d), earlier_turn in followed(plan.turns).items():
        first = plan.mesh.before(earlier_turn.shard) is None
        ended = list(waits.ended(plan.phases[earlier_turn.phase], earlier_turn.shard, first=first))
        for name in [graph.names_of_operations[i, d] for i in plan.phases[phase].starts]:
            missing = [node for node in ended if not waits.waits(name, node)]
            if missing:
                raise CheckError(f"{name!r} does not wait for {missing[0]!r} of the shard before it.")


class _Waits:
    """What has run before each node, in any order that the graph allows."""

    def __init__(self, graph: EmittedGraph):
        self._origins, self._graph, self._names = graph.origins, graph.by_name, graph.names_of_operations
        self._masks_before = [0] * len(graph.nodes)  # a bit for each node

    def follow(self) -> None:
        """Find out what has run before each node.

        Raises:
          CheckError: if nodes wait for each other.
        """
        for k in self._graph.positions_in_order:
            masks = [self._masks_before[source] | 1 << source for source in self._graph.sources[k]]
            self._masks_before[k] = functools.reduce(operator.or_, masks, 0)

    def waits(self, later: str, first: str) -> bool:
        """Return whether a node has run whenever another one does."""
        return bool(self._masks_before[self._graph.place[later]] >> self._graph.place[first] & 1)

    def ended(self, phase: Phase, d: int, *, first: bool) -> Iterator[str]:
        """Return the nodes that have run when shard `d` has ended a phase.

        Args:
          phase: which.
          d: the shard.
          first: whether it is the first on its device: then nothing is there yet to which its parts would be added.
        """
        for i in phase.ends:
            yield self._names[i, d]
        for move in () if first else phase.sums:
            yield from self._added(self._names[move.tensor.op, d])

    def _added(self, part: str) -> Iterator[str]:
        for reader in [self._graph.nodes[k] for k in self._graph.readers[self._graph.place[part]]]:
            if self._origins[reader.name].role in _ADDED_UP:
                yield from self._added(reader.name) if reader.op == "ConcatV2" else [reader.name]
