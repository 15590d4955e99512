"""Layouts: which device has which part of a tensor or variable, and the names of the moves between layouts.

Plain Python, no TensorFlow. The terms are those of GSPMD and DTensor. A tensor's layout (`SingleDevice`, `Replicate`,
`Shard`, `Partial`) is about one mesh axis, the shards. It says how an axis is cut and in which order the pieces follow,
and never how many rows there are: the mesh knows. A variable's (`Cut`, `Replicate`, `Nested`) names the devices, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphsplit.core.hosts import host_name
from graphsplit.core.sizes import apportion


@dataclass(frozen=True)
class SingleDevice:
    """The whole value, on one device; "" while none has been chosen for it: in the end its owner's, or the default."""

    device: str = ""

    def __str__(self) -> str:
        return f"whole on {self.device.split('device:')[-1]}" if self.device else "whole"


@dataclass(frozen=True)
class Replicate:
    """The whole value, on every device of the shards, or of a group.

    Attributes:
      devices: of the group, full names; empty for those of the shards.
      sums: those of the group on which parts of a sum are added up that all of it needs.
      readers: for each of them, the devices that read its value; empty where these are the group.
      why: why a variable is not cut, though that was asked for.
    """

    devices: tuple[str, ...] = ()
    sums: tuple[str, ...] = field(default=(), compare=False)
    readers: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    why: str = field(default="", compare=False)

    @property
    def parts(self) -> int:
        """Return how many values there are, each the whole, of a group."""
        return len(self.devices)

    def nearest(self, device: str) -> str:
        """Return the device of the group whose value another device reads: its own, one of its host, or the first."""
        named = [copy for copy, readers in zip(self.devices, self.readers, strict=False) if device in readers]
        on_same_host = [copy for copy in self.devices if host_name(copy) == host_name(device)]
        return device if device in self.devices else [*named, *on_same_host, self.devices[0]][0]

    def cut(self, shape: Sequence[int | None] | None) -> Shard | None:
        """Return how a sum of this shape is cut that is added up in parts: along its longest axis; None if it is not.

        >>> print(Replicate(("a", "b"), ("a", "b")).cut((3, 5)))
        shard(1 of 5)
        """
        sizes = [size for size in shape or () if type(size) is int]
        axis = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        parts = min(len(self.sums), sizes[axis]) if sizes and len(sizes) == len(shape or ()) else 0
        return Shard(axis, partition=EvenCut(sizes[axis], self.sums[:parts])) if parts > 1 else None

    def __str__(self) -> str:
        return f"replicated on {len(self.devices)} devices" if self.devices else "replicated"


@dataclass(frozen=True)
class BatchRows:
    """An axis is cut into the rows of the batch: each shard has its share of them, uneven, perhaps unknown."""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class EvenCut:
    """An axis of known length is cut evenly, whatever the batch: a slice of a variable.

    Attributes:
      length: of the axis.
      devices: those that have the pieces, full names; empty for the shards.
      groups: of devices that each have all pieces, if several do; `devices` are of the first. See `copies_of_pieces`.
    """

    length: int
    devices: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()

    def counts(self, shards: int) -> tuple[int, ...]:
        """Return the entries of each shard, or of each device; the first have one more where it does not divide.

        >>> EvenCut(10).counts(4)
        (3, 3, 2, 2)
        """
        count = len(self.devices) or shards
        share, remainder = divmod(self.length, count)
        return tuple(share + (d < remainder) for d in range(count))

    def __str__(self) -> str:
        return f" of {self.length}"


