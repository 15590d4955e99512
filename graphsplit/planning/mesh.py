"""The mesh: the shards, the device of each, and its share of the batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Layout, Shard
from graphsplit.core.sizes import STAND_IN, Shape, Size, apportion, is_same, whole_weights, without_sizes
from graphsplit.core.sizes import rows as rows_of_unknown_batch
from graphsplit.errors import CheckError
from graphsplit.planning.costs.exchanges import groups_of
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.stages import Stage


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
        near = [sum(map(self.devices.count, group)) for group in groups]  # how many shards each has
        return self.exchange_bytes // (max(near) + len(groups) - 2) if self.shards > 1 else 0

    @property
    def has_turns(self) -> bool:
        """Whether a device has several shards."""
        return any(self.before(d) is not None for d in range(self.shards))

    def before(self, d: int) -> int | None:
        """Return the shard that shard `d` follows on its device; None for the first there."""
        return d - 1 if d and self.positions[d - 1] == self.positions[d] else None

    def device_of(self, d: int, op: Op) -> str:
        """Return the device on which shard `d` runs an operation: that of its stage and column, or the shard's own."""
        stage = self.stage_of(op)
        return stage.device(self._number(self.positions[d], op)) if stage else self.near(d, op)

    def devices_of(self, op: Op) -> Sequence[str]:
        """Return the device on which each shard runs an operation; see `device_of`."""
        stage = self.stage_of(op)
        if stage is None:
            return self.devices_near(op)
        return [stage.device(self._number(position, op)) for position in self.positions]

    def stage_of(self, op: Op) -> Stage | None:
        """Return the stage that has devices for an operation: none along another axis, planned for all stages alike."""
        return None if self.axis else op.stage

    def home_of(self, op: Op) -> str | None:
        """Return the device of an operation that runs once, if its stage has one for it."""
        stage = self.stage_of(op)
        return stage.device(self._number(0, op)) if stage else None

    def _number(self, position: int, op: Op) -> int:
        """Return which of the devices of its stage an operation has for the shards at a position."""
        return position * max(len(self.columns), 1) + (op.provenance.column or 0)

    def devices_near(self, op: Op) -> Sequence[str]:
        """Return the device of each shard in the column of an operation."""
        column = op.provenance.column
        own_column = None if column is None or not self.columns else self.columns[column]
        return self.devices if own_column is None else [own_column[position] for position in self.positions]

    def near(self, d: int, op: Op) -> str:
        """Return the device of shard `d` in the column of an operation."""
        column = op.provenance.column
        return self.devices[d] if column is None or not self.columns else self.columns[column][self.positions[d]]

    def carried_at(self, op: Op, device: str, d: int | None) -> Sequence[str]:
        """Return where the values are that a loop or branch on a device hands on: each in its column.

        Args:
          op: the loop or branch.
          device: where it runs.
          d: the shard that runs it, or None if it runs once.
        """
        body = op.bodies[function_names(op.node)[-1]]
        arguments = [body.ops[i] for i in body.inputs]
        if d is None:
            return [next(iter(self.column_of(argument)), device) for argument in arguments]
        return [self.near(d, argument) if self.column_of(argument) else device for argument in arguments]

    def made_at(self, op: Op, output: int, d: int) -> str:
        """Return the device on which shard `d` makes an output: of a loop or branch, that of the operation there."""
        if not op.bodies:
            return self.device_of(d, op)
        body = op.bodies[function_names(op.node)[-1]]
        maker = body.ops[body.outputs[output].op]
        return self.near(d, maker) if self.column_of(maker) else self.device_of(d, op)

    def column_of(self, op: Op) -> tuple[str, ...]:
        """Return the devices of the column of an operation, by position; empty for one that is in no column."""
        column, stage = op.provenance.column, self.stage_of(op)
        if column is None or not self.columns:
            return ()
        return stage.column(column, len(self.columns)) if stage else self.columns[column]

    def axes_between(self, device: str, other: str) -> list[str]:
        """Return the axes along which two devices of columns differ; all other axes than the batch's if none does.

        >>> mesh = Mesh(columns=(("a",), ("b",), ("c",), ("d",)), others=(("model", 2), ("expert", 2)))
        >>> mesh.axes_between("a", "c"), mesh.axes_between("a", "d")
        (['model'], ['model', 'expert'])
        """
        pairs = zip(self.others, self._places.get(device, ()), self._places.get(other, ()), strict=False)
        return [name for (name, _), a, b in pairs if a != b] or [name for name, _ in self.others]

    @functools.cached_property
    def _places(self) -> dict[str, tuple[int, ...]]:
        """The place of each device along each of the other axes."""
        places = itertools.product(*[range(size) for _, size in self.others])
        return {device: place for place, column in zip(places, self.columns, strict=True) for device in column}

    def copy_for(self, device: str) -> int:
        """Return the shard whose copy a device reads of what all shards have: its own, or one of its host.

        Of shards that may have no rows, it is the first, which always has some.

        >>> mesh = Mesh(("/task:0/device:CPU:0", "/task:1/device:CPU:0"), (1, 1), (2, 1), (0, 1))
        >>> mesh.copy_for("/task:1/device:CPU:7")
        1
        """
        if device in self.devices and self.rows:
            return self.devices.index(device)
        near = [d for d, other in enumerate(self.devices) if self.rows and host_name(other) == host_name(device)]
        return [*near, 0][0]

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
