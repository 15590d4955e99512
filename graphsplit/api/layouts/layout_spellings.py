"""How layouts of variables are spelled, checked, and what each says of a variable on a mesh.

A word, `"home"`, `"replicated"`, `"sharded"` or `"host"`; or for each dimension the axis of the mesh along which it is
cut, or None; or both as a pair, `((None, "model"), "sharded")`: the word is then for the axis of which the dimensions
say nothing. `docs/large_layers.md` has them in a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphsplit.core.device_mesh import ALIASES, LAYOUTS, DeviceMesh
from graphsplit.core.layouts import Cut, Division, MeshDivision, Nested, Replicate, Shard, in_groups, part_shapes
from graphsplit.core.patterns import meant
from graphsplit.errors import ArgumentError
from graphsplit.planning.amounts import count_text


@dataclass(frozen=True)
class AxisCut:
    """An axis of a mesh along which a dimension is cut, and how; see `cut`. Of a name alone, `blocks` is 0."""

    axis: str
    unit: int = 1
    blocks: int | tuple[int, ...] = 0
    in_place: bool = False

    @property
    def plain(self) -> str | AxisCut:
        """As users write it."""
        return self if self.blocks else self.axis

    def __repr__(self) -> str:
        unit = f", unit={self.unit}" if self.unit != 1 else ""
        blocks = f", blocks={self.blocks}" if self.blocks not in (0, 1) else ""
        stays = ", in_place=True" if self.in_place else ""
        return f"gs.cut({self.axis!r}{unit}{blocks}{stays})"


def cut(axis: str, *, unit: int = 1, blocks: int | Sequence[int] = 1, in_place: bool = False) -> AxisCut:
    """Return an entry of a variable's layout: how the dimension is cut along an axis of the mesh.

    Write it instead of the name of the axis: `{"*/qkv/kernel": (None, gs.cut("model", unit=64, blocks=3))}`. Then
    heads that are merged with their width, or with each other, stay whole, and nothing is gathered for them.

    Along the axis of the batch, `gs.cut("batch", in_place=True)` uses each part on its device: rows are sent there and
    back (expert parallelism). The name alone, `"batch"`, gathers the parts first.

    Args:
      axis: of the mesh. Along the batch axis there are no units.
      unit: entries of the dimension that stay together: the width of a head.
      blocks: how many equal blocks the dimension consists of, each cut by itself: 3 for fused queries, keys and
        values, 2 for a fused gate and up. Each device has its units of every block. If a block has fewer units than
        the axis has devices (a few heads of keys and values), each device has a copy of the variable.
        For blocks that differ, the units of each: `(8, 2, 2)` for 8 heads of queries, and 2 of keys and of values. They
        are cut alike, here into two groups: 4 heads of queries go with one of keys and one of values.
      in_place: for the batch axis: whether parts are used where they are. Along other axes they always are.

    Raises:
      ArgumentError: for a unit, or a number of blocks, that is not at least 1. (Where the variable is laid out, for
        those that do not divide its dimension, and for an axis that the mesh lacks.)

    >>> import tensorflow as tf, graphsplit as gs
    >>> qkv = tf.Variable(tf.zeros((8, 3 * 4 * 2)), name="qkv")   # queries, keys and values of 4 heads of width 2
    >>> gs.set_variable_layout(qkv, (None, gs.cut("model", unit=2, blocks=3)), mesh={"model": 2})
    >>> gs.visualize_layout(qkv)
    qkv float32[8,24], on a mesh, columns along 'model'
    ┌────────────────────┬────────────────────┐
    │ CPU:0              │ CPU:1              │
    │ :, 0:4 8:12 16:20  │ :, 4:8 12:16 20:24 │
    └────────────────────┴────────────────────┘
    """
    several: tuple[Any, ...] = tuple(blocks) if isinstance(blocks, (list, tuple)) and blocks else (blocks,)
    for name, number in (("unit", unit), *[("blocks", block) for block in several]):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArgumentError(f"cut({axis!r}, {name}={number!r}): {name} must be a number of at least 1.")
    if isinstance(blocks, int):
        return AxisCut(axis, unit, blocks, in_place)
    return AxisCut(axis, unit, several if len(set(several)) > 1 else len(several), in_place)


DimensionAxes = str | AxisCut | Sequence[str | AxisCut] | None
Dimensions = Sequence[DimensionAxes]
AUTO = "auto"
WORDS = (*LAYOUTS, "host")
"""The layouts that are a word: those that a part along an axis of a mesh may have, and the host's memory."""

