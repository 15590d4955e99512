"""The mesh and the layout map of a distribution of Keras, in the words of graphsplit.

Keras names the axes of a mesh as its user likes, and says which one the rows of the batch go along. A layout names an
axis for each dimension of a variable. What of that cannot be done as it is asked for is said, in `Asked.instead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import can_be_parted
from graphsplit.api.layouts.layout_spellings import VariableLayout, check_layout
from graphsplit.api.layouts.with_layout import with_layout
from graphsplit.core.device_mesh import DeviceMesh, MeshAxes, device_mesh
from graphsplit.keras.distribution.backend import to_backend_mesh


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
      devices: full names, row by row.
      mesh: it as ours, without axes of one device.
      why_not: why there is none, and variables are divided over all devices and gathered; "" where there is one.
    """

    devices: tuple[str, ...]
    mesh: DeviceMesh | None
    why_not: str = ""

    def layout_of(self, variable: tf.Variable, axes: Sequence[str | None]) -> Asked:
        """Return how a variable is to lie for which Keras has these axes.

        Raises:
          ArgumentError: if they name an axis twice.
        """
        if len(self.devices) == 1 or not any(axes):
            return Asked("home")
        if self.mesh is None:
            return Asked("sharded")
        own = [name if name in self.mesh.sizes else None for name in axes]  # (others have one device)
        check_layout(own, self.mesh)
        if not can_be_parted(variable):
            return Asked("home", f"TensorFlow cannot cut {variable.dtype.name}: it stays whole")
        short = self._too_short(own, variable.shape)
        instead = [
            f"dimension {k} has {variable.shape[k]} entr{'y' if variable.shape[k] == 1 else 'ies'} for "
            f"{self.mesh.others[axis]} devices along {axis!r}: it stays whole"
            for k, axis in short.items()
        ]
        own = [None if k in short else axis for k, axis in enumerate(own)]
        return Asked(tuple(own) if any(own) else "home", "; ".join(instead))

    def _too_short(self, own: Sequence[str | None], shape: Any) -> dict[int, str]:
        """Return the dimensions, with their axes, that have fewer entries than such an axis has devices."""
        assert self.mesh is not None
        named = [(k, axis) for k, axis in enumerate(own[: len(shape)]) if axis in self.mesh.others]
        return {k: str(axis) for k, axis in named if axis and (shape[k] is None or shape[k] < self.mesh.others[axis])}

    def of_output(self, tensor: tf.Tensor, axes: Sequence[str | None]) -> tuple[tf.Tensor, str]:
        """Return what a layer returns, asked to lie as Keras has it; and why it does not, or "".

        Its rows lie as those of the batch do, whatever the axes say of the first dimension.
        """
        if self.mesh is None:
            return tensor, self.why_not
        shape, batch, others = tensor.shape, self.mesh.batch_axis, self.mesh.others
        if shape.rank != len(axes):
            return tensor, f"it has {len(axes)} dimensions, and the output {shape.rank}"
        if batch in axes[1:]:
            return tensor, f"{batch!r}, the batch's axis, cuts the rows of an output, which are its first dimension"
        if not others:
            return tensor, ""
        names = [name if name in others else None for name in axes]
        for k, axis in self._too_short(names, shape).items():
            entries = "an unknown number of" if shape[k] is None else shape[k]
            return tensor, f"dimension {k} has {entries} entries for {others[axis]} devices"
        return with_layout(tensor, tuple(names)), ""


def mesh_of(distribution: Any) -> MeshOfKeras:
    """Return the mesh of a distribution.

    Args:
      distribution: of Keras. The batch of a `DataParallel` goes over all of its devices, whatever the axes.
    """
    import keras

    mesh, devices = distribution.device_mesh, to_backend_mesh(distribution.device_mesh)
    batch_axis = str(distribution.get_data_layout((1,)).axes[0])
    sizes = tuple([(str(name), int(n)) for name, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1])
    if isinstance(distribution, keras.distribution.DataParallel):
        return MeshOfKeras(devices, None, "the batch goes over all of them")
    return MeshOfKeras(devices, device_mesh(MeshAxes(sizes, batch_axis), devices) if sizes else None)
