"""`multi_gpu_model`: the one-line wrap of a built Keras model, and the checks that come before it.

Stages of a model are given by the names of its layers: Keras calls each in a name scope.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from graphsplit.api.calls.chosen_devices import stages_asked
from graphsplit.api.layouts.layout_spellings import AUTO, VariableLayout, check_layout, is_word, names_host
from graphsplit.api.layouts.variable_layouts import check_patterns, idle_patterns, variables_of
from graphsplit.api.options import Options
from graphsplit.core.device_mesh import device_mesh, devices_of, mesh_axes
from graphsplit.core.devices import canonical_name, check_existing, names_of_devices, resolve_devices, short_name
from graphsplit.core.gpus import has_gpus
from graphsplit.core.keras_internals import layers_not_built, names_in_optimizers
from graphsplit.core.patterns import suggesting_options
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.keras.answers import STEPS
from graphsplit.keras.flavors import KERAS_3, Flavor, defines, flavor_of
from graphsplit.keras.models import ModelDevices, base_of, is_wrapped, wrapped
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.schedule.automatic_stages import Beginnings

Model = TypeVar("Model")  # of either Keras, neither of which is imported here

CPU = "/device:CPU:0"


@suggesting_options
def multi_gpu_model(
    model: Model,
    gpus: int | Sequence[int | str] | None = None,
    cpu_merge: bool = True,
    cpu_relocation: bool = False,
    *,
    mesh: Mapping[str, int] | None = None,
    shares: Sequence[float] | None = None,
    variables: VariableLayout | Mapping[str, VariableLayout] = AUTO,
    micro_batches: int = 1,
    stages: int | Sequence[str] | None = None,
    schedule: str | None = None,
    recompute: str | float | Sequence[str] | None = None,
    strict: bool = False,
    plan: str | os.PathLike[str] | Machine | None = None,
    memory: str | float | None = None,
) -> Model:
    """Return `model` with `fit`, `evaluate` and `predict` running on several devices, with one device's numbers.

    The returned model shares everything with the template: class, layers, variables, optimizer, metrics, compile state
    and files. Only what runs a batch differs: `graphsplit.parallelize` runs the template's `train_step`, `test_step`
    and `predict_step`. Losses, metrics, BatchNormalization's statistics and dropout masks are those of the template on
    one device, for every batch size.

    Args:
      model: a built Keras 3 or tf_keras model (Sequential, functional or subclassed), or a Keras 3 layer that has
        `fit`; trained or not, compiled or not.
      gpus: how many devices, or which: `[0, 2]` means GPU 0 and GPU 2 (or logical CPU devices, if there is no GPU).
        Names such as `"GPU:1"` work, too; for plans they may be another machine's. None means all GPUs, or without
        GPUs all logical CPU devices.
      cpu_merge: merge the shards' predictions on the CPU, else on the first device.
      cpu_relocation: keep the weights on the CPU and update them there. They must have been made there.
      mesh, shares, micro_batches, schedule, recompute, strict, plan: as for `parallelize`.
      variables: where the weights and the optimizer's slots are stored: `"auto"` as for `parallelize`, or any layout,
        or layouts by patterns of names, of `set_variable_layout`. With `"auto"`, the first training batch divides what
        was copied for predictions before it. `"home"` leaves them where they are. `"sharded"` divides them over the
        devices, for a model that is too large for one; `"replicated"` copies them to all.
        `{"slots of *": "host", "*": "home"}` keeps the optimizer's slots in the host's memory, also for one device;
        `{"*/up/kernel": (None, "model"), "*": "home"}` names an axis of the mesh.
      stages: as for `parallelize`. Of patterns, `["block4_*", "block9_*"]`, a stage begins with the first layer that
        matches, and has all that Keras runs after it.
      memory: as for `parallelize`. The first training batch chooses, with the optimizer's slots; without an optimizer,
        the first batch. `evaluate` and `predict` use the variables where they are then.

    Returns:
      The wrapped model, which also has `plan(x, y)` and `placement(x, y)`, and works with `verify`; or `model` itself,
      if there is only one device and nothing to divide for it.

    Raises:
      ArgumentError: if `model` is not a Keras model, not built, or wrapped already; if `gpus` cannot be understood; if
        `cpu_relocation` is given and weights are elsewhere, or with `memory` or another layout; for an unknown layout;
        for `micro_batches` below 1, an unknown `schedule`, or `stages` that do not fit the layers or devices.
      DeviceError: if there are not that many devices.
      UnsupportedError: for a model of a `tf.distribute` strategy, one that overrides `make_train_function`, or another
        Keras backend than TensorFlow.

    >>> import keras, numpy as np, graphsplit as gs
    >>> template = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    >>> model = gs.multi_gpu_model(template, gpus=2)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((5, 3)), np.ones((5, 1)), verbose=0)
    >>> template.predict(np.ones((5, 3)), verbose=0).shape
    (5, 1)
    """
    flavor = _check_model(model)
    axes = mesh_axes(mesh)
    devices = devices_of(axes, None) if axes and gpus is None else _devices(gpus)
    mesh_devices = device_mesh(axes, devices) if axes else None
    cpu = None if devices[0] == CPU else CPU  # (None is the first device)
    is_automatic = plan is not None or memory is not None
    if is_automatic and cpu_relocation:
        name, value = ("memory", memory) if plan is None else ("plan", plan)
        raise ArgumentError(
            f"cpu_relocation=True keeps the weights on the CPU, {name}={value!r} chooses where they are. Choose one."
        )
    options = Options(
        devices=devices,
        mesh=axes,
        shares=shares,
        variables=AUTO if is_word(variables, AUTO) and not is_automatic and not cpu_relocation else None,
        micro_batches=micro_batches,
        stages=stages_of_model(model, stages, flavor),
        schedule=schedule,
        recompute=recompute,  # type: ignore[arg-type]  # a list becomes a tuple there
        strict=strict,
        plan=plan,  # type: ignore[arg-type]  # a path becomes the machine there
        memory=memory,  # type: ignore[arg-type]  # a text becomes bytes there
        tuning={"default_device": cpu if cpu_relocation else None},
        devices_argument="gpus",
    )
    stages_asked(options, devices)  # (checks that they make whole pipelines)
    plain = micro_batches == 1 and schedule is None and recompute is None and not names_host(variables)
    if len(devices) == 1 and plain and not is_automatic:
        return model
    check_strategy(model, "multi_gpu_model")
    if cpu_relocation:
        _check_on_cpu(model)
    if not is_word(variables, AUTO):
        check_layout(variables, mesh_devices)
    if cpu_relocation and not is_word(variables, "home", AUTO):
        raise ArgumentError(
            f"cpu_relocation=True keeps the weights on the CPU, variables={variables!r} divides them. Choose one."
        )
    layout = "home" if is_word(variables, AUTO) else variables
    if isinstance(layout, Mapping) and flavor is KERAS_3:
        _check_patterns(model, layout)
    where = ModelDevices(devices, options, cpu if cpu_merge else options.tuning["default_device"], layout)
    return wrapped(model, base_of(flavor), where)  # type: ignore[no-any-return]


def _check_model(model: Any) -> Flavor:
    flavor = flavor_of(model)
    if flavor is None:
        raise ArgumentError(
            f"multi_gpu_model takes a Keras model, got {type(model).__module__}.{type(model).__qualname__}. "
            "For a function or a layer use graphsplit.parallelize."
        )
    if flavor is KERAS_3 and (backend := flavor.module().backend.backend()) != "tensorflow":
        raise UnsupportedError(
            f"multi_gpu_model splits TensorFlow graphs, but Keras runs on {backend!r}. "
            "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if is_wrapped(model):
        raise ArgumentError(
            f"{model.name!r} is wrapped already, on {model.model_devices}. "
            "Wrap its template, model.template, to run it on others."
        )
    if not model.built and defines(model, "call"):
        raise ArgumentError(
            f"{model.name!r} is not built: it has no variables yet that could be shared. Give it an Input, or call "
            "it once on a batch, before it is wrapped. If its fit makes its layers, call model.fit(x, y, epochs=0)."
        )
    if not model.built and (unbuilt := layers_not_built(model)):
        raise ArgumentError(
            f"{model.name!r} has no call(), and some of its layers have no variables yet that could be shared:\n"
            f"{bullet_list(unbuilt, 5)}\n"
            "Give each an Input, or call it once on a batch, before the model is wrapped."
        )
    if overridden := own_functions(model):
        raise UnsupportedError(
            f"{model.name!r} overrides {' and '.join(overridden)}, which runs the batches itself and cannot be split. "
            "Override train_step, test_step or predict_step instead."
        )
    return flavor


def _check_patterns(model: Any, layout: Mapping[str, VariableLayout]) -> None:
    """Raise `ArgumentError` if a pattern fits no variable of a model, nor one that an optimizer of Keras may add."""
    names = [name_of(variable) for variable in variables_of(model)]
    idle = idle_patterns(layout, [*names, *names_in_optimizers(getattr(model, "optimizer", None), names)])
    check_patterns(dict.fromkeys(idle, "home"), names)


def own_functions(model: Any) -> list[str]:
    """Return those methods that drive batches and that a model's class has overridden."""
    methods = [f"make_{kind}_function" for kind in STEPS]
    return [m for m in methods if not getattr(type(model), m).__module__.startswith(("keras.", "tf_keras."))]