VariableLayout = str | Dimensions | tuple[Dimensions, str]
"""One of `WORDS`; or for each dimension the axes of a mesh along which it is cut, or None; or a pair of both."""


@dataclass(frozen=True)
class Spelling:
    """What a layout says, however it is spelled.

    Attributes:
      dimensions: the axes of the mesh along which each dimension is cut, and how; empty if none is.
      along_others: one of `WORDS`: how the variable lies along the axes that no dimension names.
    """

    dimensions: tuple[tuple[AxisCut, ...], ...]
    along_others: str

    @property
    def named(self) -> dict[str, int]:
        """The dimension that is cut along each axis."""
        return {axis_cut.axis: k for k, axes in enumerate(self.dimensions) for axis_cut in axes}

    def cut_along(self, axis: str) -> AxisCut | None:
        """Return how the dimension that is cut along an axis is cut."""
        return next((axis_cut for axes in self.dimensions for axis_cut in axes if axis_cut.axis == axis), None)

    def plain(self, rank: int | None) -> Any:
        """Return the layout of a variable as users write it, always in the same way."""
        if not self.named:
            return self.along_others
        named = [tuple([axis_cut.plain for axis_cut in axes]) for axes in self.dimensions]
        entries: list[Any] = [axes if len(axes) > 1 else next(iter(axes), None) for axes in named]
        dimensions = (*entries, *[None] * ((rank or 0) - len(entries)))
        return dimensions if self.along_others == "home" else (dimensions, self.along_others)


def spelling_of(layout: VariableLayout) -> Spelling:
    """Return what a layout says.

    >>> spelling_of(((None, cut("model", unit=2)), "sharded"))
    Spelling(dimensions=((), (gs.cut('model', unit=2),)), along_others='sharded')
    """
    if isinstance(layout, str):
        return Spelling((), ALIASES.get(layout, layout))
    along_others = "home"
    dimensions: Any = layout
    if len(layout) == 2 and _is_several(layout[0]) and layout[1] in (*LAYOUTS, *ALIASES):
        dimensions, along_others = layout[0], ALIASES.get(layout[1], layout[1])
    named = [() if entry is None else tuple(entry) if _is_several(entry) else (entry,) for entry in dimensions]
    axes = [tuple([axis if isinstance(axis, AxisCut) else AxisCut(axis) for axis in entry]) for entry in named]
    return Spelling(tuple(axes), along_others)


_OF_THE_FIELD = {
    **dict.fromkeys(("fsdp", "zero3"), "'sharded'"),
    **dict.fromkeys(("ddp", "dataparallel"), "'replicated'"),
    **dict.fromkeys(("zero1", "zero2"), '{"slots of *": "sharded", "*": "replicated"}'),
    **dict.fromkeys(("cpu", "offload", "cpuoffload"), "'host'"),
}
"""Words of the field, without case and hyphens, and how the layout that they mean is written; see the glossary."""


def _is_several(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str)


def is_word(layout: Any, *words: str) -> bool:
    """Return whether a layout is one of some words. (Arrays and layouts of DTensor do not compare with words.)"""
    return isinstance(layout, str) and layout in words


def check_layout(layout: Any, mesh: DeviceMesh | None = None) -> None:
    """Raise an error unless this is a layout, which may name axes of a mesh if there is one, or layouts by patterns."""
    for one_layout in layout.values() if isinstance(layout, Mapping) else [layout]:
        check_one(one_layout, mesh)


