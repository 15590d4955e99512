"""Wrapped models: a second object that shares the template's whole state and only runs batches differently.

When one is saved, a file of Keras' is written beside the old one, which stays as it is until the new one is whole.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.layouts.automatic import why_they_stay
from graphsplit.api.layouts.layout_spellings import AUTO, VariableLayout, names_host
from graphsplit.api.layouts.new_variables import variable_layout
from graphsplit.api.layouts.variable_layouts import decide_target, idle_patterns, variables_of
from graphsplit.api.options import Options, Tuning, check_flag
from graphsplit.core.devices import short_name
from graphsplit.core.keras_internals import (
    SharedState,
    asks_for_xla,
    compilation_of,
    make_slots,
    quantization_of,
    sharing_state,
    step_counter,
)
from graphsplit.core.patterns import SLOTS
from graphsplit.core.storage.files import kind_of, replacing
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.errors import UnsupportedError
from graphsplit.inspect.placements import Placement
from graphsplit.inspect.sources import Planned
from graphsplit.keras.answers import STEPS, arguments_of, busiest, check_one_batch, kind_of_step
from graphsplit.keras.batches import (
    BatchesFunction,
    BatchFunction,
    ModelStep,
    joined_predictions,
    last,
    last_sorted,
    step_of_parts,
)
from graphsplit.keras.flavors import KERAS_3, Flavor
from graphsplit.planning.plan import Plan

_SUFFIXES = (".keras", ".h5")
_IN_THE_WAY = ("", "a plain file")  # what Keras replaces without a word


def save_whole(save: Callable[..., Any], filepath: Any, overwrite: bool, *args: Any, **options: Any) -> Any:
    """Call a `save` of Keras', so that an interruption leaves the old file whole.

    What is no single file on this machine (a SavedModel, weights in several files, a bucket, an open file) is Keras'
    own business, and so is the question whether to replace something.

    Args:
      save: takes what follows.
      filepath: where to write.
      overwrite: whether a file there is replaced without asking.
      *args, **options: of the method.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    single = path.endswith(_SUFFIXES) and "://" not in path and options.get("max_shard_size") is None
    zipped = options.get("zipped", args[0] if args else None) is not False
    if not (single and overwrite and zipped and kind_of(Path(path)) in _IN_THE_WAY):
        return save(filepath, overwrite, *args, **options)
    with replacing(path, lambda _: "") as new_path:
        return save(new_path, overwrite, *args, **options)


@dataclass(frozen=True)
class ModelDevices:
    """Where a wrapped model runs.

    Attributes:
      devices: the device of each shard.
      options: of its steps in training and evaluation.
      predict_device: where predictions are merged; None for the first device.
      variables: the layout of the model's and its optimizer's variables, or layouts by patterns of names. (What is
        chosen automatically is an option of the steps.)
    """

    devices: tuple[str, ...]
    options: Options
    predict_device: str | None
    variables: VariableLayout | Mapping[str, VariableLayout] = "home"

    def __str__(self) -> str:
        count, parts = len(self.devices), self.options.micro_batches
        text = f"{count} device{'s' if count != 1 else ''}"
        return f"{text}, {parts} micro-batches each" if parts > 1 else text


