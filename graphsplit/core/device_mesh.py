"""A mesh of named axes: devices in rows and columns, each axis with a name that layouts of variables use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.core.devices import short_name
from graphsplit.core.errors import ArgumentError, UnsupportedError

BATCH_AXIS = "batch"
"""The name of the axis over which the rows of the batch are shared out."""


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in the order of a mesh: those of the first row, column by column, then those of the next.

    Attributes:
      sizes: how many devices each axis has, by name, the first axis first.
      devices: full names; the last axis changes first.

    >>> DeviceMesh((("batch", 2), ("model", 2)), ("a", "b", "c", "d")).rows
    (('a', 'b'), ('c', 'd'))
    """

    sizes: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]

    @property
    def axis(self) -> str:
        """The name of the axis that is not the batch's; "" if there is none."""
        return axis_of(self.sizes)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each row: those among which the other axis is shared out."""
        columns = dict(self.sizes).get(self.axis, 1)
        own = [self.devices[k : k + columns] for k in range(0, len(self.devices), columns)]
        if len(self.sizes) > 1 and self.sizes[0][0] == self.axis:  # columns first
            count = len(self.devices) // columns
            own = [self.devices[d::count] for d in range(count)]
        return tuple(own)

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each column: those among which the rows of the batch are shared out."""
        return tuple(zip(*self.rows, strict=True))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes)


def axis_of(sizes: Sequence[tuple[str, int]]) -> str:
    """Return the name of the axis that is not the batch's; "" if there is none."""
    return next((name for name, _ in sizes if name != BATCH_AXIS), "")


def count_of(sizes: Sequence[tuple[str, int]]) -> int | None:
    """Return how many devices a mesh has; None without a mesh."""
    return math.prod(size for _, size in sizes) if sizes else None


def mesh_sizes(mesh: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Return the axes of a mesh as users write it, `{"batch": 2, "model": 4}`, checked.

    Raises:
      ArgumentError: for what is no mapping from names to numbers of devices.
      UnsupportedError: for more than one axis beside the batch's.
    """
    if mesh is None:
        return ()
    if not isinstance(mesh, Mapping) or not mesh:
        raise ArgumentError(f'mesh={mesh!r}: it maps names of axes to numbers of devices, {{"batch": 2, "model": 4}}.')
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"mesh={dict(mesh)!r}: {name!r} is no name of an axis; it is a word, 'model'.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"mesh={dict(mesh)!r}: {name!r} has {size!r} devices; it is a number of at least 1.")
    others = [name for name in mesh if name != BATCH_AXIS]
    if len(others) > 1:
        raise UnsupportedError(
            f"mesh={dict(mesh)!r} has {len(others)} axes beside {BATCH_AXIS!r}: {', '.join(map(repr, others))}. A mesh "
            "may have one."
        )
    return tuple(mesh.items())


def device_mesh(sizes: Sequence[tuple[str, int]], devices: Sequence[str]) -> DeviceMesh:
    """Return the mesh of these devices.

    Raises:
      ArgumentError: if there are not as many devices as the mesh has.
    """
    count = count_of(sizes)
    if count != len(devices):
        text = " x ".join(str(size) for _, size in sizes) + (f" = {count}" if len(sizes) > 1 else "")
        names = ", ".join(map(short_name, devices[:8])) + (", ..." if len(devices) > 8 else "")
        raise ArgumentError(
            f"mesh={dict(sizes)!r} has {text} devices, and there are {len(devices)}: {names}. Name {count} "
            "of them in devices, row by row, or change the mesh."
        )
    return DeviceMesh(tuple(sizes), tuple(devices))
