"""A model under a distribution, as it runs: its template's whole state, its batches on the distribution's devices."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.devices import check_existing
from graphsplit.core.user_code import user_stack_level
from graphsplit.keras.answers import STEPS
from graphsplit.keras.batches import BatchFunction
from graphsplit.keras.distribution.layouts import DistributedLayouts
from graphsplit.keras.distribution.map_notes import idle_entries, notes_on_map
from graphsplit.keras.distribution.meshes import mesh_of
from graphsplit.keras.models import ModelDevices, ParallelKeras3Model, wrapped
from graphsplit.keras.wrapping import CPU, check_strategy
from graphsplit.planning.options import Options
from graphsplit.planning.plan import Plan


class DistributedModel(ParallelKeras3Model):
    """A wrapped model whose devices and variables a distribution of Keras says, and which may not be built yet.

    Attributes:
      distribution: that which was set when it was made.
    """

    __slots__ = ("_layouts", "distribution")

    distribution: Any
    _layouts: DistributedLayouts

    def _batch_function(self, kind: str) -> Any:
        function = super()._batch_function(kind)
        function.before, function.after, function.owner = self._prepare, self._warn_of_idle_entries, self
        return function

    def _warn_of_idle_entries(self) -> None:
        told = self._layouts.told_of(self.distribution)
        idle = idle_entries(self.template, self.distribution, self._layouts.of_outputs)
        if idle and idle not in told:
            told.add(idle)
            warnings.warn(
                f"{type(self.distribution).__name__} on {len(self.model_devices.devices)} devices: entries of its "
                f"layout map match no variable and no layer's output: {idle}. They have no effect.",
                stacklevel=user_stack_level(),
            )

    def _prepare(self, step: ParallelFunction[..., Any], arguments: tuple[Any, ...]) -> None:
        """Build the model, as Keras does: while the step is traced for its first batch. Then lay its variables out."""
        if not self.template.built:
            step.variables(*arguments)
        self._layouts.follow(self.template, self.distribution)

    def plan(self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None) -> Plan:
        """Return what would run where for a batch; see the base class. Notes say what the layout map leaves out."""
        found = super().plan(x, y, sample_weight, step=step)
        mesh = mesh_of(self.distribution)
        notes = notes_on_map(self.template, self.distribution, mesh, self._layouts.of_outputs)
        return replace(found, notes=(*found.notes, *notes))

    def _parallel_step(self, *batch: Any, **which: Any) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]:
        function, arguments = super()._parallel_step(*batch, **which)
        if arguments:
            self._prepare(function, arguments)
        return function, arguments


def distributed(model: Any, distribution: Any, layouts: DistributedLayouts) -> DistributedModel:
    """Return a model as it runs under a distribution: the same for all its steps, until it is compiled anew.

    Raises:
      UnsupportedError: for a model of a `tf.distribute` strategy.
    """
    for kind in STEPS:
        function = getattr(model, f"{kind}_function", None)
        owner = owner_of(function)
        if owner is not None and owner.distribution is distribution and getattr(owner, f"{kind}_function") is function:
            return owner
    check_strategy(model, "keras.distribution")
    mesh = mesh_of(distribution)
    devices, axes = mesh.devices, MeshAxes() if mesh.mesh is None else mesh.mesh.axes
    where = ModelDevices(devices, Options(devices=devices, mesh=axes), None if devices[0] == CPU else CPU)
    own = {"distribution": distribution, "_layouts": layouts}
    made: DistributedModel = wrapped(model, DistributedModel, where, **own)
    return made


def owner_of(function: Any) -> DistributedModel | None:
    """Return the model under a distribution whose batches a function runs; None for all other functions."""
    owner = function.owner if isinstance(function, BatchFunction) else None
    return owner if issubclass(type(owner), DistributedModel) else None


def make_function(model: DistributedModel, kind: str) -> Any:
    """Make the function that Keras calls for each batch, on the model's devices.

    Raises:
      DeviceError: if this process lacks some of them.
    """
    devices = model.model_devices.devices
    check_existing(devices, "devices", [str(name) for name in model.distribution.device_mesh.devices.flatten()])
    function = getattr(model, f"{kind}_function")
    if function is None:
        getattr(model, f"make_{kind}_function")()
        function = getattr(model, f"{kind}_function")
    return function
