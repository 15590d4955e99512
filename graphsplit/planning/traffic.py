"""Traffic: the bytes that leave and reach each device when a plan runs once. They follow from its moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Partial, Replicate, Shard, SingleDevice, is_whole
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.gateways import Gateways, gateways_of
from graphsplit.planning.steps import Move
from graphsplit.program.program import COPIES, Tensor

COPY = "copy"  # of a variable that lies in copies, for a shard on a device without one


Send = tuple[str, str, int]
"""From where, to where, how many bytes."""


@dataclass(frozen=True)
class Traffic:
    """Bytes by device, full names.

    Attributes:
      sent: what leaves it for other devices.
      received: what reaches it from other devices.
      between_hosts: how much of all that passes from host to host.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    between_hosts: int = 0

    @property
    def within_hosts(self) -> int:
        """The bytes that devices send to others of their host."""
        return sum(self.sent.values()) - self.between_hosts

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
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    between_hosts = 0
    for source, target, size in sorted([send for _, sends in _sends(plan) for send in sends]):
        if source != target and size:
            sent[source] = sent.get(source, 0) + size
            received[target] = received.get(target, 0) + size
            between_hosts += size if host_name(source) != host_name(target) else 0
    return Traffic(sent, received, between_hosts)


def sent_by_kind(plan: Decisions) -> dict[str, int]:
    """Return the bytes that one call sends between devices, by the kind of move: they add up to what devices send."""
    found = {COPY: 0}
    for kind, sends in _sends(plan):
        found[kind] = found.get(kind, 0) + sum([size for source, target, size in sends if source != target])
    return found


def _sends(plan: Decisions) -> Iterator[tuple[str, list[Send]]]:
    """Yield the kinds of moves, and what each move of them sends; what stays where it is, too."""
    yield COPY, list(_sends_of_copies(plan))
    to_gateways: set[tuple[Tensor, str, str]] = set()
    for move in plan.moves:
        if isinstance(move.source, SingleDevice) and is_whole(move.target):
            found = []
            for source, target, size in _sends_of_whole(plan, move):
                key = move.tensor, source, target
                is_there = key in to_gateways  # for another move that passes through it
                if target in gateways_of(plan.gateways, move).values():
                    to_gateways.add(key)
                found += [] if is_there else [(source, target, size)]
            yield move.kind, found
        else:
            yield move.kind, list(_sends_of_parts(plan, move))


def _sends_of_copies(plan: Decisions) -> Iterator[Send]:
    for op in plan.program.ops:
        if op.type == COPIES and plan.steps[op.index].shards:  # a shard elsewhere than all copies is sent one
            for device in dict.fromkeys([plan.shard_device(op, d) for d in range(plan.mesh.shards)]):
                tensor = plan.program.nearest(op, device)
                yield plan.program.places[tensor.op], device, plan.program.bytes(tensor)


def _sends_of_whole(plan: Decisions, move: Move) -> Iterator[Send]:
    """Yield what is sent of a value that one device has."""
    targets = [_device(plan, move.target)]
    if isinstance(move.target, Replicate):
        targets = list(dict.fromkeys(_devices_of_shards(plan, move)))
    source, size = _device(plan, move.source), plan.program.bytes(move.tensor)
    yield from [(a, b, size) for a, b in _hops(source, targets, gateways_of(plan.gateways, move))]


def _hops(source: str, targets: Sequence[str], gateways: Gateways) -> Iterator[tuple[str, str]]:
    """Yield from where to where a value goes that one device has and others read: over the gateways of their hosts."""
    through = {host: gateways[host] for host in dict.fromkeys(map(host_name, targets)) if host in gateways}
    yield from ((source, gateway) for gateway in through.values())
    yield from ((through.get(host_name(t), source), t) for t in targets if through.get(host_name(t)) != t)


def _sums(sources: Sequence[str], target: str, gateways: Gateways) -> Iterator[tuple[str, str]]:
    """Yield from where to where the parts of a sum go, each to the gateway of its host, and the sums of hosts."""
    devices = dict.fromkeys(sources)
    yield from ((device, gateways.get(host_name(device), target)) for device in devices)
    hosts = dict.fromkeys(map(host_name, devices))
    yield from ((gateways[host], target) for host in hosts if host in gateways)


def _sends_of_parts(plan: Decisions, move: Move) -> Iterator[Send]:
    """Yield what a move sends of what the shards have, or to the shards, to each another part."""
    size = plan.program.bytes(move.tensor)
    shards = _devices_of_shards(plan, move)
    if isinstance(move.source, SingleDevice):
        if isinstance(move.target, Shard):
            source = _device(plan, move.source)
            yield from ((source, device, _share(plan, size, d)) for d, device in enumerate(shards))
    elif isinstance(move.target, SingleDevice):
        target = _device(plan, move.target)
        if isinstance(move.source, Partial):
            yield from [(a, b, size) for a, b in _sums(shards, target, gateways_of(plan.gateways, move))]
        elif isinstance(move.source, Shard):
            yield from ((device, target, _share(plan, size, d)) for d, device in enumerate(shards))
    elif isinstance(move.source, (Shard, Partial)):
        yield from _sends_of_exchange(plan, move, shards)


def _sends_of_exchange(plan: Decisions, move: Move, shards: Sequence[str]) -> Iterator[Send]:
    size = plan.program.bytes(move.tensor)
    if isinstance(move.source, Partial):
        for e, other in enumerate(plan.devices):
            own = _share(plan, size, e) if isinstance(move.target, Shard) else size
            yield from [(a, b, own) for a, b in _sums(shards, other, gateways_of(plan.gateways, move, e))]
        return
    for d, device in enumerate(shards):
        own = _share(plan, size, d)
        if isinstance(move.target, Replicate):
            yield from [(a, b, own) for a, b in _hops(device, plan.devices, gateways_of(plan.gateways, move, d))]
        else:
            yield from [(device, other, _share(plan, own, e)) for e, other in enumerate(plan.devices)]


def _devices_of_shards(plan: Decisions, move: Move) -> list[str]:
    op = plan.program.ops[move.tensor.op]
    return [plan.shard_device(op, d) for d in range(plan.mesh.shards)]


def _device(plan: Decisions, layout: object) -> str:
    return (layout.device if isinstance(layout, SingleDevice) else "") or plan.home


def _share(plan: Decisions, size: int, shard: int) -> int:
    return round(size * plan.mesh.share(shard))
