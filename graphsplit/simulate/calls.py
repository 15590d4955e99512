"""`predict`: the time and memory of a step on a machine, before it runs, wherever this is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from graphsplit.api.layouts.layout_spellings import VariableLayout, spelling_of
from graphsplit.api.layouts.predicted_layouts import Layout, layout_name, notes_on_layout
from graphsplit.api.stepping import step_of
from graphsplit.core.device_mesh import mesh_as_if, mesh_axes
from graphsplit.core.progress import phase
from graphsplit.core.user_code import with_users_traceback
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of
from graphsplit.planning.options import Options
from graphsplit.simulate.predicted_calls import PredictedCall, check_renamed, predicted_call
from graphsplit.simulate.prediction.predictions import Prediction, predict_plan
from graphsplit.simulate.prediction.unknown_sizes import checked_unknown_size

MOST_TASKS = 10_000_000  # operations and what is sent: of a million, half a minute, and 2 GB


@with_users_traceback
def predict(
    fn: Callable[..., Any],
    *args: Any,
    machine: str | os.PathLike[str] | Machine,
    devices: int | None = None,
    mesh: Mapping[str, int] | None = None,
    variables: Layout = None,
    micro_batches: int | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    unknown_size: int | None = None,
    **kwargs: Any,
) -> Prediction:
    """Predict how long a step takes on a machine, and how much memory each device needs. Nothing runs.

    The function is traced and planned as on that machine. Then what the plan runs is replayed: every operation on its
    device, every tensor on its links. The prediction prints what it assumes.

    Args:
      fn: a function, or one made by `parallelize`, whose options then apply; or a model made by `multi_gpu_model` with
        a batch, `x, y, sample_weight`: its training step, or without `y` its prediction.
      *args, **kwargs: its arguments; a `tf.TensorSpec` will do for a tensor.
      machine: `"8xA100-SXM4-80GB"`, `"2x8xH100-SXM5"`, `"dgx-a100"`, or a TOML file. `graphsplit machines` lists those
        that come with graphsplit; `graphsplit calibrate` measures yours.
      devices: how many of its devices; by default as many as `parallelize` has, else all.
      mesh: its devices as a mesh of named axes, `{"batch": 64, "model": 8}`, as for `parallelize`; None: that of `fn`.
      variables: their layout: `"home"`, `"replicated"`, `"sharded"`, `"host"`, `"auto"`, or layouts by patterns, as
        for `set_variable_layout`, with axes of the mesh, too. None keeps their layouts.
      micro_batches, stages, schedule: as for `parallelize`; None: as `fn` has them.
      unknown_size: what to assume for sizes that depend on data (`tf.where`). None assumes 1, and the prediction says
        that the step takes at least so long.

    Raises:
      ArgumentError: for an unknown machine, more devices than it has, another number of devices than the mesh has,
        unknown sizes of arguments, an unknown layout; for variables on a host whose speed the machine does not say.
      UnsupportedError: for more than ten million operations and tensors that are sent.

    >>> import tensorflow as tf, graphsplit as gs
    >>> w = tf.Variable(tf.ones([1024, 1024]))
    >>> prediction = gs.predict(lambda x: x @ w, tf.TensorSpec([4096, 1024]), machine="8xA100-SXM4-80GB", devices=2)
    >>> prediction.step_s < 0.01, sorted(prediction.memory_bytes)
    (True, ['CPU:0', 'GPU:0', 'GPU:1'])
    """
    found, unknown_size = machine_of(machine), checked_unknown_size(unknown_size)
    check_renamed(fn, kwargs)
    fn, args, kwargs = step_of(fn, args, kwargs)
    axes = mesh_axes(mesh) or None
    options = {"micro_batches": micro_batches, "schedule": schedule, "stages": stages, "mesh": axes}
    call = predicted_call(fn, args, kwargs, **options)
    count = _count(call.options, devices, found)
    found.names(count)  # checks that it has so many
    if why := why_too_many(call, count, variables):
        raise UnsupportedError(f"{call.title} on {count} devices: {why}. Choose fewer devices.")
    return predict_call(call, found, count, variables, unknown_size)


@phase("predicting")
def predict_call(
    call: PredictedCall,
    machine: Machine,
    devices: int,
    layout: Layout = None,
    unknown_size: int | None = None,
) -> Prediction:
    """Return the prediction of a call that was traced; see `predict`."""
    names = machine.names(devices)
    mesh_devices = mesh_as_if(call.options.mesh, names)
    plan = call.plan(names, layout, machine.device.memory_bytes)
    layout = call.options.variables if layout is None else layout
    notes = (*call.notes, *notes_on_layout(call.trace, layout, names, mesh_devices))
    name = layout_name(layout)
    found = predict_plan(plan, machine, title=call.title, layout=name, unknown_size=unknown_size)
    return dataclasses.replace(found, notes=notes)


def why_too_many(call: PredictedCall, devices: int, layout: Layout) -> str:
    """Return why a call runs too much for a prediction; "" if it does not.

    Where variables are several, each device sends to each; what lies along an axis of a mesh is not sent.
    """
    named = list(layout.values()) if isinstance(layout, Mapping) else [layout]
    is_sent = any(own is not None and own != "home" and not _stays(own, call.options) for own in named)
    exchanged = devices * devices * len(call.trace.variables) if is_sent else 0
    tasks = devices * sum(op.type != "Const" for op in call.trace.program.ops) + exchanged
    if tasks <= MOST_TASKS:
        return ""
    return f"the step has about {tasks:,} operations and transfers, and a prediction replays at most {MOST_TASKS:,}"


def _stays(layout: VariableLayout, options: Options) -> bool:
    """Return whether a variable that lies so is cut along the axis of a mesh that is not the batch's, and only so."""
    spelling = spelling_of(layout)
    return spelling.others == "home" and bool(spelling.named) and spelling.named.keys() <= options.mesh.others.keys()


def _count(options: Options, devices: int | None, machine: Machine) -> int:
    if devices is not None:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ArgumentError(
                f"devices must be how many of the machine's devices to use, at least 1, got {devices!r}."
            )
        return devices
    return machine.most_devices if options.count is None else options.count
