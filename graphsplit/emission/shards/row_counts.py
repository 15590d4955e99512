"""How many rows each shard has, and how long sequences are, as graph nodes: constants where that is known beforehand.

Of a batch of unknown size every shard takes a fixed share, rounded to whole rows. With fewer rows than devices some
shards have none. No kernel runs there: what a shard reads passes a `Switch`, everything behind an untaken one is dead
and costs nothing, and where shards are joined a `Merge` puts in what no rows amount to. The first shard is the last to
run out of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import EvenCut, Shard
from graphsplit.core.polynomials import (
    Monomial,
    Polynomial,
    Symbol,
    as_entries,
    coefficients,
    is_symbolic,
    substituted,
    values_at,
)
from graphsplit.core.protos import NodeWriter, constant_node, host_of
from graphsplit.core.sizes import OWN, ROWS
from graphsplit.errors import CheckError

BEGIN = Symbol("first row", 0, 0, 0)
"""The number of the first row of a shard. It occurs in what a shard makes for itself, in no shape."""

AddToShard = Callable[[Any, int | None], None]
Groups = Sequence[Sequence[int]]


class Measured(NamedTuple):
    """An argument on which something is counted, where it lies: on `axis` it has `each` entries for one of it."""

    name: str
    axis: int
    each: int
    dtype: tf.DType
    device: str


class Site(NamedTuple):
    """Where sizes are computed and what for.

    Attributes:
      default_device: the device of whole values.
      devices: the device of each shard.
      scope: a prefix for the names of nodes.
      add: takes each node and the shard that it belongs to.
      lengths: references of the sizes of sequences, 64 bits; and of rows, where somebody is told these.
      counting: the device beside which sizes are computed that are not a shard's; "" for the default device.
    """

    default_device: str
    devices: Mapping[int, str]
    scope: str
    add: AddToShard
    lengths: Mapping[Symbol, str]
    counting: str = ""


class RowCounts:
    """What emission asks of sizes, for what runs once (None) and on each shard.

    As it is, it is for the one shard that runs the body of a loop by itself, which is told all sizes. (Without rows, it
    does not run it.)

    Args:
      site: where they are computed.

    Attributes:
      once, writers: what writes arithmetic on sizes, on the default device and for each shard.
      numbers, scalars: the sizes that are known beforehand, and references of those that are not.
    """

    def __init__(self, site: Site):
        default_device, devices, scope, add, lengths, counting = site
        self.once = NodeWriter(f"{scope}/home", host_of(counting or default_device), lambda node: add(node, None))
        self.writers = {
            d: NodeWriter(f"{scope}/shard_{d}", host_of(device), lambda node, d=d: add(node, d))  # type: ignore[misc]
            for d, device in devices.items()
        }
        self.numbers: dict[int | None, dict[Symbol, int]] = {d: {} for d in (None, *devices)}
        self.scalars: dict[int | None, dict[Symbol, str]] = {d: dict(lengths) for d in (None, *devices)}
        self._devices: dict[int | None, str] = {None: default_device, **devices}  # type: ignore[dict-item]
        self._add = add
        self._made: dict[tuple[Any, ...], str] = {}

    def may_be_absent(self, d: int) -> bool:
        """Return whether shard `d` may turn out to have no rows."""
        return False

    def present(self, d: int) -> str:
        """Return the reference of a truth value on the default device: whether shard `d` has rows."""
        raise CheckError(f"Shard {d} has rows, and nobody should ask.")

    def all_present(self, shards: Sequence[int]) -> str:
        """Return the reference of a truth value on the default device: whether all of some shards have rows."""
        key = "all present", tuple(shards)
        if key not in self._made:
            self._made[key] = functools.reduce(lambda a, b: self.once("LogicalAnd", a, b), map(self.present, shards))
        return self._made[key]

    def presence_control(self, d: int) -> str:
        """Return the control input that keeps a node of shard `d` from running if it has no rows, or ""."""
        return ""

    def operand(self, name: str, d: int | None, value: np.ndarray, dtype: tf.DType, device: str = "") -> str:
        """Return integers that follow from sizes, on the device of shard `d`, made if need be; `name` if constant.

        A constant may have another device than that, on which it is read.
        """
        value, device = substituted(value, self.numbers[d]), device or self._devices[d]
        key = d, repr(value.tolist()), value.shape, dtype, device
        if key not in self._made:
            is_made = is_symbolic(value)
            self._made[key] = self._sum(d, value, dtype) if is_made else self._number(name, d, value, dtype, device)
        return self._made[key]

    def split_sizes(self, name: str, layout: Shard, d: int | None, device: str, shards: Groups = ()) -> str:
        """Write the sizes of all pieces of an axis, block by block, for a device: a shard's, or one with all of it.

        Args:
          name: of the node, if there is none with these numbers.
          layout: of the pieces.
          d: the shard on whose device they are cut, if it is the only one that has them.
          device: which that is.
          shards: whose entries each piece of a block has, where that is not one of each shard. See `Split`.
        """
        raise CheckError("A shard by itself cuts nothing.")

    def own_sizes(self, name: str, layout: Shard, d: int) -> str:
        """Write the sizes of the blocks that shard `d` holds of a batch, on its device."""
        blocks = [self.own(layout.between(i, i + 1), d) for i in range(len(layout.blocks))]
        return self.operand(f"{name}/sizes", d, as_entries(blocks), tf.int64)

    def _sizes_known(
        self, name: str, layout: Shard, rows: Sequence[int], d: int | None, device: str, shards: Groups = ()
    ) -> str:
        # (of lengths, where blocks are)
        blocks = layout.pieces(rows)
        groups = shards or [(k,) for k in range(len(blocks[0]))]
        sizes = [
            Polynomial.of(sum([block[k] for k in shards_of_device])) for block in blocks for shards_of_device in groups
        ]
        return self.operand(f"{name}/sizes", d, as_entries(sizes), tf.int64, device)

    def own(self, layout: Shard, d: int) -> Polynomial:
        """Return how many entries shard `d` has of an axis that lies so."""
        return Polynomial.of(Polynomial.of(OWN) * Polynomial.of(sum(layout.blocks)))

    def before(self, layout: Shard, d: int) -> Polynomial:
        """Return how many entries of an axis of one block are before those of shard `d`."""
        return Polynomial.of(Polynomial.of(BEGIN) * Polynomial.of(sum(layout.blocks)))

    def share(self, name: str, d: int, dtype: tf.DType, layout: Shard) -> str:
        """Write the fraction that shard `d` has of an axis that lies so."""
        w, double = self.writers[d], tf.float64
        own_rows, rows = (self._scalar(d, (symbol,), double) for symbol in (OWN, ROWS))
        return w.cast(w("RealDiv", own_rows, rows, T=double), double, dtype)

    def shares(self, name: str, layout: Shard, dtype: tf.DType, rank: int, device: str, groups: Groups) -> str | None:
        """Write, on a device, the fractions that groups of shards have of what they all have of an axis that lies so.

        None if all are equal.
        """
        raise CheckError("The body of a loop has one shard.")

    def _shares_known(
        self, name: str, layout: Shard, rows: Sequence[int], dtype: tf.DType, rank: int, device: str, groups: Groups
    ) -> str | None:
        entries = [sum([layout.own(rows, d) for d in shards]) for shards in groups]
        if len(set(entries)) == 1:
            return None
        shares = np.array(entries, np.float64).reshape(-1, *[1] * rank) / sum(entries)
        self._add(constant_node(name, shares.astype(dtype.as_numpy_dtype), dtype, device), None)
        return name

    def told(self, d: int | None, symbols: Sequence[Symbol]) -> list[str]:
        """Return the references that the body of a loop is given, on shard `d` or (None) for what runs once."""
        return [self.scalars[d][symbol] for symbol in symbols]

    def _number(self, name: str, d: int | None, value: np.ndarray, dtype: tf.DType, device: str) -> str:
        wait = "" if d is None else self.presence_control(d)
        array = values_at(value, {}).astype(dtype.as_numpy_dtype)
        self._add(constant_node(name, array, dtype, device, wait), d)
        return name

    def _sum(self, d: int | None, value: np.ndarray, dtype: tf.DType) -> str:
        """Write a polynomial, one product for each of its monomials."""
        w = self.once if d is None else self.writers[d]
        total = ""
        for monomial, counts in coefficients(value).items():
            part = w.constant(counts, dtype)
            if monomial:
                part = w("Mul", self._scalar(d, monomial, dtype), part, T=dtype)
            total = w("AddV2", total, part, T=dtype) if total else part
        return total

    def _scalar(self, d: int | None, monomial: Monomial, dtype: tf.DType) -> str:
        """Write the product of some sizes."""
        w, key = self.once if d is None else self.writers[d], (d, monomial, dtype)
        if key not in self._made:
            last = w.cast(self.scalars[d][monomial[-1]], tf.int64, dtype)
            product = self._scalar(d, monomial[:-1], dtype) if len(monomial) > 1 else ""
            self._made[key] = w("Mul", product, last, T=dtype) if product else last
        return self._made[key]


class FixedRows(RowCounts):
    """Row counts that are known when planning."""

    def __init__(self, rows: Sequence[int], site: Site):
        super().__init__(site)
        self._rows = tuple(rows)
        self.numbers = {d: {ROWS: sum(rows), OWN: rows[d], BEGIN: sum(rows[:d])} for d in site.devices}
        self.numbers[None] = {ROWS: sum(rows)}

    def split_sizes(self, name: str, layout: Shard, d: int | None, device: str, shards: Groups = ()) -> str:
        """Write the sizes of all pieces of an axis, block by block, for a device: a shard's, or one with all of it."""
        return self._sizes_known(name, layout, self._rows, d, device, shards)

    def own(self, layout: Shard, d: int) -> Polynomial:
        """Return how many entries shard `d` has of an axis that lies so."""
        return Polynomial.of(layout.own(self._rows, d))

    def before(self, layout: Shard, d: int) -> Polynomial:
        """Return how many entries of an axis of one block are before those of shard `d`."""
        return Polynomial.of(sum([layout.own(self._rows, i) for i in range(d)]))

    def share(self, name: str, d: int, dtype: tf.DType, layout: Shard) -> str:
        """Write the fraction that shard `d` has of an axis that lies so."""
        own_length, total = layout.own(self._rows, d), layout.size(sum(self._rows))
        key = "share", d, dtype, own_length / total
        if key not in self._made:
            share = np.array(own_length / total, dtype.as_numpy_dtype)
            self._add(constant_node(name, share, dtype, self._devices[d]), d)
            self._made[key] = name
        return self._made[key]

    def shares(self, name: str, layout: Shard, dtype: tf.DType, rank: int, device: str, groups: Groups) -> str | None:
        """Write, on a device, the fractions that groups of shards have of an axis that lies so."""
        return self._shares_known(name, layout, self._rows, dtype, rank, device, groups)


