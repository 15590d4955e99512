"""Transfers: what a move consists of: values on devices, and what is sent from one device to another.

A move says that a tensor changes its layout. What carries it out is a small graph of values, each on one device, each
made of others by one of five primitives: a value is sliced, several are concatenated or added, zeros are filled in for
one, or it is sent on. A value that is read on another device than its own is sent there, once: that is a transfer.

Everything else follows from these. Buckets, turns and gateways rewrite them, emission writes one node or two for each,
traffic adds up their bytes, and `transfer_checks` derives from them what every reader gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import MOMENTS, Layout, Shard
from graphsplit.planning.steps import Move
from graphsplit.program.program import Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """What a device has while tensors move.

    Attributes:
      of: what it is made of, by number among the values of its collective.
      device: where it is.
      bytes: its size.
      shard: without whose rows it is not there; None for what is always there.
    """

    of: tuple[int, ...]
    device: str
    bytes: int
    shard: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Own(Value):
    """What a move starts from: what a shard has of a tensor, or a device of a group, or (`by` is None) all of it."""

    tensor: Tensor
    layout: Layout
    by: int | str | None = None


class Slicing(NamedTuple):
    """How a value is split.

    Attributes:
      axis: along which axis.
      layout: into the pieces of this layout: block by block, of each block one for each shard. None: see `sizes`.
      shards: whose entries each piece of a block has, if it is not one piece for each shard; together they have all of
        the value. So what a device's shards read is one piece, which that device splits again, and what a shard has of
        several blocks is split into these.
      holder: the shard on whose device a whole value is split, if that is not where it is whole for everybody.
      sizes: the bytes of vectors that were joined, or of numbers that were packed.
    """

    axis: int
    layout: Shard | None = None
    shards: tuple[tuple[int, ...], ...] = ()
    holder: int | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Value):
    """One piece of a value, which is split where it is."""

    split: Slicing
    piece: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenation(Value):
    """Values one after the other along an axis."""

    axis: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum(Value):
    """What values amount to, added up or reduced in another way, in this order.

    Attributes:
      reduction: `"sum"`, `"mean"` (a sum, divided at the end), `"max"`, ...
      entries: by how many the sum of a mean is divided, where it is complete; else 0.
      turn: the shard whose own part is taken in on its device, behind those of the shards before it.
      host: the host whose devices' parts it adds up; "" for any other sum.
    """

    reduction: str
    entries: int = 0
    turn: int | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Packed(Value):
    """Several of the same shape, as one: a shard's own mean and variance, or an owner's numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged(Value):
    """The mean (0) or variance (1) of all rows that follows from those of each shard's own, in this order.

    Attributes:
      which: of both.
      host: the host whose devices' rows it is of; "" for all rows.
    """

    which: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Zeros(Value):
    """Zeros of the shape of a value. Those of known shape are made of nothing."""


@dataclass(frozen=True, slots=True)
class Relay(Value):
    """The same again, on a device from which others of its host get it."""


def is_total(value: Value) -> TypeGuard[Sum | Merged]:
    """Return whether a value amounts to several, all at once."""
    return isinstance(value, Merged) or (isinstance(value, Sum) and value.turn is None)


def shards_behind(values: Sequence[Value], i: int) -> tuple[int, ...]:
    """Return the shards that have what a value is made of, by its number."""
    value = values[i]
    if isinstance(value, Own):
        return (value.by,) if isinstance(value.by, int) else ()
    return tuple(dict.fromkeys([d for k in value.of for d in shards_behind(values, k)]))


class Read(NamedTuple):
    """What somebody gets: a value, by number, and the device on which it is read."""

    value: int
    device: str


Send = tuple[str, str, int]
"""From which device, to which other one, how many bytes."""


@dataclass(frozen=True)
class Collective:
    """What carries out moves that are made together: of one tensor from one device, or in a bucket.

    Attributes:
      moves: which.
      values: each after those that it is made of.
      reads: for each move what it makes: one value for each shard, or a single one.
    """

    moves: tuple[Move, ...]
    values: tuple[Value, ...]
    reads: tuple[tuple[Read, ...], ...]

    @property
    def kind(self) -> str:
        """The field's name for it."""
        return self.moves[0].kind

    @property
    def is_bucket(self) -> bool:
        """Whether it makes the moves of several tensors as one."""
        return self.moves[0].source not in MOMENTS and len({move.tensor for move in self.moves}) > 1

    @property
    def adds_up(self) -> bool:
        """Whether anything is added up in it."""
        return any(isinstance(value, Sum) for value in self.values)

    @property
    def sends(self) -> bool:
        """Whether anything of it is sent from one device to another."""
        return next(self.transfers(), None) is not None

    @property
    def gateways(self) -> dict[str, str]:
        """The devices, by host, through which passes what comes from other hosts or leaves for them, if one does."""
        relays = {host_name(v.device): v.device for v in self.values if isinstance(v, Relay)}
        return {v.host: v.device for v in self.values if isinstance(v, (Sum, Merged)) and v.host} | relays

    def transfers(self) -> Iterator[tuple[Move, Send]]:
        """Yield what is sent from device to device, each value to each device once, and for which move."""
        pairs_sent: set[tuple[int, str]] = set()
        inner = [(self.moves[0], Read(i, value.device)) for value in self.values for i in value.of]
        last = [(move, read) for move, reads in zip(self.moves, self.reads, strict=True) for read in reads]
        for move, (i, device) in [*inner, *last]:
            value = self.values[i]
            if value.device != device and (i, device) not in pairs_sent:
                pairs_sent.add((i, device))
                yield move, (value.device, device, value.bytes)


@dataclass
class Rewrite:
    """The values of a collective while they are written again, in order."""

    values: list[Value] = field(default_factory=list)
    numbers: dict[Value, int] = field(default_factory=dict)

    def add_once(self, value: Value) -> int:
        """Write a value that several others are made of, unless that has been done, and return its number."""
        if value not in self.numbers:
            self.numbers[value] = self.add(value)
        return self.numbers[value]

    def add(self, value: Value) -> int:
        """Write a value, and return its number."""
        self.values.append(value)
        return len(self.values) - 1

    def add_sum(self, value: Sum) -> int:
        """Write a sum; of one value, of which nothing is to be divided, it is that value."""
        return value.of[0] if len(value.of) == 1 and not value.entries else self.add(value)

    def giver(self, i: int) -> int:
        """Return the shard that has what a value is made of."""
        value = self.values[i]
        while not isinstance(value, Own):
            value = self.values[value.of[0]]
        return value.by if isinstance(value.by, int) else 0


def rewritten(collective: Collective, write: Callable[[Rewrite, Value], int]) -> Collective:
    """Return a collective whose values are written again, each by a function that returns which one stands for it."""
    rewrite, renamed = Rewrite(), list[int]()
    for value in collective.values:
        renamed.append(write(rewrite, replace(value, of=tuple([renamed[i] for i in value.of]))))
    reads = [tuple([Read(renamed[i], device) for i, device in reads]) for reads in collective.reads]
    return replace(collective, values=tuple(rewrite.values), reads=tuple(reads))