def _devices(gpus: Any) -> tuple[str, ...]:
    """Return full device names; a list of numbers means GPUs, or logical CPU devices where there is no GPU."""
    if isinstance(gpus, Iterable) and not isinstance(gpus, str):
        kind = "GPU" if has_gpus() else "CPU"
        names = list(gpus)
        if names and all(isinstance(gpu, str) for gpu in names):
            full = names_of_devices(names, "gpus")  # they may be another machine's GPUs, for which there are plans
            check_existing([name for name in full if name.startswith("/device:CPU:")], "gpus", names)
            return full
        gpus = [f"{kind}:{gpu}" if isinstance(gpu, int) and not isinstance(gpu, bool) else gpu for gpu in names]
    return resolve_devices(gpus, "gpus")


def check_strategy(model: Any, instead: str) -> None:
    """Raise `UnsupportedError` if a `tf.distribute` strategy owns the model or what it was compiled with.

    Args:
      model: of either Keras.
      instead: what takes the strategy's place.
    """
    strategy = model.distribute_strategy
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        parts = [model, *([model.optimizer] if getattr(model, "optimizer", None) is not None else []), *model.metrics]
        mirrored = [
            v for part in parts for v in _variables(part) if isinstance(_value(v), tf.distribute.DistributedValues)
        ]
        if not mirrored:
            return
    raise UnsupportedError(
        f"{model.name!r} was made, compiled or wrapped under a tf.distribute strategy's scope, which mirrors variables "
        f"and splits batches itself. Make, compile and wrap it outside of `with strategy.scope():`; {instead} "
        "takes the strategy's place."
    )


