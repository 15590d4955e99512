"""Traffic: the bytes that leave and reach each device when a plan runs once. They follow from its moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphsplit.core.hosts import host_name
from graphsplit.planning.communication.transfers import Send
from graphsplit.planning.decisions import Decisions
from graphsplit.program.program import COPIES

COPY = "copy"  # of a variable that lies in copies, for a shard on a device without one


@dataclass(frozen=True)
class Traffic:
    """Bytes by device, full names.

    Attributes:
      sent: what leaves it for other devices.
      received: what reaches it from other devices.
      between_hosts: how much of all that passes from host to host.
      by_kind: all that is sent, by the kind of move, and of what is sent between columns by the axis: see `along`.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    between_hosts: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)

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
    between_hosts, by_kind = 0, {COPY: 0}
    sends = [(send, kind) for kind, send in _sends(plan)]
    for (source, target, size), kind in sorted(sends):
        by_kind[kind] = by_kind.get(kind, 0) + (size if source != target else 0)
        if source != target and size:
            sent[source] = sent.get(source, 0) + size
            received[target] = received.get(target, 0) + size
            between_hosts += size if host_name(source) != host_name(target) else 0
    return Traffic(sent, received, between_hosts, by_kind)


def along(axis: str) -> str:
    """Return what sends along an axis are called, which no kind of move is, whatever a user calls the axis."""
    return f"along {axis!r}"


def _sends(plan: Decisions) -> Iterator[tuple[str, Send]]:
    """Yield what is sent from device to device, and the kind of move for which it is, or along which axis."""
    for op in plan.program.ops:
        if op.type == COPIES and plan.steps[op.index].shards:  # a shard elsewhere than all copies is sent one
            for device in dict.fromkeys([plan.shard_device(op, d) for d in range(plan.mesh.shards)]):
                tensor = plan.program.nearest(op, device)
                yield COPY, (plan.program.places[tensor.op], device, plan.program.bytes(tensor))
    for collective in plan.collectives:
        for move, send in collective.transfers():
            yield move.kind, send
    if plan.mesh.columns:
        yield from _sends_between_columns(plan)


def _sends_between_columns(plan: Decisions) -> Iterator[tuple[str, Send]]:
    """Yield what operations of a column read of another one, in the same row: each value goes to each device once."""
    carried_out = {(m.tensor, m.target): (c, k) for c in plan.collectives for k, m in enumerate(c.moves)}
    seen: set[tuple[object, str]] = set()
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        pairs = zip(op.inputs, step.shards.wants, strict=True) if step.shards else ()
        for i, (tensor, want) in enumerate(pairs):
            if step.shards is None or i in step.shards.makes:
                continue
            made, (carried, k) = plan.steps[tensor.op].shards, carried_out.get((tensor, want), (None, 0))
            for d in range(plan.mesh.shards):
                device, size = plan.mesh.read_at(op, i, d), plan.program.bytes(tensor)
                if made is not None and made.gives[tensor.index] == want:
                    source, key = plan.mesh.made_at(plan.program.ops[tensor.op], tensor.index, d), (tensor, d)
                    size = plan.mesh.bytes_of(d, size, want)
                elif carried is not None:
                    read = carried.reads[k][d]
                    value = carried.values[read.value]
                    if read.device == device:
                        continue
                    source, key, size = value.device, (carried.moves[0].tensor, read.value), value.bytes
                else:
                    continue
                if source != device and (key, device) not in seen:
                    seen.add((key, device))
                    yield along(plan.mesh.other_axis), (source, device, size)
