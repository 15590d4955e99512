"""Gateways: the devices through which goes what passes from host to host, so that it passes once.

Between devices of one host there is memory, or a fast link; between hosts there is a network, which all devices of a
host share. So what the devices of a host give to a sum is added up on one of them, and one value leaves the host; and
what several devices of another host read is sent to one of them, and from there to the others. Of many such values,
each goes through the device through which least has gone.

On one host nothing has a gateway. But what each of many devices sends to all others is many messages there, too: their
groups add up first (`costs/exchanges.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphsplit.core.hosts import by_host, host_name
from graphsplit.planning.communication.transfers import (
    Collective,
    Merged,
    Packed,
    Read,
    Relay,
    Rewrite,
    Sum,
    Value,
    is_total,
    rewritten,
)
from graphsplit.planning.costs.exchanges import groups_of

Passed = Counter[str]
"""The bytes that have passed through each device."""


def through_gateways(collectives: Iterable[Collective], has_rows: bool) -> list[Collective]:
    """Return collectives in which what passes from host to host passes once, and many devices exchange in groups.

    Args:
      collectives: of all moves.
      has_rows: whether all shards are known to have rows.
    """
    passed: Passed = Counter()
    summed = (_summed_by_group(collective, has_rows, passed) for collective in collectives)
    return [_relayed(c, passed) if _crosses(c) else c for c in summed]


def _crosses(collective: Collective) -> bool:
    """Return whether anything passes from host to host."""
    devices = {value.device for value in collective.values} | {
        read.device for reads in collective.reads for read in reads
    }
    return len({host_name(device) for device in devices}) > 1


def _summed_by_group(collective: Collective, has_rows: bool, passed: Passed) -> Collective:
    """Add up, on one of them, what several devices of a host give to a sum; so do groups of many devices of one host.

    A sum of several hosts is added up host by host in the target's, too: so it has the same bits whichever device it is
    wanted on, and all layouts of variables train alike. What all devices want is added up on one device of each host,
    for all. In a group of one host every device adds up, and sends that to its like in each other group.
    """
    totals = [value for value in collective.values if is_total(value)]
    is_exchange = len({value.of for value in totals}) == 1 < len({value.device for value in totals})
    gateways: dict[tuple[str, tuple[int, ...]], str] = {}

    def place(value: Value, group: Sequence[str], own_group: Sequence[str]) -> str:
        if own_group:
            return value.device if group == own_group else group[own_group.index(value.device) % len(group)]
        host = host_name(group[0])
        if (host, value.of) not in gateways:
            is_target = host == host_name(value.device) and not is_exchange
            gateways[host, value.of] = _least([value.device] if is_target else group, passed, value.bytes)
        return gateways[host, value.of]

    def write(rewrite: Rewrite, value: Value) -> int:
        if not is_total(value):
            return rewrite.add(value)
        devices = [rewrite.values[i].device for i in value.of]
        groups = groups_of(devices, has_rows and is_exchange)
        is_across = len(by_host([*devices, value.device])) > 1
        if len(groups) == 1 and not is_across:
            return rewrite.add(value)
        own_group = [] if is_across else next(group for group in groups if value.device in group)
        parts: dict[str, list[int]] = {}
        for i, device in zip(value.of, devices, strict=True):
            parts.setdefault(device, []).append(i)
        of_groups = list[int]()
        for group in groups:
            of = tuple([i for device in group for i in parts[device]])
            if len(of) > 1:
                host = host_name(group[0]) if is_across else ""
                of = (_added_up(rewrite, replace(value, of=of, device=place(value, group, own_group), host=host)),)
            of_groups += of
        total = replace(value, of=tuple(of_groups))
        return rewrite.add_sum(total) if isinstance(total, Sum) else rewrite.add(total)

    return rewritten(collective, write)


def _added_up(rewrite: Rewrite, part: Sum | Merged) -> int:
    """Write, once, what a group gives to a total: of moments both, as one."""
    if isinstance(part, Sum):
        return rewrite.add_once(replace(part, entries=0))
    count = len(rewrite.values[part.of[0]].of)
    moments = [rewrite.add_once(replace(part, which=k)) for k in range(count)]
    return rewrite.add_once(Packed(tuple(moments), part.device, count * part.bytes))


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
        tuple([Read(relays.get((i, host_name(device)), renamed[i]), device) for i, device in reads_of_move])
        for reads_of_move in collective.reads
    ]
    return replace(collective, values=tuple(values), reads=tuple(reads))


def _users(collective: Collective) -> list[list[str]]:
    """Return for each value the devices that get it."""
    users: list[list[str]] = [[] for _ in collective.values]
    for value in collective.values:
        for i in value.of:
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
