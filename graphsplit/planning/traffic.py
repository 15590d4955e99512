"""Traffic: the bytes that leave and reach each device when a plan runs once. They follow from its moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from graphsplit.core.layouts import Partial, Replicate, Shard, SingleDevice
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.steps import Move
from graphsplit.program.program import COPIES

COPY = "copy"  # of a variable that lies in copies, for a shard on a device without one


@dataclass(frozen=True)
class Traffic:
    """Bytes by device, full names.

    Attributes:
      sent: what leaves it for other devices.
      received: what reaches it from other devices.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)

    @property
    def busiest(self) -> tuple[str, int, int]:
        """The device through which most bytes go, the bytes that it sends, and those that it receives."""
        devices = dict.fromkeys([*self.sent, *self.received])
        through = {device: (self.sent.get(device, 0), self.received.get(device, 0)) for device in devices}
        device = max(through, key=lambda device: sum(through[device]), default="")
        return (device, *through.get(device, (0, 0)))


def traffic(plan: Decisions) -> Traffic:
    """Return the bytes that one call moves between devices.

    A tensor that several operations of a device read is sent there once, as TensorFlow's runtime does. Sizes that are
    not known count as planned. What loops at home move in each turn is not in it.
    """
    found = Traffic()
    sends = [send for move in plan.moves for send in _sends_of(plan, move)]
    for source, target, size in sorted([*_sends_of_copies(plan), *sends]):
        if source != target and size:
            found.sent[source] = found.sent.get(source, 0) + size
            found.received[target] = found.received.get(target, 0) + size
    return found


def sent_by_kind(plan: Decisions) -> dict[str, int]:
    """Return the bytes that one call sends between devices, by the kind of move: they add up to what devices send."""
    found = {COPY: _crossing(_sends_of_copies(plan))}
    for move in plan.moves:
        found[move.kind] = found.get(move.kind, 0) + _crossing(_sends_of(plan, move))
    return found


def _crossing(sends: Iterable[tuple[str, str, int]]) -> int:
    return sum([size for source, target, size in sends if source != target])


def _sends_of_copies(plan: Decisions) -> Iterator[tuple[str, str, int]]:
    for op in plan.program.ops:
        if op.type == COPIES and plan.steps[op.index].shards:  # a shard elsewhere than all copies is sent one
            for device in dict.fromkeys([plan.shard_device(op, d) for d in range(plan.mesh.shards)]):
                tensor = plan.program.nearest(op, device)
                yield plan.program.places[tensor.op], device, plan.program.bytes(tensor)


def _sends_of(plan: Decisions, move: Move) -> Iterator[tuple[str, str, int]]:
    """Yield what a move sends: from where, to where, how many bytes; what stays where it is, too."""
    size = plan.program.bytes(move.tensor)
    shards = _devices_of_shards(plan, move)
    source = _device(plan, move.source)
    target = _device(plan, move.target)
    if isinstance(move.source, (Shard, Partial)) and isinstance(move.target, (Shard, Replicate)):
        for d, device in enumerate(shards):
            own = _share(plan, size, d) if isinstance(move.source, Shard) else size
            for e, other in enumerate(plan.devices):
                yield device, other, _share(plan, own, e) if isinstance(move.target, Shard) else own
    elif isinstance(move.target, Replicate):
        yield from ((source, device, size) for device in dict.fromkeys(shards))
    elif isinstance(move.target, SingleDevice):
        if isinstance(move.source, SingleDevice):
            yield source, target, size
        elif isinstance(move.source, Partial):
            yield from ((device, target, size) for device in dict.fromkeys(shards))  # its shards' sum
        elif isinstance(move.source, Shard):
            yield from ((device, target, _share(plan, size, d)) for d, device in enumerate(shards))
    elif isinstance(move.target, Shard) and isinstance(move.source, SingleDevice):
        yield from ((source, device, _share(plan, size, d)) for d, device in enumerate(shards))


def _devices_of_shards(plan: Decisions, move: Move) -> list[str]:
    op = plan.program.ops[move.tensor.op]
    return [plan.shard_device(op, d) for d in range(plan.mesh.shards)]


def _device(plan: Decisions, layout: object) -> str:
    return (layout.device if isinstance(layout, SingleDevice) else "") or plan.home


def _share(plan: Decisions, size: int, shard: int) -> int:
    return round(size * plan.mesh.share(shard))
