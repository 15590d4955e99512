"""Resharding: the moves of a plan, each carried out once, when somebody first reads what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graphsplit.core.errors import CheckError
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Partial, Replicate, Shard, SingleDevice, is_whole
from graphsplit.emission import collectives, exchanges, reductions
from graphsplit.emission.constants import Constants
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.row_counts import RowCounts
from graphsplit.planning.averages import entries_averaged
from graphsplit.planning.gateways import gateways_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Bucket, Move
from graphsplit.program.program import Tensor


class Resharding:
    """References of tensors in the layouts in which they are read.

    Args:
      plan: which tensor is made in which layouts, and every move.
      draft: what is written; what it takes to move tensors is added.
      counts: how many rows each shard has.
    """

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._program = plan.program
        self._draft = draft
        self._counts = counts
        self._constants = Constants(draft, counts, plan.mesh)
        self._moves: dict[tuple[Tensor, Layout], Move] = {(move.tensor, move.target): move for move in plan.moves}
        self._numbers: Mapping[Move, int] = {move: number for number, move in enumerate(plan.moves)}
        self._bucket_of = {move: bucket for bucket in plan.buckets for move in bucket.moves}
        self._made: dict[Move, list[str]] = {}
        self._added: dict[Move, Sequence[str]] = {}
        self._relays: dict[str, dict[str, str]] = {}  # by what is sent, and host

    def check(self) -> None:
        """Raise `CheckError` if a move was not carried out."""
        left = [move for move in self._plan.moves if move not in self._made]
        if left and self._plan.mesh.shards:
            name = self._program.ops[left[0].tensor.op].name
            raise CheckError(f"The {left[0].kind} of {name!r} is planned, and nobody reads what it makes.")

    def added(self, move: Move, d: int) -> str:
        """Return the node that has taken in what shard `d` gives to a sum; "" if that is the shard's own operation."""
        return self._added[move][d]

    def whole(self, tensor: Tensor, layout: SingleDevice) -> str:
        """Return the reference of a whole value on a device; on whichever it is made, if the layout names none."""
        op, step = self._program.ops[tensor.op], self._plan.steps[tensor.op]
        own = SingleDevice(self._plan.owners.of_ops[tensor.op])
        if step.home and (layout == own or not layout.device):
            return _reference(op.name, tensor.index)
        if self._plan.state.is_everywhere(op):
            return self._constants.get(op, layout, None, layout.device)
        if layout.device:
            return self._moved(tensor, layout)[0]
        if step.shards and is_whole(step.shards.gives[tensor.index]):
            return self._of_shard(tensor, self._draft.shards[0])
        return self._moved(tensor, SingleDevice(self._plan.owners.of(tensor)))[0]

    def on_shard(self, tensor: Tensor, layout: Layout, d: int, device: str) -> str:
        """Return the reference of what shard `d` has of a tensor in a layout, for a reader on a device."""
        op, step = self._program.ops[tensor.op], self._plan.steps[tensor.op]
        if step.shards and step.shards.gives[tensor.index] == layout:
            return self._of_shard(tensor, d)
        if isinstance(layout, SingleDevice):  # one of several copies
            return self.whole(tensor, layout)
        if op.type == "Const" and isinstance(layout, Shard):
            self._made.setdefault(self._moves[tensor, layout], [])
            return self._constants.get(op, layout, d, device)
        if is_whole(layout) and self._plan.state.is_everywhere(op):
            return self._constants.get(op, layout, d, device)
        return self._moved(tensor, layout)[d]

    def _of_shard(self, tensor: Tensor, d: int) -> str:
        return _reference(self._draft.prefixes[d] + self._program.ops[tensor.op].name, tensor.index)

    def _moved(self, tensor: Tensor, layout: Layout) -> Sequence[str]:
        """Return what a move makes: one reference, or one for each shard."""
        move = self._moves.get((tensor, layout))
        if move is None:
            name = self._program.ops[tensor.op].name
            raise CheckError(f"{name!r} is read as {layout}, and no move of the plan makes that.")
        if move not in self._made:
            bucket = self._bucket_of.get(move)
            if bucket is None:
                self._made[move] = self._carry_out(move)
            else:
                self._made.update(self._carry_out_bucket(bucket))
        return self._made[move]

    def _carry_out(self, move: Move) -> list[str]:
        if isinstance(move.source, (Shard, Partial)) and isinstance(move.target, (Shard, Replicate)):
            return self._exchange(move, move.source, move.target)
        if isinstance(move.source, Shard):
            return self._gather(move, move.source)
        if isinstance(move.source, Partial):
            return self._reduce(move, move.source)
        if move.source == REPLICATE and isinstance(move.target, Shard):
            return self._slice(move, move.target)
        source = self._source(move)
        if isinstance(move.target, Shard):
            return self._scatter(move, move.target, source)
        if isinstance(move.target, Partial):
            return self._zero_fill(move, source)
        if move.target == REPLICATE:
            op = self._program.ops[move.tensor.op]
            return self._sent(move, source, [self._plan.shard_device(op, d) for d in self._draft.shards])
        return self._sent(move, source, [_device(move.target, self._plan.home)])

    def _sent(self, move: Move, source: str, devices: Sequence[str]) -> list[str]:
        """Return what devices read of a whole value: what TensorFlow sends them, or one of their host for all."""
        gateways = gateways_of(self._plan.gateways, move)
        if gateways and source not in self._relays:
            dtype = self._draft.dtype(move.tensor)
            nodes, self._relays[source] = collectives.relays(self._name(move), source, dtype, gateways)
            self._draft.add_all(nodes, self._origin(move))
        relayed = self._relays[source] if gateways else {}
        return [relayed.get(host_name(device), source) for device in devices]

    def _source(self, move: Move) -> str:
        """Return the reference of the whole value that a move starts from."""
        if isinstance(move.source, SingleDevice):
            return self.whole(move.tensor, move.source)
        # every shard has it: nothing moves if one is on the device
        shard = self._plan.mesh.copy_for(move.target.device) if isinstance(move.target, SingleDevice) else 0
        return self._of_shard(move.tensor, shard)

    def _parts(self, move: Move) -> list[str]:
        return [self._of_shard(move.tensor, d) for d in self._draft.shards]

    def _gather(self, move: Move, source: Shard) -> list[str]:
        op, name = self._program.ops[move.tensor.op], self._name(move)
        nodes, reference = collectives.gather(
            name,
            self._parts(move),
            source,
            self._counts,
            self._draft.dtype(move.tensor),
            _device(move.target, self._plan.home),
            [self._plan.shard_device(op, d) for d in self._draft.shards],
        )
        self._draft.add_all(nodes, self._origin(move))
        return [reference]

    def _reduce(self, move: Move, source: Partial) -> list[str]:
        op = self._program.ops[move.tensor.op]
        devices = [self._plan.shard_device(op, d) for d in self._draft.shards]
        dtype, positions = self._draft.dtype(move.tensor), self._plan.mesh.positions
        gateways = gateways_of(self._plan.gateways, move)
        parts = reductions.Parts(self._parts(move), devices, positions, dtype, self._counts, gateways)
        entries = entries_averaged(op) if source.reduction == "mean" else 0
        device = _device(move.target, self._plan.home)
        nodes, reduced = reductions.reduce(self._name(move), parts, source.reduction, device, entries)
        self._draft.add_all(nodes, self._origin(move))
        self._added[move] = reduced.added
        return [reduced.reference]

    def _exchange(self, move: Move, source: Shard | Partial, target: Shard | Replicate) -> list[str]:
        op, dtype = self._program.ops[move.tensor.op], self._draft.dtype(move.tensor)
        made_on = [self._plan.shard_device(op, d) for d in self._draft.shards]
        nodes, references = exchanges.exchange(
            self._name(move),
            self._parts(move),
            source,
            target,
            self._counts,
            dtype,
            made_on,
            self._plan.devices,
            [gateways_of(self._plan.gateways, move, d) for d in self._draft.shards],
        )
        self._draft.add_all(nodes, self._origin(move))
        return references

    def _scatter(self, move: Move, target: Shard, source: str) -> list[str]:
        name, device = self._name(move), _device(move.source, self._plan.home)
        dtype, devices = self._draft.dtype(move.tensor), self._plan.devices
        nodes, references = collectives.scatter(name, source, target, self._counts, dtype, device, devices)
        self._draft.add_all(nodes, self._origin(move))
        return references

    def _slice(self, move: Move, target: Shard) -> list[str]:
        """Let each shard cut what it has, and take its own part."""
        op, dtype = self._program.ops[move.tensor.op], self._draft.dtype(move.tensor)
        found = []
        for d, whole in zip(self._draft.shards, self._parts(move), strict=True):
            name, device = f"{self._name(move)}/on_{d}", self._plan.shard_device(op, d)
            cut = collectives.scatter(name, whole, target, self._counts, dtype, device, self._plan.devices, d)
            self._draft.add_all(cut[0], self._origin(move))
            found.append(cut[1][d])
        return found

    def _zero_fill(self, move: Move, source: str) -> list[str]:
        name, device = self._name(move), self._draft.device_of(source) or self._plan.home
        shape, dtype = self._program.shape(move.tensor), self._draft.dtype(move.tensor)
        nodes, references = collectives.zero_fill(name, source, shape, self._counts, dtype, device, self._plan.devices)
        self._draft.add_all(nodes, self._origin(move))
        return references

    def _carry_out_bucket(self, bucket: Bucket) -> dict[Move, list[str]]:
        first, moves = bucket.moves[0], bucket.moves
        dtype: tf.DType = self._draft.dtype(first.tensor)
        name = f"{self._draft.scope}/bucket_{self._plan.buckets.index(bucket)}/{first.kind}"
        sizes = [self._program.bytes(move.tensor) // dtype.size for move in moves]
        gateways = gateways_of(self._plan.gateways, first)
        if bucket.kind == "broadcast":
            sources, device = [self._source(move) for move in moves], _device(first.source, self._plan.home)
            nodes, apart = collectives.broadcast_bucket(
                name, sources, sizes, dtype, device, self._plan.devices, gateways
            )
            made = {move: [own[k] for own in apart] for k, move in enumerate(moves)}
        else:
            assert first.source == PARTIAL_SUM
            parts = [[self._of_shard(move.tensor, d) for move in moves] for d in self._draft.shards]
            device = _device(first.target, self._plan.home)
            joined = reductions.Parts((), self._plan.devices, self._plan.mesh.positions, dtype, self._counts, gateways)
            nodes, sums, added = reductions.reduce_bucket(name, parts, sizes, device, joined)
            self._added.update(dict.fromkeys(moves, added))
            made = {move: [reference] for move, reference in zip(moves, sums, strict=True)}
        self._draft.add_all(nodes, Origin(None, None, first.kind))
        return made

    def _name(self, move: Move) -> str:
        """Return a name for what carries out a move that no other node's begins with: it has the move's number."""
        kind = move.kind.replace("-", "_").replace(" ", "_")
        return f"{self._draft.scope}/{kind}_{self._numbers[move]}/{self._program.ops[move.tensor.op].name}"

    def _origin(self, move: Move) -> Origin:
        return Origin(move.tensor.op, None, move.kind)


def _device(layout: Layout, home: str) -> str:
    """Return the device of a whole value; nodes that move it are at home where that is wherever a loader puts it."""
    assert isinstance(layout, SingleDevice)
    return layout.device or home


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name
