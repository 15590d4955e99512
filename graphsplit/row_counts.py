"""How many rows each shard has, as graph nodes: constants where the batch size is known, else measured in each run.

Of a batch of unknown size every shard takes a fixed share, rounded to whole rows. With fewer rows than devices some
shards have none. No kernel runs there: what a shard reads passes a `Switch`, everything behind an untaken one is dead
and costs nothing, and where shards are joined a `Merge` puts in what no rows amount to. The first shard is the last to
run out of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.errors import CheckError
from graphsplit.graphdefs import constant_node, make_node
from graphsplit.layouts import Shard

AddNode = Callable[[Any], None]
AddToShard = Callable[[Any, int | None], None]
_FINEST_SHARE = 1000  # weights are rounded to fractions with at most this denominator


class Writer:
    """Writes nodes of one scope on one device, named by their type and a number; equal constants once."""

    def __init__(self, scope: str, device: str, add: AddNode, control: str = ""):
        self.device = device
        self.control = control
        self._scope = scope
        self._add = add
        self._serial = itertools.count()
        self._constants: dict[tuple[bytes, tuple[int, ...], tf.DType], str] = {}

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Write a node and return the reference of its first output."""
        return self.write(f"{self._scope}/{op_type}_{next(self._serial)}", op_type, *inputs, **attributes)

    def write(self, name: str, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Write a node under a name of its own."""
        self._add(make_node(name, op_type, inputs, self.device, **attributes))
        return name

    def constant(self, value: Any, dtype: tf.DType = tf.int64) -> str:
        """Write a constant, or find the one that is there."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = array.tobytes(), array.shape, dtype
        if key not in self._constants:
            name = self._constants[key] = f"{self._scope}/Const_{next(self._serial)}"
            self._add(constant_node(name, array, dtype, self.device, self.control))
        return self._constants[key]

    def cast(self, source: str, dtype: tf.DType, target: tf.DType) -> str:
        """Write a conversion, if one is needed."""
        return source if dtype == target else self("Cast", source, SrcT=dtype, DstT=target)


class RowCounts:
    """What emission asks of row counts. Where every shard has rows, nothing is said of those that have none."""

    def may_be_absent(self, d: int) -> bool:
        """Return whether shard `d` may turn out to have no rows."""
        return False

    def present(self, d: int) -> str:
        """Return the reference of a truth value at home: whether shard `d` has rows."""
        raise CheckError(f"Shard {d} has rows, and nobody should ask.")

    def waits_for(self, d: int) -> str:
        """Return the control input that keeps a node of shard `d` from running if it has no rows, or ""."""
        return ""

    def split_sizes(self, name: str, layout: Shard) -> str:
        """Write the sizes of all pieces of an axis, block by block, at home."""
        raise CheckError("A shard by itself cuts nothing.")

    def own_sizes(self, name: str, layout: Shard, d: int) -> str:
        """Write the sizes of the blocks that shard `d` holds, on its device."""
        raise CheckError("A shard by itself joins nothing.")

    def told(self, d: int | None) -> list[str]:
        """Return the references that the body of a loop is given, on shard `d` or at home: none where all is known."""
        return []

    def operand(self, name: str, d: int, rest: np.ndarray, own: np.ndarray, whole: np.ndarray, dtype: tf.DType) -> str:
        """Write `rest + own * (rows of shard d) + whole * (rows of the batch)` on the device of shard `d`."""
        raise NotImplementedError

    def whole(self, name: str, rest: np.ndarray, whole: np.ndarray, dtype: tf.DType) -> None:
        """Write `rest + whole * (rows of the batch)` at home, under a name."""
        raise CheckError(f"{name!r} depends on the number of rows of the whole batch, which is not counted here.")

    def share(self, name: str, d: int, dtype: tf.DType) -> str:
        """Write the fraction of all rows that shard `d` has."""
        raise CheckError("A shard by itself does not know its share.")


class FixedRows(RowCounts):
    """Row counts that are known when planning."""

    def __init__(self, rows: Sequence[int], home: str, devices: Sequence[str], add: AddToShard):
        self._rows = tuple(rows)
        self._home = home
        self._devices = devices
        self._add = add
        self._constants: dict[tuple[Any, ...], str] = {}

    def split_sizes(self, name: str, layout: Shard) -> str:
        """Write the sizes of all pieces of an axis, block by block, at home."""
        sizes = [size for block in layout.pieces(self._rows) for size in block]
        return self._constant(f"{name}/sizes", np.array(sizes, np.int64), tf.int64, None)

    def own_sizes(self, name: str, layout: Shard, d: int) -> str:
        """Write the sizes of the blocks that shard `d` holds, on its device."""
        sizes = [block[d] for block in layout.pieces(self._rows)]
        return self._constant(f"{name}/sizes", np.array(sizes, np.int64), tf.int64, d)

    def operand(self, name: str, d: int, rest: np.ndarray, own: np.ndarray, whole: np.ndarray, dtype: tf.DType) -> str:
        """Write `rest + own * (rows of shard d) + whole * (rows of the batch)` on the device of shard `d`."""
        value = rest + own * self._rows[d] + whole * sum(self._rows)
        return self._constant(name, value, dtype, d)

    def share(self, name: str, d: int, dtype: tf.DType) -> str:
        """Write the fraction of all rows that shard `d` has."""
        share = self._rows[d] / sum(self._rows)
        return self._constant(name, np.array(share, dtype.as_numpy_dtype), dtype, d)

    def _constant(self, name: str, value: np.ndarray, dtype: tf.DType, d: int | None) -> str:
        """Write a constant of a few numbers: operands of many ops are equal on a device, and one node."""
        key = d, dtype, value.shape, value.tobytes()
        if key not in self._constants:
            self._add(constant_node(name, value, dtype, self._home if d is None else self._devices[d]), d)
            self._constants[key] = name
        return self._constants[key]


class Measured(NamedTuple):
    """An argument on which rows are counted: on `axis` it has `per_row` entries for each."""

    name: str
    axis: int
    per_row: int
    dtype: tf.DType


class RowsInRun(RowCounts):
    """Row counts that are only known in each run: arithmetic with them, which each shard does for itself.

    Attributes:
      rows: the reference of the number of rows of the batch, 64 bits like all of these.
      own: of each shard, the number of its rows.
      begins: of each shard, the number of its first row.
      home, writers: what writes arithmetic on sizes, at home and for each shard.
    """

    def __init__(self, home: Writer) -> None:
        self.home = home
        self.rows = ""
        self.own: dict[int, str] = {}
        self.begins: dict[int, str] = {}
        self.writers: dict[int, Writer] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def told(self, d: int | None) -> list[str]:
        """Return what the body of a loop is told: on shard `d` its rows, those of the batch, and where it begins."""
        return [self.rows] if d is None else [self.own[d], self.rows, self.begins[d]]

    def operand(self, name: str, d: int, rest: np.ndarray, own: np.ndarray, whole: np.ndarray, dtype: tf.DType) -> str:
        """Write `rest + own * (rows of shard d) + whole * (rows of the batch)` on the device of shard `d`."""
        key = d, rest.tobytes(), own.tobytes(), whole.tobytes(), rest.shape, dtype
        if key not in self._known:
            w = self.writers[d]
            value = w.constant(rest, dtype)
            for factor, rows in ((own, self.own[d]), (whole, self.rows)):
                if factor.any():
                    part = w("Mul", self._cast(d, rows, dtype), w.constant(factor, dtype), T=dtype)
                    value = w("AddV2", value, part, T=dtype)
            self._known[key] = value
        return self._known[key]

    def whole(self, name: str, rest: np.ndarray, whole: np.ndarray, dtype: tf.DType) -> None:
        """Write `rest + whole * (rows of the batch)` at home, under a name."""
        w = self.home
        part = w("Mul", w.cast(self.rows, tf.int64, dtype), w.constant(whole, dtype), T=dtype)
        w.write(name, "AddV2", part, w.constant(rest, dtype), T=dtype)

    def share(self, name: str, d: int, dtype: tf.DType) -> str:
        """Write the fraction of all rows that shard `d` has."""
        w, double = self.writers[d], tf.float64
        own, rows = (self._cast(d, rows, double) for rows in (self.own[d], self.rows))
        return w.cast(w("RealDiv", own, rows, T=double), double, dtype)

    def _cast(self, d: int, rows: str, dtype: tf.DType) -> str:
        key = d, rows, dtype
        if key not in self._known:
            self._known[key] = self.writers[d].cast(rows, tf.int64, dtype)
        return self._known[key]


class MeasuredRows(RowsInRun):
    """Row counts that are measured, and divided among shards of which some may go without.

    Args:
      sources: the arguments that have the rows of the batch; all must have the same number. Or the reference of that
        number.
      batch: how the user calls these arguments.
      weights: the share of each shard, as whole numbers.
      scope: a prefix for the names of the nodes.
      home, devices: where the batch, and each shard, is.
      add: takes each node and the shard that it belongs to (None: home).
    """

    def __init__(
        self,
        sources: Sequence[Measured] | str,
        batch: Sequence[str],
        weights: Sequence[int],
        scope: str,
        home: str,
        devices: Sequence[str],
        add: AddToShard,
    ):
        super().__init__(Writer(f"{scope}/home", host_of(home), lambda node: add(node, None)))
        w = self.home
        if isinstance(sources, str):
            self.rows = sources
        else:
            self.rows = _equal(w, [_measured(w, source) for source in sources], batch)
        sizes, begins = self._divide(weights)
        self._present = [w("Greater", size, w.constant(0), T=tf.int64) for size in sizes]
        for d, device in enumerate(devices):
            writer = Writer(f"{scope}/shard_{d}", host_of(device), lambda node, d=d: add(node, d))  # type: ignore[misc]
            self.own[d], self.begins[d] = self._taken(d, sizes[d]), self._taken(d, begins[d])
            if self.may_be_absent(d):
                writer.control = "^" + writer("Identity", self.own[d], T=tf.int64)  # dead if there are no rows
            self.writers[d] = writer

    def _divide(self, weights: Sequence[int]) -> tuple[list[str], list[str]]:
        """Write the rows of each shard and where they begin: border `d` is the batch times its part, rounded up."""
        w, count, total = self.home, len(weights), sum(weights)
        upto = w.constant(np.cumsum([0, *weights]))
        rounded_up = w("AddV2", w("Mul", self.rows, upto, T=tf.int64), w.constant(total - 1), T=tf.int64)
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
        """Return a number at home as shard `d` reads it."""
        return self.home("Switch", source, self._present[d], T=tf.int64) + ":1" if self.may_be_absent(d) else source

    def may_be_absent(self, d: int) -> bool:
        """Return whether shard `d` may turn out to have no rows: all but the first."""
        return d > 0

    def present(self, d: int) -> str:
        """Return the reference of a truth value at home: whether shard `d` has rows."""
        return self._present[d]

    def waits_for(self, d: int) -> str:
        """Return the control input that keeps a node of shard `d` from running if it has no rows; "" for the first."""
        return self.writers[d].control

    def split_sizes(self, name: str, layout: Shard) -> str:
        """Write the sizes of all pieces of an axis, block by block, at home."""
        w, key = self.home, (layout.blocks,)
        if layout.blocks != (1,) and key not in self._known:
            by_block = w("Mul", self._all_sizes, w.constant([[block] for block in layout.blocks]), T=tf.int64)
            self._known[key] = w("Reshape", by_block, w.constant([-1]), T=tf.int64, Tshape=tf.int64)
        return self._known.get(key, self._all_sizes)

    def own_sizes(self, name: str, layout: Shard, d: int) -> str:
        """Write the sizes of the blocks that shard `d` holds, on its device."""
        blocks = np.array(layout.blocks)
        return self.operand(name, d, 0 * blocks, blocks, 0 * blocks, tf.int64)


class ToldRows(RowsInRun):
    """Row counts of the one shard that runs the body of a loop by itself. (Without rows, it does not run it.)

    Args:
      d: the shard.
      given: references of its rows, those of the batch, and where it begins.
      scope: a prefix for the names of the nodes.
      add: takes each node.
    """

    def __init__(self, d: int, given: Sequence[str], scope: str, add: AddToShard):
        super().__init__(Writer(scope, "", lambda node: add(node, d)))
        self.own[d], self.rows, self.begins[d] = given
        self.writers[d] = self.home


def _measured(w: Writer, source: Measured) -> str:
    """Write the number of rows of an argument."""
    shape = w("Shape", source.name, T=source.dtype, out_type=tf.int64)
    types = {"Tparams": tf.int64, "Tindices": tf.int64, "Taxis": tf.int64}
    size = w("GatherV2", shape, w.constant(source.axis), w.constant(0), **types)
    return size if source.per_row == 1 else w("FloorDiv", size, w.constant(source.per_row), T=tf.int64)


def _equal(w: Writer, counts: Sequence[str], batch: Sequence[str]) -> str:
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


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers in the same proportion.

    >>> whole_weights([1, 0.5])
    [2, 1]
    """
    shares = [Fraction(weight / sum(weights)).limit_denominator(_FINEST_SHARE) for weight in weights]
    common = np.lcm.reduce([share.denominator for share in shares])
    counts = [int(share * common) for share in shares]
    return [count // int(np.gcd.reduce(counts)) for count in counts]


def host_of(device: str) -> str:
    """Return the device on which sizes are computed for another: itself if it is a CPU, else its machine's.

    >>> host_of("/job:localhost/replica:0/task:0/device:GPU:3")
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    before, _, kind = device.rpartition("device:")
    return device if not before or kind.startswith("CPU") else f"{before}device:CPU:0"
