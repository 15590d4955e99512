"""`predict`: the time and memory of a step on a machine, before it runs, wherever this is.

A call that is predicted is traced once, and planned for devices that need not exist, as often as asked.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphsplit.api.calls.argument_splitting import Splitting, check_split, resolve_split
from graphsplit.api.calls.call_signatures import as_call, by_bound_arguments, parameters_of, signature_of, spread
from graphsplit.api.calls.chosen_devices import check_no_others
from graphsplit.api.calls.compilation import Called, trace_call, variables_elsewhere
from graphsplit.api.calls.parallel_function import ParallelFunction, Stepping, step_of
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.layouts.layout_spellings import VariableLayout, spelling_of
from graphsplit.api.layouts.predicted_layouts import VariableLayouts, layout_name, notes_on_layout
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.device_mesh import mesh_as_if, mesh_axes
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.layouts import Shard
from graphsplit.core.progress import phase
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.core.user_code import with_users_traceback
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of
from graphsplit.planning.plan import Plan
from graphsplit.simulate.prediction.predictions import Prediction, checked_unknown_size, predict_plan
from graphsplit.tracing.trace import Trace

MOST_TASKS = 10_000_000  # operations and what is sent: of a million, half a minute, and 2 GB


@with_users_traceback
def predict(
    fn: Callable[..., Any],
    *args: Any,
    machine: str | os.PathLike[str] | Machine,
    devices: int | None = None,
    mesh: Mapping[str, int] | None = None,
    variables: VariableLayouts = None,
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
    target, unknown_size = machine_of(machine), checked_unknown_size(unknown_size)
    check_renamed(fn, kwargs)
    fn, args, kwargs = step_of(fn, args, kwargs)
    axes = mesh_axes(mesh) or None
    options = {"micro_batches": micro_batches, "schedule": schedule, "stages": stages, "mesh": axes}
    call = predicted_call(fn, args, kwargs, **options)
    count = _count(call.options, devices, target)
    target.names(count)  # checks that it has so many
    if why := why_too_many(call, count, variables):
        raise UnsupportedError(f"{call.title} on {count} devices: {why}. Choose fewer devices.")
    return predict_call(call, target, count, variables, unknown_size)


@phase("predicting")
def predict_call(
    call: PredictedCall,
    machine: Machine,
    devices: int,
    layout: VariableLayouts = None,
    unknown_size: int | None = None,
) -> Prediction:
    """Return the prediction of a call that was traced; see `predict`."""
    names = machine.names(devices)
    mesh_devices = mesh_as_if(call.options.mesh, names)
    plan = call.plan(names, layout, machine.device.memory_bytes)
    layout = call.options.variables if layout is None else layout
    notes = (*call.notes, *notes_on_layout(call.lies, call.trace, layout, names, mesh_devices))
    name = layout_name(layout)
    prediction = predict_plan(plan, machine, title=call.title, layout=name, unknown_size=unknown_size)
    return dataclasses.replace(prediction, notes=notes)


def why_too_many(call: PredictedCall, devices: int, layout: VariableLayouts) -> str:
    """Return why a call runs too much for a prediction; "" if it does not.

    Where variables are several, each device sends to each; what lies along an axis of a mesh is not sent.
    """
    named = list(layout.values()) if isinstance(layout, Mapping) else [layout]
    is_sent = any(
        asked_layout is not None and asked_layout != "home" and not _stays(asked_layout, call.options)
        for asked_layout in named
    )
    exchanged = devices * devices * len(call.trace.variables) if is_sent else 0
    tasks = devices * sum(op.type != "Const" for op in call.trace.program.ops) + exchanged
    if tasks <= MOST_TASKS:
        return ""
    return f"the step has about {tasks:,} operations and transfers, and a prediction replays at most {MOST_TASKS:,}"


def _stays(layout: VariableLayout, options: Options) -> bool:
    """Return whether a variable that lies so is cut along the axis of a mesh that is not the batch's, and only so."""
    spelling = spelling_of(layout)
    return (
        spelling.along_others == "home" and bool(spelling.named) and spelling.named.keys() <= options.mesh.others.keys()
    )


def _count(options: Options, devices: int | None, machine: Machine) -> int:
    if devices is not None:
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ArgumentError(
                f"devices must be how many of the machine's devices to use, at least 1, got {devices!r}."
            )
        return devices
    return machine.most_devices if options.count is None else options.count