def check_one(layout: Any, mesh: DeviceMesh | None = None) -> None:
    """Raise `ArgumentError` unless this is one layout; see `check_layout`."""
    words = ", ".join(map(repr, WORDS))
    if (axes_named := _axes_elsewhere(layout)) is not None:
        raise ArgumentError(
            f"A layout must be a word or a tuple, got a {type(layout).__module__}.{type(layout).__qualname__}. Write "
            f"{axes_named!r} and pass the mesh, mesh={{'batch': 2, 'model': 4}}. Without a mesh there are {words}."
        )
    if isinstance(layout, str) or not isinstance(layout, Sequence):
        if isinstance(layout, AxisCut):
            raise ArgumentError(
                f"{layout} says how one dimension is cut: give the layout an entry for each dimension, ({layout},) for "
                f"the first, (None, {layout}) for the second."
            )
        if layout == AUTO:
            raise ArgumentError(
                f"Layout {AUTO!r} is chosen when a function first runs, for all variables that have no layout yet: "
                "gs.multi_gpu_model(model, variables='auto'), gs.parallelize(step, variables='auto'). Lay others out "
                f"before, by gs.set_variable_layout. Layouts: {words}."
            )
        if layout not in (*WORDS, *ALIASES):
            word = _OF_THE_FIELD.get(str(layout).lower().replace("-", "").replace("_", ""))
            question = meant(layout, WORDS) if word is None else f" Here it is {word}."
            raise ArgumentError(f"Unknown layout {layout!r}.{question} Layouts: {words}.")
        return
    text = f"The variable layout {layout!r}"
    if not all(entry is None or isinstance(entry, (str, AxisCut, Sequence)) for entry in layout):
        raise ArgumentError(
            f"{text} names, for each dimension, an axis of a mesh or None: (None, 'model'). Without axes there are "
            f"{words}."
        )
    if mesh is None:
        raise ArgumentError(
            f"{text} names axes of a mesh: pass the mesh, mesh={{'batch': 2, 'model': 4}}. Without a mesh there are "
            f"{words}."
        )
    axes, spelling = dict(mesh.sizes), spelling_of(layout)
    named = [axis_cut.axis for cuts in spelling.dimensions for axis_cut in cuts]
    is_pair = len(layout) == 2 and _is_several(layout[0]) and isinstance(layout[1], str)
    if is_pair and layout[1] not in axes and layout[1] not in (*LAYOUTS, *ALIASES):
        layouts = ", ".join(map(repr, LAYOUTS))
        if layout[1] == "host":
            raise ArgumentError(
                f"{text}: 'host' has a variable whole, and an axis of mesh {mesh} divides it over devices. Write "
                f"'host' alone, or one of {layouts} beside the axis."
            )
        raise ArgumentError(f"{text}: {layout[1]!r} is no axis of mesh {mesh}, and none of {layouts}.")
    copies_axis, in_place = (
        mesh.axes.copies_axis,
        [axis_cut.axis for cuts in spelling.dimensions for axis_cut in cuts if axis_cut.in_place],
    )
    if mesh.axes.copies > 1 and {copies_axis, mesh.batch_axis}.intersection(in_place):
        raise ArgumentError(
            f"{text}: mesh {mesh} copies along {copies_axis!r} what is cut along {mesh.batch_axis!r}, and "
            "in_place=True is for parts of which there is one each. Use a mesh with one axis of the rows, or leave "
            "in_place=True out."
        )
    if copies_axis in named:
        raise ArgumentError(
            f"{text}: mesh {mesh} copies along {copies_axis!r} what is cut along {mesh.batch_axis!r}. Write "
            f"{mesh.batch_axis!r} for the dimension that is to be cut."
        )
    for name in named:
        if name not in axes:
            raise ArgumentError(
                f"{text}: mesh {mesh} has no axis {name!r}; it has {', '.join(map(repr, axes))}.{meant(name, axes)}"
            )
    along_batch = spelling.cut_along(mesh.batch_axis)
    if along_batch is not None and (along_batch.unit, along_batch.blocks or 1) != (1, 1):
        raise ArgumentError(
            f"{text}: a dimension cut along {mesh.batch_axis!r}, the batch axis, has no units. Write "
            f"{mesh.batch_axis!r}, to gather it before it is used, or gs.cut({mesh.batch_axis!r}, in_place=True)."
        )
    if twice := [name for name in axes if named.count(name) > 1]:
        raise ArgumentError(
            f"{text} names axis {twice[0]!r} twice; each axis cuts one dimension of a variable. Write None for the "
            "other one."
        )
    if spelling.along_others != "home" and {*named} == axes.keys() - {mesh.axes.copies_axis}:
        raise ArgumentError(
            f"{text}: the dimensions name all axes of mesh {mesh}, so {spelling.along_others!r} applies to no axis. "
            "Leave it out."
        )


def _axes_elsewhere(layout: Any) -> tuple[Any, ...] | None:
    """Return how a layout of DTensor, or an array, is written as a tuple; None for anything else."""
    if isinstance(layout, np.ndarray):
        return tuple(layout.tolist())
    specs = getattr(layout, "sharding_specs", None)
    return None if specs is None else tuple([None if axis == "unsharded" else axis for axis in specs])


