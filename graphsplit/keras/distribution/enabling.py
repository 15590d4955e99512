"""`enable_distribution`: what a user switches on and off, and how a model runs meanwhile.

It has its template's whole state, and its batches are on the distribution's devices.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.layouts.new_variables import are_laid_out_when_made, laid_out_when_made
from graphsplit.api.options import Options
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.devices import available_devices, check_existing
from graphsplit.core.stand_ins import register, unregister
from graphsplit.core.user_code import user_stack_level
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.inspect.placements import Placement
from graphsplit.keras.answers import STEPS
from graphsplit.keras.batches import BatchFunction
from graphsplit.keras.distribution.layouts import DistributedLayouts, idle_entries, mesh_of, notes_on_map
from graphsplit.keras.distribution.replacements import replace_all, to_backend_mesh
from graphsplit.keras.flavors import KERAS_3, flavor_of
from graphsplit.keras.models import ModelDevices, ParallelKeras3Model, is_wrapped, warn_of_eager, wrapped
from graphsplit.keras.wrapping import CPU, check_strategy, own_functions
from graphsplit.planning.plan import Plan


class KerasDistribution:
    """`keras.distribution` on TensorFlow, while it is enabled; see `enable_distribution`.

    As a context manager it leaves things as they were before that call: a block inside of another one, or after a call
    without a block, switches nothing off.
    """

    def __init__(self, running: _RunningDistribution, was_enabled: bool):
        self._running = running
        self._was_enabled = was_enabled

    def __enter__(self) -> KerasDistribution:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._was_enabled:
            self.disable()

    def disable(self) -> None:
        """Give Keras back all that was replaced, models their own functions, variables their places.

        The next `fit` is Keras' own, on one device, whether or not a distribution is still set. Where nothing is
        enabled any more, this does nothing.
        """
        if _enabled == [self._running]:
            _enabled.clear()
            self._running.stop()

    def plan(
        self, model: Any, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None
    ) -> Plan:
        """Return what would run where for a batch of a model under the distribution that is set. `print` it.

        Args:
          model: a Keras 3 model.
          x, y, sample_weight, step: see `plan` of a model made by `multi_gpu_model`: one batch; without any, the plan
            of the batches that ran most.

        Raises:
          ArgumentError: without arguments, if no batch has run; for a model that runs eagerly.
          UnsupportedError: if it runs on one device: no distribution is set, or its class drives batches itself.
        """
        plan: Plan = self._parallel(model).plan(x, y, sample_weight, step=step)
        return plan

    def placement(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        step: str | None = None,
        actual: bool = False,
    ) -> Placement:
        """Return which operation runs on which device for a batch; see `plan`, and `placement` of wrapped models."""
        placement: Placement = self._parallel(model).placement(x, y, sample_weight, step=step, actual=actual)
        return placement

    def _parallel(self, model: Any) -> Any:
        if _enabled != [self._running]:
            raise ArgumentError("This keras.distribution was disabled. Call gs.keras.enable_distribution() again.")
        if flavor_of(model) is not KERAS_3:
            raise ArgumentError(f"keras.distribution is about models of Keras 3, got {type(model).__name__}.")
        stand_in = self._running.stand_in(model)
        if stand_in is None:
            raise UnsupportedError(f"{model.name!r} has no plan here: {self._running.why_not(model)}")
        return stand_in


_enabled: list[_RunningDistribution] = []  # at most one


def enable_distribution() -> KerasDistribution:
    """Let `keras.distribution` do on TensorFlow what it says: `fit` on all devices, with one device's numbers.

    Keras 3 on TensorFlow accepts a distribution, and uses one device. After this call, `fit`, `evaluate`, `predict`
    and their `..._on_batch` forms use the devices of the current distribution, for any batch size, also for models
    that were made, compiled or trained before. The batch of the dataset is the global batch.

    Only this call changes Keras (`graphsplit/keras/distribution/replacements.py` lists what it replaces).
    `disable()` of the result, or the end of a `with` block, restores everything. Calling it twice changes nothing.
    Your own loops (use `parallelize`), models with `run_eagerly=True` and classes that override `make_train_function`
    stay on one device; a warning says so for the last two.

    Returns:
      A `KerasDistribution`: `disable()`, and `plan(model, x, y)` and `placement(model, x, y)` of models. `verify`,
      `gs.placement` and `gs.inspect.timeline` take such models themselves.

    Raises:
      UnsupportedError: for another Keras than 3.3 to 3.15, or another backend than TensorFlow.

    >>> import keras, numpy as np, graphsplit as gs
    >>> with gs.keras.enable_distribution(), keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     history = model.fit(np.ones((5, 3)), np.ones((5, 1)), verbose=0)
    ...     gs.verify(model, np.ones((5, 3)), np.ones((5, 1))).devices
    ('/device:CPU:0', '/device:CPU:1')
    """
    was_enabled = bool(_enabled)
    if not was_enabled:
        running = _RunningDistribution()
        running.start()
        _enabled.append(running)
    return KerasDistribution(_enabled[0], was_enabled)


class _RunningDistribution:
    """What runs while it is enabled: the replaced names of Keras call it."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._told: weakref.WeakSet[type] = weakref.WeakSet()
        self._layouts = DistributedLayouts()
        self._replaced = contextlib.ExitStack()

    def start(self) -> None:
        """Replace the names."""
        self._replaced = replace_all(self)
        register(self.stand_in)

    def stop(self) -> None:
        """Take everything back."""
        unregister(self.stand_in)
        self._replaced.close()
        self._layouts.bring_all_home()
        for model in self._models:
            for kind in STEPS:
                if owner_of(getattr(model, f"{kind}_function", None)) is not None:
                    setattr(model, f"{kind}_function", None)

    def make_function(self, model: Any, kind: str, original: Callable[..., Any], force: bool) -> Any:
        """Make the function that Keras calls for each batch, unless it has one for the present distribution."""
        distribution = None if f"make_{kind}_function" in own_functions(model) else _several(model)
        name = f"{kind}_function"
        function, owner = getattr(model, name), owner_of(getattr(model, name))
        if distribution is None:
            self._layouts.bring_home(model)
        if function is None or force or (owner and owner.distribution) is not distribution:
            if distribution is None:
                if model.run_eagerly and (present := _present()) is not None:
                    warn_of_eager(model, f"the {present.device_mesh.devices.size} of {type(present).__name__}")
                original(model, force=True)
            else:
                setattr(model, name, make_function(distributed(model, distribution, self._layouts), kind))
                self._models.add(model)
        return getattr(model, name)

    def stand_in(self, target: Any) -> DistributedModel | None:
        """Return a model as it runs under the distribution that is set; None for what runs on one device."""
        if flavor_of(target) is not KERAS_3 or is_wrapped(target) or own_functions(target):
            return None
        distribution = _several(target, eagerly=True)
        return None if distribution is None else distributed(target, distribution, self._layouts)

    def why_not(self, model: Any) -> str:
        """Return why a model has no plan here."""
        if is_wrapped(model):
            return "it was made by multi_gpu_model. Call its own plan(), or pass its template."
        if overridden := own_functions(model):
            names = " and ".join(overridden)
            return f"it runs on one device, since its class overrides {names}. Override train_step instead."
        return (
            "it runs on one device, since no distribution of several is set. Call keras.distribution.set_distribution "
            "first."
        )

    def says_that_it_drives_batches(self, model: Any) -> None:
        """Say, once for a class, that its own functions stay on one device under the distribution that is set."""
        if is_wrapped(model) or type(model) in self._told or not (overridden := own_functions(model)):
            return
        if (distribution := _several(model)) is None:
            return
        self._told.add(type(model))
        warnings.warn(
            f"{type(model).__name__} overrides {' and '.join(overridden)}, which runs the batches itself, on one "
            f"device, instead of the {distribution.device_mesh.devices.size} of {type(distribution).__name__}. "
            "Override train_step, test_step or predict_step instead.",
            stacklevel=user_stack_level(),
        )

    def born(self, variable: Any, value: Any) -> AbstractContextManager[None]:
        """Lay out a variable that is made in the block of an initial value, under the distribution that is set."""
        distribution = _present()
        if distribution is None or are_laid_out_when_made():  # (what a user has laid out stays so)
            return contextlib.nullcontext()
        return laid_out_when_made(
            lambda new_variable: self._layouts.born(new_variable, variable, distribution), only=value
        )

    def with_layout(self, tensor: Any, layout: Any) -> Any:
        """Ask that a tensor lies so on the mesh of the distribution that is set."""
        distribution = _present()
        return tensor if distribution is None else self._layouts.with_layout(tensor, layout, distribution)


def _present() -> Any:
    import keras

    return keras.distribution.distribution()


def _several(model: Any, eagerly: bool = False) -> Any:
    """Return the distribution that is set, if a model is to run by it; None if it runs on the default device alone.

    Args:
      model: asked whether it runs eagerly.
      eagerly: whether it counts even then.
    """
    distribution = _present()
    if distribution is None or (model.run_eagerly and not eagerly):
        return None
    devices = to_backend_mesh(distribution.device_mesh)
    return None if devices == available_devices()[:1] else distribution


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
        said_before = self._layouts.told_of(self.distribution)
        idle = idle_entries(self.template, self.distribution, self._layouts.of_outputs)
        if idle and idle not in said_before:
            said_before.add(idle)
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
        plan = super().plan(x, y, sample_weight, step=step)
        mesh = mesh_of(self.distribution)
        notes = notes_on_map(self.template, self.distribution, mesh, self._layouts.of_outputs)
        return replace(plan, notes=(*plan.notes, *notes))

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
    attributes = {"distribution": distribution, "_layouts": layouts}
    parallel_model: DistributedModel = wrapped(model, DistributedModel, where, **attributes)
    return parallel_model


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
