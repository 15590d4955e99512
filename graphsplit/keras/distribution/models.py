"""A model under a distribution, as it runs: its template's whole state, its batches on the distribution's devices.

Its plans say what a layout map leaves out, and what of it is not done as it says: the map's author reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.layouts.layout_targets import variables_with_owners
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.devices import check_existing
from graphsplit.core.keras_internals import layout_map_of
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.keras.answers import STEPS
from graphsplit.keras.batches import BatchFunction
from graphsplit.keras.distribution.layouts import DistributedLayouts, asked_of
from graphsplit.keras.distribution.meshes import MeshOfKeras, mesh_of
from graphsplit.keras.models import ModelDevices, ParallelKeras3Model, wrapped
from graphsplit.keras.wrapping import CPU, check_strategy
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.options import Options
from graphsplit.planning.plan import Plan

_LARGE = 0.01  # of the bytes of a model: matrices alike count together, so that many layers hide none
_MOST_NAMED = 8


def notes_on_map(model: Any, distribution: Any, mesh: MeshOfKeras, of_outputs: Collection[Any]) -> tuple[str, ...]:
    """Return the notes on a distribution's layout map, as a model has it: none if there is no map.

    Args:
      model: built.
      distribution: of Keras.
      mesh: its mesh.
      of_outputs: the layouts, as they are in the map, that Keras has found for outputs of layers.
    """
    layout_map = layout_map_of(distribution)
    if layout_map is None:
        return ()
    notes = [f"{_listed(names)}: {instead}" for instead, names in _otherwise(model, distribution, mesh).items()]
    owners = [owner for _, owner in variables_with_owners(model) if hasattr(owner, "path")]
    used = {id(layout_map[owner.path]) for owner in owners} | {id(layout) for layout in of_outputs}
    idle = [pattern for pattern in layout_map if id(layout_map[pattern]) not in used]
    if idle:
        patterns = ", ".join(map(repr, idle))
        notes.append(f"entries of the layout map that match no variable and no layer's output: {patterns}")
    return (*notes, *_left_out(model, distribution))


def _otherwise(model: Any, distribution: Any, mesh: MeshOfKeras) -> dict[str, list[str]]:
    """Return the names of variables that do not lie as the map says, by what is done instead."""
    asked = asked_of(model, distribution, mesh)
    found: dict[str, list[str]] = {}
    for variable, _ in variables_with_owners(model):
        if instead := asked[id(variable)].instead:
            found.setdefault(instead, []).append(name_of(variable))
    return found


def _left_out(model: Any, distribution: Any) -> Iterable[str]:
    """Yield a note for the large matrices that no pattern matches; those whose names differ in numbers are one."""
    alike: dict[tuple[str, Any], list[Any]] = {}
    for variable in model.variables:
        if len(variable.shape) > 1 and not any(distribution.get_variable_layout(variable).axes):
            alike.setdefault((re.sub(r"\d+", "*", variable.path), tuple(variable.shape)), []).append(variable)
    all_bytes = sum(map(_bytes_of, model.variables))
    for (name, shape), found in sorted(alike.items(), key=lambda item: -sum(map(_bytes_of, item[1]))):
        size = sum(map(_bytes_of, found))
        if size >= _LARGE * all_bytes:
            named = found[0].path if len(found) == 1 else f"{len(found)} of {name}"
            share = f"{format_bytes(size)}, {100 * size / all_bytes:.2g} % of the model"
            yield f"no pattern of the layout map matches {named} {list(shape)}, {share}: stored whole on one device"


def _bytes_of(variable: Any) -> int:
    value = variable.value
    return int(value.dtype.size) * int(value.shape.num_elements() or 0)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


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
        function.before, function.owner = self._prepare, self
        return function

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
    devices, axes = mesh.devices, MeshAxes() if mesh.grid is None else mesh.grid.axes
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
