"""`parallelize`, `ParallelFunction` and `make_parallel`: an ordinary function, run on several devices."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from graphsplit import structures
from graphsplit.collecting import collection_paused
from graphsplit.devices import canonical_name, resolve_devices
from graphsplit.differentiation import Differentiable
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning import plan_program
from graphsplit.plans import Plan
from graphsplit.retracing import warn_of_retracing
from graphsplit.splitting import Split, argument_paths, check_split, resolve_split
from graphsplit.tensorflow_internals import eager_context_started, in_xla_context
from graphsplit.tracing import inside_trace, trace

if TYPE_CHECKING:
    from graphsplit.placement import Placement

DevicesLike = int | str | Sequence[str] | None


@dataclass(frozen=True)
class Options:
    """The options of `parallelize`, checked as far as they can be without starting TensorFlow."""

    devices: DevicesLike = None
    split: Split = 0
    home: str | None = None
    weights: tuple[float, ...] | None = None
    strict: bool = False
    random: str = "exact"


class ParallelFunction:
    """A function that runs on several devices and returns what it would return on one. Made by `parallelize`."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        self._fn = fn
        self._options = options
        self._signature = _signature(fn)
        self._compiled: dict[structures.Branch, list[Differentiable]] = {}
        self._lock = threading.RLock()
        self._attribute = ""
        functools.update_wrapper(self, fn, updated=())
        del self.__dict__["__wrapped__"]  # else a tf.function given this object as an argument calls that instead
        self.__signature__ = self._signature
        check_split(options.split, _parameters(self._signature))
        _check_weights(options)
        if eager_context_started():
            _ = self.devices, self.home

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """The full names of the devices. The first use starts TensorFlow."""
        devices = resolve_devices(self._options.devices)
        weights = self._options.weights
        if weights is not None and len(weights) != len(devices):
            raise ArgumentError(_weights_message(weights, len(devices)))
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
        from graphsplit.placement import placement_of_plan

        tensors, arguments = self._flatten(args, kwargs)
        compiled = self._get(arguments)
        return placement_of_plan(compiled.trace, compiled.plan, self._name(), tensors, actual)

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> ParallelFunction:
        """Bind to an instance, once for each: its traces belong to it and go with it."""
        if instance is None:
            return self
        bound = ParallelFunction(types.MethodType(self._fn, instance), self._options)
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
        found = self._find(arguments)
        if found is not None:
            return found
        with self._lock:
            found = self._find(arguments)  # another thread may have been faster
            if found is None:
                found = self._compile(arguments)
                self._compiled.setdefault(arguments, []).append(found)
                warn_of_retracing(self._name(), list(self._compiled))
        return found

    def _find(self, arguments: structures.Branch) -> Differentiable | None:
        """Return the compiled form for this signature that is valid here: what it captured is at hand."""
        outer = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        for compiled in self._compiled.get(arguments, ()):
            if compiled.trace.outer_graph is None or compiled.trace.outer_graph is outer:
                return compiled
        return None

    @collection_paused()
    def _compile(self, arguments: structures.Branch) -> Differentiable:
        splitting = resolve_split(self._options.split, _spread(arguments, self._signature))
        names = [path for path, _ in argument_paths(_spread(arguments, self._signature))]
        traced = trace(_by_bound_arguments(self._fn, self._signature), _as_call(arguments), names)
        rows = splitting.rows(self._options.weights or (1,) * len(self.devices))
        used = [d for d, count in enumerate(rows) if count]
        plan = plan_program(
            traced.program,
            devices=[self.devices[d] for d in used],
            rows=[rows[d] for d in used],
            home=self.home,
            input_layouts=splitting.layouts,
            strict=self._options.strict,
            random=self._options.random,
            notes=splitting.notes,
        )
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
            parallelize, devices=devices, split=split, home=home, weights=weights, strict=strict, random=random
        )
    if not callable(fn):
        raise ArgumentError(f"parallelize takes a function, got {fn!r}; options are named: devices=4, split=0, ...")
    if random not in ("exact", "independent"):
        raise ArgumentError(f"random={random!r} is not known; choose 'exact' or 'independent'.")
    if isinstance(devices, (list, tuple)):
        devices = tuple(devices)
    options = Options(devices, split, home, None if weights is None else tuple(weights), strict, random)
    _check_devices(options)
    if isinstance(fn, ParallelFunction):
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
        from graphsplit.v1_graphs import make_parallel_in_graph

        return make_parallel_in_graph(fn, num_gpus, inputs)
    return parallelize(fn, devices=num_gpus)(**inputs)


def _check_devices(options: Options) -> None:
    """Check what can be checked before TensorFlow starts: numbers and spellings, not existence."""
    devices, home = options.devices, options.home
    if isinstance(devices, (str, tuple)):
        names = [devices] if isinstance(devices, str) else list(devices)
        canonical = [canonical_name(name) for name in names]
        if not canonical or len(set(canonical)) != len(canonical):
            resolve_devices(names)
    elif devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        resolve_devices(devices)
    if home is not None:
        canonical_name(home, "home")


def _check_weights(options: Options) -> None:
    weights, devices = options.weights, options.devices
    if weights is None:
        return
    if not all(isinstance(w, (int, float)) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ArgumentError(f"weights={list(weights)}: weights are numbers of at least 0, and not all of them 0.")
    count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, tuple) else len(weights)
    if count != len(weights):
        raise ArgumentError(_weights_message(weights, count))


def _weights_message(weights: Sequence[float], count: int) -> str:
    return f"weights={list(weights)} has {len(weights)} entries for {count} devices; give one for each device."


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins and some callables do not say
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))
    return signature.replace(return_annotation=inspect.Signature.empty)


def _parameters(signature: inspect.Signature) -> list[str] | None:
    """Return the parameters that `split` may name, or None if the function takes any."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(signature.parameters)


def _spread(arguments: structures.Branch, signature: inspect.Signature) -> structures.Branch:
    """Return the arguments by name with those of `**kwargs` among them, as the user wrote the call."""
    keys: list[str] = []
    entries: list[structures.Tree] = []
    for key, entry in zip(arguments.keys, arguments.entries, strict=True):
        if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD and isinstance(entry, structures.Branch):
            keys += entry.keys
            entries += entry.entries
        else:
            keys.append(key)
            entries.append(entry)
    return structures.Branch(dict, tuple(keys), tuple(entries))


def _as_call(arguments: structures.Branch) -> structures.Branch:
    """Return the structure of `(args, kwargs)` for a function of the bound arguments."""
    return structures.Branch(
        tuple, (0, 1), (structures.Branch(tuple, (0,), (arguments,)), structures.Branch(dict, (), ()))
    )


def _by_bound_arguments(fn: Callable[..., Any], signature: inspect.Signature) -> Callable[[Mapping[str, Any]], Any]:
    """Return `fn` as a function of the mapping that `Signature.bind` gives."""
    unbind = tf.autograph.experimental.do_not_convert(
        lambda arguments: (
            (bound := inspect.BoundArguments(signature, arguments)).args,  # type: ignore[arg-type]
            bound.kwargs,
        )
    )

    def call(arguments: Mapping[str, Any]) -> Any:
        args, kwargs = unbind(dict(arguments))
        return fn(*args, **kwargs)

    return call
