"""`parallelize` and `make_parallel`: from an ordinary function to one that runs on several devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import tensorflow as tf

from graphsplit.api.calls.parallel_function import P, ParallelFunction, R
from graphsplit.api.layouts.layout_spellings import AUTO, VariableLayout, check_layout, is_word
from graphsplit.api.options import DevicesLike, Options, Split, Tuning
from graphsplit.core.device_mesh import device_mesh, mesh_axes
from graphsplit.core.patterns import suggesting_options
from graphsplit.core.tensorflow_internals import is_compiled_function, is_retraced_less
from graphsplit.errors import ArgumentError
from graphsplit.planning.costs.machine import Machine

OptionsP = ParamSpec("OptionsP")  # the options


class Decorator(Protocol):
    """`parallelize` with its options, waiting for a function."""

    def __call__(self, fn: Callable[P, R], /) -> ParallelFunction[P, R]:
        """Return `fn`, run on several devices."""
        ...


class _Parallelize(Protocol[OptionsP]):
    """The type of `parallelize`, which is called with a function or without one; its options are listed once, there."""

    @overload
    def __call__(self, *args: OptionsP.args, **options: OptionsP.kwargs) -> Decorator: ...

    @overload
    def __call__(
        self, fn: Callable[P, R], *args: OptionsP.args, **options: OptionsP.kwargs
    ) -> ParallelFunction[P, R]: ...


def _typed(function: Callable[Concatenate[Any, OptionsP], Any]) -> _Parallelize[OptionsP]:
    return function  # type: ignore[return-value]


@_typed
@suggesting_options
def parallelize(
    fn: Callable[P, R] | None = None,
    *,
    devices: DevicesLike = None,
    mesh: Mapping[str, int] | None = None,
    split: Split = 0,
    shares: Sequence[float] | None = None,
    variables: VariableLayout | Mapping[str, VariableLayout] | None = None,
    micro_batches: int = 1,
    stages: int | Sequence[str] | None = None,
    schedule: str | None = None,
    recompute: str | float | Sequence[str] | None = None,
    jit_compile: bool = False,
    strict: bool = False,
    plan: str | os.PathLike[str] | Machine | None = None,
    memory: str | float | None = None,
    tuning: Tuning | None = None,
) -> ParallelFunction[P, R] | Decorator:
    """Run a single-device TensorFlow function on several devices, with exactly the single device's results.

    The function is traced once per input signature, as `tf.function` would. Its batched arguments are split. Operations
    that keep rows apart run on each device, with that device's rows. What needs all rows (an optimizer, a metric,
    BatchNormalization's moving average) runs once, on whole values. Outputs, gradients, variables and counters are
    those of one device, up to rounding.

    Use it as a decorator, a decorator with options, or a call.

    Args:
      fn: a Python function, method, lambda, `tf.function`, or Keras layer or model: inference, or a whole training step
        with its optimizer. `tf.function` must be able to trace it.
      devices: how many devices, or their names: `4`, `["GPU:0", "GPU:1"]`. None means all GPUs, or without GPUs all
        logical CPU devices. For plans they need not exist.
      mesh: the devices as a mesh of named axes: `{"batch": 2, "model": 4}`, row by row. The axis `"batch"` (or
        `"data"`) divides the rows of the batch. Each other axis divides the variables that `set_variable_layout` cut
        along it, and the work on them. `"fsdp"` beside `"data"` or `"batch"` divides the rows, too: `"sharded"`
        variables are divided along it, and copied along the other one (HSDP). `shares` divide the rows. The axis
        `"stage"` has the stages, each with a mesh of the other axes: `{"stage": 2, "batch": 2, "model": 2}`; variables
        move to the devices of their stage.
      split: the axis along which batched arguments are split; or a mapping from argument names to an axis or None (keep
        whole), nested like the arguments if they are. By default every argument of rank 1 or more is split that has the
        size of the first one along the axis. It changes speed, and never results.
      shares: how much of the batch each device gets, where that is unequal: `[3, 1]`. A device with 0 gets no rows.
      variables: where variables are stored that have no layout yet. `"auto"` chooses at the first call. Over GPUs and
        workers, those that the function writes are divided, and those that it only reads are copied to each device;
        `docs/variables.md` has the rule. Or a layout, or layouts by patterns of names, as for `set_variable_layout`:
        `"sharded"`, `{"embedding*": "sharded", "*": "replicated"}`. None leaves them where they are.
      micro_batches: parts of each device's rows, computed one after the other, forward and backward, so that larger
        batches fit into memory: gradient accumulation, exactly. The result is the same as for the whole batch. The plan
        says which operations need all rows and make all parts wait, and how much is kept then.
      stages: parts into which the function is cut, each on a device of its own, forward and backward. `stages=4` on 8
        devices are two pipelines with half of the rows each, or as `shares` say. The parts take equal time, cuts are
        where few bytes pass, and on GPUs each stage fits into memory. Or patterns of names of layers, or other scopes,
        at which new stages begin, `["block4_*", "block9_*"]`. The plan says where. None does not cut the function, and
        keeps stages from `on_device`.
      schedule: the order in which micro-batches go through stages: a pipeline, `"gpipe"`, `"1f1b"`, `"interleaved"`
        (several stages on each device) or `"zero-bubble"` (gradients of weights last). None runs a micro-batch through
        all stages and back before the next one. `plan(...).schedule` is the chart.
      recompute: activations that are recomputed instead of stored, which takes time and saves memory. `"blocks"` keeps
        only what passes between blocks of the function; a share, `0.5`, recomputes as many blocks as save that share of
        the bytes; patterns of names, `["block_*"]`, recompute these layers. The plan says how much. Results stay those
        of one device, dropout masks and statistics included.
      jit_compile: let XLA compile what each device computes between two moves. A `tf.function(jit_compile=True)` sets
        it. Operations without an XLA kernel, random numbers, sizes that depend on data, and effects run between the
        compiled parts; the plan lists them. Each size is compiled separately. If XLA refuses an operation in spite of
        its kernel, the error names your line.
      strict: fail if work on the batch would run on one device: raise `StrictError` for an operation on its rows, or if
        more than a hundredth of the floating-point operations would be computed from whole rows. A lookup whose rows
        are fewer bytes than its table may run where the table is. How evenly devices work, a plan says: `assert
        step.plan(x).balance > 0.9`.
      plan: search for the fastest plan: `"auto"` for the devices at hand; the name of a machine, the path of its file
        or a `Machine` for that machine, see `predict`. It chooses what `memory` chooses, and the number of devices and
        of stages. Without `memory`, a device's whole memory counts.
      memory: how much each device may hold: `"24GB"`, `"24GiB"` or bytes. The mesh, the layout of the variables,
        `micro_batches` and `recompute` are chosen for the fastest predicted plan that fits. Options that you give are
        kept, and so are variables that already have a layout; others are laid out at the first call. The first call
        prints what was chosen; the plan says why.
      tuning: what few need, by name: `{"bucket_bytes": 1 << 20}`, the most that small gradients sent as one have
        together; `"default_device"`, for work that is not sharded; `"reduce_retracing": True`, one trace for calls that
        differ in sizes only.

    Returns:
      A `ParallelFunction`, called like `fn`; or a decorator, if `fn` is None.

    Raises:
      ArgumentError: for options that contradict each other or the function; on first use, if nothing fits into
        `memory`.
      DeviceError: for devices that do not exist; raised on first use if TensorFlow has not started yet.
      UnsupportedError: for options that do not work yet with a mesh that has another axis than the batch's.

    >>> import tensorflow as tf, graphsplit as gs
    >>> double = gs.parallelize(lambda x: 2 * x, devices=2)
    >>> double(tf.constant([1, 2, 3])).numpy().tolist()
    [2, 4, 6]
    """
    axes = mesh_axes(mesh)
    if variables is not None and not is_word(variables, AUTO):
        check_layout(variables, device_mesh(axes, [str(k) for k in range(axes.count or 0)]) if axes else None)
    options = Options(
        devices=devices,
        mesh=axes,
        split=split,
        shares=shares,
        variables=variables,
        micro_batches=micro_batches,
        stages=stages,  # type: ignore[arg-type]  # names become their beginnings there
        schedule=schedule,
        recompute=recompute,  # type: ignore[arg-type]  # a list becomes a tuple there
        jit_compile=jit_compile,
        strict=strict,
        plan=plan,  # type: ignore[arg-type]  # a path becomes the machine there
        memory=memory,  # type: ignore[arg-type]  # a text becomes bytes there
        tuning=Tuning() if tuning is None else tuning,
    )
    if fn is None:
        return functools.partial(_with_options, options=options)
    return _with_options(fn, options)


_OF_MANY_BATCHES = ("fit", "evaluate", "predict")  # methods of Keras' models


def _with_options(fn: Callable[P, R], options: Options) -> ParallelFunction[P, R]:
    if not callable(fn):
        raise ArgumentError(f"parallelize takes a function, got {fn!r}; options are named: devices=4, split=0, ...")
    model = getattr(fn, "__self__", None)
    if hasattr(model, "train_step") and getattr(fn, "__name__", "") in _OF_MANY_BATCHES:
        raise ArgumentError(
            f"parallelize takes a function of tensors, and {fn.__name__} of {getattr(model, 'name', 'a model')!r} runs "
            f"batches by itself: write model = gs.multi_gpu_model(model, gpus=4), then model.{fn.__name__}(...)."
        )
    # what is parallelized already runs by these options; a stage stays one
    fn = fn.function if type(fn) is ParallelFunction else fn
    if is_compiled_function(fn) and not options.jit_compile:
        options = replace(options, jit_compile=True)
    if is_retraced_less(fn):
        options = replace(options, tuning={**options.tuning, "reduce_retracing": True})
    return ParallelFunction(fn, options)


def make_parallel(fn: Callable[..., R], num_gpus: DevicesLike, **inputs: Any) -> R:  # inputs: whatever `fn` takes
    """Split the inputs, run `fn` on every device and join its outputs: the well-known recipe, in one call.

    Eagerly and inside a `tf.function` this is `parallelize(fn, devices=num_gpus)(**inputs)`. In a TensorFlow 1 style
    graph it is the recipe itself: `tf.split` each input, call `fn` per device, `tf.concat` the outputs along axis 0,
    variables shared through the variable scope. Functions that make other variables in each tower raise an error
    there.

    Args:
      fn: the model, called with the names in `inputs`.
      num_gpus: how many devices, or their names.
      **inputs: batched inputs.

    Raises:
      ArgumentError, DeviceError: as `parallelize`.

    >>> import tensorflow as tf, graphsplit as gs
    >>> c = gs.make_parallel(lambda a, b: a + b, 2, a=tf.constant([1.0, 2.0]), b=tf.constant([3.0, 4.0]))
    >>> c.numpy().tolist()
    [4.0, 6.0]
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        from graphsplit.api.v1_towers import make_parallel_in_graph

        joined: R = make_parallel_in_graph(fn, num_gpus, inputs)
        return joined
    return parallelize(fn, devices=num_gpus)(**inputs)
