"""The mesh and the layout map of a distribution of Keras, in the words of graphsplit.

Keras names the axes of a mesh as its user likes, and says which one the rows of the batch go along. A layout names an
axis for each dimension of a variable. What of that cannot be done as it is asked for is said, in `Asked.instead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.api.layout_spellings import VariableLayout, check_layout
from graphsplit.api.variable_layouts import can_be_parted
from graphsplit.core.device_mesh import DeviceMesh, MeshAxes, device_mesh
from graphsplit.keras_models.distribution.backend import to_backend_mesh


@dataclass(frozen=True)
class Asked:
    """How a variable is to lie.

    Attributes:
      layout: that of graphsplit.
      instead: what is done otherwise than Keras' layout says; "" if nothing is.
    """

    layout: VariableLayout
    instead: str = ""


@dataclass(frozen=True)
class MeshOfKeras:
    """A distribution's mesh.

    Attributes:
      grid: it as ours, if it has an axis of several devices beside the batch's, and only one.
      axis: what Keras' user calls that axis, or "".
      batch_axis: what Keras' user calls the batch's.
      devices: full names, row by row.
      why_not: why variables are divided over all devices instead, and gathered; "" where they are not.
    """

    grid: DeviceMesh | None
    axis: str
    batch_axis: str
    devices: tuple[str, ...]
    why_not: str = ""

    def layout_of(self, variable: tf.Variable, axes: Sequence[str | None]) -> Asked:
        """Return how a variable is to lie for which Keras has these axes.

        Raises:
          ArgumentError: if they name the axis twice.
        """
        if len(self.devices) == 1 or not any(axes):
            return Asked("home")
        if self.why_not:
            return Asked("sharded")
        if self.grid is None or self.axis not in axes:
            if self.batch_axis not in axes:  # along an axis of one device
                return Asked("home")
            return Asked("sharded", f"along {self.batch_axis!r}, the batch's axis: divided over all devices instead")
        own = tuple([self.grid.axis if name == self.axis else None for name in axes])
        check_layout(own, self.grid)
        dimension, columns = axes.index(self.axis), len(self.grid.rows[0])
        length = variable.shape[dimension] if dimension < len(variable.shape) else columns  # (longer ones are refused)
        if length < columns:
            entries = f"{length} entr{'y' if length == 1 else 'ies'}"
            return Asked("home", f"dimension {dimension} has {entries} for {columns} devices: it stays whole")
        if not can_be_parted(variable):
            return Asked("home", f"TensorFlow cannot cut {variable.dtype.name}: it stays whole")
        if self.batch_axis in axes:
            return Asked(own, f"also along {self.batch_axis!r}, the batch's axis: cut along {self.axis!r} only")
        return Asked(own)


def mesh_of(distribution: Any, compiled_by_xla: bool = False) -> MeshOfKeras:
    """Return the mesh of a distribution.

    Args:
      distribution: of Keras. The batch of a `DataParallel` goes over all of its devices, whatever the axes.
      compiled_by_xla: whether shards are compiled, which those of a mesh with a second axis cannot be yet.
    """
    import keras

    mesh, devices = distribution.device_mesh, to_backend_mesh(distribution.device_mesh)
    batch_axis = str(distribution.get_data_layout((1,)).axes[0])
    sizes = [(str(name), int(size)) for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    others = [name for name, _ in sizes if name != batch_axis]
    if isinstance(distribution, keras.distribution.DataParallel):
        return MeshOfKeras(None, "", batch_axis, devices, "the batch goes over all of them")
    if len(others) > 1:
        names = ", ".join(map(repr, others))
        return MeshOfKeras(
            None, "", batch_axis, devices, f"its mesh has {len(others)} axes beside the batch's, {names}"
        )
    if not others:
        return MeshOfKeras(None, "", batch_axis, devices)
    if compiled_by_xla:
        return MeshOfKeras(None, "", batch_axis, devices, "it was compiled with jit_compile=True")
    [axis] = others
    grid = device_mesh(MeshAxes(tuple(sizes), batch_axis), devices)
    return MeshOfKeras(grid, axis, batch_axis, devices)