def names_host(layout: Any) -> bool:
    """Return whether a layout, or one of several by patterns, is the host's memory."""
    layouts = list(layout.values()) if isinstance(layout, Mapping) else [layout]
    return any(is_word(one_layout, "host") for one_layout in layouts)


@dataclass(frozen=True, eq=False)
class LayoutOnMesh:
    """What a layout that names axes says of a variable of a shape, on a mesh.

    Attributes:
      spelling: checked.
      shape: of the variable.
      mesh: the mesh.
      reshard: whether what is put together before it is used is dropped after the forward pass.
      units: if a function has told them, how a dimension is cut along an axis of so many devices; they count where the
        layout says nothing of units.
    """

    spelling: Spelling
    shape: Sequence[int]
    mesh: DeviceMesh
    reshard: bool
    units: Mapping[tuple[str, int], Shard]

    def wrong(self) -> Iterator[str]:
        """Say why a variable of this shape cannot lie so."""
        rank = len(self.spelling.dimensions)
        if rank > len(self.shape):
            yield f"{self.spelling.plain(rank)} has {rank} dimensions, the variable {len(self.shape)}"
            return
        axes = [name for name in self.mesh.others if name in self.spelling.named]
        yield from self._wrong_along(axes, self.shape)

    def _wrong_along(self, axes: Sequence[str], shape: Sequence[int]) -> Iterator[str]:
        """Say why a variable, or a part of it of this shape, cannot be cut along some axes."""
        if not axes:
            return
        if why := self._wrong_cut(axes[0], shape):
            yield why
            return
        division = self._cut(axes[0], shape, ("",) * self.mesh.others[axes[0]])
        assert division is not None
        for part_shape in dict.fromkeys(part_shapes(division, shape)):
            yield from itertools.islice(self._wrong_along(axes[1:], part_shape), 1)

    def _wrong_cut(self, axis: str, shape: Sequence[int]) -> str:
        """Return why a dimension cannot be cut along an axis as it is asked for; "" if it can."""
        axis_cut, k, count = self.spelling.cut_along(axis), self.spelling.named[axis], self.mesh.others[axis]
        assert axis_cut is not None
        size, unit, blocks = shape[k], axis_cut.unit, axis_cut.blocks or 1
        of_part = "" if size == self.shape[k] else " in a part"
        if isinstance(blocks, tuple):
            if size != unit * sum(blocks):
                of_unit = f" of {unit}" if unit > 1 else ""
                as_asked = f"blocks={blocks} units{of_unit} are {unit * sum(blocks)}"
                return f"dimension {k} has {size} entries{of_part}, and {as_asked}"
            if math.gcd(*blocks) >= count:
                return ""
            return (
                f"dimension {k} has blocks={blocks}, which are {count_text(math.gcd(*blocks), 'group')} of units, and "
                f"{axis!r} has {count} devices; take a variable for each block, and gs.cut copies small ones"
            )
        if not axis_cut.blocks and size < count:
            in_units = [
                tuple([replace(other, blocks=1) if other == axis_cut else other for other in axes])
                for axes in self.spelling.dimensions
            ]
            copied_layout = replace(self.spelling, dimensions=tuple(in_units)).plain(len(shape))
            has = f"{size} entries{of_part}, and {axis!r} has {count} devices"
            return f"dimension {k} has {has}; {copied_layout} copies it"
        if size % blocks:
            has = f"{size} entries{of_part}, which are not {blocks} equal blocks"
            return f"dimension {k} has {has}; blocks={_nearest(blocks, size)} divides them"
        one_block = size // blocks
        if one_block % unit:
            entries = f"entries in each of {blocks} blocks" if blocks > 1 else "entries"
            has = f"{one_block} {entries}{of_part}, which are not units of {unit}"
            return f"dimension {k} has {has}; unit={_nearest(unit, one_block)} divides them"
        return ""

    def _cut(self, axis: str, shape: Sequence[int], devices: tuple[str, ...]) -> Division | None:
        """Return how it is cut along an axis that is not the batch's, if it is; copied where it has few units."""
        axis_cut = self.spelling.cut_along(axis)
        if axis_cut is None:
            return None
        k, unit, blocks = self.spelling.named[axis], axis_cut.unit, axis_cut.blocks or 1
        if isinstance(blocks, tuple):
            cut, groups = Cut(k, 0, len(devices), unit, devices=devices, along=axis), math.gcd(*blocks)
            times = tuple([block // groups for block in blocks])
            return replace(cut, length=groups, blocks=len(blocks), times=times)
        learned = self.units.get((axis, len(devices)))
        if learned is not None and (learned.axis, unit, blocks, learned.size(0)) == (k, 1, 1, shape[k]):
            unit, blocks = learned.blocks[0], len(learned.blocks)
        units = shape[k] // unit // blocks
        if units < len(devices):
            return Replicate(devices, devices, why=f"it has fewer units, as heads, than {len(devices)} devices")
        return Cut(k, units, len(devices), unit, devices=devices, along=axis, blocks=blocks)

    @property
    def shared(self) -> list[tuple[tuple[str, ...], Sequence[int]]]:
        """The devices and the shape of each part that is shared out by bytes, as `"sharded"` shares variables out."""
        parts: list[tuple[tuple[str, ...], Sequence[int]]] = []
        if self.spelling.along_others == "sharded" and self.mesh.batch_axis not in self.spelling.named:
            self._along(self.mesh.table, list(self.mesh.others), self.shape, lambda *part: parts.append(part))
        return parts

    def division(self, shares: Iterable[MeshDivision]) -> MeshDivision:
        """Return how the variable is several.

        Args:
          shares: how each of the parts in `shared` is shared out.
        """
        row, along_others, next_share = (
            self.spelling.named.get(self.mesh.batch_axis),
            self.spelling.along_others,
            iter(shares),
        )

        def in_rows(devices: tuple[str, ...], shape: Sequence[int]) -> MeshDivision | None:
            if row is not None:
                return self._gathered(row, shape, devices)
            if along_others == "sharded":
                return next(next_share)
            return Replicate(devices, devices) if along_others == "replicated" else None

        division = self._along(self.mesh.table, list(self.mesh.others), self.shape, in_rows)
        return division or self._gathered(row or 0, self.shape, self.mesh.devices[:1])

    def _along(
        self,
        table: np.ndarray[Any, Any],
        axes: Sequence[str],
        shape: Sequence[int],
        in_rows: Callable[[tuple[str, ...], Sequence[int]], MeshDivision | None],
    ) -> MeshDivision | None:
        """Return how the variable, or a part of it, is several; None if it is whole on the first device.

        Args:
          table: the devices along the batch's axis, along `axes`, and along those that it does not name.
          axes: along which it is yet to be cut, or copied.
          shape: of the part.
          in_rows: returns how a part is several over the other devices, those that are meant.
        """
        if not axes:
            used = table if self.spelling.along_others == "sharded" else table.reshape(len(table), -1)[:, 0]
            return in_rows(tuple(used.ravel().tolist()), shape) if used.size > 1 else None
        firsts = tuple(table.reshape(*table.shape[:2], -1)[0, :, 0].tolist())
        columns = self._cut(axes[0], shape, firsts)
        if columns is None:
            if self.spelling.along_others != "replicated" or len(firsts) == 1:
                return self._along(np.moveaxis(table, 1, -1), axes[1:], shape, in_rows)
            columns = Replicate(firsts, firsts)
        shapes = part_shapes(columns, shape)
        divisions = [self._along(table[:, d], axes[1:], part_shape, in_rows) for d, part_shape in enumerate(shapes)]
        if isinstance(columns, Cut) and all(division is None for division in divisions):
            return columns
        wholes = [
            Cut(0, part_shape[0], 1, devices=(device,)) for part_shape, device in zip(shapes, firsts, strict=True)
        ]
        rows = tuple([division or whole for division, whole in zip(divisions, wholes, strict=True)])
        return Nested(axes[0], columns, rows)

    def _gathered(self, k: int, shape: Sequence[int], devices: Sequence[str]) -> MeshDivision:
        """Return how a dimension is cut over devices that put it together before they use it. None has no part."""
        groups = self.mesh.groups(devices)
        devices = groups[0] if groups else devices
        count = max(min(len(devices), shape[k]), 1)
        axis_cut = self.spelling.cut_along(self.mesh.batch_axis)
        stays = axis_cut is not None and axis_cut.in_place
        cut = Cut(k, shape[k], count, reshard=self.reshard, devices=tuple(devices[:count]), stays=stays, groups=groups)
        return in_groups(cut)


def _nearest(number: int, size: int) -> int:
    """Return what divides a size and is nearest to a number."""
    return min([k for k in range(1, size + 1) if size % k == 0], key=lambda k: abs(k - number))
