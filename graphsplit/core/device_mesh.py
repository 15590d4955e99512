"""A mesh of named axes: devices in rows and columns, each axis with a name that layouts of variables use."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphsplit.core.devices import resolve_devices, short_name
from graphsplit.errors import ArgumentError

BATCH_AXIS = "batch"
"""The name of the axis over which the rows of the batch are shared out; "data" is another one."""

FSDP_AXIS = "fsdp"
"""The name of the axis of the rows over which sharded variables are divided, and along the other one copied."""

STAGE_AXIS = "stage"
"""The name of the axis whose devices are those of one stage of the function each: no variable is cut along it."""

LAYOUTS = ("home", "replicated", "sharded")
ALIASES = {"mirrored": "replicated"}
"""The layouts of variables that name no axis, and other words for them; no axis is called so."""


@dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh.

    Attributes:
      sizes: how many devices each has, by name, the first axis first; empty without a mesh.
      batch_axis: the name of the one over which the rows of the batch are shared out. A mesh may lack it.
      copies_axis: the name of another one over which the rows are shared out first: along it what is sharded is copied
        (HSDP); "" for none.
      stages: how many stages the function has, each on a mesh of the other axes; 0 without an axis of stages.
      stage_at: how many of the other axes are before that of the stages.

    >>> axes = MeshAxes((("data", 2), ("model", 4)), "data")
    >>> axes.others, axes.count, str(axes)
    ({'model': 4}, 8, '(data=2, model=4)')
    """

    sizes: tuple[tuple[str, int], ...] = ()
    batch_axis: str = BATCH_AXIS
    stages: int = 0
    stage_at: int = 0
    copies_axis: str = ""

    def __bool__(self) -> bool:
        return bool(self.sizes or self.stages)

    @property
    def asked(self) -> dict[str, int]:
        """All axes, as users write them."""
        before, after = self.sizes[: self.stage_at], self.sizes[self.stage_at :]
        return dict([*before, *[(STAGE_AXIS, self.stages)] * bool(self.stages), *after])

    @property
    def others(self) -> dict[str, int]:
        """How many devices each axis has that is not the batch's. Columns are numbered along them, the last fastest."""
        return {name: size for name, size in self.sizes if name not in (self.batch_axis, self.copies_axis)}

    @property
    def columns(self) -> int:
        """How many devices share one part of the batch."""
        return math.prod(self.others.values())

    @property
    def rows(self) -> int:
        """How many devices the batch's axis has, or both axes of the rows."""
        return dict(self.sizes).get(self.batch_axis, 1) * self.copies

    @property
    def copies(self) -> int:
        """On how many devices each part of a sharded variable is."""
        return dict(self.sizes).get(self.copies_axis, 1)

    @property
    def is_of_rows(self) -> bool:
        """Whether it says no more than how many devices share out the rows."""
        return not self.others and not self.stages and self.copies == 1

    @property
    def growing(self) -> str:
        """The name of the axis that has more devices if there are more."""
        return self.copies_axis or self.batch_axis

    @property
    def each(self) -> int:
        """How many devices there are for each along that axis."""
        return math.prod([size for name, size in self.asked.items() if name != self.growing])

    def grown(self, size: int) -> MeshAxes:
        """Return the axes with so many devices along that one, which is the first if it is new."""
        sizes = dict(self.sizes)
        new = {self.growing: size} if size > 1 and self.growing not in sizes else {}
        grown_sizes = {name: size if name == self.growing else known_size for name, known_size in sizes.items()}
        return replace(self, sizes=(*new.items(), *grown_sizes.items()))

    @property
    def count(self) -> int | None:
        """How many devices it has; None without a mesh."""
        return math.prod(self.asked.values()) if self else None

    def of_stages(self, devices: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the devices of each stage; all of them without stages.

        >>> MeshAxes((("batch", 2),), stages=2).of_stages("abcd")
        (('a', 'b'), ('c', 'd'))
        """
        count, per_stage = max(self.stages, 1), math.prod(size for _, size in self.sizes[self.stage_at :])
        numbered = [(k // per_stage % count, device) for k, device in enumerate(devices)]
        return tuple(
            [
                tuple([device for stage_of_device, device in numbered if stage_of_device == stage])
                for stage in range(count)
            ]
        )

    @property
    def _of_rows(self) -> list[str]:
        """The names of the axes of the rows that there are."""
        return [name for name in (self.copies_axis, self.batch_axis) if name in self.asked]

    def table(self, devices: Sequence[str]) -> np.ndarray[Any, np.dtype[np.object_]]:
        """Return devices row by row of the batch, one row without its axis, then along the others in their order."""
        names, table = list(self.asked), np.array(devices, object).reshape(list(self.asked.values()))
        other_sizes = [size for name, size in self.asked.items() if name not in self._of_rows]
        moved = np.moveaxis(table, [names.index(name) for name in self._of_rows], range(len(self._of_rows)))
        return moved.reshape(-1, *other_sizes)

    def by_growing(self, devices: Sequence[str]) -> list[list[str]]:
        """Return devices along the axis that has more of them if there are more: of each of its places, all."""
        rows: list[list[str]] = self.table(devices).reshape(self.asked.get(self.growing, 1), -1).tolist()
        return rows

    def with_rows(self, rows: Sequence[Sequence[str]]) -> tuple[MeshAxes, tuple[str, ...]]:
        """Return the axes with other devices along that axis, as `by_growing` has them, and these in their order.

        >>> axes, devices = MeshAxes((("model", 2), ("batch", 3))).with_rows([("a", "b"), ("c", "d")])
        >>> str(axes), devices
        ('(model=2, batch=2)', ('a', 'c', 'b', 'd'))
        """
        sizes = tuple([(name, len(rows) if name == self.growing else size) for name, size in self.sizes])
        axes = replace(self, sizes=sizes)
        names, first = list(axes.asked), axes._of_rows
        in_order = [*first, *[name for name in names if name not in first]]
        table = np.array(rows, object).reshape([axes.asked[name] for name in in_order])
        table = np.moveaxis(table, range(len(first)), [names.index(name) for name in first])
        return axes, tuple(table.ravel().tolist())

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.asked.items()]
        return f"({', '.join(sizes)})"


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in the order of a mesh.

    Attributes:
      axes: see there.
      devices: full names; the last axis changes first. Of several stages, those of the first.
      stages: the devices of each stage, likewise; empty without an axis of stages.

    >>> DeviceMesh(MeshAxes((("batch", 2), ("model", 2))), ("a", "b", "c", "d")).rows
    (('a', 'b'), ('c', 'd'))
    """

    axes: MeshAxes
    devices: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...] = ()

    def of_stage(self, devices: Sequence[str]) -> DeviceMesh:
        """Return the mesh that the devices of a stage are."""
        return replace(self, devices=tuple(devices))

    @property
    def alike(self) -> tuple[DeviceMesh, ...]:
        """The mesh itself, and those of the stages."""
        return tuple([self.of_stage(devices) for devices in dict.fromkeys([self.devices, *self.stages])])

    @property
    def by_row(self) -> tuple[str, ...]:
        """The devices row by row."""
        return tuple([device for row in self.rows for device in row])

    @property
    def sizes(self) -> dict[str, int]:
        """How many devices each axis has."""
        return dict(self.axes.sizes)

    @property
    def others(self) -> dict[str, int]:
        """How many devices each axis has that is not the batch's."""
        return self.axes.others

    @property
    def batch_axis(self) -> str:
        """The name of the batch's axis."""
        return self.axes.batch_axis

    @functools.cached_property
    def table(self) -> np.ndarray[Any, np.dtype[np.object_]]:
        """The devices: along the batch's axis, of one where there is none, then along the others in their order."""
        return replace(self.axes, stages=0).table(self.devices)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each row: those among which the other axes are shared out."""
        return tuple([tuple(row) for row in self.table.reshape(len(self.table), -1).tolist()])

    def groups(self, by_row: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the groups of devices each of which has all parts of what is sharded; none if it is one group.

        >>> mesh = DeviceMesh(mesh_axes({"data": 2, "fsdp": 2}), ("a", "b", "c", "d"))
        >>> mesh.groups(mesh.by_row)
        (('a', 'b'), ('c', 'd'))
        """
        size, count = len(by_row) // self.axes.copies, len(by_row)
        return tuple([tuple(by_row[k : k + size]) for k in range(0, count, size)]) if 0 < size < count else ()

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each column: those among which the rows of the batch are shared out."""
        return tuple(zip(*self.rows, strict=True))

    def __str__(self) -> str:
        return str(self.axes)


def mesh_axes(mesh: Mapping[str, int] | None) -> MeshAxes:
    """Return the axes of a mesh as users write it, `{"batch": 2, "model": 4}`, checked; none for None.

    Raises:
      ArgumentError: for what is no mapping from names to numbers of devices, or has two axes of the rows.
    """
    if mesh is None:
        return MeshAxes()
    if not isinstance(mesh, Mapping) or not mesh:
        raise ArgumentError(f'mesh must map axes to numbers of devices, {{"batch": 2, "model": 4}}, got {mesh!r}.')
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"mesh={dict(mesh)!r}: an axis must be named by a word, 'model', got {name!r}.")
        if name in (*LAYOUTS, *ALIASES):
            raise ArgumentError(f"mesh={dict(mesh)!r}: {name!r} is a layout; give the axis another name.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"mesh={dict(mesh)!r}: {name!r} must have at least 1 device, got {size!r}.")
    usual = [name for name in (BATCH_AXIS, "data") if name in mesh]
    if len(usual) > 1:
        raise ArgumentError(
            f"mesh={dict(mesh)!r}: both {usual[0]!r} and {usual[1]!r} are names of the axis over which the batch is "
            "split. Call the one along which variables are sharded 'fsdp' (HSDP), or give it another name."
        )
    sizes = {name: size for name, size in mesh.items() if name != STAGE_AXIS}
    at = [*mesh].index(STAGE_AXIS) if STAGE_AXIS in mesh else 0
    named = FSDP_AXIS if FSDP_AXIS in mesh else next(iter(usual), BATCH_AXIS)
    copies_axis = usual[0] if usual and named == FSDP_AXIS else ""
    return MeshAxes(tuple(sizes.items()), named, mesh.get(STAGE_AXIS, 0), at, copies_axis)


def devices_of(axes: MeshAxes, devices: int | str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the full names of the devices asked for: None for as many as the mesh has, or without one for all.

    Raises:
      DeviceError: if some do not exist; see `resolve_devices`.
    """
    if devices is not None or not axes:
        return resolve_devices(devices)
    return resolve_devices(axes.count, as_said=f"mesh={axes.asked!r} has {axes.count} devices")


