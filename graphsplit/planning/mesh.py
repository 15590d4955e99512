"""The mesh: the shards, the device of each, and its share of the batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from graphsplit.core.layouts import Layout, Shard
from graphsplit.core.sizes import STAND_IN, Shape, Size, apportion, is_same, whole_weights, without_sizes
from graphsplit.core.sizes import rows as rows_of_unknown_batch
from graphsplit.errors import CheckError
from graphsplit.planning.costs.exchanges import groups_of
from graphsplit.program.program import Program, Tensor


@dataclass(frozen=True)
class Mesh:
    """The shards of a plan. A device may have several of them, its micro-batches, one after the other.

    Attributes:
      devices: of each shard; only those that have rows.
      weights: the share of the batch of each, in any unit.
      rows: how many rows of the batch each has; empty if that is not known when planning.
      positions: which of the devices asked for each shard has (those without rows are left out); stages have devices of
        their own at the same positions, of each column.
      columns: where the mesh has other axes, the devices of each column, by position: the first of them are those of
        operations of no column.
      others: what those axes are called, and how many devices each has: the number of a column counts along the last of
        them first.
      axis: what the axis of the shards themselves is called, if it is not the batch's: no shard has rows then.
      exchange_bytes: the most that a device gets of a sum that goes from each shard to each; see `costs/exchanges.py`.
    """

    devices: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    columns: tuple[tuple[str, ...], ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    axis: str = ""
    exchange_bytes: int = 0

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.devices)

    @property
    def batch(self) -> int:
        """The number of rows of the whole batch: 0 if nothing is split, a `Size` if it is not known."""
        if self.devices and not self.rows:
            return rows_of_unknown_batch(1)
        return sum(self.rows)

    @property
    def exchanging(self) -> int:
        """How many shards can send each other parts of what they have: all, or 0.

        Their numbers of rows must be known, and they must be on several devices. (Those of one device put together, or
        add up, what they have before it is sent.)
        """
        return self.shards if self.rows and len(set(self.positions)) > 1 else 0

    @functools.cached_property
    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """The shards of each device, in order; if rows are not known, where some may be absent, each by itself.

        >>> Mesh(("a", "a", "b"), (1, 1, 1), (2, 2, 1), (0, 0, 1)).by_device
        ((0, 1), (2,))
        """
        places = self.positions if self.rows else range(self.shards)
        return tuple([tuple(shards) for _, shards in itertools.groupby(range(self.shards), places.__getitem__)])

    @functools.cached_property
    def few_bytes(self) -> int:
        """Up to how many bytes a sum has that each shard sends to all others, not through one device; 0 for none.

        >>> Mesh(("a", "b", "c"), (1, 1, 1), (2, 2, 1), (0, 1, 2), exchange_bytes=100).few_bytes
        50
        """
        groups = groups_of(self.devices, bool(self.rows))
        shard_counts = [sum(map(self.devices.count, group)) for group in groups]  # how many shards each has
        return self.exchange_bytes // (max(shard_counts) + len(groups) - 2) if self.shards > 1 else 0

    @property
    def has_turns(self) -> bool:
        """Whether a device has several shards."""
        return any(self.before(d) is not None for d in range(self.shards))

    def before(self, d: int) -> int | None:
        """Return the shard that shard `d` follows on its device; None for the first there."""
        return d - 1 if d and self.positions[d - 1] == self.positions[d] else None

    def apart(self) -> Mesh:
        """Return the shards for what each runs by itself: where it runs what calls that, or in a column."""
        columns = tuple([tuple([column[position] for position in self.positions]) for column in self.columns])
        return replace(self, devices=("",) * self.shards, positions=tuple(range(self.shards)), columns=columns)

    def share(self, d: int) -> float:
        """Return the part of the batch that shard `d` has."""
        return self._shares[d]

    @functools.cached_property
    def _shares(self) -> Sequence[float]:
        shares = self.rows or self.weights
        total = sum(shares)
        return [share / total for share in shares]

    def bytes_of(self, d: int, size: int, layout: Layout) -> int:
        """Return how many bytes of a tensor shard `d` has in a layout, where it has any.

        Args:
          d: the shard.
          size: of the whole tensor, in bytes.
          layout: of the tensor on the shards.

        >>> from graphsplit.core.layouts import evenly
        >>> mesh = Mesh(("a", "b"), (1, 1), (4, 2), (0, 1))
        >>> mesh.bytes_of(0, 60, Shard(0)), mesh.bytes_of(0, 60, evenly(0, 10, 2))
        (40, 30)
        """
        return sum(self.bytes_of_blocks(d, size, layout)) if isinstance(layout, Shard) else size

    def bytes_of_blocks(self, d: int, size: int, layout: Shard) -> list[int]:
        """Return how many bytes shard `d` has of each block of a tensor of so many bytes."""
        pieces = self.pieces(layout)
        whole = sum(map(sum, pieces)) or 1
        return [size * piece[d] // whole for piece in pieces]

    def pieces(self, layout: Shard) -> Sequence[Sequence[int]]:
        """Return, block by block, how many entries each shard has: of rows that are not known, of their stand-ins."""
        if layout not in self._pieces:
            self._pieces[layout] = layout.pieces(self._counted_rows)
        return self._pieces[layout]

    @functools.cached_property
    def _pieces(self) -> dict[Shard, Sequence[Sequence[int]]]:
        return {}

    @functools.cached_property
    def _counted_rows(self) -> tuple[int, ...]:
        return self.rows_of(STAND_IN)

    def shape_on(self, d: int, shape: Shape | None, layout: Layout) -> tuple[int | None, ...] | None:
        """Return the shape of what a device of an axis that is not the batch's has of a tensor."""
        sizes = without_sizes(shape)
        if sizes is None or not isinstance(layout, Shard) or layout.axis >= len(sizes):
            return sizes
        return (*sizes[: layout.axis], layout.own(self.rows, d), *sizes[layout.axis + 1 :])

    def fits(self, program: Program, tensor: Tensor, layout: Layout) -> bool:
        """Return whether what is whole may be cut so: it has as many entries there, whatever sizes are not known."""
        shape, dtype = program.shape(tensor), program.ops[tensor.op].out_dtypes[tensor.index]
        if not isinstance(layout, Shard) or dtype == tf.variant:  # (lists are not cut)
            return True
        return shape is not None and layout.axis < len(shape) and is_same(shape[layout.axis], layout.size(self.batch))

    def rows_of(self, batch: int) -> tuple[int, ...]:
        """Return how many rows of a batch each shard has, where that was not known when planning.

        >>> Mesh(("a", "a", "b"), (1, 1, 1), (), (0, 0, 1)).rows_of(7)
        (2, 2, 3)
        """
        if self.rows:
            return self.rows
        first = [d for d in range(self.shards) if self.before(d) is None]
        rows_of_devices = apportion(batch, whole_weights([self.weights[d] for d in first]))
        counts = [self.positions.count(self.positions[d]) for d in first]
        return tuple(
            [
                count_of_shard
                for rows, count in zip(rows_of_devices, counts, strict=True)
                for count_of_shard in apportion(rows, (1,) * count)
            ]
        )

    def check(self) -> None:
        """Raise `CheckError` unless every shard has a device, a share, and rows if those are known."""
        count = self.shards
        if self.rows and (min(self.rows) < 1 or len(self.rows) != count):
            raise CheckError(f"Shards of {self.rows} rows on {count} devices.")
        if len(self.weights) != count or (count and min(self.weights) <= 0):
            raise CheckError(f"Shares of {self.weights} for {count} devices.")
        if len(self.positions) != count:
            raise CheckError(f"{count} shards at positions {self.positions}.")


