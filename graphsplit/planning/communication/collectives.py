"""Collectives: what carries out each move, by a table from layouts to values and who reads them.

A kind of move is a row of the table, and known nowhere else. What comes after works on values alone: moves of small
tensors are made as one (`bucketed`), what shards of one device give to a sum is added as it comes (`in_turns`), and
what goes from host to host goes once (`gateways`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphsplit.core.layouts import (
    BATCH,
    MOMENTS,
    OWN_MEAN,
    OWN_ROW,
    REPLICATE,
    Layout,
    Partial,
    Replicate,
    Shard,
    SingleDevice,
    group_of,
    is_whole,
)
from graphsplit.core.sizes import has_sizes
from graphsplit.planning.communication.moves import is_added_up_by_each
from graphsplit.planning.communication.transfers import (
    Collective,
    Concatenation,
    Merged,
    Own,
    Packed,
    Read,
    Rewrite,
    Slice,
    Slicing,
    Sum,
    Value,
    Zeros,
    rewritten,
)
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Places
from graphsplit.planning.propagation.backward_propagation import entries_averaged
from graphsplit.planning.steps import Move
from graphsplit.program.program import Program, Tensor


def find_collectives(program: Program, places: Places, moves: Sequence[Move]) -> list[Collective]:
    """Return what carries out moves, each by itself, in the order of the first of each.

    Args:
      program: whose tensors move.
      places: of the operations.
      moves: all moves.
    """
    return [_made(program, places, alike) for alike in _together(program, moves)]


def _together(program: Program, moves: Iterable[Move]) -> list[list[Move]]:
    """Return moves, those together that send one whole value on, and those of a mean and its variance."""
    moves_by_key: dict[object, list[Move]] = {}
    for move in moves:
        if move.source in MOMENTS:
            op = program.ops[move.tensor.op]
            mean = program.ops[op.inputs[0].op].inputs[1] if op.merged == "variance" else move.tensor
            moves_by_key.setdefault((OWN_MEAN, mean), []).append(move)
            continue
        is_sent = isinstance(move.source, SingleDevice) and is_whole(move.target)
        moves_by_key.setdefault((move.tensor, move.source) if is_sent else move, []).append(move)
    return list(moves_by_key.values())


def _made(program: Program, places: Places, moves: Sequence[Move]) -> Collective:
    first = moves[0]
    writer = _ValueWriter(program, places, first.tensor)
    if first.source in MOMENTS:
        reads = writer.merged(moves)
    elif first.source == OWN_ROW:
        reads = [writer.in_rows(first)]
    elif first.source == REPLICATE and group_of(first.target):
        reads = [writer.to_group(first)]
    elif is_whole(first.source) and is_whole(first.target):
        whole_value = writer.whole(first.source, first.target)
        reads = [writer.sent(whole_value, move.target) for move in moves]
    else:
        reads = [_TABLE[type(first.source), type(first.target)](writer, first)]
    return Collective(tuple(moves), tuple(writer.values), tuple(map(tuple, reads)))


class _ValueWriter:
    """Writes the values of one tensor's moves."""

    def __init__(self, program: Program, places: Places, tensor: Tensor):
        self.values: list[Value] = []
        self._program = program
        self._tensor = tensor
        self._places = places
        self._mesh = places.mesh
        self._shards = range(places.mesh.shards)
        self._op = program.ops[tensor.op]
        self._size = program.bytes(tensor)
        self._shape = program.shape(tensor)
        self._made_on = places.on_shards(self._op)
        self._copies: dict[str, int] = {}

    def _add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def whole(self, layout: Layout, target: Layout | None = None) -> int:
        """Return a whole value: where it is, or what the shard has that is nearest to who wants it."""
        if isinstance(layout, SingleDevice):
            return self._add(Own((), self._devices_of(layout)[0], self._size, tensor=self._tensor, layout=layout))
        if group_of(layout):
            return self._copy(layout, self._made_on[0])
        by = self._places.nearest_shard(target.device) if isinstance(target, SingleDevice) else 0
        return self._own(by, layout)

    def _own(self, d: int, layout: Layout) -> int:
        """Return what shard `d` has."""
        [number] = self._owns(layout, [d])
        return number

    def to_group(self, move: Move) -> list[Read]:
        """Each device of a group reads what the shard has that is nearest to it."""
        devices = group_of(move.target)
        return [Read(self.whole(move.source, SingleDevice(device)), device) for device in devices]

    def _copy(self, layout: Layout, device: str) -> int:
        """Return the copy of a group's that is nearest to a device."""
        assert isinstance(layout, Replicate)
        nearest = layout.nearest(device)
        if nearest not in self._copies:
            copy_value = Own((), nearest, self._size, tensor=self._tensor, layout=layout, by=nearest)
            self._copies[nearest] = self._add(copy_value)
        return self._copies[nearest]

    def _devices_of(self, layout: Layout) -> Sequence[str]:
        """Return the devices that have a value in a layout; the default one moves what a loader puts somewhere."""
        return self._places.having(self._op, layout)

    def _owns(self, layout: Layout, shards: Iterable[int] | None = None) -> list[int]:
        """Return what shards have, all of them if it is not said which."""
        of_rows = isinstance(layout, Partial) or (isinstance(layout, Shard) and layout.partition == BATCH)
        numbers = []
        for d in self._shards if shards is None else shards:
            size = self._mesh.bytes_of(d, self._size, layout)
            shard = d if of_rows else None
            shard_value = Own((), self._made_on[d], size, shard, tensor=self._tensor, layout=layout, by=d)
            numbers.append(self._add(shard_value))
        return numbers

    def sent(self, whole_value: int, target: Layout) -> list[Read]:
        """Return who reads a whole value: a device, or all shards."""
        return [Read(whole_value, device) for device in self._devices_of(target)]

    def scattered(self, move: Move) -> list[Read]:
        """One device slices, and each shard gets its piece."""
        whole_value, target = self.whole(move.source), _shard(move.target)
        return self._read(self._pieces(whole_value, Slicing(target.axis, target), self._shards))

    def sliced(self, move: Move) -> list[Read]:
        """Each shard slices what it has, and takes its own piece."""
        target = _shard(move.target)
        if group_of(move.source):
            owns = [self._copy(move.source, device) for device in self._made_on]
            return self._read(
                [self._pieces(copy_number, Slicing(target.axis, target), [d])[0] for d, copy_number in enumerate(owns)]
            )
        splits = [Slicing(target.axis, target, holder=d) for d in self._shards]
        return self._read([self._pieces(self._own(d, move.source), splits[d], [d])[0] for d in self._shards])

    def gathered(self, move: Move) -> list[Read]:
        """One device concatenates what the shards have, in the order of the whole."""
        source, device = _shard(move.source), self._devices_of(move.target)[0]
        return [Read(self._in_order(self._owns(source), source, device), device)]

    def all_gathered(self, move: Move) -> list[Read]:
        """Each device concatenates what all have."""
        source, devices = _shard(move.source), self._devices_of(move.target)
        blocks = self._blocks(self._owns(source), source)
        pairs = itertools.product(blocks, self._mesh.by_device)
        own_parts = [
            self._joined([block[d] for d in shards_of_device], source.axis, self._made_on[shards_of_device[0]])
            for block, shards_of_device in pairs
        ]
        joined_by_device = {device: self._joined(own_parts, source.axis, device) for device in dict.fromkeys(devices)}
        return [Read(joined_by_device[device], device) for device in devices]

    def in_rows(self, move: Move) -> list[Read]:
        """Each device concatenates a row of each shard."""
        owns, made_on = self._owns(move.source), self._made_on
        own_rows = [self._joined([owns[d] for d in alike], 0, made_on[alike[0]]) for alike in self._mesh.by_device]
        rows_by_device = {device: self._joined(own_rows, 0, device) for device in dict.fromkeys(made_on)}
        return [Read(rows_by_device[device], device) for device in made_on]

    def exchanged(self, move: Move) -> list[Read]:
        """Each device slices what it has for all others, and concatenates what it gets."""
        source = _shard(move.source)
        return self._from_each(move, lambda pieces, device: self._joined(pieces, source.axis, device))

    def reduced(self, move: Move) -> list[Read]:
        """One device adds up what the shards have."""
        device, source = self._devices_of(move.target)[0], _partial(move.source)
        return [Read(self._sum(self._owns(source), source, device), device)]

    def merged(self, moves: Sequence[Move]) -> list[list[Read]]:
        """Each device gets the moments of all shards' own rows, and merges them."""
        parts, of_rows = [], self._made_on
        for d in self._shards:
            owns = [
                self._add(Own((), of_rows[d], self._size, d, tensor=m.tensor, layout=m.source, by=d)) for m in moves
            ]
            parts.append(self._add(Packed(tuple(owns), of_rows[d], self._size * len(owns), d)))
        merged_by_device = {
            (device, k): self._add(Merged(tuple(parts), device, self._size, which=k))
            for device in dict.fromkeys(of_rows)
            for k in range(len(moves))
        }
        return [[Read(merged_by_device[device, k], device) for device in of_rows] for k in range(len(moves))]

    def reduce_scattered(self, move: Move) -> list[Read]:
        """Each device slices what it has for all others, and adds up what it gets."""
        source = _partial(move.source)
        return self._from_each(move, lambda pieces, device: self._sum(pieces, source, device))

    def all_reduced(self, move: Move) -> list[Read]:
        """Each shard adds up what all have; of a group each a part, which all get."""
        source = _partial(move.source)
        owns: Sequence[int] = self._owns(source)
        if isinstance(move.target, Replicate) and move.target.devices:
            cut = move.target.cut(self._shape)
            if cut is None or is_added_up_by_each(self._program, self._mesh, self._tensor, move.target):
                return [Read(self._sum(owns, source, device), device) for device in move.target.devices]
            own_sums = [
                self._sum([owns[d] for d in shards_of_device], source, self._made_on[shards_of_device[0]])
                for shards_of_device in self._mesh.by_device
            ]
            owns, parts = self._added_up_near(own_sums, source, move.target), range(len(group_of(cut)))
            sent = [
                self._pieces(shard_number, Slicing(cut.axis, cut, holder=d), parts)
                for d, shard_number in enumerate(owns)
            ]
            sums = [
                self._sum(part_numbers, source, group_of(cut)[k], True)
                for k, part_numbers in enumerate(zip(*sent, strict=True))
            ]
            return [Read(self._in_order(sums, cut, device), device) for device in move.target.devices]
        sum_by_device = {device: self._sum(owns, source, device) for device in dict.fromkeys(self._made_on)}
        return [Read(sum_by_device[device], device) for device in self._made_on]

    def _added_up_near(self, owns: Sequence[int], source: Partial, copies: Replicate) -> Sequence[int]:
        """Return the sums of what those shards have that read one copy, each where that is; with one copy for all, it.

        (Between groups travels what all of a group have added up.)
        """
        if not copies.readers:
            return owns
        parts_by_device: dict[str, list[int]] = {}
        for shard_number in owns:
            parts_by_device.setdefault(copies.nearest(self.values[shard_number].device), []).append(shard_number)
        return [self._sum(parts, source, device, True) for device, parts in parts_by_device.items()]

    def filled(self, move: Move) -> list[Read]:
        """The first shard has all, the others zeros: of known shape constants of their own, else sent to them."""
        whole_value = self.whole(move.source)
        is_static = self._shape is not None and None not in self._shape and not has_sizes(self._shape)
        numbers = [whole_value]
        for d in self._shards[1:]:
            of, device = ((), self._made_on[d]) if is_static else ((whole_value,), self.values[whole_value].device)
            numbers.append(self._add(Zeros(of, device, self._size, d)))
        return self._read(numbers)

    def _read(self, values: Sequence[int]) -> list[Read]:
        return [Read(value, device) for value, device in zip(values, self._made_on, strict=True)]

    def _from_each(self, move: Move, together: Callable[[Sequence[int], str], int]) -> list[Read]:
        """Each device has one piece for every other one, and splits what it got, put together, for its own shards.

        Args:
          move: of what shards have into another layout.
          together: puts values together on a device: what its shards have, then what it gets from all.
        """
        source, target, by_device = move.source, _shard(move.target), self._mesh.by_device
        devices = [self._made_on[shards_of_device[0]] for shards_of_device in by_device]
        sent = []
        for shards_of_device, device in zip(by_device, devices, strict=True):
            split = Slicing(target.axis, target, by_device if self._mesh.has_turns else (), shards_of_device[0])
            sent.append(
                self._pieces(together(self._owns(source, shards_of_device), device), split, range(len(by_device)))
            )
        pieces_read = []
        for shards_of_device, device, pieces in zip(by_device, devices, zip(*sent, strict=True), strict=True):
            split = Slicing(target.axis, target, tuple([(d,) for d in shards_of_device]), shards_of_device[0])
            pieces_read += self._pieces(together(pieces, device), split, range(len(shards_of_device)))
        return self._read(pieces_read)

    def _pieces(self, whole: int, split: Slicing, wanted: Sequence[int]) -> list[int]:
        """Return some of the pieces of a value, by number: sliced where it is, concatenated where they are."""
        layout = split.layout
        assert layout is not None
        shards = split.shards or [(d,) for d in range(len(group_of(layout)) or len(self._shards))]
        if len(shards) == 1:
            return [whole]
        whole_value, blocks, piece_numbers = self.values[whole], self._mesh.pieces(layout), []
        counts = [[sum([block[d] for d in shards_of_piece]) for shards_of_piece in shards] for block in blocks]
        entries = sum(map(sum, counts)) or 1
        numbers: dict[tuple[int, int], int] = {}
        for b, k in itertools.product(range(len(blocks)), wanted):
            size, piece = whole_value.bytes * counts[b][k] // entries, b * len(shards) + k
            shard = shards[k][0] if layout.partition == BATCH else whole_value.shard
            numbers[b, k] = self._add(Slice((whole,), whole_value.device, size, shard, split=split, piece=piece))
        for k in wanted:
            slices = tuple([numbers[b, k] for b in range(len(blocks))])
            size, d = sum(self.values[i].bytes for i in slices), shards[k][0]
            joined = Concatenation(slices, self._devices_of(layout)[d], size, d, axis=layout.axis)
            piece_numbers.append(slices[0] if len(blocks) == 1 else self._add(joined))
        return piece_numbers

    def _in_order(self, owns: Sequence[int], layout: Shard, device: str) -> int:
        """Return the whole that consists of what shards have: block by block."""
        return self._joined(
            [piece_number for block in self._blocks(owns, layout) for piece_number in block], layout.axis, device
        )

    def _blocks(self, owns: Sequence[int], layout: Shard) -> list[list[int]]:
        """Return what shards have of each block, sliced where it is; what a single one has is all of it, in order."""
        if len(layout.blocks) == 1 or len(owns) == 1:
            return [[*owns]]
        blocks: list[list[int]] = [[] for _ in layout.blocks]
        for d, i in enumerate(owns):
            shard_value, split = self.values[i], Slicing(layout.axis, layout, ((d,),))
            for b, size in enumerate(self._mesh.bytes_of_blocks(d, self._size, layout)):
                blocks[b].append(
                    self._add(Slice((i,), shard_value.device, size, shard_value.shard, split=split, piece=b))
                )
        return blocks

    def _joined(self, values: Sequence[int], axis: int, device: str) -> int:
        """Return values one after the other, on a device; one value is that, where it is."""
        if len(values) == 1:
            return values[0]
        size = sum(self.values[i].bytes for i in values)
        return self._add(Concatenation(tuple(values), device, size, axis=axis))

    def _sum(self, parts: Sequence[int], source: Partial, device: str, is_sent_on: bool = False) -> int:
        if len(parts) == 1 and (not is_sent_on or self.values[parts[0]].device == device):
            return parts[0]
        entries = entries_averaged(self._op) if source.reduction == "mean" else 0
        return self._add(
            Sum(tuple(parts), device, self.values[parts[0]].bytes, reduction=source.reduction, entries=entries)
        )