def device_mesh(axes: MeshAxes, devices: Sequence[str]) -> DeviceMesh:
    """Return the mesh of these devices.

    Raises:
      ArgumentError: if there are not as many devices as the mesh has.
    """
    if axes.count != len(devices):
        text = " x ".join(map(str, axes.asked.values())) + (f" = {axes.count}" if len(axes.asked) > 1 else "")
        names = ", ".join(map(short_name, devices[:8])) + (", ..." if len(devices) > 8 else "")
        raise ArgumentError(
            f"mesh={axes.asked!r} has {text} devices, and there are {len(devices)}: {names}. Name {axes.count} "
            "of them in devices, row by row, or change the mesh."
        )
    stages = axes.of_stages(devices)
    return DeviceMesh(axes, stages[0], stages if axes.stages else ())


def mesh_as_if(axes: MeshAxes, devices: Sequence[str]) -> DeviceMesh | None:
    """Return the mesh that these devices would be; None without axes.

    Of the batch's axis alone, as many devices may be predicted as one likes.

    Raises:
      ArgumentError: if there are not as many devices as the mesh has, of several axes.
    """
    if not axes:
        return None
    return device_mesh(replace(axes, sizes=((axes.batch_axis, len(devices)),)) if axes.is_of_rows else axes, devices)
