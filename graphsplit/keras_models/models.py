"""Wrapped models: a second object that shares the template's whole state and only runs batches differently.

The wrapper and its template have one `__dict__`. So layers, optimizer, metrics, compile state and checkpoint
dependencies cannot differ, and whatever Keras does to one it does to both. The wrapper's own few attributes lie in
slots, beside that dictionary. It says that its `__class__` is the template's, so that Keras writes the template's own
name into files and makes the template's own class from them.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.api.options import Options
from graphsplit.api.parallel_function import ParallelFunction
from graphsplit.api.variable_layouts import set_variable_layout
from graphsplit.core.devices import short_name
from graphsplit.core.errors import UnsupportedError
from graphsplit.core.user_code import user_stack_level
from graphsplit.keras_models.answers import STEPS, arguments_of, busiest, kind_of_step
from graphsplit.keras_models.batches import BatchFunction, joined_predictions, last, last_sorted, step_of_parts
from graphsplit.keras_models.flavors import KERAS_3, Flavor
from graphsplit.keras_models.saving import save_whole
from graphsplit.placement.placements import Placement
from graphsplit.placement.sources import Planned
from graphsplit.planning.automatic_stages import Beginnings
from graphsplit.planning.plan import Plan


@dataclass(frozen=True)
class ModelDevices:
    """Where a wrapped model runs.

    Attributes:
      devices: the device of each shard.
      home: where whole operations run in training and evaluation.
      predict_home: where predictions are merged.
      variables: the layout of the model's and its optimizer's variables, or layouts by patterns of names.
      micro_batches: how many shards each device has.
      schedule: the order in which these go through stages, if it has any.
      stages: into which the model is cut.
      strict: whether what carries the batch and would run at home is an error, or how much of it may.
    """

    devices: tuple[str, ...]
    home: str
    predict_home: str
    variables: str | Mapping[str, str] = "home"
    micro_batches: int = 1
    schedule: str | None = None
    stages: int | Beginnings | None = None
    strict: bool | float = False

    def __str__(self) -> str:
        count = len(self.devices)
        text = f"{count} device{'s' if count != 1 else ''}"
        return f"{text}, {self.micro_batches} micro-batches each" if self.micro_batches > 1 else text


class ParallelModel:
    """What both kinds of wrapped models have in common; stands before the template's class among the bases.

    Attributes:
      template: the model that was wrapped.
      model_devices: where this one runs.
    """

    __slots__ = ("_compiled_by_xla", "_functions", "model_devices", "template")

    template: Any
    model_devices: ModelDevices
    _functions: dict[str, tuple[Any, Any]]
    _compiled_by_xla: bool | str

    @classmethod
    def _wrap(cls, template: Any, model_devices: ModelDevices) -> ParallelModel:
        model: ParallelModel = object.__new__(cls)  # Keras' own constructors would make new state
        object.__setattr__(model, "__dict__", template.__dict__)
        own = {"template": template, "model_devices": model_devices, "_functions": {}, "_compiled_by_xla": False}
        for name, value in own.items():
            object.__setattr__(model, name, value)
        return model

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.template)

    def __repr__(self) -> str:
        names = ", ".join(map(short_name, self.model_devices.devices))
        return f"<{type(self.template).__name__} name={self.template.name} on {names}>"

    def __reduce__(self) -> Any:
        return self.template.__reduce__()  # a copy, or what is unpickled, is a template

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the template, which compiles this model too: they share what it makes."""
        bound = _bind(self.template.compile, args, kwargs)
        if tf.distribute.has_strategy():
            raise UnsupportedError(
                f"compile() on {self.template.name!r}, which runs on {self.model_devices}, is "
                "called under a tf.distribute strategy's scope, which would mirror the optimizer's variables. Call it "
                "outside of `with strategy.scope():`."
            )
        asked = bound.get("jit_compile")  # (what Keras makes of its default is meant for one device)
        object.__setattr__(self, "_compiled_by_xla", asked if asked in (True, "auto") else False)
        return self._compile_template(*args, **kwargs)

    def _compile_template(self, *args: Any, **kwargs: Any) -> Any:
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
        from graphsplit.placement.builders import placement_of_plan

        return placement_of_plan(self._planned(x, y, sample_weight, step=step), actual)

    def _planned(self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None) -> Planned:
        """Return what a batch runs, for those who look at it."""
        function, arguments = self._parallel_step(x, y, sample_weight, step=step)
        planned = function._planned(*arguments)
        return planned._replace(name=f"{self.template.name}.{planned.name}")

    def _parallel_step(
        self, x: Any = None, y: Any = None, sample_weight: Any = None, *, step: str | None = None
    ) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]:
        """Return the step that runs a batch and its arguments; the step that ran most, and none, for no batch."""
        if x is None:
            functions = [self._function(kind) for kind in (STEPS if step is None else [step])]
            return busiest(self.template, functions).step, ()
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
        return function if compiled is _compilation(self.template) else None

    def _set_function(self, kind: str, function: Any) -> None:
        self._functions[kind] = (_compilation(self.template), function)

    def _make(self, kind: str, force: bool) -> Any:
        if force or self._function(kind) is None:
            self._lay_out()
            self._set_function(kind, self._eager(kind) if self.template.run_eagerly else self._batch_function(kind))
        return self._function(kind)

    def _lay_out(self) -> None:
        """Lay out what the model has by now; an optimizer makes its slots first."""
        if self.model_devices.variables == "home":
            return
        optimizer: Any = getattr(self.template, "optimizer", None)
        if hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
            optimizer.build(self.template.trainable_variables)
        elif hasattr(optimizer, "_create_all_weights"):  # tf_keras' legacy ones, which have no public name for it
            optimizer._create_all_weights(self.template.trainable_variables)
        set_variable_layout(self.template, self.model_devices.variables, self.model_devices.devices)

    def _eager(self, kind: str) -> Any:
        """Return the template's own function after a word on what that costs."""
        warnings.warn(
            f"{self.template.name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device "
            f"instead of {len(self.model_devices.devices)}, many times slower. The numbers are the same. To use the "
            "devices, compile without run_eagerly.",
            stacklevel=user_stack_level(),
        )
        getattr(self.template, f"make_{kind}_function")(force=True)
        return getattr(self.template, f"{kind}_function")

    def _step(self, kind: str) -> ParallelFunction[..., Any]:
        step = step_of_parts(tf.autograph.experimental.do_not_convert(getattr(self.template, f"{kind}_step")))
        home = self.model_devices.predict_home if kind == "predict" else self.model_devices.home
        where = self.model_devices
        options = Options(
            devices=where.devices,
            home=None if home == where.devices[0] else home,
            micro_batches=where.micro_batches,
            schedule=where.schedule,
            stages=where.stages,
            jit_compile=self._compiled_by_xla,
            strict=where.strict,
            devices_argument="gpus",
        )
        return ParallelFunction(step, options)

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
            return BatchFunction(self._step(kind), steps, last_sorted, open_rows=True)
        return _OnLists(self._step(kind), steps, joined_predictions)