class AxisRows(FixedRows):
    """Of an axis of the mesh that has no rows: what is cut along it has a known length, and is cut evenly."""

    def __init__(self, rows: Sequence[int], site: Site):
        super().__init__(rows, site)
        self.numbers = {d: {} for d in self.numbers}  # how many rows the batch has is not known here


class MeasuredRows(RowCounts):
    """Row counts that are measured, and divided among shards of which some may go without. First `divide` is called."""

    def divide(self, sources: Sequence[Measured] | str, batch: Sequence[str], weights: Sequence[int]) -> None:
        """Write how many rows each shard has.

        Args:
          sources: the arguments that have the rows of the batch; all must have the same number. Or the reference of
            that number.
          batch: how the user calls these arguments.
          weights: the share of each shard, as whole numbers.
        """
        w = self.once
        rows = sources if isinstance(sources, str) else _equal(w, [measured(w, s) for s in sources], batch)
        sizes, begins = self._borders(rows, weights)
        self._present = [w("Greater", size, w.constant(0), T=tf.int64) for size in sizes]
        self.scalars[None][ROWS] = rows
        for d, writer in self.writers.items():
            self.scalars[d] |= {ROWS: rows, OWN: self._taken(d, sizes[d]), BEGIN: self._taken(d, begins[d])}
            if self.may_be_absent(d):
                writer.control = "^" + writer("Identity", self.scalars[d][OWN], T=tf.int64)  # dead if there are no rows

    def _borders(self, rows: str, weights: Sequence[int]) -> tuple[list[str], list[str]]:
        """Write the rows of each shard and where they begin: border `d` is the batch times its part, rounded up."""
        w, count, total = self.once, len(weights), sum(weights)
        upto = w.constant(np.cumsum([0, *weights]))
        rounded_up = w("AddV2", w("Mul", rows, upto, T=tf.int64), w.constant(total - 1), T=tf.int64)
        borders = w("FloorDiv", rounded_up, w.constant(total), T=tf.int64)
        begins, ends = [
            w("Slice", borders, w.constant([first]), w.constant([count]), T=tf.int64, Index=tf.int64)
            for first in (0, 1)
        ]
        self._all_sizes = w("Sub", ends, begins, T=tf.int64)
        refs = [w("Unpack", vector, num=count, axis=0, T=tf.int64) for vector in (self._all_sizes, begins)]
        sizes, starts = [[f"{ref}:{d}" if d else ref for d in range(count)] for ref in refs]
        return sizes, starts

    def _taken(self, d: int, source: str) -> str:
        """Return a number of what runs once as shard `d` reads it."""
        return self.once("Switch", source, self._present[d], T=tf.int64) + ":1" if self.may_be_absent(d) else source

    def may_be_absent(self, d: int) -> bool:
        """Return whether shard `d` may turn out to have no rows: all but the first."""
        return d > 0

    def present(self, d: int) -> str:
        """Return the reference of a truth value on the default device: whether shard `d` has rows."""
        return self._present[d]

    def presence_control(self, d: int) -> str:
        """Return the control input that keeps a node of shard `d` from running if it has no rows; "" for the first."""
        return self.writers[d].control

    def split_sizes(self, name: str, layout: Shard, d: int | None, device: str, shards: Groups = ()) -> str:
        """Write the sizes of all pieces of an axis, block by block."""
        if shards:
            raise CheckError("Of shards that may be absent each has a piece by itself.")
        if isinstance(layout.partition, EvenCut):
            return self._sizes_known(name, layout, (0,) * len(self._present), None, device)
        if layout.blocks == (1,):
            return self._all_sizes
        w, key = self.once, ("split sizes", repr(layout.blocks))
        if key not in self._made:
            column = as_entries([*map(Polynomial.of, layout.blocks)]).reshape(-1, 1)
            blocks = self.operand(f"{name}/blocks", None, column, tf.int64)
            by_block = w("Mul", self._all_sizes, blocks, T=tf.int64)
            self._made[key] = w("Reshape", by_block, w.constant([-1]), T=tf.int64, Tshape=tf.int64)
        return self._made[key]

    def shares(self, name: str, layout: Shard, dtype: tf.DType, rank: int, device: str, groups: Groups) -> str | None:
        """Write, on a device, the fractions that groups of shards have of an axis that lies so; 0 without rows."""
        count = len(self._present)
        if isinstance(layout.partition, EvenCut):
            return self._shares_known(name, layout, (0,) * count, dtype, rank, device, groups)
        w, double, key = self.once, tf.float64, ("shares", dtype, rank, tuple(groups))
        if key not in self._made:
            shard_rows, rows = (
                w.cast(source, tf.int64, double) for source in (self._all_sizes, self.scalars[None][ROWS])
            )
            divide = "RealDiv"
            if [*groups] != [(d,) for d in range(count)]:
                of_groups = w.constant([[d in group for d in range(count)] for group in groups], double)
                shard_rows = w(
                    "Sum", w("Mul", shard_rows, of_groups, T=double), w.constant([1]), T=double, Tidx=tf.int64
                )
                rows, divide = w("Sum", shard_rows, w.constant([0]), T=double, Tidx=tf.int64), "DivNoNan"
            shares = w.cast(w(divide, shard_rows, rows, T=double), double, dtype)
            shape = w.constant([-1, *[1] * rank])
            self._made[key] = w("Reshape", shares, shape, T=dtype, Tshape=tf.int64)
        return self._made[key]