class ParallelModel(SharedState):
    """What both kinds of wrapped models have in common; stands before the template's class among the bases.

    Attributes:
      model_devices: where this one runs.
    """

    __slots__ = ("_functions", "_quantization", "model_devices")

    model_devices: ModelDevices
    _functions: dict[str, tuple[Any, Any]]
    _quantization: tuple[str, ...]

    def __repr__(self) -> str:
        names = ", ".join(map(short_name, self.model_devices.devices))
        return f"<{type(self.template).__name__} name={self.template.name} on {names}>"

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the template, which compiles this model too: they share what it makes."""
        bound = _bind(self.template.compile, args, kwargs)
        if tf.distribute.has_strategy():
            raise UnsupportedError(
                f"compile() on {self.template.name!r}, which runs on {self.model_devices}, is "
                "called under a tf.distribute strategy's scope, which would mirror the optimizer's variables. Call it "
                "outside of `with strategy.scope():`."
            )
        if (jit_compile := bound.get("jit_compile")) not in (None, "auto"):
            check_flag("jit_compile", jit_compile)
        return self.template.compile(*args, **kwargs)

    def plan(self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None) -> Plan:
        """Return what would run where for a batch, without running it. `print` it.

        Args:
          x, y, sample_weight: one batch, as `train_on_batch` takes it, or `tf.TensorSpec`s; without any, the plan of
            the batches that ran most.
          step: `"train"`, `"test"` or `"predict"`; by default training if there is `y`, else prediction.

        Raises:
          ArgumentError: without arguments, if no batch has run; for a model that runs eagerly.
        """
        function, arguments = self._parallel_step(x, y, sample_weight, step=step)
        return function.plan(*arguments)

    def placement(
        self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None, actual: bool = False
    ) -> Placement:
        """Return which operation runs on which device for a batch; `print` it, `save` it, ask it.

        Args:
          x, y, sample_weight, step: see `plan`.
          actual: run the step once, give all variables back the values that they had, and read from TensorFlow where
            each operation ran.
        """
        from graphsplit.inspect.placements import placement_of_plan

        return placement_of_plan(self._planned((x, y, sample_weight), {"step": step}, actual), actual)

    def _planned(self, batch: tuple[Any, ...], which: dict[str, Any], runs: bool) -> Planned:
        """Return what a batch runs, for those who look at it or run it; see `plan`."""
        function, arguments = self._parallel_step(*batch, **which)
        planned = function._planned(arguments, {}, runs)
        return planned._replace(name=f"{self.template.name}.{planned.name}")

    def _parallel_step(
        self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None
    ) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]:
        """Return the step that runs a batch and its arguments; the step that ran most, and none, for no batch."""
        if x is None:
            functions = [self._function(kind) for kind in (STEPS if step is None else [step])]
            return busiest(self.template, functions).step, ()
        check_one_batch(self.template, x, y)
        kind = kind_of_step(self.template, y, step)
        batch = (x, None, None) if kind == "predict" else (x, y, sample_weight)
        function = self._make(kind, force=False)
        arguments = arguments_of(self, kind, function, batch)
        return function.step, arguments

    def save(self, filepath: Any, overwrite: bool = True, *args: Any, **options: Any) -> Any:
        """Save the template; an interruption leaves the old file whole."""
        return save_whole(self.template.save, filepath, overwrite, *args, **options)

    def save_weights(self, filepath: Any, overwrite: bool = True, *args: Any, **options: Any) -> Any:
        """Save the template's weights; an interruption leaves the old file whole."""
        return save_whole(self.template.save_weights, filepath, overwrite, *args, **options)

    def _function(self, kind: str) -> Any:
        """Return the function made for `kind` since the last `compile`, or None."""
        compiled, function = self._functions.get(kind, (None, None))
        return function if compiled is compilation_of(self.template) else None

    def _set_function(self, kind: str, function: Any) -> None:
        self._functions[kind] = (compilation_of(self.template), function)

    def _make(self, kind: str, force: bool) -> Any:
        if (quantization := quantization_of(self.template)) != self._quantization:
            self._functions.clear()  # they have the weights of before
            object.__setattr__(self, "_quantization", quantization)
        if force or self._function(kind) is None:
            asks = self._asks(kind)
            function = self._eager(kind) if self.template.run_eagerly else self._batch_function(kind)
            if isinstance(step := getattr(function, "step", None), ParallelFunction):
                step._asks = asks
            elif asks is not None:
                asks(lies := Arrangement())
                lies.apply()
            self._set_function(kind, function)
        return self._function(kind)

    def _asks(self, kind: str) -> Callable[[Arrangement], None] | None:
        """Return what decides how all lies that the model has by now; an optimizer makes its slots first."""
        where, optimizer = self.model_devices, getattr(self.template, "optimizer", None)
        if where.variables == "home" and not where.options.is_automatic:
            if where.options.variables != AUTO or why_they_stay(where.devices, where.options):
                return None
            optimizer = optimizer if kind == "train" else None
        # (where slots do not fit on a device, they are never there: each goes to the host before the next is made)
        on_host = names_host(where.variables) and tf.executing_eagerly()
        with variable_layout("host", where.devices) if on_host else contextlib.nullcontext():
            make_slots(optimizer, self.template.trainable_variables)
        if where.variables == "home":
            variables_of(self.template)  # (its variables get the names by which slots are found)
            return None
        target, mesh = self.template, where.options.mesh.asked or None
        layout = where.variables if optimizer is not None else self._without_patterns_of_slots(where.variables)

        def decide(lies: Arrangement) -> None:
            decide_target(lies, target, layout, where.devices, mesh)

        decide(Arrangement())  # (what is wrong with it is said now)
        return decide

    def _without_patterns_of_slots(self, layout: Any) -> Any:
        """Return a layout without the patterns that fit nothing: `compile` may bring an optimizer that they fit."""
        if not isinstance(layout, Mapping):
            return layout
        later = idle_patterns(layout, [name_of(variable) for variable in variables_of(self.template)])
        if later:
            warnings.warn(
                f"No variable of {self.template.name!r} has a name that fits {', '.join(map(repr, later))}. It has no "
                "optimizer yet: the pattern applies once compile() adds one.",
                stacklevel=user_stack_level(),
            )
        return {
            p: layout_of_pattern
            for p, layout_of_pattern in layout.items()
            if p not in later and not p.startswith(SLOTS)
        }

    def _eager(self, kind: str) -> Any:
        """Return the template's own function after a word on what that costs."""
        warn_of_eager(self.template, str(len(self.model_devices.devices)))
        getattr(self.template, f"make_{kind}_function")(force=True)
        return getattr(self.template, f"{kind}_function")

    def _step(self, kind: str) -> ModelStep:
        step = step_of_parts(tf.autograph.experimental.do_not_convert(getattr(self.template, f"{kind}_step")))
        where = self.model_devices
        default_device = where.predict_device if kind == "predict" else where.options.tuning["default_device"]
        trains = kind == "train" or getattr(self.template, "optimizer", None) is None
        default_device = None if where.options.is_automatic else default_device
        tuning: Tuning = {**where.options.tuning, "default_device": default_device}
        options = replace(where.options, tuning=tuning, jit_compile=self._compiles())
        title = STEPS[kind].format(self.template.name)
        return ModelStep(step, replace(options, lays_out=options.lays_out and trains), title)

    def _compiles(self) -> bool:
        """Return whether XLA compiles the steps: as asked, or as Keras chose, unless it undoes an option."""
        options = self.model_devices.options
        chosen = getattr(self.template, "jit_compile", False) is True
        return asks_for_xla(self.template) or (chosen and not options.recompute and not options.is_automatic)

    def _batch_function(self, kind: str) -> Any:
        raise NotImplementedError

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` and `train_on_batch` call; the template's `train_step` on all devices."""
        return self._make("train", force)

    def make_test_function(self, force: bool = False) -> Any:
        """Make the function that `evaluate` and `test_on_batch` call; the template's `test_step` on all devices."""
        return self._make("test", force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Make the function that `predict` and `predict_on_batch` call; `predict_step` on all devices."""
        return self._make("predict", force)

    train_function = property(lambda s: s._function("train"), lambda s, value: s._set_function("train", value))
    test_function = property(lambda s: s._function("test"), lambda s, value: s._set_function("test", value))
    predict_function = property(lambda s: s._function("predict"), lambda s, value: s._set_function("predict", value))


class ParallelKeras3Model(ParallelModel):
    """A wrapped Keras 3 model."""

    __slots__ = ()

    def _batch_function(self, kind: str) -> Any:
        steps = lambda: int(self.template.steps_per_execution)  # noqa: E731
        if kind != "predict":
            return BatchFunction(self._step(kind), steps, last_sorted)
        return BatchesFunction(self._step(kind), steps, joined_predictions, is_graph=True)


class ParallelKeras2Model(ParallelModel):
    """A wrapped tf_keras model. Keras 2 counts steps in a variable of the model; its callbacks read that."""

    __slots__ = ()

    def _batch_function(self, kind: str) -> Any:
        finish = joined_predictions if kind == "predict" else last

        def finish_and_count(outputs: list[Any]) -> Any:
            step_counter(self.template, kind).assign_add(len(outputs))
            return finish(outputs)

        def steps() -> int:
            variable = self.template.steps_per_execution
            return 1 if variable is None else int(variable.numpy())

        return BatchFunction(self._step(kind), steps, finish_and_count, is_graph=True)


def warn_of_eager(model: Any, devices: str) -> None:
    """Say that a model that was compiled with `run_eagerly=True` uses one device, and how many it might use."""
    warnings.warn(
        f"{model.name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device instead of "
        f"{devices}, many times slower. The numbers are the same. To use the devices, compile without run_eagerly.",
        stacklevel=user_stack_level(),
    )


def is_wrapped(model: Any) -> bool:
    """Return whether `model` was made by `multi_gpu_model`."""
    return issubclass(type(model), ParallelModel)


def base_of(flavor: Flavor) -> type[ParallelModel]:
    """Return what all wrapped models of a Keras are."""
    return ParallelKeras3Model if flavor is KERAS_3 else ParallelKeras2Model


def wrapped(template: Any, base: type[ParallelModel], model_devices: ModelDevices, **own_attributes: Any) -> Any:
    """Return a model that runs on several devices, which says itself that it is of the template's class.

    Args:
      template: the model.
      base: what it is besides.
      model_devices: where it runs.
      **own_attributes: values of attributes that the template lacks.
    """
    attributes = {"model_devices": model_devices, "_functions": {}, "_quantization": (), **own_attributes}
    return sharing_state(_parallel_class(type(template), base), template, **attributes)


def _parallel_class(template_class: type, base: type[ParallelModel]) -> type[ParallelModel]:
    """Return the class of wrapped models of a template's class, which are also what `base` says."""
    namespace = {"__slots__": (), "__module__": template_class.__module__, "__doc__": template_class.__doc__}
    methods = {name: inspect.getattr_static(template_class, name, None) for name in ("plan", "placement")}
    namespace.update({name: method for name, method in methods.items() if method is not None})  # the user's own methods
    parallel_class: type[ParallelModel] = types.new_class(
        f"Parallel{template_class.__name__}", (base, template_class), exec_body=lambda ns: ns.update(namespace)
    )
    return parallel_class


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; those that do not fit are left for the function itself to refuse."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    return {**bound.pop("kwargs", {}), **bound}
