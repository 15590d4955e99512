"""Exchanges: which sums are so small that each shard sends its part to all others, instead of through one device.

Shards that wait for a sum over the batch wait twice if one device adds it up: for the parts to arrive there, and for
the sum to come back. If each shard sends its part of `s` bytes to the `N - 1` others, they wait once, and each device
gets `(N - 1) s` bytes. With a latency of `L` seconds and links of `B` bytes per second that pays where
`(N - 1) s <= L B`. All devices add up in the same order, so all have equal bits.

Each message costs its sender some time, too, however few bytes it has. So many devices exchange in two levels: groups
add up what their devices have, and then send each other what they got. The devices of a host are a group; on one host,
those of `N` are in about `sqrt(N)` groups. See `communication/gateways.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from graphsplit.core.devices import copies_take_time
from graphsplit.core.hosts import by_host
from graphsplit.core.layouts import Layout, Partial
from graphsplit.program.program import Program, Tensor

EXCHANGE_BYTES = 524_288
"""The most that a device gets from all others of such a sum: a second way between GPUs takes 20 us and more, in which a
link of 25 GB/s carries 500 kB. (Between hosts it takes 0.15 ms and more, in which 25 Gbit/s carry 470 kB.)"""

FEWEST_IN_GROUPS = 16
"""So many devices of one host exchange in groups: a message costs its sender 5 us and more, and 15 of them more than a
second way and 6."""


def exchange_bytes_between(devices: Sequence[str], most_bytes: int | None) -> int:
    """Return how many bytes a device may get of a sum that goes from each shard to each; 0 if none does.

    Logical devices of one CPU share its cores, and a copy between them takes no time: a second way costs less there
    than what each of them adds up.

    Args:
      devices: full names, of all that exchange.
      most_bytes: what `tuning={"exchange_bytes": ...}` says; None for what pays between these devices.
    """
    usual = EXCHANGE_BYTES if copies_take_time(devices) else 0
    return usual if most_bytes is None else most_bytes


def groups_of(devices: Iterable[str], has_rows: bool) -> list[list[str]]:
    """Return devices, each once, in the groups that add up what they have before they send it to each other.

    Args:
      devices: full names.
      has_rows: whether all are known to have rows. Those of one host are in one group else, in which what stands in for
        one without rows need not be sent.

    >>> [len(group) for group in groups_of([f"/device:GPU:{k}" for k in range(18)], has_rows=True)]
    [4, 5, 4, 5]
    """
    hosts = list(by_host(devices).values())
    if len(hosts) != 1 or len(hosts[0]) < FEWEST_IN_GROUPS or not has_rows:
        return hosts
    count = math.isqrt(len(hosts[0]))
    borders = [k * len(hosts[0]) // count for k in range(count + 1)]
    return [hosts[0][first:last] for first, last in pairwise(borders)]


def is_exchanged(program: Program, tensor: Tensor, made_layout: Layout, most: int) -> bool:
    """Return whether the shards send each other what they have of a sum: it is small, with its parts if it is one."""
    op = program.ops[tensor.op]
    is_part_of_much = op.divides and sum(op.out_bytes) > most
    return isinstance(made_layout, Partial) and has_few_bytes(program, tensor, most) and not is_part_of_much


def has_few_bytes(program: Program, tensor: Tensor, most: int) -> bool:
    """Return whether a tensor has a known shape and at most so many bytes; never if that is 0."""
    shape = program.shape(tensor)
    return most > 0 and shape is not None and all(type(n) is int for n in shape) and program.bytes(tensor) <= most