def mesh_of(devices: Sequence[str], batch: int, weights: Sequence[float] | None = None, micro_batches: int = 1) -> Mesh:
    """Return the mesh for a batch: shards that get no rows are left out.

    The batch is shared out over the devices first, and each device's rows, which are consecutive, over its shards.

    Args:
      devices: all that were asked for.
      batch: the number of rows; a `Size` if it is not known, 0 if nothing is split.
      weights: the share of each device; equal by default.
      micro_batches: how many shards each device has.

    >>> mesh_of(["a", "b", "c"], 2).rows
    (1, 1)
    >>> mesh_of(["a", "b"], 7, micro_batches=3).rows
    (2, 1, 1, 1, 1, 1)
    """
    shares = tuple(weights or (1,) * len(devices))
    if isinstance(batch, Size):
        positions = [d for d, share in enumerate(shares) if share > 0 for _ in range(micro_batches)]
        rows: tuple[int, ...] = ()
    else:
        rows_of_devices = apportion(batch, shares)
        rows_of_shards = [
            apportion(count, (1,) * min(micro_batches, count)) if count else () for count in rows_of_devices
        ]
        positions = [d for d, pieces in enumerate(rows_of_shards) for _ in pieces]
        rows = tuple([count for pieces in rows_of_shards for count in pieces])
    return Mesh(tuple([devices[d] for d in positions]), tuple([shares[d] for d in positions]), rows, tuple(positions))
