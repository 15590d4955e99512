"""`parallelize` and `make_parallel`: from an ordinary function to one that runs on several devices."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import Split
from graphsplit.api.calls.parallel_function import P, ParallelFunction, R
from graphsplit.api.options import DevicesLike, Options
from graphsplit.core.device_mesh import mesh_axes
from graphsplit.core.errors import ArgumentError
from graphsplit.core.patterns import suggesting_options
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.costs.machine import Machine
from graphsplit.search.automatic import checked_automatic

Given = ParamSpec("Given")  # the options


class Decorator(Protocol):
    """`parallelize` with its options, waiting for a function."""

    def __call__(self, fn: Callable[P, R], /) -> ParallelFunction[P, R]:
        """Return `fn`, run on several devices."""
        ...


class _Parallelize(Protocol[Given]):
    """The type of `parallelize`, which is called with a function or without one; its options are listed once, there."""

    @overload
    def __call__(self, *args: Given.args, **options: Given.kwargs) -> Decorator: ...

    @overload
    def __call__(self, fn: Callable[P, R], *args: Given.args, **options: Given.kwargs) -> ParallelFunction[P, R]: ...


def _typed(function: Callable[Concatenate[Any, Given], Any]) -> _Parallelize[Given]:
    return function  # type: ignore[return-value]


@_typed
@suggesting_options
def parallelize(
    fn: Callable[P, R] | None = None,
    *,
    devices: DevicesLike = None,
    mesh: Mapping[str, int] | None = None,
    batch_axis: str | None = None,
    split: Split = 0,
    home: str | None = None,
    weights: Sequence[float] | None = None,
    strict: bool | float = False,
    random: str = "exact",
    reduce_retracing: bool = False,
    micro_batches: int = 1,
    schedule: str | None = None,
    stages: int | None = None,
    jit_compile: bool = False,
    bucket_bytes: int | None = None,
    recompute: str | float | Sequence[str] | None = None,
    plan: str | None = None,
    memory: str | float | None = None,
    machine: str | os.PathLike[str] | Machine | None = None,
) -> ParallelFunction[P, R] | Decorator:
    """Run a single-device TensorFlow function on several devices, with exactly the single device's results.

    The function is traced once per input signature, as `tf.function` would. Its batched arguments are split, every
    op that keeps rows apart runs on each device with that device's rows, and whatever needs all rows (an optimizer,
    a metric, BatchNormalization's moving average) runs once on whole values. Outputs, gradients, variables and
    counters are those of one device, up to the order of floating-point sums.

    Use it as a decorator, a decorator with options, or a call.

    Args:
      fn: a Python function, method, lambda, `tf.function`, or Keras layer or model. Inference or a whole training
        step, optimizer included. It must be traceable by `tf.function`.
      devices: how many devices, or their names, `["GPU:0", "GPU:1"]`. None takes all GPUs, or, without any, all
        logical CPU devices.
      mesh: the devices as a mesh of named axes, `{"batch": 2, "model": 4}`: `devices` are those of the first row, then
        those of the next. The rows of the batch are shared out over the axis `"batch"`; variables that
        `set_variable_layout` cut along the other axis are used where their parts are. `weights` are shares along the
        batch's axis.
      batch_axis: the name of the axis over which the rows are shared out, if it is not `"batch"`: Keras' meshes call it
        `"data"`.
      split: the axis along which batched arguments are split; or a mapping from argument names to an axis or None
        (keep whole), nested like the arguments if they are. By default every argument of rank 1 or more whose size
        along the axis is that of the first such argument is split. A hint for speed: results never depend on it.
      home: the device of whole values that belong to nobody; the first device if None, or, where devices or variables
        are on several hosts, the one that has most bytes of variables. What only changes a variable
        runs where the variable is.
      weights: shares of the batch for unequal devices, `[3, 1]`. A device with weight 0 gets no rows.
      strict: raise `StrictError` if an operation that carries rows of the batch would have to run at home, or if what
        follows from rows that are whole is more than a hundredth of all floating-point operations. A number is the
        largest share of these that may be work on the batch at home.
      random: `"exact"` gives one device's random numbers, row by row. `"independent"` lets each shard draw numbers
        of its own: reproducible from the seed, different on every shard, not those of one device. It also shards
        stateful random ops (`tf.random.normal`), which otherwise run at home.
      reduce_retracing: trace once more, and then no more, where calls differ in sizes only: those that differ are left
        open, as `tf.function` does; the batch size among them. A `tf.function` with an `input_signature` is traced for
        that from the start.
      micro_batches: into how many parts the rows of each device are divided, which it computes one after the other,
        forward and backward: a batch that does not fit into its memory, the result of one that does. Gradients are
        added up as they come. The plan says what needs all rows, and so makes all parts wait, and what is held then.
      schedule: the order in which micro-batches go through stages, as a pipeline: `"gpipe"`, `"1f1b"`, `"interleaved"`
        (several stages a device) or `"zero-bubble"` (gradients of weights last). None runs one micro-batch through all
        stages and back before the next. `plan(...).schedule` is the chart.
      stages: into how many parts of equal time the function is cut, forward and backward of each on a device of its
        own: `stages=4` on 8 devices are two pipelines, each with half of the rows; `weights` are then theirs. Few bytes
        are sent between stages, and on GPUs each has room for what it keeps. The plan says where the cuts are. None
        leaves the function whole, or with the stages that `on_device` made.
      jit_compile: let XLA compile what each shard, and home, computes between two moves, as it compiles a
        `tf.function(jit_compile=True)`; given such a function, it is True. What XLA draws or returns otherwise (random
        numbers, sizes that follow from data), and what it has no kernel for, runs between the compiled parts, as
        effects do that are none of variables; the plan says which. Each size is compiled for itself. What XLA refuses
        in spite of its kernels is an error that names the line.
      bucket_bytes: small gradients are summed over the devices in buckets of at most so many bytes, each as soon as it
        is full, while the backward pass goes on; 0 lets each travel alone. None: 64 kB, and 512 kB where they pass from
        host to host.
      recompute: what the backward pass makes again instead of finding it kept, which takes time and saves memory:
        `"blocks"` keeps what passes between blocks of the function; a share, `0.5`, recomputes as many of these blocks
        as save that share of the bytes; patterns of names of layers, `["block_*"]`, recompute each such layer. The
        plan says how much it is. The numbers stay those of one device, dropout's masks and statistics included.
      memory: what each device may hold, `"24GB"`, `"24GiB"` or bytes: the mesh, the layout of the variables, on it or
        without one, `micro_batches` and `recompute` are chosen together, for the fastest predicted plan that fits; what
        you give stays as it is, and so do variables that are laid out. The others are laid out at the first call. The
        plan says what was chosen, and what the next ones take.
      plan: `"auto"` chooses the number of devices and stages as well; without `memory`, for all that a device has.
      machine: by which speed is predicted for these, see `predict`; None: the one that looks like this one.

    Returns:
      A `ParallelFunction`, called like `fn`; or a decorator, if `fn` is None.

    Raises:
      ArgumentError: for options that contradict each other or the function.
      ArgumentError: on first use, if nothing fits into `memory`: with what would help.
      DeviceError: for devices that do not exist; raised on first use if TensorFlow has not started yet.
      UnsupportedError: for a mesh with more than one axis beside the batch's, and what does not work yet with one.

    >>> import tensorflow as tf, graphsplit as gs
    >>> double = gs.parallelize(lambda x: 2 * x, devices=2)
    >>> double(tf.constant([1, 2, 3])).numpy().tolist()
    [2, 4, 6]
    """
    options = Options(
        devices=devices,
        mesh=mesh_axes(mesh, batch_axis),
        split=split,
        home=home,
        weights=weights,
        strict=strict,
        random=random,
        reduce_retracing=reduce_retracing,
        micro_batches=micro_batches,
        schedule=schedule,
        stages=stages,
        jit_compile=jit_compile,
        bucket_bytes=bucket_bytes,
        recompute=recompute,  # type: ignore[arg-type]  # a list becomes a tuple there
        automatic=checked_automatic(plan, memory, machine),
    )
    if fn is None:
        return functools.partial(_with_options, options=options)
    return _with_options(fn, options)


def _with_options(fn: Callable[P, R], options: Options) -> ParallelFunction[P, R]:
    if not callable(fn):
        raise ArgumentError(f"parallelize takes a function, got {fn!r}; options are named: devices=4, split=0, ...")
    # what is parallelized already runs by these options; a stage stays one
    fn = fn.function if type(fn) is ParallelFunction else fn
    if is_compiled_function(fn) and not options.jit_compile:
        options = replace(options, jit_compile=True)
    return ParallelFunction(fn, options)


def make_parallel(fn: Callable[..., R], num_gpus: DevicesLike, **inputs: Any) -> R:  # inputs: whatever `fn` takes
    """Split the inputs, run `fn` on every device and join its outputs: the well-known recipe, in one call.

    Eagerly and inside a `tf.function` this is `parallelize(fn, devices=num_gpus)(**inputs)`. In a TensorFlow 1 style
    graph it is the recipe itself: `tf.split` each input, call `fn` per device, `tf.concat` the outputs along axis 0,
    variables shared through the variable scope. Functions that make others in each tower are refused there.

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