def length_sizes(sizes: Mapping[Symbol, str]) -> dict[Symbol, str]:
    """Return those of some sizes that are lengths: no numbers of rows."""
    return {symbol: reference for symbol, reference in sizes.items() if symbol not in (ROWS, OWN, BEGIN)}


def measured(w: NodeWriter, source: Measured) -> str:
    """Write how many there are of something along an axis of an argument."""
    shape = w("Shape", source.name, device=source.device, T=source.dtype, out_type=tf.int64)
    types = {"Tparams": tf.int64, "Tindices": tf.int64, "Taxis": tf.int64}
    size = w("GatherV2", shape, w.constant(source.axis), w.constant(0), **types)
    return size if source.each == 1 else w("FloorDiv", size, w.constant(source.each), T=tf.int64)


def _equal(w: NodeWriter, counts: Sequence[str], batch: Sequence[str]) -> str:
    """Write the number of rows that all of `counts` are, and an assertion that they are the same."""
    if len(counts) == 1:
        return counts[0]
    every = w("Pack", *counts, N=len(counts), axis=0, T=tf.int64)
    same = w("Equal", every, counts[0], T=tf.int64)
    alike = w("All", same, w.constant([0]), Tidx=tf.int64)
    names = " and ".join([", ".join(batch[:-1]), batch[-1]])
    message = (
        f"{names} were taken for one batch, and must have the same number of rows; give split={{...: None}} for those "
        "that are not. They have:"
    )
    types = tf.compat.v1.AttrValue()
    types.list.type.extend([tf.string.as_datatype_enum, tf.int64.as_datatype_enum])
    check = w("Assert", alike, w.constant(message.encode(), tf.string), every, T=types)
    return w("Identity", counts[0], f"^{check}", T=tf.int64)