_TABLE: dict[tuple[type, type], Callable[[_ValueWriter, Move], list[Read]]] = {
    (SingleDevice, Shard): _ValueWriter.scattered,
    (SingleDevice, Partial): _ValueWriter.filled,
    (Replicate, Shard): _ValueWriter.sliced,
    (Replicate, Partial): _ValueWriter.filled,
    (Shard, SingleDevice): _ValueWriter.gathered,
    (Shard, Replicate): _ValueWriter.all_gathered,
    (Shard, Shard): _ValueWriter.exchanged,
    (Partial, SingleDevice): _ValueWriter.reduced,
    (Partial, Replicate): _ValueWriter.all_reduced,
    (Partial, Shard): _ValueWriter.reduce_scattered,
}
"""What carries out a move, by its layouts; whole values are sent as they are."""


def _shard(layout: Layout) -> Shard:
    assert isinstance(layout, Shard)
    return layout


def _partial(layout: Layout) -> Partial:
    assert isinstance(layout, Partial)
    return layout


def bucketed(
    program: Program, collectives: Sequence[Collective], buckets: Sequence[Sequence[Move]]
) -> list[Collective]:
    """Return collectives, those of each bucket as one: vectors are concatenated where they are, and split where read.

    Numbers are packed and unpacked.

    Args:
      program: whose tensors move.
      collectives: of all moves, each of one tensor.
      buckets: the moves of vectors, or of numbers, between the same places.
    """
    bucket_of = {move: number for number, moves in enumerate(buckets) for move in moves}
    with_buckets: list[Collective] = []
    place: dict[int, int] = {}
    for collective in collectives:
        number = bucket_of.get(collective.moves[0])
        if number is None or number not in place:
            place.update({} if number is None else {number: len(with_buckets)})
            with_buckets.append(collective)
    for number, moves in enumerate(buckets):
        alike = {c.moves[0]: c for c in collectives if bucket_of.get(c.moves[0]) == number}
        are_numbers = program.shape(moves[0].tensor) == ()
        with_buckets[place[number]] = _as_one([alike[move] for move in moves], are_numbers)
    return with_buckets


