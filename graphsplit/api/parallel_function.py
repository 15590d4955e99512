"""`parallelize`, `ParallelFunction` and `make_parallel`: an ordinary function, run on several devices."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from graphsplit.api import prefetching
from graphsplit.api.argument_splitting import Split, check_split, resolve_split, same_batch
from graphsplit.api.call_signatures import (
    as_call,
    as_specified,
    by_bound_arguments,
    generalized,
    parameters_of,
    signature_of,
    spread,
)
from graphsplit.api.compilation import trace_and_plan
from graphsplit.api.options import DevicesLike, Options, check_devices, check_weights, weights_message
from graphsplit.api.retracing import warn_of_retracing
from graphsplit.core import structures
from graphsplit.core.devices import resolve_devices
from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.tensorflow_internals import eager_context_started, in_xla_context
from graphsplit.planning.plan import Plan
from graphsplit.runtime.differentiable import Differentiable
from graphsplit.tracing.trace import inside_trace

if TYPE_CHECKING:
    from graphsplit.placement.placements import Placement
    from graphsplit.placement.sources import Planned


class ParallelFunction:
    """A function that runs on several devices and returns what it would return on one. Made by `parallelize`."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        self._fn = fn
        self._options = options
        self._signature = signature_of(fn)
        self._compiled: dict[structures.Branch, list[Differentiable]] = {}
        self._covered: dict[structures.Branch, structures.Branch] = {}
        self._lock = threading.RLock()
        self._attribute = ""
        functools.update_wrapper(self, fn, updated=())
        del self.__dict__["__wrapped__"]  # else a tf.function given this object as an argument calls that instead
        self.__signature__ = self._signature
        check_split(options.split, parameters_of(self._signature))
        check_weights(options)
        if eager_context_started():
            _ = self.devices, self.home

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """The full names of the devices. The first use starts TensorFlow."""
        devices = resolve_devices(self._options.devices)
        weights = self._options.weights
        if weights is not None and len(weights) != len(devices):
            raise ArgumentError(weights_message(weights, len(devices)))
        return devices

    @functools.cached_property
    def home(self) -> str:
        """The device of whole operations and variables' updates."""
        if self._options.home is None:
            return self.devices[0]
        return resolve_devices([self._options.home], "home")[0]

    @property
    def function(self) -> Callable[..., Any]:
        """The single-device function."""
        return self._fn

    @property
    def _traced(self) -> Callable[..., Any]:
        """What is traced: the single-device function, or (a subclass) something around it."""
        return self._fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the devices."""
        if tf.executing_eagerly():
            return self._run(args, kwargs)
        return tf.autograph.experimental.do_not_convert(self._run)(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside_trace(self._name()):  # of another parallelized function, whose plan covers this one as well
            return tf.function(self._fn)(*args, **kwargs)
        tensors, arguments = self._flatten(args, kwargs)
        compiled = self._get(arguments)
        results = compiled(tensors)
        return structures.unflatten(compiled.trace.result, results)

    def map(self, batches: Iterable[Any], *, prefetch: int = 1) -> Iterator[Any]:
        """Return an iterator over the results for many batches; the next batch travels while this one computes.

        Another thread reads the batches, cuts them and sends each device its rows. Results and changes of variables
        are those of calling the function on one batch after the other.

        Args:
          batches: a `tf.data.Dataset` or any iterable. A tuple is the function's arguments in order, as in
            `Dataset.map`; anything else is its only argument.
          prefetch: how many batches are read and sent ahead of the one that computes; 0 for none.

        Raises:
          ArgumentError: if `prefetch` is not a number of at least 0.
          UnsupportedError: in a graph; from the iterator, if a gradient tape watches.

        >>> import tensorflow as tf, graphsplit as gs
        >>> double = gs.parallelize(lambda x: 2 * x, devices=2)
        >>> [y.numpy().tolist() for y in double.map(tf.data.Dataset.range(5).batch(3))]
        [[0, 2, 4], [6, 8]]
        """
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ArgumentError(f"prefetch takes a number of batches, 0 or more, got {prefetch!r}.")
        if not tf.executing_eagerly():
            raise UnsupportedError(
                f"{self._name()}.map runs batch by batch, eagerly; it is called while a graph is built. Call it "
                "outside of tf.function, or call the function itself in a loop over the dataset."
            )
        return prefetching.results(self, iter(batches), prefetch)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return what would run where for these arguments, without running it. `print` it."""
        _, arguments = self._flatten(args, kwargs)
        return self._get(arguments).plan

    def gradient_plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan of the function together with its gradients, as it runs under a tape around the call."""
        _, arguments = self._flatten(args, kwargs)
        return self._get(arguments).pair().plan

    def graph_def(self, *args: Any, **kwargs: Any) -> Any:
        """Return the multi-device graph for these arguments as a `GraphDef`; every node has a device."""
        _, arguments = self._flatten(args, kwargs)
        return self._get(arguments).executable.emitted.graph_def()

    def variables(self, *args: Any, **kwargs: Any) -> tuple[tf.Variable, ...]:
        """Return the variables that a call with these arguments reads or changes."""
        _, arguments = self._flatten(args, kwargs)
        return self._get(arguments).trace.variables

    def placement(self, *args: Any, actual: bool = False, **kwargs: Any) -> Placement:
        """Return which operation runs on which device for these arguments; `print` it, `save` it, ask it.

        Args:
          *args, **kwargs: the function's arguments.
          actual: run the function once, give all variables back the values that they had, and read from TensorFlow
            where each operation ran. Other state (tables, files, what is printed) is not restored.
        """
        from graphsplit.placement.builders import placement_of_plan

        return placement_of_plan(self._planned(*args, **kwargs), actual)

    def _planned(self, *args: Any, **kwargs: Any) -> Planned:
        """Return what a call with these arguments runs, for those who look at it."""
        from graphsplit.placement.sources import Planned

        tensors, arguments = self._flatten(args, kwargs)
        compiled = self._get(arguments)
        return Planned(compiled.trace, compiled.plan, tensors, self._name())

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> ParallelFunction:
        """Bind to an instance, once for each: its traces belong to it and go with it."""
        if instance is None:
            return self
        bound = type(self)(types.MethodType(self._fn, instance), self._options)
        if self._attribute and hasattr(instance, "__dict__"):
            instance.__dict__[self._attribute] = bound  # shadows this descriptor, as functools.cached_property does
        return bound

    def __repr__(self) -> str:
        name = getattr(self, "__qualname__", getattr(self, "__name__", repr(self._fn)))
        return f"<ParallelFunction {name} on {self._options.devices or 'all devices'}>"

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tf.Tensor], structures.Branch]:
        bound = self._signature.bind(*args, **kwargs)
        tensors, tree = structures.flatten(dict(bound.arguments))
        assert isinstance(tree, structures.Branch)
        return tensors, tree

    def _get(self, arguments: structures.Branch) -> Differentiable:
        """Return the compiled form for this signature, making it on first use."""
        if in_xla_context():
            raise UnsupportedError(
                f"{self._name()} is called inside a function with jit_compile=True. XLA compiles such a function for "
                "one device and would erase the placement. Drop jit_compile=True from the outer function; put it on "
                "functions that the parallelized one calls."
            )
        if (found := self._find(arguments)) is not None:
            return found
        with self._lock:
            arguments = self._cover(arguments)
            found = self._find(arguments)  # another thread may have been faster, or another call was like this
            if found is None:
                found = self._compile(arguments)
                self._compiled.setdefault(arguments, []).append(found)
                warn_of_retracing(self._name(), list(self._compiled))
        return found

    def _find(self, arguments: structures.Branch) -> Differentiable | None:
        """Return the compiled form for this signature that is valid here: what it captured is at hand."""
        outer = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        for compiled in self._compiled.get(self._covered.get(arguments, arguments), ()):
            if compiled.trace.outer_graph is None or compiled.trace.outer_graph is outer:
                return compiled
        return None

    def _cover(self, arguments: structures.Branch) -> structures.Branch:
        """Return the signature under which a call is traced: its own, or one that leaves sizes open.

        It does so where the function is a `tf.function` with an `input_signature`, and under `reduce_retracing`.
        """
        specs = self._signature.bind_partial(*(getattr(self._fn, "input_signature", None) or ())).arguments
        wider: list[structures.Tree | None] = [as_specified(arguments, specs)]
        if self._options.reduce_retracing:
            wider += [generalized(known, arguments) for known in self._compiled]
        for found in wider:
            if isinstance(found, structures.Branch) and found != arguments and self._is_one_batch(found, arguments):
                self._covered[arguments] = found
                return found
        return arguments

    def _is_one_batch(self, found: structures.Branch, arguments: structures.Branch) -> bool:
        splitting = resolve_split(self._options.split, spread(found, self._signature))
        return same_batch(splitting, spread(arguments, self._signature))

    @collection_paused()
    def _compile(self, arguments: structures.Branch) -> Differentiable:
        named = spread(arguments, self._signature)
        fn = by_bound_arguments(self._traced, self._signature)
        traced, plan = trace_and_plan(fn, as_call(arguments), named, self._options, self.devices, self.home)
        return Differentiable(traced, plan, self._name())

    def _name(self) -> str:
        return str(getattr(self, "__name__", type(self._fn).__name__))


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    devices: DevicesLike = None,
    split: Split = 0,
    home: str | None = None,
    weights: Sequence[float] | None = None,
    strict: bool = False,
    random: str = "exact",
    reduce_retracing: bool = False,
) -> Any:
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
      split: the axis along which batched arguments are split; or a mapping from argument names to an axis or None
        (keep whole), nested like the arguments if they are. By default every argument of rank 1 or more whose size
        along the axis is that of the first such argument is split. A hint for speed: results never depend on it.
      home: the device of whole operations and of variables' updates; the first device if None.
      weights: shares of the batch for unequal devices, `[3, 1]`. A device with weight 0 gets no rows.
      strict: raise `StrictError` if an operation that carries rows of the batch would have to run at home.
      random: `"exact"` gives one device's random numbers, row by row. `"independent"` lets each shard draw numbers
        of its own: reproducible from the seed, different on every shard, not those of one device. It also shards
        stateful random ops (`tf.random.normal`), which otherwise run at home.
      reduce_retracing: trace once more, and then no more, where calls differ in sizes only: those that differ are left
        open, as `tf.function` does; the batch size among them. A `tf.function` with an `input_signature` is traced for
        that from the start.

    Returns:
      A `ParallelFunction`, called like `fn`; or a decorator, if `fn` is None.

    Raises:
      ArgumentError: for options that contradict each other or the function.
      DeviceError: for devices that do not exist; raised on first use if TensorFlow has not started yet.

    >>> import tensorflow as tf, graphsplit as gs
    >>> double = gs.parallelize(lambda x: 2 * x, devices=2)
    >>> double(tf.constant([1, 2, 3])).numpy().tolist()
    [2, 4, 6]
    """
    if fn is None:
        return functools.partial(
            parallelize,
            devices=devices,
            split=split,
            home=home,
            weights=weights,
            strict=strict,
            random=random,
            reduce_retracing=reduce_retracing,
        )
    if not callable(fn):
        raise ArgumentError(f"parallelize takes a function, got {fn!r}; options are named: devices=4, split=0, ...")
    if random not in ("exact", "independent"):
        raise ArgumentError(f"random={random!r} is not known; choose 'exact' or 'independent'.")
    if isinstance(devices, (list, tuple)):
        devices = tuple(devices)
    shares = None if weights is None else tuple(weights)
    options = Options(devices, split, home, shares, strict, random, reduce_retracing)
    check_devices(options)
    if type(fn) is ParallelFunction:  # a stage stays one
        fn = fn.function
    return ParallelFunction(fn, options)


def make_parallel(fn: Callable[..., Any], num_gpus: DevicesLike, **inputs: Any) -> Any:
    """Split the inputs, run `fn` on every device and join its outputs: the well-known recipe, in one call.

    Eagerly and inside a `tf.function` this is `parallelize(fn, devices=num_gpus)(**inputs)`. In a TensorFlow 1 style
    graph it is the recipe itself: `tf.split` each input, call `fn` per device, `tf.concat` the outputs along axis 0,
    variables shared through the variable scope.

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

        return make_parallel_in_graph(fn, num_gpus, inputs)
    return parallelize(fn, devices=num_gpus)(**inputs)
