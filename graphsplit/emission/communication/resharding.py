"""Resharding: the moves of a plan, each carried out once, when somebody first reads what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import Layout, Shard, SingleDevice
from graphsplit.emission.communication.collectives import CollectiveWriter
from graphsplit.emission.constants import Constants
from graphsplit.emission.draft import Draft
from graphsplit.emission.shards.row_counts import RowCounts
from graphsplit.planning.communication.givers import Made, Moved, giver_of
from graphsplit.planning.communication.transfers import Collective, Own
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Move, spread
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
        self._collectives = {move: (k, c) for k, c in enumerate(plan.collectives) for move in c.moves}
        self._made: dict[Move, list[str]] = {}
        self._added: dict[Move, Mapping[int, str]] = {}

    def check(self) -> None:
        """Raise `CheckError` if a move was not carried out."""
        left = [move for move in self._plan.moves if move not in self._made]
        if left and self._plan.mesh.shards:
            name = self._program.ops[left[0].tensor.op].name
            raise CheckError(f"The {left[0].kind} of {name!r} is planned, and nobody reads what it makes.")

    def added(self, move: Move, d: int) -> str:
        """Return the node that has taken in what shard `d` gives to a sum; "" if that is the shard's own operation."""
        return self._added[move].get(d, "")

    def whole(self, tensor: Tensor, layout: SingleDevice) -> str:
        """Return the reference of a whole value on a device; on whichever it is made, if the layout names none."""
        match giver_of(self._plan, tensor, layout, on_shards=False):
            case Made(on_shards):
                name = self._program.ops[tensor.op].name
                return self._of_shard(tensor, self._draft.shards[0]) if on_shards else _reference(name, tensor.index)
            case Moved(into):
                return self._moved(tensor, into)[0]
        return self._constants.get(self._program.ops[tensor.op], layout, None, layout.device)

    def on_shard(self, tensor: Tensor, layout: Layout, d: int, device: str) -> str:
        """Return the reference of what shard `d` has of a tensor in a layout, for a reader on a device."""
        if isinstance(layout, SingleDevice):  # one of several copies
            return self.whole(tensor, layout)
        match giver_of(self._plan, tensor, layout, on_shards=True):
            case Made():
                return self._of_shard(tensor, d)
            case Moved(into):
                return self._moved(tensor, into)[d]
        if isinstance(layout, Shard):
            self._made.setdefault(self._moves[tensor, layout], [])
        return self._constants.get(self._program.ops[tensor.op], layout, d, device)

    def _of_shard(self, tensor: Tensor, d: int) -> str:
        shards, name = self._plan.steps[tensor.op].shards, self._program.ops[tensor.op].name
        if shards is not None and shards.together:
            own = spread(shards.gives, self._plan.mesh.shards)[tensor.index]
            return _reference(name, own[min(d, len(own) - 1)])
        return _reference(self._draft.prefixes[d] + name, tensor.index)

    def _moved(self, tensor: Tensor, layout: Layout) -> Sequence[str]:
        """Return what a move makes: one reference, or one for each shard."""
        move = self._moves.get((tensor, layout))
        if move is None:
            name = self._program.ops[tensor.op].name
            raise CheckError(f"{name!r} is read as {layout}, and no move of the plan makes that.")
        if move not in self._made:
            self._carry_out(*self._collectives[move])
        return self._made[move]

    def _carry_out(self, number: int, collective: Collective) -> None:
        writer = CollectiveWriter(collective, self._own, self._name(number, collective), self._draft, self._counts)
        for i in range(len(collective.values)):
            writer.write(i)
        for move, reads in zip(collective.moves, collective.reads, strict=True):
            self._made[move] = [writer.references[read.value] for read in reads]
            self._added[move] = writer.taken_in

    def _own(self, own: Own) -> str:
        """Return the reference of what a move begins with."""
        if isinstance(own.layout, SingleDevice):
            return self.whole(own.tensor, own.layout)
        assert own.by is not None
        return self.on_shard(own.tensor, own.layout, own.by, self._plan.devices[own.by])

    def _name(self, number: int, collective: Collective) -> str:
        """Return a name for what carries out moves that no other node's begins with: it has a number."""
        kind = collective.kind.replace("-", "_").replace(" ", "_")
        of = "bucket" if collective.is_bucket else self._program.ops[collective.moves[0].tensor.op].name
        return f"{self._draft.scope}/{kind}_{number}/{of}"


def _reference(name: str, index: int) -> str:
    return f"{name}:{index}" if index else name