@dataclass(frozen=True)
class OtherRows:
    """An axis of known length is shared out as the batch is: the rows of another batch in the same function."""

    length: int

    def counts(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the entries of each shard, in proportion to its rows of the batch.

        >>> OtherRows(10).counts((3, 2, 2))
        (4, 3, 3)
        """
        return apportion(self.length, rows)

    def __str__(self) -> str:
        return f" of {self.length}"


@dataclass(frozen=True)
class Joined:
    """An axis of several blocks, each with a partition of its own: batches of different sizes, one after the other."""

    parts: tuple[BatchRows | EvenCut | OtherRows, ...]

    def __str__(self) -> str:
        return " joined"


Partition = BatchRows | EvenCut | OtherRows | Joined
BATCH = BatchRows()


@dataclass(frozen=True)
class Shard:
    """Cut along `axis`; shard `d` holds what the `partition` gives it.

    The axis consists of consecutive `blocks`. Block `i` is `blocks[i]` entries per row, ordered by row, and every shard
    holds its own rows of every block, one block after the other. The ordinary batch axis is one block of one entry per
    row, `(1,)`. Flattening `[batch, 7, c]` to `[batch * 7, c]` gives `(7,)`;
    flattening time-major `[3, batch, c]` to `[3 * batch, c]` gives `(1, 1, 1)`, as does concatenating three batches.
    """

    axis: int
    blocks: tuple[int, ...] = (1,)
    partition: Partition = BATCH

    @property
    def parts(self) -> tuple[BatchRows | EvenCut | OtherRows, ...]:
        """The partition of each block."""
        return self.partition.parts if isinstance(self.partition, Joined) else (self.partition,) * len(self.blocks)

    def size(self, rows: int) -> int:
        """Return the length of the axis for `rows` rows of the batch."""
        pairs = zip(self.blocks, self.parts, strict=True)
        return sum([(rows if isinstance(part, BatchRows) else part.length) * block for block, part in pairs])

    def pieces(self, rows: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, block by block, the number of entries each shard holds: the order they have in the whole."""
        pairs = zip(self.blocks, self.parts, strict=True)
        return [tuple([count * block for count in _counts(part, rows)]) for block, part in pairs]

    def own(self, rows: Sequence[int], d: int) -> int:
        """Return how many entries shard `d` holds."""
        return sum([block[d] for block in self.pieces(rows)])

    def between(self, first: int, last: int) -> Shard:
        """Return the layout of the blocks from one to before another."""
        return _of_blocks(self.axis, self.blocks[first:last], self.parts[first:last])

    def repeated(self, times: int) -> Shard:
        """Return the layout of all blocks, one time after the other."""
        return _of_blocks(self.axis, self.blocks * times, self.parts * times)

    def along(self, axis: int) -> Shard:
        """Return the same cut of another axis."""
        return self if axis == self.axis else Shard(axis, self.blocks, self.partition)

    def __str__(self) -> str:
        cut = f"{self.axis}{self.partition}"
        if self.blocks == (1,):
            return f"shard({cut})"
        if isinstance(self.partition, Joined):
            named = [f"{block}{part}" for block, part in zip(self.blocks, self.parts, strict=True)]
            return f"shard({cut}, blocks=({', '.join(named)}))"
        return f"shard({cut}, blocks={_short(self.blocks)})"


@dataclass(frozen=True)
class Cut:
    """An axis that is cut into consecutive pieces, one for each part.

    Attributes:
      axis: which one.
      length: of the axis that is cut evenly; `block` entries of this axis belong to each of it.
      parts: how many pieces.
      reshard: whether the whole is put together again for the backward pass, and not kept in between.
      devices: of the pieces, full names, if they are known.
      along: the axis of a mesh along which a variable is cut, and used where its pieces are; "" where it is put
        together before it is used.
      blocks: how often such an axis lies in the variable's, one after the other, each cut by itself: of fused queries,
        keys and values, a piece has its heads of all three.
      times: how many times `block` entries of each of these belong together, where they differ: of two heads of queries
        for each of keys and values `(2, 1, 1)`.
      stays: whether the pieces are used where they are by devices that share out a batch, whose rows go there instead.
      groups: see `EvenCut`.
    """

    axis: int
    length: int
    parts: int
    block: int = 1
    reshard: bool = True
    devices: tuple[str, ...] = ()
    along: str = ""
    blocks: int = 1
    times: tuple[int, ...] = ()
    stays: bool = False
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the length of each piece.

        >>> Cut(0, 10, 4).lengths
        (3, 3, 2, 2)
        """
        return tuple([sum(map(len, entries)) for entries in self.ranges])

    @property
    def ranges(self) -> list[list[range]]:
        """Return which entries each piece has: a range of each block.

        >>> Cut(0, 3, 2, blocks=2).ranges
        [[range(0, 2), range(3, 5)], [range(2, 3), range(5, 6)]]
        """
        ranges_by_piece: list[list[range]] = [[] for _ in range(self.parts)]
        end = 0
        for times in self.times or (1,) * self.blocks:
            for ranges, count in zip(ranges_by_piece, EvenCut(self.length).counts(self.parts), strict=True):
                ranges.append(range(end, end + self.block * times * count))
                end += self.block * times * count
        return ranges_by_piece

    @property
    def in_place(self) -> Shard:
        """Return the layout of a variable that is used where its pieces are."""
        times = self.times or (1,) * self.blocks
        return joined([evenly(self.axis, self.length, self.parts, self.block * count) for count in times])

    @property
    def layout(self) -> Shard:
        """Return the layout of a variable, each piece of which is used for itself, on its device."""
        return Shard(self.axis, partition=EvenCut(self.length, self.devices, self.groups))


@dataclass(frozen=True)
class Nested:
    """A variable that lies along an axis of a mesh, and whose part of each column is several on that column's devices.

    Attributes:
      axis: what the axis is called; "" for the batch's, where each part is copied.
      columns: how it lies along the axis: cut, and used where its parts are; or copied, the same in all columns.
      rows: for each column, how its part or copy is several: along the axes that are planned later, and the batch's.
    """

    axis: str
    columns: Division
    rows: tuple[MeshDivision, ...]

    @property
    def parts(self) -> int:
        """Return how many parts there are, those of the first column first."""
        return sum([row.parts for row in self.rows])

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the parts, full names."""
        return tuple([device for row in self.rows for device in row.devices])

    @property
    def reshard(self) -> bool:
        """Whether what is put together in a column is dropped, and put together again for the backward pass."""
        if not self.axis:
            return isinstance(self.columns, Cut) and self.columns.reshard
        return any(not isinstance(row, Replicate) and row.reshard for row in self.rows)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The number of each column's first part."""
        return tuple([sum([row.parts for row in self.rows[:d]]) for d in range(len(self.rows))])


Division = Cut | Replicate
"""How one variable is several: each a part of it, or each the whole."""

MeshDivision = Division | Nested
"""How one variable is several on a mesh."""


def in_groups(cut: Cut) -> MeshDivision:
    """Return how a variable is several that is cut so over each of several groups of devices, if there are some.

    >>> in_groups(Cut(0, 4, 2, devices=("a", "b"), groups=(("a", "b"), ("c", "d")))).devices
    ('a', 'c', 'b', 'd')
    """
    return Nested("", cut, tuple(copies_of_pieces(cut.layout))) if cut.groups else cut


def copies_of_pieces(layout: Layout) -> list[Replicate]:
    """Return how each piece lies of what is cut over each of several groups of devices; nothing if it is one."""
    cut = layout.partition if isinstance(layout, Shard) else None
    if not isinstance(cut, EvenCut) or not cut.groups:
        return []
    copies = [tuple([group[cut.groups[0].index(device)] for group in cut.groups]) for device in cut.devices]
    return [Replicate(devices, devices, cut.groups) for devices in copies]


def cut_in(division: MeshDivision) -> MeshDivision:
    """Return how a variable is cut in each group of devices, see `in_groups`; as it is several where there are none."""
    return division.columns if isinstance(division, Nested) and not division.axis else division


def axis_of(division: MeshDivision) -> str:
    """Return the axis of a mesh, other than the batch's, along which a variable lies; "" if there is none."""
    if isinstance(division, Nested):
        return division.axis
    return division.along if isinstance(division, Cut) else ""


def along_axis(division: MeshDivision) -> Division:
    """Return how a variable lies along the axis of `axis_of`."""
    return division.columns if isinstance(division, Nested) else division


def layout_along_axis(division: MeshDivision) -> Shard | Replicate:
    """Return the layout along that axis of a variable that is used where its parts are."""
    columns = along_axis(division)
    return columns.in_place if isinstance(columns, Cut) else REPLICATE


def part_ranges(division: MeshDivision, ranges: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], ...]]:
    """Return which entries of a variable each part has, along each dimension: a range where they follow each other.

    >>> [own] = part_ranges(Cut(1, 5, 1), [range(3), range(5)])
    >>> own
    (range(0, 3), range(0, 5))
    """
    if isinstance(division, Replicate):
        return [tuple(ranges)] * division.parts
    if isinstance(division, Cut) and division.parts == 1:
        return [tuple(ranges)]
    if isinstance(division, Cut):
        of_axis, ranges_before = ranges[division.axis], (*ranges[: division.axis],)
        pieces = [[of_axis[entries.start : entries.stop] for entries in blocks] for blocks in division.ranges]
        joined = [piece[0] if len(piece) == 1 else [*itertools.chain(*piece)] for piece in pieces]
        return [(*ranges_before, piece, *ranges[division.axis + 1 :]) for piece in joined]
    columns = zip(division.rows, part_ranges(division.columns, ranges), strict=True)
    return [part for row_division, column in columns for part in part_ranges(row_division, column)]