def _check_on_cpu(model: Any) -> None:
    elsewhere = [
        f"{getattr(v, 'path', v.name)} on {short_name(device)}"
        for v in model.variables
        if ":CPU:" not in (device := canonical_name(_value(v).device))
    ]
    if elsewhere:
        raise ArgumentError(
            "cpu_relocation=True keeps the weights on the CPU, but variables cannot move once they are made:\n"
            f"{bullet_list(elsewhere, 5)}\n"
            "Make the model under `with tf.device('CPU:0'):`. If it is trained already, make a copy there with "
            "clone_model, and copy the weights with set_weights. Or leave out cpu_relocation."
        )


def _variables(part: Any) -> list[Any]:
    variables = part.variables
    return list(variables() if callable(variables) else variables)  # a method in old tf_keras optimizers


def _value(variable: Any) -> Any:
    """Return the TensorFlow variable behind a variable of either Keras."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


_MOST_NAMES = 12


def stages_of_model(model: Any, stages: object, flavor: Flavor) -> int | Beginnings | None:
    """Return what stages a user asked for, checked against the layers of the model.

    Args:
      model: a built model.
      stages: how many, which the options check, or patterns of names of layers at which stages begin.
      flavor: the Keras of the model. Keras 3 enters each layer's scope twice, to build and to call it, so that
        TensorFlow gives the second one a number; Keras 2 enters it once.

    Raises:
      ArgumentError: for neither of these, or a pattern that no layer's name fits.
    """
    if stages is None or (isinstance(stages, int) and not isinstance(stages, bool)):
        return stages
    if not isinstance(stages, (list, tuple)) or not stages or not all(isinstance(name, str) for name in stages):
        raise ArgumentError(
            f"stages={stages!r}: stages of a model are a number, at least 1, or patterns of names of the layers at "
            "which new stages begin, ['block4_*', 'block9_*']."
        )
    if not hasattr(model, "layers"):
        raise ArgumentError(
            f"stages={stages!r}: {model.name!r} is a layer with fit, no keras.Model, and does not say which layers it "
            "has. Give a number of stages, or make it a keras.Model."
        )
    names = list(dict.fromkeys(_layer_names(model)))
    fitting = {pattern: fnmatch.filter(names, pattern) for pattern in stages}
    idle = [pattern for pattern, layers in fitting.items() if not layers]
    if idle:
        raise ArgumentError(
            f"stages={stages!r}: no layer of {model.name!r} has a name that fits {', '.join(map(repr, idle))}. Its "
            f"layers are:\n{bullet_list(names, _MOST_NAMES)}"
        )
    suffix = r"_\d+" if flavor is KERAS_3 else ""
    return Beginnings.at(fitting, names, f"(^|/)({{}}){suffix}/")


def _layer_names(model: Any) -> Iterator[str]:
    """Return the names of the layers of a model, and of models in it, in order."""
    for layer in model.layers:
        yield layer.name
        if hasattr(layer, "layers"):
            yield from _layer_names(layer)
