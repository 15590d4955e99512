"""Whether an emitted graph carries out its plan: every move is read off the nodes again and held against the plan's.

What an operation reads is followed back through the nodes to the operations that made it. The nodes on the way say what
happened: a `SplitV` cut it, a `ConcatV2` joined it, an `AddN` added it up, an `Identity` sent it on within a host,
nothing at all sent it. The plan says the same in its own words; both are brought into one form, nested tuples, and
compared. Only which node is which operation is taken from the origins: what joins what, in which order and on which
device, is read from the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphsplit.core.errors import CheckError
from graphsplit.core.graphdefs import source_of, split_reference
from graphsplit.core.layouts import MOVES, REPLICATE, Layout, Partial, Replicate, Shard, SingleDevice, is_whole
from graphsplit.emission.draft import SIZES_ROLE
from graphsplit.emission.emitted_graph import RELAY_ROLE, EmittedGraph
from graphsplit.emission.forms import Form, reduced, sent
from graphsplit.emission.reductions import turns
from graphsplit.emission.turn_checks import check_turns
from graphsplit.planning.gateways import gateways_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Move
from graphsplit.program.program import COPIES, Op, Tensor

_MOVED = frozenset(MOVES.values())
_PASSED_ON = {"Identity": 0, "Switch": 0, "Merge": 0}  # of what they read; a `Merge` takes what is there before nothing


def check_emitted(plan: Plan, graph: EmittedGraph) -> None:
    """Raise `CheckError` unless every operation is where the plan says, and reads what the plan says.

    Args:
      plan: the decisions.
      graph: what was emitted for it.
    """
    graph.check()
    found, planned = _Found(plan, graph), _Planned(plan)
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.home and op.yields is None:
            node, device = found.node(op, None), plan.owners.of_ops[op.index]
            _compare_devices(node, device)
            for tensor, reference in zip(_read_at(plan, op, device), node.input, strict=False):
                _compare(plan, found.form(reference), planned.whole(tensor, SingleDevice(device)), tensor, node)
        for d in range(plan.mesh.shards) if step.shards else ():
            _check_shard(plan, op, d, found, planned)
    for tensor, reference in zip(plan.program.outputs, graph.outputs, strict=True):
        _compare(plan, found.form(reference), planned.whole(tensor, SingleDevice()), tensor, None)
    check_turns(plan, graph)


def _check_shard(plan: Plan, op: Op, d: int, found: _Found, planned: _Planned) -> None:
    sharded, node = plan.steps[op.index].shards, found.node(op, d)
    assert sharded is not None
    _compare_devices(node, plan.shard_device(op, d))
    if sharded.draw:
        return  # its counter is moved on, and its numbers cut to the shard's rows
    if sharded.weighted and plan.mesh.shards > 1:
        node = found.reader(node)
    if op.type == COPIES:
        [tensor] = _read_at(plan, op, node.device)
        there = SingleDevice(plan.program.places[tensor.op])
        _compare(plan, found.form(node.input[0]), planned.whole(tensor, there), tensor, node)
        return
    for i, (tensor, layout, reference) in enumerate(zip(op.inputs, sharded.wants, node.input, strict=False)):
        if i not in sharded.makes:
            _compare(plan, found.form(reference), planned.on_shard(tensor, layout, d), tensor, node)


def _read_at(plan: Plan, op: Op, device: str) -> Sequence[Tensor]:
    """Return what an operation reads on a device: of several copies the nearest."""
    return [plan.program.nearest(op, device)] if op.type == COPIES else op.inputs


def _compare(plan: Plan, found: Form, planned: Form, tensor: Tensor, reader: Any) -> None:
    if found != planned:
        name, who = plan.program.ops[tensor.op].name, "The result" if reader is None else repr(reader.name)
        raise CheckError(f"{who} reads {name!r} as {found}, and the plan says {planned}.")


def _compare_devices(node: Any, device: str) -> None:
    if node.device != device:
        raise CheckError(f"{node.name!r} is on {node.device!r}, and planned on {device!r}.")


class _Found:
    """What the nodes say."""

    def __init__(self, plan: Plan, graph: EmittedGraph):
        self._plan = plan
        self._graph = graph
        self._forms: dict[str, Form] = {}
        self._node_of = {
            (origin.op, origin.shard): graph.by_name[name]
            for name, origin in graph.origins.items()
            if origin.role == "op"
        }

    def node(self, op: Op, shard: int | None) -> Any:
        """Return the node that an operation is."""
        if (op.index, shard) not in self._node_of:
            where = "once" if shard is None else f"on shard {shard}"
            raise CheckError(f"{op.name!r} is planned {where}, and no node is that.")
        return self._node_of[op.index, shard]

    def reader(self, weighted: Any) -> Any:
        """Return the node whose result a node weights."""
        return self._graph.by_name[source_of(weighted.input[0])]

    def form(self, reference: str) -> Form:
        """Return how what a reference names came about."""
        if reference not in self._forms:
            self._forms[reference] = self._follow(reference)
        return self._forms[reference]

    def _follow(self, reference: str) -> Form:
        name, index = split_reference(reference)
        node, origin = self._graph.by_name[name], self._graph.origins[name]
        if origin.role == "op":
            return ("made", Tensor(origin.op or 0, index), origin.shard)
        if origin.role == SIZES_ROLE:
            return ("sizes",)
        if origin.role == "constant":
            return ("everywhere", Tensor(origin.op or 0, index))
        data = [self.form(r) for r in node.input if r[0] != "^"] if node.op not in ("Const", "ZerosLike") else []
        if origin.role in ("shift", RELAY_ROLE):  # numbers of rows, as the shard's own rows have them; the same again
            return data[0]
        if node.op == "Identity" and origin.role in _MOVED:
            return ("Identity", node.device, (data[0],))
        if node.op in _PASSED_ON:
            return data[_PASSED_ON[node.op]]
        if node.op == "SplitV":
            return self._part(data[0], index) if origin.op is None else _cut(node, data[0], index)
        if node.op == "ConcatV2":
            return ("ConcatV2", node.device, tuple(data[:-1]))
        if node.op == "RealDiv":
            return ("RealDiv", node.device, data[0])
        if node.op in ("Const", "ZerosLike"):
            return ("zeros",)
        return (node.op, node.device, tuple(data))

    def _part(self, joined: Form, index: int) -> Form:
        """Return one of the tensors of a bucket: what was joined is taken apart again."""
        kind, device, forms = joined
        if kind == "ConcatV2":
            return forms[index]  # type: ignore[no-any-return]
        return (kind, device, tuple([self._part(form, index) for form in forms]))


def _cut(node: Any, form: Form, index: int) -> Form:
    return ("SplitV", node.device, form, index)


class _Planned:
    """What the plan says."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._shards = range(plan.mesh.shards)
        self._moves = {(move.tensor, move.target): move for move in plan.moves}

    def whole(self, tensor: Tensor, layout: SingleDevice) -> Form:
        """Return how a whole value on a device comes about; wherever it is made, if the layout names none."""
        plan, op, step = self._plan, self._plan.program.ops[tensor.op], self._plan.steps[tensor.op]
        if step.home and layout.device in ("", plan.owners.of_ops[tensor.op]):
            return ("made", tensor, None)
        if plan.state.is_everywhere(op):
            return _everywhere(op, tensor)
        if not layout.device and step.shards and is_whole(step.shards.gives[tensor.index]):
            return ("made", tensor, 0)
        return self._moved(self._move(tensor, layout if layout.device else SingleDevice(plan.owners.of(tensor))), None)

    def on_shard(self, tensor: Tensor, layout: Layout, d: int) -> Form:
        """Return how what shard `d` has of a tensor comes about."""
        op, step = self._plan.program.ops[tensor.op], self._plan.steps[tensor.op]
        if step.shards and step.shards.gives[tensor.index] == layout:
            return ("made", tensor, d)
        cut_constant = op.type == "Const" and isinstance(layout, Shard)
        if cut_constant or (is_whole(layout) and self._plan.state.is_everywhere(op)):
            return _everywhere(op, tensor)
        return self._moved(self._move(tensor, layout), d)

    def _move(self, tensor: Tensor, layout: Layout) -> Move:
        if (tensor, layout) not in self._moves:
            name = self._plan.program.ops[tensor.op].name
            raise CheckError(f"{name!r} is read as {layout}, and no move of the plan makes that.")
        return self._moves[tensor, layout]

    def _moved(self, move: Move, d: int | None) -> Form:
        """Return what a move makes, for shard `d` if it makes something for each."""
        if isinstance(move.source, (Shard, Partial)) and isinstance(move.target, (Shard, Replicate)):
            return self._exchanged(move, move.source, move.target, d or 0)
        if isinstance(move.source, (Shard, Partial)):
            return self._put_together(move)
        if move.source == REPLICATE and not isinstance(move.target, SingleDevice):
            return self._taken_apart(move, d or 0)
        if move.source == REPLICATE:
            assert isinstance(move.target, SingleDevice)
            return ("made", move.tensor, self._plan.mesh.copy_for(move.target.device))
        assert isinstance(move.source, SingleDevice)
        whole = self.whole(move.tensor, move.source)
        if isinstance(move.target, Partial):
            return whole if d == 0 else ("zeros",)
        if is_whole(move.target):
            at = move.target.device or self._plan.home if isinstance(move.target, SingleDevice) else ""
            at = at or self._device_of(move.tensor, d or 0)
            return sent(whole, at, gateways_of(self._plan.gateways, move))
        if len(self._shards) == 1:
            return whole
        assert isinstance(move.target, Shard)
        assert d is not None
        return self._piece(whole, move.target, move.source.device or self._plan.home, d)

    def _taken_apart(self, move: Move, d: int) -> Form:
        """Return what shard `d` takes of what every shard has."""
        if isinstance(move.target, Partial):
            return ("made", move.tensor, 0) if d == 0 else ("zeros",)
        own: Form = ("made", move.tensor, d)
        if len(self._shards) == 1:
            return own
        assert isinstance(move.target, Shard)
        return self._piece(own, move.target, self._plan.shard_device(self._plan.program.ops[move.tensor.op], d), d)

    def _exchanged(self, move: Move, source: Shard | Partial, target: Shard | Replicate, d: int) -> Form:
        """Return what shard `d` puts together of what all shards send it."""
        op, device = self._plan.program.ops[move.tensor.op], self._plan.devices[d]
        pieces: list[Form] = [("made", move.tensor, e) for e in self._shards]
        if isinstance(target, Shard):
            pieces = [self._piece(part, target, self._plan.shard_device(op, e), d) for e, part in enumerate(pieces)]
        made_on = [self._device_of(move.tensor, e) for e in self._shards]
        if isinstance(source, Partial):
            by_turns = [(own, [piece]) for own, piece in zip(made_on, pieces, strict=True)]
            return reduced(source.reduction, by_turns, device, gateways_of(self._plan.gateways, move, d))
        if isinstance(target, Replicate):
            pieces = [sent(piece, device, gateways_of(self._plan.gateways, move, e)) for e, piece in enumerate(pieces)]
        return ("ConcatV2", device, tuple(pieces))

    def _device_of(self, tensor: Tensor, d: int) -> str:
        return self._plan.shard_device(self._plan.program.ops[tensor.op], d)

    def _piece(self, whole: Form, target: Shard, device: str, d: int) -> Form:
        """Return what shard `d` gets of a value that is cut on a device."""
        blocks = len(target.blocks)
        pieces = [("SplitV", device, whole, b * len(self._shards) + d) for b in range(blocks)]
        return pieces[0] if blocks == 1 else ("ConcatV2", self._plan.devices[d], tuple(pieces))

    def _put_together(self, move: Move) -> Form:
        assert isinstance(move.target, SingleDevice)
        parts: Sequence[Form] = [("made", move.tensor, d) for d in self._shards]
        device = move.target.device or self._plan.home
        if len(parts) == 1:
            return parts[0]
        op = self._plan.program.ops[move.tensor.op]
        own = [self._plan.shard_device(op, d) for d in self._shards]
        if isinstance(move.source, Partial):
            by_turns = [(own[shards[0]], [parts[d] for d in shards]) for shards in turns(self._plan.mesh.positions)]
            return reduced(move.source.reduction, by_turns, device, gateways_of(self._plan.gateways, move))
        assert isinstance(move.source, Shard)
        if (blocks := len(move.source.blocks)) > 1:
            parts = [("SplitV", own[d], parts[d], b) for b in range(blocks) for d in self._shards]
        return ("ConcatV2", device, tuple(parts))


def _everywhere(op: Op, tensor: Tensor) -> Form:
    return ("everywhere", tensor) if op.yields is None else ("sizes",)