def part_shapes(division: MeshDivision, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shape of each part of a variable.

    >>> part_shapes(Nested("model", Cut(1, 5, 2), (Cut(0, 3, 2), Cut(0, 3, 2))), (3, 5))
    [(2, 3), (1, 3), (2, 2), (1, 2)]
    """
    return [tuple(map(len, part)) for part in part_ranges(division, list(map(range, shape)))]


@dataclass(frozen=True)
class Partial:
    """One full-shape part per shard; `reduction` over the shards gives the value.

    A `mean` is a sum that is divided once it is reduced: what each shard has is the sum over its own rows.
    """

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.reduction})"


Layout = SingleDevice | Replicate | Shard | Partial
SINGLE_DEVICE = SingleDevice()
REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")
PARTIAL_MEAN = Partial("mean")
OWN_MEAN = Partial("own mean")
OWN_VARIANCE = Partial("own variance")
MOMENTS = (OWN_MEAN, OWN_VARIANCE)
"""What each shard has of its own rows; see `planning/moments.py`."""
OWN_ROW = Partial("own row")
"""What each shard has, as the one entry of a first axis, which has one for each; see `planning/weighted_moments.py`."""

MOVES: dict[tuple[type, type], str] = {
    (SingleDevice, SingleDevice): "send",
    (SingleDevice, Replicate): "broadcast",
    (SingleDevice, Shard): "scatter",
    (SingleDevice, Partial): "zero-fill",
    (Replicate, SingleDevice): "local copy",
    (Replicate, Replicate): "local copy",
    (Replicate, Shard): "local slice",
    (Replicate, Partial): "zero-fill",
    (Shard, SingleDevice): "gather",
    (Shard, Replicate): "all-gather",
    (Shard, Shard): "all-to-all",
    (Partial, SingleDevice): "reduce",
    (Partial, Replicate): "all-reduce",
    (Partial, Shard): "reduce-scatter",
}
"""The field's names for what takes a tensor from one layout to another."""


def evenly(axis: int, length: int, parts: int, block: int = 1) -> Shard:
    """Return how an axis of `length` times `block` entries lies that is cut evenly into consecutive parts.

    Parts that are equal are one block each: so it is seen that each has whole heads, where the axis is heads by width.

    >>> print(evenly(1, 16, 2), evenly(1, 15, 2))
    shard(1 of 2, blocks=(8,)) shard(1 of 15)
    """
    if not length or length % parts:
        return Shard(axis, (block,), EvenCut(length))
    return Shard(axis, (block * length // parts,), EvenCut(parts))


def joined(layouts: Sequence[Shard]) -> Shard:
    """Return the layout of tensors that are joined along their sharded axis.

    >>> print(joined([Shard(0), Shard(0, (2,))]), joined([Shard(0), Shard(0, (1,), OtherRows(10))]))
    shard(0, blocks=(1, 2)) shard(0 joined, blocks=(1, 1 of 10))
    """
    blocks = [block for layout in layouts for block in layout.blocks]
    return _of_blocks(layouts[0].axis, blocks, [part for layout in layouts for part in layout.parts])


def _of_blocks(axis: int, blocks: Sequence[int], parts: Sequence[BatchRows | EvenCut | OtherRows]) -> Shard:
    are_equal = all(part == parts[0] for part in parts)
    return Shard(axis, tuple(blocks), (parts[0] if parts else BATCH) if are_equal else Joined(tuple(parts)))


def _counts(part: BatchRows | EvenCut | OtherRows, rows: Sequence[int]) -> Sequence[int]:
    if isinstance(part, EvenCut):
        return part.counts(len(rows))
    return part.counts(rows) if isinstance(part, OtherRows) else rows


def group_of(layout: Layout) -> tuple[str, ...]:
    """Return the devices of the group that has a value; empty for the shards, or a single device."""
    if isinstance(layout, Shard):
        return layout.partition.devices if isinstance(layout.partition, EvenCut) else ()
    return layout.devices if isinstance(layout, Replicate) else ()


def is_whole(layout: Layout) -> bool:
    """Return whether every device that holds the tensor holds all of it."""
    return isinstance(layout, (SingleDevice, Replicate))


def _short(blocks: tuple[int, ...]) -> str:
    if len(blocks) > 4 and len(set(blocks)) == 1:
        return f"{len(blocks)} x {blocks[0]}"
    return str(blocks)