class _OnLists(BatchFunction):
    """Keras 3 hands `predict_function` a list of batches."""

    def __call__(self, iterator: Any) -> Any:
        return self.run(iterator)


class ParallelKeras2Model(ParallelModel):
    """A wrapped tf_keras model. Keras 2 counts steps in a variable of the model; its callbacks read that."""

    __slots__ = ()

    def _compile_template(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_by_xla != "auto":
            return self.template.compile(*args, **kwargs)
        return self.template.compile(
            **{**_bind(self.template.compile, args, kwargs), "jit_compile": None}
        )  # knows no auto

    def _batch_function(self, kind: str) -> Any:
        finish = joined_predictions if kind == "predict" else last

        def finish_and_count(outputs: list[Any]) -> Any:
            getattr(self.template, f"_{kind}_counter").assign_add(len(outputs))
            return finish(outputs)

        def steps() -> int:
            variable = self.template.steps_per_execution
            return 1 if variable is None else int(variable.numpy())

        return BatchFunction(self._step(kind), steps, finish_and_count)


def is_wrapped(model: Any) -> bool:
    """Return whether `model` was made by `multi_gpu_model`."""
    return issubclass(type(model), ParallelModel)


def parallel_class(template_class: type, flavor: Flavor) -> type[ParallelModel]:
    """Return the class of wrapped models of a template's class."""
    base = ParallelKeras3Model if flavor is KERAS_3 else ParallelKeras2Model
    namespace = {"__slots__": (), "__module__": template_class.__module__, "__doc__": template_class.__doc__}
    own = {name: inspect.getattr_static(template_class, name, None) for name in ("plan", "placement")}
    namespace.update({name: found for name, found in own.items() if found is not None})  # the user's own methods
    made: type[ParallelModel] = types.new_class(
        f"Parallel{template_class.__name__}", (base, template_class), exec_body=lambda ns: ns.update(namespace)
    )
    return made


def _compilation(template: Any) -> Any:
    """Return an object that is another one after each `compile`; Keras keeps its arguments in it."""
    return getattr(template, "_compile_config", None)


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; those that do not fit are left for the function itself to refuse."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    return {**bound.pop("kwargs", {}), **bound}
