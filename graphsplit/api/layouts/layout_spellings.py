"""How layouts of variables are spelled, checked, and what each says of a variable on a mesh.

A word, `"home"`, `"mirrored"` or `"sharded"`; or for each dimension the axis of the mesh along which it is cut, or
None; or both as a pair, `((None, "model"), "sharded")`: the word is then for the axis of which the dimensions say
nothing. `docs/large_layers.md` has them in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from graphsplit.core.device_mesh import LAYOUTS, DeviceMesh
from graphsplit.core.errors import ArgumentError
from graphsplit.core.layouts import Copied, Cut, Division, MeshDivision, Nested, copied, part_shapes

Dimensions = Sequence[str | Sequence[str] | None]
VariableLayout = str | Dimensions | tuple[Dimensions, str]
"""One of `LAYOUTS`; or for each dimension the axes of a mesh along which it is cut, or None; or a pair of both."""


@dataclass(frozen=True)
class Spelling:
    """What a layout says, however it is spelled.

    Attributes:
      dimensions: the axes of the mesh along which each dimension is cut; empty if none is.
      others: one of `LAYOUTS`: how the variable lies along the axes that no dimension names.
    """

    dimensions: tuple[tuple[str, ...], ...]
    others: str

    @property
    def named(self) -> dict[str, int]:
        """The dimension that is cut along each axis."""
        return {axis: k for k, axes in enumerate(self.dimensions) for axis in axes}

    def plain(self, rank: int) -> Any:
        """Return the layout of a variable as users write it, always in the same way."""
        if not self.named:
            return self.others
        own: list[Any] = [axes if len(axes) > 1 else next(iter(axes), None) for axes in self.dimensions]
        dimensions = (*own, *[None] * (rank - len(own)))
        return dimensions if self.others == "home" else (dimensions, self.others)


def spelling_of(layout: VariableLayout) -> Spelling:
    """Return what a layout says.

    >>> spelling_of(((None, "model"), "sharded"))
    Spelling(dimensions=((), ('model',)), others='sharded')
    """
    if isinstance(layout, str):
        return Spelling((), layout)
    others = "home"
    dimensions: Sequence[Any] = layout
    if len(layout) == 2 and layout[1] in LAYOUTS and not isinstance(layout[0], str) and layout[0] is not None:
        dimensions, others = layout[0], str(layout[1])
    named = [() if own is None else (own,) if isinstance(own, str) else tuple(own) for own in dimensions]
    return Spelling(tuple(named), others)


def check_layout(layout: Any, grid: DeviceMesh | None = None) -> None:
    """Raise an error unless this is a layout, which may name axes of a mesh if there is one, or layouts by patterns."""
    for own in layout.values() if isinstance(layout, Mapping) else [layout]:
        check_one(own, grid)


def check_one(layout: Any, grid: DeviceMesh | None = None) -> None:
    """Raise `ArgumentError` unless this is one layout; see `check_layout`."""
    known = ", ".join(map(repr, LAYOUTS))
    if isinstance(layout, str) or not isinstance(layout, Sequence):
        if layout not in LAYOUTS:
            raise ArgumentError(f"There is no variable layout {layout!r}; there are {known}.")
        return
    text = f"The variable layout {layout!r}"
    if not all(own is None or isinstance(own, (str, Sequence)) for own in layout):
        raise ArgumentError(
            f"{text} names, for each dimension, an axis of a mesh or None: (None, 'model'). Without axes there are "
            f"{known}."
        )
    if grid is None:
        raise ArgumentError(
            f"{text} names axes of a mesh: say which, mesh={{'batch': 2, 'model': 4}}. "
            f"Without a mesh there are {known}."
        )
    axes, spelling = dict(grid.sizes), spelling_of(layout)
    named = [name for own in spelling.dimensions for name in own]
    is_pair = len(layout) == 2 and not isinstance(layout[0], (str, type(None))) and isinstance(layout[1], str)
    if is_pair and layout[1] not in axes and layout[1] not in LAYOUTS:
        raise ArgumentError(f"{text}: {layout[1]!r} is no axis of mesh {grid}, and none of {known}.")
    for name in named:
        if name not in axes:
            near = get_close_matches(str(name), axes, 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"{text}: mesh {grid} has no axis {name!r}; it has {', '.join(map(repr, axes))}.{meant}"
            )
    if twice := [name for name in axes if named.count(name) > 1]:
        raise ArgumentError(
            f"{text} names axis {twice[0]!r} twice; each axis cuts one dimension of a variable. Take None for the "
            "other one."
        )
    if spelling.others != "home" and len(named) == len(axes):
        raise ArgumentError(
            f"{text}: the dimensions name all axes of mesh {grid}, and {spelling.others!r} is for the others. Leave it "
            "out."
        )


class LayoutOnMesh:
    """What a layout that names axes says of a variable of a shape, on a mesh.

    Args:
      layout: checked.
      shape: of the variable.
      grid: the mesh.
      reshard: whether what is put together before it is used is dropped after the forward pass.
    """

    def __init__(self, layout: VariableLayout, shape: Sequence[int], grid: DeviceMesh, reshard: bool):
        self._spelling = spelling_of(layout)
        self._shape = tuple(shape)
        self._grid = grid
        self._reshard = reshard

    @property
    def shares_columns(self) -> bool:
        """Whether the part of each column is shared out over its devices by bytes, as `"sharded"` shares variables."""
        return self._spelling.others == "sharded" and bool(self._grid.axis) and self._grid.axis in self._spelling.named

    def wrong(self) -> Iterator[str]:
        """Say why a variable of this shape cannot lie so."""
        rank = len(self._spelling.dimensions)
        if rank > len(self._shape):
            yield f"{self._spelling.plain(rank)} has {rank} dimensions, the variable {len(self._shape)}"
            return
        k = self._spelling.named.get(self._grid.axis)
        count = len(self._grid.columns)
        if k is not None and self._shape[k] < count:
            yield f"dimension {k} has {self._shape[k]} entries, and {self._grid.axis!r} has {count} devices"

    @property
    def columns(self) -> Cut | None:
        """How the variable is cut along the axis that is not the batch's, if it is."""
        k, firsts = self._spelling.named.get(self._grid.axis), self._grid.rows[0]
        return None if k is None else Cut(k, self._shape[k], len(firsts), devices=firsts, along=self._grid.axis)

    def division(self, shared: Sequence[Division] = ()) -> MeshDivision:
        """Return how the variable is several.

        Args:
          shared: how the part of each column is shared out, where `shares_columns`.
        """
        columns, row = self.columns, self._spelling.named.get(self._grid.batch_axis)
        heads, others = self._grid.columns, self._spelling.others
        if columns is not None and len(heads[0]) == 1:
            return columns
        if columns is None:
            assert row is not None
            if others == "sharded" or len(heads) == 1:
                return self._gathered(row, self._shape, self._grid.devices)
            if others == "home":
                return self._gathered(row, self._shape, heads[0])
            copies = copied(len(self._shape), self._grid.rows[0], self._grid.rows[0])
            return Nested(self._grid.axis, copies, tuple([self._gathered(row, self._shape, own) for own in heads]))
        if row is not None:
            shapes = part_shapes(columns, self._shape)
            own = [self._gathered(row, shape, devices) for shape, devices in zip(shapes, heads, strict=True)]
            return Nested(self._grid.axis, columns, tuple(own))
        if others == "home":
            return columns
        if others == "mirrored":
            shared = [Copied(own, copied(len(self._shape), own, own).layout, own) for own in heads]
        return Nested(self._grid.axis, columns, tuple(shared))

    def _gathered(self, k: int, shape: Sequence[int], devices: Sequence[str]) -> Cut:
        """Return how a dimension is cut over devices that put it together before they use it. None has no part."""
        count = max(min(len(devices), shape[k]), 1)
        return Cut(k, shape[k], count, reshard=self._reshard, devices=tuple(devices[:count]))