@dataclass(frozen=True, eq=False)
class PredictedCall:
    """A function with the arguments of one call. It is traced when that is first asked for.

    Attributes:
      function: the single-device function.
      options: those under which it is planned unless others are asked for.
      arguments: their structure, as the function's signature binds them.
      splitting: how they are split.
      run_trace: traces the function.
      seen: returns arguments as the function sees them while it is traced.
      notes: for predictions.
      arrange: returns how variables are to lie, once it is traced.
    """

    function: Callable[..., Any]
    options: Options
    arguments: structures.Container
    splitting: Splitting
    run_trace: Callable[[], Trace] = field(repr=False)
    seen: Callable[[structures.Container], structures.Container] = field(repr=False)
    notes: tuple[str, ...] = ()
    arrange: Callable[[], Arrangement] = field(default=Arrangement, repr=False)

    @property
    def title(self) -> str:
        """The function's name."""
        name = getattr(self.function, "__name__", None) or getattr(self.function, "name", None)
        return str(name or type(self.function).__name__)

    @functools.cached_property
    def trace(self) -> Trace:
        """The traced function.

        Raises:
          Exception: whatever the function raises.
        """
        trace = self.run_trace()
        check_no_others(trace.program, self.options)
        return trace

    @functools.cached_property
    def lies(self) -> Arrangement:
        """How variables are to lie, also those that the function made while it was traced."""
        _ = self.trace
        return self.arrange()

    def with_options(self, options: Options) -> PredictedCall:
        """Return the same call under other options, traced only once."""
        return replace(self, options=options, run_trace=lambda: self.trace)

    def with_rows(self, rows: int) -> PredictedCall:
        """Return the call with another number of rows in what is split."""
        layouts, batch = iter(self.splitting.layouts), int(self.splitting.batch)

        def widen(leaf: structures.Leaf) -> Any:
            if isinstance(leaf, structures.CompositeLeaf):
                return replace(leaf, parts=tuple(map(widen, leaf.parts)))
            layout = next(layouts) if isinstance(leaf, structures.TensorLeaf) else None
            if not isinstance(leaf, structures.TensorLeaf) or not isinstance(layout, Shard):
                return leaf
            sizes = enumerate(leaf.shape or ())
            return replace(leaf, shape=tuple([n * rows // batch if n and k == layout.axis else n for k, n in sizes]))

        wide = structures.map_leaves(widen, self.arguments)
        assert isinstance(wide, structures.Container)
        return replace(_call_of(self.function, self.options, wide, self.seen, self.notes), arrange=self.arrange)

    @collection_paused()
    def plan(
        self, devices: Sequence[str], layout: VariableLayouts = None, memory: float | None = None, **options: Any
    ) -> Plan:
        """Return the plan for some devices, full names; they need not exist.

        Args:
          devices: the first is the default device.
          layout: of the variables; None for as they lie.
          memory: bytes that each device has, if that is known.
          **options: instead of those that the function has, `micro_batches=4`.
        """
        chosen = replace(self.options, **options)
        request = PlanRequest(self.trace.program, self.splitting, chosen, devices, trace=self.trace, lies=self.lies)
        request = request.noting(*variables_elsewhere(self.trace)).as_if(chosen, devices, layout)
        return request.planned(lambda: memory)[0]


def check_renamed(fn: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `TypeError` for the old names of `variables=`, unless the function itself has such an argument."""
    parameters = () if isinstance(fn, Stepping) or not callable(fn) else signature_of(fn).parameters
    for name in [name for name in ("layout", "layouts") if name in kwargs and name not in parameters]:
        raise TypeError(f"{name}= is now variables={kwargs[name]!r}.")


def predicted_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **changed: Any
) -> PredictedCall:
    """Return a call of a function. Arguments may be `tf.TensorSpec`s, whose sizes are all known.

    Args:
      fn, args, kwargs: see `predict`.
      **changed: options instead of those that the function has; None: as it has them.

    Raises:
      ArgumentError: if it is no function, sizes of arguments are not known, or an option cannot be meant.
    """
    function = fn.function if isinstance(fn, ParallelFunction) else fn
    options = fn._options if isinstance(fn, ParallelFunction) else Options(jit_compile=is_compiled_function(function))
    if not callable(function):
        raise ArgumentError(f"predict takes a function and its arguments, got {fn!r} for the function.")
    if changed.get("mesh") is not None:  # (as many devices as it has)
        options = replace(options, devices=None)
    plan_option = options.asks_for_plan.partition("=")[0] if options.is_automatic else ""
    notes = (
        (f"{plan_option}= is not used here; the function is predicted with its other options",) if plan_option else ()
    )
    options = replace(options.as_given(), **{name: value for name, value in changed.items() if value is not None})
    signature = signature_of(function)
    check_split(options.split, parameters_of(signature))
    bound = signature.bind(*args, **kwargs)
    _, tree = structures.flatten(dict(bound.arguments), specs=True)
    assert isinstance(tree, structures.Container)
    as_seen = fn._seen if isinstance(fn, ParallelFunction) else lambda arguments: arguments
    call = _call_of(function, options, tree, as_seen, notes)
    return replace(call, arrange=fn._arrangement) if isinstance(fn, ParallelFunction) else call


def _call_of(
    function: Callable[..., Any],
    options: Options,
    arguments: structures.Container,
    as_seen: Callable[[structures.Container], structures.Container],
    notes: tuple[str, ...],
) -> PredictedCall:
    signature = signature_of(function)
    named = spread(arguments, signature)
    paths = structures.paths(named)
    _check_known(paths)
    splitting = resolve_split(options.split, named)
    fn, names = by_bound_arguments(function, signature), [path for path, _ in paths]
    called = Called(fn, as_call(as_seen(arguments)), named)
    traced = functools.partial(trace_call, called, names, splitting, bool(options.jit_compile))
    return PredictedCall(function, options, arguments, splitting, traced, as_seen, notes)


def _check_known(paths: Sequence[tuple[str, structures.TensorLeaf]]) -> None:
    """Raise `ArgumentError` if a size of an argument is not known: times depend on all of them."""
    wrong = [
        f"{path}: {structures.spec_text(leaf)}" for path, leaf in paths if leaf.shape is None or None in leaf.shape
    ]
    if wrong:
        raise ArgumentError(
            f"predict needs the shapes of all arguments, and these have unknown sizes:\n{bullet_list(wrong)}\n"
            "Give tensors, or a tf.TensorSpec with every size, like tf.TensorSpec([256, 224, 224, 3])."
        )
