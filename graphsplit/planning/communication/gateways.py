"""Gateways: the devices through which goes what passes from host to host, so that it passes once.

Between devices of one host there is memory, or a fast link; between hosts there is a network, which all devices of a
host share. So what the devices of a host give to a sum is added up on one of them, and one value leaves the host; and
what several devices of another host read is sent to one of them, and from there to the others. Of many such values,
each goes through the device through which least has gone.

On one host nothing has a gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphsplit.core.hosts import by_host, host_name
from graphsplit.planning.communication.transfers import Collective, Read, Relay, Rewrite, Sum, Value, rewritten

Passed = Counter[str]
"""The bytes that have passed through each device."""


def through_gateways(collectives: Iterable[Collective]) -> list[Collective]:
    """Return collectives in which what passes from host to host passes once."""
    passed: Passed = Counter()
    return [_relayed(_summed_by_host(c, passed), passed) if _crosses(c) else c for c in collectives]


def _crosses(collective: Collective) -> bool:
    """Return whether anything passes from host to host."""
    devices = {value.device for value in collective.values} | {read.device for own in collective.reads for read in own}
    return len({host_name(device) for device in devices}) > 1


def _summed_by_host(collective: Collective, passed: Passed) -> Collective:
    """Add up, on one of them, what several devices of a host give to a sum.

    A sum of several hosts is added up host by host in the target's, too: so it has the same bits whichever device it is
    wanted on, and all layouts of variables train alike.
    """

    def write(rewrite: Rewrite, value: Value) -> int:
        if not isinstance(value, Sum) or value.turn is not None:
            return rewrite.add(value)
        there, hosts = host_name(value.device), by_host(rewrite.values[i].device for i in value.of)
        if list(hosts) == [there]:
            return rewrite.add(value)
        together: dict[str | int, list[int]] = {}
        for i in value.of:
            own_host = host_name(rewrite.values[i].device)
            together.setdefault(own_host if len(hosts[own_host]) > 1 else i, []).append(i)
        totals = []
        for host, parts in together.items():
            if isinstance(host, str):
                gateway = _least([value.device] if host == there else hosts[host], passed, value.bytes)
                own = replace(value, of=tuple(parts), device=gateway, entries=0, host=host)
                totals.append(rewrite.add(own))
            else:
                totals += parts
        return rewrite.add_sum(replace(value, of=tuple(totals)))

    return rewritten(collective, write)


def _relayed(collective: Collective, passed: Passed) -> Collective:
    """Send what several devices of another host read to one of them, and from there to the others."""
    users = _users(collective)
    relays: dict[tuple[int, str], int] = {}  # by value and host
    values: list[Value] = []
    renamed: list[int] = []
    for i, value in enumerate(collective.values):
        of = [relays.get((k, host_name(value.device)), renamed[k]) for k in value.of]
        values.append(replace(value, of=tuple(of)))
        renamed.append(len(values) - 1)
        for host, devices in by_host(users[i]).items():
            if host != host_name(value.device) and len(devices) > 1:
                gateway = _least(devices, passed, value.bytes)
                relays[i, host] = len(values)
                values.append(Relay((renamed[i],), gateway, value.bytes, value.shard))
    reads = [
        tuple([Read(relays.get((i, host_name(device)), renamed[i]), device) for i, device in own])
        for own in collective.reads
    ]
    return replace(collective, values=tuple(values), reads=tuple(reads))


def _users(collective: Collective) -> list[list[str]]:
    """Return for each value the devices that get it; of what is added up elsewhere, none."""
    users: list[list[str]] = [[] for _ in collective.values]
    for value in collective.values:
        for i in () if isinstance(value, Sum) else value.of:
            users[i].append(value.device)
    for reads in collective.reads:
        for i, device in reads:
            users[i].append(device)
    return users


def _least(devices: Sequence[str], passed: Passed, size: int) -> str:
    """Return the device through which least has gone, and let a value of this size go through it."""
    device = min(devices, key=lambda d: passed[d])
    passed[device] += max(size, 1)
    return device
