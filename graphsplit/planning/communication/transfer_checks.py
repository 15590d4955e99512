"""Whether transfers do what their moves say: what each value consists of is derived from the values alone.

A value consists of entries of a tensor along its axes, named by block and shard, and is whole or the sum of what some
shards have. Slices pick entries, concatenations put them one after the other, sums unite what shards have. What is read
in the end is held against the layout in which the move says that it is read. No table of moves is asked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphsplit.core.hosts import by_host, host_name
from graphsplit.core.layouts import OWN_ROW, Layout, Partial, Replicate, Shard, group_of, is_whole
from graphsplit.core.sizes import STAND_IN
from graphsplit.errors import CheckError
from graphsplit.planning.communication.transfers import (
    Collective,
    Concatenation,
    Merged,
    Own,
    Packed,
    Relay,
    Slice,
    Sum,
    Value,
    Zeros,
    is_total,
)
from graphsplit.planning.places import Places
from graphsplit.planning.propagation.backward_propagation import entries_averaged
from graphsplit.planning.steps import Move
from graphsplit.program.program import Program, Tensor

Entries = tuple[tuple[int, int], ...]
"""Of an axis that lies in pieces, some: each the block, and the shard that has it."""


class _Content(NamedTuple):
    """What a value consists of.

    Attributes:
      tensor: whose entries.
      along: for each axis of which it has not all, the layout of that axis, and which entries, in order.
      of: the shards whose parts have been added up; None if that is all of them.
      divided: whether the sum of a mean has been divided.
    """

    tensor: Tensor
    along: frozenset[tuple[int, Shard, Entries]] = frozenset()
    of: frozenset[int] | None = None
    divided: bool = False


_Contents = tuple[_Content, ...]
"""Of one tensor, or of vectors one after the other."""


def check_transfers(program: Program, places: Places, moves: Sequence[Move], collectives: Sequence[Collective]) -> None:
    """Raise `CheckError` unless every move is carried out, once, and what passes from host to host passes once."""
    carried, wanted = Counter(move for collective in collectives for move in collective.moves), set(moves)
    for move in {*moves, *carried}:
        if carried[move] != 1 or move not in wanted:
            name, times = program.ops[move.tensor.op].name, f"{carried[move]} times" if carried[move] else "by nobody"
            raise CheckError(f"The {move.kind} of {name!r} is carried out {times}.")
    pieces = _Pieces(places.mesh.shards)
    for collective in collectives:
        try:
            _Check(program, places, pieces, collective).check()
        except CheckError as error:
            name = program.ops[collective.moves[0].tensor.op].name
            raise CheckError(f"The {collective.kind} of {name!r} {error}") from None


class _Pieces:
    """What shards have of an axis in a layout; the same for all tensors."""

    def __init__(self, shards: int):
        self._shards = shards
        self.everybody = frozenset(range(shards))
        self.alone = [frozenset([d]) if shards > 1 else None for d in range(shards)]  # what a sum consists of, at first
        self._by_layout: dict[tuple[Shard, Sequence[int]], frozenset[tuple[int, Shard, Entries]]] = {}

    def of_shards(self, layout: Shard, shards: Sequence[int]) -> frozenset[tuple[int, Shard, Entries]]:
        """Return what some shards have along the axis of a layout: their pieces of each block."""
        if (layout, shards) not in self._by_layout:
            entries = tuple([(b, d) for b in range(len(layout.blocks)) for d in shards])
            self._by_layout[layout, shards] = (
                frozenset() if self._are_all(layout, entries) else frozenset([(layout.axis, layout, entries)])
            )
        return self._by_layout[layout, shards]

    def whole(self, content: _Content) -> _Content:
        """Return what a value consists of, without naming an axis of which it has all entries in order."""
        along = [axis for axis in content.along if not self._are_all(axis[1], axis[2])]
        of = None if content.of == self.everybody else content.of
        is_same = len(along) == len(content.along) and of == content.of
        return content if is_same else content._replace(along=frozenset(along), of=of)

    def _are_all(self, layout: Shard, entries: Entries) -> bool:
        blocks, count = range(len(layout.blocks)), self.count(layout)
        return len(entries) == len(blocks) * count and list(entries) == [(b, d) for b in blocks for d in range(count)]

    def count(self, layout: Shard) -> int:
        """Return how many pieces each block has: one for each shard, or each device of a group."""
        return len(group_of(layout)) or self._shards


class _Check:
    """One collective. Errors are the ends of sentences that begin with the move."""

    def __init__(self, program: Program, places: Places, pieces: _Pieces, collective: Collective):
        self._program = program
        self._places = places
        self._mesh = places.mesh
        self._pieces = pieces
        self._whole = pieces.whole
        self._collective = collective
        self._sources = {(move.tensor, move.source) for move in collective.moves}
        self._values = collective.values
        self._contents: list[_Contents] = []
        self._orders: list[tuple[object, ...]] = []  # in which each is added up
        self._first: list[int | str | None] = []  # the shard with whose part each begins, or the device of a group

    def check(self) -> None:
        for value in self._values:
            if value.of and not 0 <= min(value.of) <= max(value.of) < len(self._contents):
                raise CheckError("is made of what does not come before it.")
            self._first.append(value.by if isinstance(value, Own) else self._first[value.of[0]] if value.of else None)
            self._contents.append(self._content(value))
            self._orders.append(self._order(value))
            self._check_bytes(value)
        for move, reads in zip(self._collective.moves, self._collective.reads, strict=True):
            expected = list(self._expected(move))
            if [read.device for read in reads] != [device for device, _ in expected]:
                where = ", ".join(read.device for read in reads) or "no device"
                raise CheckError(f"is read on {where}.")
            for read, (device, content) in zip(reads, expected, strict=True):
                if self._contents[read.value] != (content,):
                    raise CheckError(f"gives {device} something else than {move.target}.")
            if isinstance(move.target, Replicate) and len({self._orders[read.value] for read in reads}) > 1:
                raise CheckError("is added up in another order on some devices than on others.")
        self._check_places()
        self._check_hosts()

    def _order(self, value: Value) -> tuple[object, ...]:
        """Return in which order a value is added up, wherever that is; of what is not, nothing."""
        of = tuple([self._orders[i] for i in value.of])
        if isinstance(value, Own):
            return (value.by,) if isinstance(value.layout, Partial) else ()
        return of[0] if isinstance(value, Relay) else (type(value), of)

    def _check_bytes(self, value: Value) -> None:
        of = [self._values[i].bytes for i in value.of]
        if isinstance(value, Own):
            size = self._program.bytes(value.tensor)
            if isinstance(value.layout, Shard) and isinstance(value.by, int):
                rows = self._mesh.rows_of(STAND_IN)
                size = size * value.layout.own(rows, value.by) // max(value.layout.size(sum(rows)), 1)
            expected = {size}
        elif isinstance(value, (Concatenation, Packed)):
            expected = {sum(of)}
        elif isinstance(value, Merged):
            expected = {self._program.bytes(self._collective.moves[value.which].tensor)}
        else:
            expected = {value.bytes} if isinstance(value, (Slice, Zeros)) else set(of)
        if {value.bytes} != expected:
            raise CheckError(f"counts {value.bytes} bytes, and has {expected}.")

    def _check_places(self) -> None:
        """Raise `CheckError` if a device takes part that neither gives nor gets, or what is put together is sent on."""
        reads = [read for reads in self._collective.reads for read in reads]
        taking_part = {v.device for v in self._values if isinstance(v, Own)} | {read.device for read in reads}
        for value in self._values:
            if value.device not in taking_part:
                raise CheckError(f"passes through {value.device}, which has no part in it.")
        for read in reads:
            value = self._values[read.value]
            is_sum = is_total(value) and not value.host
            is_apart = isinstance(value, Slice) and bool(value.split.sizes)
            if (is_sum or is_apart or isinstance(value, Concatenation)) and value.device != read.device:
                raise CheckError(f"is put together on {value.device}, and read on {read.device}.")

    def _made(self, tensor: Tensor, layout: Layout | None, d: int | str | None) -> _Content:
        """Return what a shard has of a tensor in a layout, or (None, or on a device of a group) what is whole."""
        if isinstance(layout, Shard) and isinstance(d, int):
            return _Content(tensor, self._pieces.of_shards(layout, (d,)))
        is_part = isinstance(layout, Partial) and isinstance(d, int)
        return _Content(tensor, of=self._pieces.alone[d] if is_part else None)  # type: ignore[index]

    def _expected(self, move: Move) -> Iterator[tuple[str, _Content]]:
        """Yield where what a move makes is read, and what it has to be there."""
        for_all = self._given(move, None) if is_whole(move.target) else None
        for d, device in enumerate(self._places.having(self._program.ops[move.tensor.op], move.target)):
            yield device, for_all or self._given(move, d)

    def _given(self, move: Move, d: int | None) -> _Content:
        if isinstance(move.target, Partial) and d is not None:  # all of it, added to nothing
            return _Content(move.tensor, of=frozenset() if d else None)
        is_mean = isinstance(move.source, Partial) and move.source.reduction == "mean" and self._mesh.shards > 1
        return self._made(move.tensor, move.target, d)._replace(divided=is_mean)

    def _content(self, value: Value) -> _Contents:
        of = [self._contents[i] for i in value.of]
        if isinstance(value, Own):
            return (self._own(value),)
        if isinstance(value, Zeros):
            return (_Content(self._collective.moves[0].tensor, of=frozenset()),)
        if isinstance(value, Slice):
            return self._slice(value, of[0])
        if isinstance(value, Concatenation):
            return self._concatenation(value, of)
        if isinstance(value, Sum):
            return self._sum(value, of)
        if isinstance(value, Packed):
            if {self._values[i].device for i in value.of} != {value.device}:
                raise CheckError(f"is packed on {value.device}, and is not there.")
            return tuple([content for contents in of for content in contents])
        if isinstance(value, Merged):
            return self._merged(value, of)
        return of[0]

    def _merged(self, value: Merged, of: Sequence[_Contents]) -> _Contents:
        """Raise `CheckError` unless moments of shards' own rows are merged, those of each shard once."""
        parts = [d for contents in of for d in sorted(contents[value.which].of or ())]
        tensors = [tuple([content.tensor for content in contents]) for contents in of]
        is_paired = all(len({content.of for content in contents}) == 1 for contents in of)
        is_once = len(set(parts)) == len(parts) and self._is_in_order(value, [contents[0] for contents in of])
        if not is_once or not is_paired or len(set(tensors)) > 1:
            raise CheckError("merges other moments than those of each shard.")
        return (self._whole(of[0][value.which]._replace(of=frozenset(parts))),)

    def _is_in_order(self, value: Value, contents: Sequence[_Content]) -> bool:
        """Return whether a value takes what shards have in their order; of several hosts, in that of their first."""
        hosts = by_host(self._behind_relays(i).device for i in value.of)
        shards = [sorted(content.of or ())[: 1 if len(hosts) > 1 else None] for content in contents]
        order = list(itertools.chain(*shards))
        return order == sorted(order)

    def _own(self, shard_value: Own) -> _Content:
        if (shard_value.tensor, shard_value.layout) not in self._sources:
            raise CheckError("begins with something else than what is made.")
        op, by, places = self._program.ops[shard_value.tensor.op], shard_value.by, self._places
        made_on = places.on(op, by) if isinstance(by, int) else by or places.having(op, shard_value.layout)[0]
        if shard_value.device != made_on:
            raise CheckError(f"begins on {shard_value.device}, and is made on {made_on}.")
        return self._made(shard_value.tensor, shard_value.layout, shard_value.by)

    def _slice(self, value: Slice, of: _Contents) -> _Contents:
        axis, layout, shards, _, sizes = value.split
        if layout is None:
            if sizes != tuple(self._program.bytes(content.tensor) for content in of):
                raise CheckError("is split into other sizes than were joined.")
            return (of[value.piece],)
        [content] = of
        shards = shards or tuple([(d,) for d in range(self._pieces.count(layout))])
        split = frozenset([entry for entry in content.along if entry[0] == axis])
        if layout.axis != axis or split != self._pieces.of_shards(layout, tuple(itertools.chain(*shards))):
            raise CheckError(f"is split along axis {axis} into pieces that are not there.")
        b, k = divmod(value.piece, len(shards))
        entries = tuple([(b, d) for d in shards[k]])
        return (self._whole(content._replace(along=content.along - split | {(axis, layout, entries)})),)

    def _concatenation(self, value: Concatenation, of: Sequence[_Contents]) -> _Contents:
        if len({content.tensor for contents in of for content in contents}) > 1:  # vectors
            if value.axis:
                raise CheckError("concatenates vectors along another axis than theirs.")
            return tuple([content for contents in of for content in contents])
        if self._collective.moves[0].source == OWN_ROW:
            return self._rows(of)
        entries: list[tuple[int, int]] = []
        remainders = set()
        for content in [content for contents in of for content in contents]:
            for axis, layout, part_entries in content.along:
                if axis == value.axis:
                    entries += part_entries
                    remainders.add((content._replace(along=content.along - {(axis, layout, part_entries)}), layout))
        if len(remainders) != 1 or len(entries) < len(of):
            raise CheckError("concatenates what does not belong together.")
        [(content, layout)] = remainders
        return (self._whole(content._replace(along=content.along | {(value.axis, layout, tuple(entries))})),)

    def _rows(self, of: Sequence[_Contents]) -> _Contents:
        """Raise `CheckError` unless a row of each shard follows that of the shard before."""
        [content, *_] = contents = [content for contents in of for content in contents]
        shards = [d for content in contents for d in sorted(content.of or ())]
        if shards != [*range(shards[0], shards[0] + len(shards))]:
            raise CheckError("joins rows in another order than that of their shards.")
        return (self._whole(content._replace(of=frozenset(shards))),)

    def _sum(self, value: Sum, of: Sequence[_Contents]) -> _Contents:
        self._check_turn(value)
        sums = []
        for contents in zip(*of, strict=True):
            parts = [d for content in contents for d in ([-1] if content.of is None else sorted(content.of))]
            if len({(content.tensor, content.along, content.divided) for content in contents}) > 1:
                raise CheckError("adds up what does not belong together.")
            if len(set(parts)) < len(parts) or (-1 in parts and len(parts) > 1):
                raise CheckError("adds up what a shard has twice.")
            if not self._is_in_order(value, contents):
                raise CheckError("adds up what shards have in another order than theirs.")
            whole = self._whole(contents[0]._replace(of=None if parts == [-1] else frozenset(parts)))
            source = next(m.source for m in self._collective.moves if m.tensor == whole.tensor)
            if not isinstance(source, Partial) or value.reduction != source.reduction:
                raise CheckError(f"is reduced by {value.reduction!r}.")
            if value.entries:
                op = self._program.ops[whole.tensor.op]
                if source.reduction != "mean" or whole.of is not None or value.entries != entries_averaged(op):
                    raise CheckError(f"is divided by {value.entries}.")
                whole = whole._replace(divided=True)
            sums.append(whole)
        return tuple(sums)

    def _check_turn(self, value: Sum) -> None:
        """Raise `CheckError` unless what shards of one device have is taken in one by one, as it comes."""
        if value.turn not in (None, *[self._first[i] for i in value.of[1:]]):
            raise CheckError(f"does not take in what shard {value.turn} has.")
        for place, i in enumerate(value.of):
            d = self._first[i]
            is_part = not isinstance(self._values[i], Sum) and isinstance(d, int)
            follows = is_part and self._mesh.before(d) is not None  # type: ignore[arg-type]
            is_turn = place > 0 and value.turn == d and value.turn is not None and not value.host
            if follows != is_turn:
                raise CheckError(f"does not take in what shard {d} has where and when it comes.")

    def _check_hosts(self) -> None:
        """Raise `CheckError` if a value passes twice between two hosts, or through a device that has no part in it."""
        taking_part = {
            *[value.device for value in self._values],
            *[r.device for reads_of_move in self._collective.reads for r in reads_of_move],
        }
        if len(set(map(host_name, taking_part))) == 1 and not self._collective.gateways:
            return
        readers: list[list[str]] = [[] for _ in self._values]
        for value in self._values:
            for k in value.of:
                readers[k].append(value.device)
        of_hosts = [self._contents[i] for i, value in enumerate(self._values) if is_total(value) and value.host]
        if len(set(of_hosts)) < len(of_hosts):
            raise CheckError("is added up twice on a host.")
        for i, value in enumerate(self._values):
            if is_total(value):
                self._check_sum(i, value, by_host(readers[i]))
        for reads in self._collective.reads:
            for i, device in reads:
                readers[i].append(device)
        for value, devices in zip(self._values, readers, strict=True):
            for host, devices_there in by_host(devices).items():
                if host != host_name(value.device) and len(devices_there) > 1:
                    raise CheckError(f"passes through no device on host {host!r}.")
            is_relay, away = isinstance(value, Relay), any(host_name(d) != host_name(value.device) for d in devices)
            if is_relay and (away or len(set(devices)) < 2 or value.device not in devices):
                raise CheckError(f"passes through {value.device} on host {host_name(value.device)!r}.")

    def _check_sum(self, i: int, value: Sum | Merged, readers: dict[str, list[str]]) -> None:
        """Raise `CheckError` if a sum takes several values of one host, although others have some as well.

        What a host adds up is added up where it is read there, or where one of its parts is.
        """
        hosts = by_host(self._behind_relays(k).device for k in value.of)
        devices_of_host = {host: devices for host, devices in hosts.items() if len(devices) > 1}
        if value.host:
            devices_there = readers.get(value.host) or hosts.get(value.host, [])
            if list(hosts) != [value.host] or value.device not in devices_there:
                raise CheckError(f"passes through {value.device} on host {value.host!r}.")
            if not readers and host_name(self._target(i)) == value.host:
                raise CheckError(f"needs no gateway on host {value.host!r}, and has one.")
        elif devices_of_host and list(hosts) != [host_name(value.device)]:
            raise CheckError(f"passes through no device on host {next(iter(devices_of_host))!r}.")

    def _behind_relays(self, i: int) -> Value:
        value = self._values[i]
        return self._behind_relays(value.of[0]) if isinstance(value, Relay) else value

    def _target(self, i: int) -> str:
        """Return where a value is read in the end."""
        reads = [read.device for reads in self._collective.reads for read in reads if read.value == i]
        return [*reads, ""][0]