def _as_one(alike: Sequence[Collective], are_numbers: bool) -> Collective:
    """Return one collective for several that differ in their tensors only."""
    first = alike[0]
    values: list[Value] = []
    renamed: dict[int, int] = {}
    for i, value in enumerate(first.values):
        if isinstance(value, Own):
            owns = [c.values[i] for c in alike]
            values += owns
            of = tuple(range(len(values) - len(owns), len(values)))
            kind = Packed if are_numbers else Concatenation
            values.append(kind(of, value.device, sum(shard_value.bytes for shard_value in owns), value.shard))
        else:
            size = sum(c.values[i].bytes for c in alike)
            values.append(replace(value, of=tuple([renamed[k] for k in value.of]), bytes=size))
        renamed[i] = len(values) - 1
    slices: dict[tuple[int, str], list[int]] = {}
    sizes = tuple([c.values[0].bytes for c in alike])
    for read in first.reads[0]:
        joined = renamed[read.value]
        if read not in slices:
            slices[read] = [len(values) + k for k in range(len(alike))]
            split = Slicing(0, sizes=sizes)
            values += [Slice((joined,), read.device, size, split=split, piece=k) for k, size in enumerate(sizes)]
    reads = [tuple([Read(slices[read][k], read.device) for read in first.reads[0]]) for k in range(len(alike))]
    return Collective(tuple([c.moves[0] for c in alike]), tuple(values), tuple(reads))


def in_turns(collectives: Iterable[Collective], mesh: Mesh) -> list[Collective]:
    """Return collectives in which each shard's part of a sum is taken in as it comes, if others follow on its device.

    So none of them waits, with what it made, for the last.
    """
    if len(set(mesh.positions)) == mesh.shards:
        return list(collectives)
    return [rewritten(c, functools.partial(_taken_in, mesh=mesh)) for c in collectives]


def _taken_in(rewrite: Rewrite, value: Value, mesh: Mesh) -> int:
    """Write a value; the parts of a sum one after the other, where shards take turns."""
    if not isinstance(value, Sum):
        return rewrite.add(value)
    totals = []
    for _, alike in itertools.groupby(value.of, lambda i: mesh.positions[rewrite.giver(i)]):
        total, *more_parts = alike
        for part in more_parts:
            device, turn = rewrite.values[part].device, rewrite.giver(part)
            taken = Sum((total, part), device, value.bytes, reduction=value.reduction, turn=turn)
            total = rewrite.add_once(taken)
        totals.append(total)
    return rewrite.add_sum(replace(value, of=tuple(totals)))
